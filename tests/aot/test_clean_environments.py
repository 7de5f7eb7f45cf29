"""Wheels in clean environments: what is installed answers, what is not is named with its fix.

An environment is a folder that pip has installed wheels into; its Python starts without site-packages (-S -E), so that
nothing else can be found. numpy, which the core requires, is linked in.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gristmill import errors
from gristmill.aot.wheel import core_wheel, pack_wheel, source_tree
from gristmill.manifest import SCHEMA
from gristmill.packs import Pack
from gristmill.verified import Record, dump_records
from source_copy import copy_source

TESTS = Path(__file__).parents[1]

Environment = Callable[..., subprocess.CompletedProcess]

# The first line stands for what `-E` and `-S` keep out: this folder alone is searched, besides the standard library.
PRELUDE = """
import sys
sys.path.append({site!r})
"""

# A device of each arch named, and what its loader says.
LOADERS = """
import importlib.util, json
spec = importlib.util.spec_from_file_location("fake_driver", {fake!r})
fake_driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake_driver)
from gristmill.arrays import Device
from gristmill.drivers import register
from gristmill.errors import GristmillError
from gristmill.loader import loader_for
archs = {archs!r}
register(fake_driver.FakeDriver(archs=archs))
found = {{}}
for ordinal, arch in enumerate(archs):
    try:
        loader = loader_for(Device("fake", ordinal))
        for entry in loader.pack.manifest.entries.values():
            loader.kernel(entry)
        found[arch] = [loader.pack.manifest.arch, len(loader.loaded())]
    except GristmillError as error:
        found[arch] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return copy_source(source_tree(), tmp_path_factory.mktemp("tree") / "source")


@pytest.fixture(scope="module")
def wheels(tiny_packs, source, tmp_path_factory) -> dict[str, Path]:
    """The core's wheel, and of packs for gfx1201 and sm90; "newer" and "older" are sm90's of other schemas."""
    folder = tmp_path_factory.mktemp("wheels")
    packs = Path(shutil.copytree(tiny_packs, folder / "packs"))
    made = {"core": core_wheel(source, folder / "dist").path}
    for arch in ("gfx1201", "sm90"):
        entries = Pack.open(packs / arch).manifest.entries
        records = {name: Record(entry.object, "a test", "silicon", 1, 0.5) for name, entry in entries.items()}
        (packs / arch / "verified.json").write_bytes(dump_records(records))
        made[arch] = pack_wheel(packs / arch, folder / "dist", "licence").path
    return made


@pytest.fixture
def environment(wheels, tmp_path) -> Callable[..., Environment]:
    """Install wheels by name; what comes back runs a program, or a `gristmill` command with its arguments."""

    def install(*names: str) -> Environment:
        site = tmp_path / "site"
        pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "--target", site, *(wheels[name] for name in names)], check=True)
        for package in ("numpy", "numpy.libs", "ml_dtypes"):
            spec = importlib.util.find_spec(package.partition(".")[0])
            folder = Path(spec.origin).parents[1] / package
            if folder.exists():
                (site / package).symlink_to(folder)

        def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GRISTMILL"))}
            return subprocess.run(
                [sys.executable, "-S", "-E", "-c", PRELUDE.format(site=str(site)) + program, *arguments],
                cwd=tmp_path,
                env=clean,
                capture_output=True,
                text=True,
            )

        return run

    return install


def loaders(run: Environment, *archs: str) -> dict[str, list]:
    result = run(LOADERS.format(fake=str(TESTS / "fake_driver.py"), archs=archs))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def command(run: Environment, *arguments: str) -> tuple[int, dict]:
    result = run("from gristmill.cli import main; sys.exit(main())", *arguments, "--json")
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


def change_schema(site: Path, schema: int) -> None:
    manifest = site / "gristmill_packs" / "sm90" / "manifest.json"
    text = manifest.read_text()
    assert f'"schema": {SCHEMA}' in text
    manifest.write_text(text.replace(f'"schema": {SCHEMA}', f'"schema": {schema}'))


WHY = ("why", "--M", "5", "--N", "64", "--K", "128", "--group-size", "64", "--arch")


def test_nothing_else_is_found(environment):
    result = environment("core")("import gristmill; print(gristmill.__file__); import triton")
    assert "site/gristmill/__init__.py" in result.stdout
    assert "No module named 'triton'" in result.stderr


def test_core_alone_names_the_pack_to_install(environment):
    run = environment("core")
    assert loaders(run, "sm90") == {
        "sm90": [
            "NoPackError",
            "no pack for sm90 is installed; run: pip install gristmill-sm90. Packs found: none",
        ]
    }
    code, answer = command(run, *WHY, "sm90")
    assert (code, answer["error"]["class"]) == (1, "NoPackError")
    code, answer = command(run, "doctor")
    assert (code, answer["can_run"], answer["packs"]) == (1, False, [])
    assert command(run, "list") == (0, {"entries": []})


