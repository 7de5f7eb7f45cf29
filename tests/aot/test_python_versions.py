"""The core on every Python that it claims and that this machine has: it compiles, imports and opens a pack."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import sample_pack
from gristmill.aot.wheel import core_folders, source_tree

VERSIONS = tuple(f"3.{minor}" for minor in range(10, 15))

# Run by each interpreter: compiles each file with warnings as errors, and imports what asks for no package.
PROGRAM = """
import importlib, json, pathlib, pkgutil, sys, warnings
warnings.simplefilter("error")
sys.dont_write_bytecode = True
site, packs = sys.argv[1:]
sys.path.insert(0, site)
sources = sorted(pathlib.Path(site).rglob("*.py"))
for path in sources:
    compile(path.read_text(), str(path), "exec")
import gristmill
imported, lacking = [], {}
for module in pkgutil.walk_packages(gristmill.__path__, "gristmill."):
    if module.name == "gristmill.__main__" or module.name.startswith(("gristmill.aot", "gristmill.kernels")):
        continue
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ModuleNotFoundError as error:
        lacking[module.name] = error.name
from gristmill.packs import find_pack
pack = find_pack("gfx1151", [pathlib.Path(packs) / "gfx1151"])
(entry,) = pack.manifest.entries.values()
from gristmill.device import nominal_device
from gristmill.problem import Problem
from gristmill.select import select
problem = Problem("w4a16_gemm", 5, 64, 128, 64, "float16", False, True, 16)
chosen = select(problem, nominal_device("gfx1151"), pack.manifest)
print(json.dumps({
    "version": sys.version_info[:2],
    "compiled": len(sources),
    "imported": imported,
    "lacking": lacking,
    "grid": chosen.grid,
    "object_bytes": len(pack.read_object(entry)),
}))
"""

# What every interpreter can import, with no package installed.
CORE_MODULES = {
    "cli",
    "device",
    "drivers.cuda",
    "drivers.hip",
    "formula",
    "launch",
    "loader",
    "manifest",
    "packs",
    "select",
}


def find_interpreter(version: str) -> Path | None:
    """The Python of `version` on PATH or among pyenv's, else None."""
    found = shutil.which(f"python{version}")
    roots = [Path(os.environ.get("PYENV_ROOT", "")), Path.home() / ".pyenv"]
    own = [path for root in roots for path in sorted(root.glob(f"versions/{version}.*/bin/python"))]
    candidates = [*own, *([Path(found)] if found else [])]
    return next((path for path in candidates if _says(path) == version), None)


def _says(python: Path) -> str:
    """The version that an interpreter gives; a shim of pyenv may stand for none."""
    result = subprocess.run([python, "-S", "-E", "--version"], capture_output=True, text=True)
    match = re.match(r"Python (3\.\d+)\.", result.stdout)
    return match.group(1) if match else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The packages as they install, copied from the source tree."""
    source, site = source_tree(), tmp_path_factory.mktemp("site")
    for folder, place in sorted(core_folders(source).items(), key=lambda item: item[1]):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / folder, site / place, ignore=ignored, dirs_exist_ok=True)
    return site


def test_the_range_is_what_pyproject_claims():
    assert f'requires-python = ">={VERSIONS[0]}"' in (source_tree() / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_core_compiles_imports_and_chooses(version, site, tmp_path):
    python = find_interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or in pyenv")
    sample_pack.write_pack(tmp_path)
    result = subprocess.run(
        [python, "-S", "-E", "-c", PROGRAM, site, tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert ".".join(map(str, found["version"])) == version
    assert found["compiled"] > 80
    assert {f"gristmill.{name}" for name in CORE_MODULES} <= set(found["imported"])
    assert set(found["lacking"].values()) <= {"numpy", "ml_dtypes", "torch"}
    assert found["grid"] == [1, 1, 1]
    assert found["object_bytes"] == len(sample_pack.CODE)