def test_core_alone_still_computes_on_the_host(environment):
    result = environment("core")(
        """
import numpy as np, gristmill
weight = gristmill.pack(np.arange(16).reshape(2, 8), np.ones((2, 1), np.float16), group_size=-1)
from gristmill.packed_weight import dequantize
print(dequantize(weight).tolist())
"""
    )
    assert result.stdout.strip() == str([[float(q - 8) for q in row] for row in (range(8), range(8, 16))])


def test_core_with_the_wrong_pack_names_both(environment):
    run = environment("core", "gfx1201")
    assert loaders(run, "sm90", "gfx1151") == {
        arch: [
            "NoPackError",
            f"no pack for {arch} is installed; run: pip install gristmill-{arch}. Packs found: gfx1201",
        ]
        for arch in ("sm90", "gfx1151")
    }
    code, answer = command(run, *WHY, "sm90")
    assert (code, answer["error"]["class"]) == (1, "NoPackError")
    code, answer = command(run, "doctor")
    assert [(pack["arch"], pack["entries"], pack["problem"]) for pack in answer["packs"]] == [("gfx1201", 3, None)]


def test_core_with_two_packs_serves_both_devices(environment):
    run = environment("core", "gfx1201", "sm90")
    found = loaders(run, "gfx1201", "sm90", "sm80")
    assert found["gfx1201"] == ["gfx1201", 3]
    assert found["sm90"] == ["sm90", 3]
    assert found["sm80"][0] == "NoPackError"
    assert found["sm80"][1].endswith("run: pip install gristmill-sm80. Packs found: gfx1201, sm90")
    for arch in ("gfx1201", "sm90"):
        code, answer = command(run, *WHY, arch)
        assert (code, answer["entry"]) == (0, "tiny_16")


def test_pack_without_core_holds_nothing_to_import(environment):
    run = environment("sm90")
    result = run("import gristmill_packs; print(list(gristmill_packs.__path__)); import gristmill")
    assert "site/gristmill_packs" in result.stdout
    assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'gristmill'"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            SCHEMA + 1,
            f"schema {SCHEMA + 1} is newer than schema {SCHEMA}, which this gristmill reads; "
            "upgrade gristmill: pip install --upgrade gristmill",
        ),
        (
            SCHEMA - 1,
            f"schema {SCHEMA - 1} is older than schema {SCHEMA}, which this gristmill reads; "
            "upgrade the pack: pip install --upgrade gristmill-sm90",
        ),
    ],
)
def test_pack_of_another_schema_says_which_side_to_upgrade(schema, message, environment, tmp_path):
    run = environment("core", "gfx1201", "sm90")
    change_schema(tmp_path / "site", schema)
    found = loaders(run, "sm90", "gfx1201")
    assert issubclass(getattr(errors, found["sm90"][0]), errors.PackSchemaError)
    assert found["sm90"][1].endswith(message)
    assert found["gfx1201"] == ["gfx1201", 3], "the other device is served all the same"
    code, answer = command(run, *WHY, "sm90")
    assert (code, answer["error"]["class"]) == (1, found["sm90"][0])
    code, answer = command(run, "doctor")
    assert code == 1
    assert [pack["problem"] is None for pack in answer["packs"]] == [True, False]


def test_editable_install_is_the_tree_itself(tmp_path, source):
    """In a virtual environment of its own; an edit shows in the next process."""
    tree = Path(shutil.copytree(source, tmp_path / "tree"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for package in ("setuptools", "numpy"):
        folder = Path(importlib.util.find_spec(package).origin).parents[1]
        (site / f"{package}.pth").write_text(f"{folder}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-build-isolation", "--editable", tree], check=True)
    (tree / "dispatch" / "__init__.py").write_text(
        (tree / "dispatch" / "__init__.py").read_text() + "\nEDITED = True\n"
    )
    program = """
import gristmill, gristmill.aot.wheel, gristmill.csrc, gristmill.kernels
assert gristmill.EDITED
for module in (gristmill, gristmill.aot.wheel, gristmill.csrc, gristmill.kernels):
    print(module.__file__)
from gristmill.cli import main
main(["--help"])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run([python, "-c", program], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    files = result.stdout.splitlines()[:4]
    assert [Path(file).relative_to(tree).as_posix() for file in files] == [
        "dispatch/__init__.py", "aot/wheel.py", "csrc/__init__.py", "kernels/__init__.py",
    ]  # fmt: skip
    assert "  wheel " in result.stdout
