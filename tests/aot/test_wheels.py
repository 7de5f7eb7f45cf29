"""Wheels: complete, within budget, the same bytes again, and packs of several archs side by side."""

from __future__ import annotations

import email
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import gristmill
import pytest
from gristmill.aot.errors import ObjectError, WheelError
from gristmill.aot.wheel import (
    BUDGET_BYTES,
    EXTENSION,
    PLATFORM,
    core_folders,
    core_wheel,
    find_license,
    pack_wheel,
    source_tree,
    zig_environment,
)
from gristmill.cli import main
from gristmill.errors import PackError
from gristmill.packs import Pack
from gristmill.verified import Record, dump_records, read_records
from source_copy import copy_source

VERSION = gristmill.__version__


@pytest.fixture(scope="module")
def tiny_packs(tiny_packs, tmp_path_factory) -> Path:
    """The packs of the small rows, with records as if each entry had run."""
    folder = Path(shutil.copytree(tiny_packs, tmp_path_factory.mktemp("verified") / "packs"))
    for manifest in folder.glob("*/manifest.json"):
        entries = Pack.open(manifest.parent).manifest.entries
        records = {name: Record(entry.object, "a test", "silicon", 1, 0.5) for name, entry in entries.items()}
        (manifest.parent / "verified.json").write_bytes(dump_records(records))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The source tree as it is now; it may be edited while the tests run."""
    return copy_source(source_tree(), tmp_path_factory.mktemp("tree") / "source")


@pytest.fixture(scope="module")
def made(tiny_packs, source, tmp_path_factory) -> Path:
    """Wheels of the core and of two packs, from the command."""
    out = tmp_path_factory.mktemp("wheels") / "dist"
    arguments = ["--packs", str(tiny_packs), "--arch", "gfx1201,sm90", "--source", str(source)]
    assert main(["wheel", *arguments, "--out", str(out)]) == 0
    return out


@pytest.fixture
def pack(tiny_packs, tmp_path) -> Path:
    """A pack that may be changed."""
    return Path(shutil.copytree(tiny_packs / "gfx1151", tmp_path / "packs" / "gfx1151"))


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_wheels_bear_version_and_arch_and_the_cores_platform(made):
    assert sorted(path.name for path in made.iterdir()) == [
        f"gristmill-{VERSION}-cp310-abi3-{PLATFORM}.whl",
        f"gristmill-{VERSION}-py3-none-any.whl",
        f"gristmill_gfx1201-{VERSION}-py3-none-any.whl",
        f"gristmill_sm90-{VERSION}-py3-none-any.whl",
    ]


def test_pack_wheel_is_the_pack_and_nothing_else(made, tiny_packs):
    with zipfile.ZipFile(made / f"gristmill_sm90-{VERSION}-py3-none-any.whl") as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        packed = {name.removeprefix("gristmill_packs/sm90/"): archive.read(name) for name in names}
    folder = tiny_packs / "sm90"
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert packed == {name: path.read_bytes() for name, path in files.items()}


def test_wheel_goes_into_a_relative_folder(pack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wheel = pack_wheel(pack, Path("dist"), "licence")
    assert wheel.path.is_file()
    assert wheel.path.parent == tmp_path / "dist"


def test_pack_wheel_metadata(made):
    found = metadata(made / f"gristmill_sm90-{VERSION}-py3-none-any.whl")
    assert found["Name"] == "gristmill-sm90"
    assert found["Version"] == VERSION
    assert found["License-Expression"] == "Apache-2.0"
    assert found["License-File"] == "LICENSE"
    assert found["Summary"] == "Gristmill's W4A16 GEMM kernels for sm90, as machine code."
    assert found["Requires-Dist"] is None


def test_core_wheel_holds_every_module_and_no_pack(made, source):
    with zipfile.ZipFile(made / f"gristmill-{VERSION}-py3-none-any.whl") as archive:
        names = set(archive.namelist())
        points = archive.read(f"gristmill-{VERSION}.dist-info/entry_points.txt").decode()
    assert core_folders(source).keys() >= {"dispatch", "kernels", "csrc", "aot"}
    for folder, place in core_folders(source).items():
        for path in (source / folder).rglob("*.py"):
            assert f"{place}/{path.relative_to(source / folder).as_posix()}" in names
    assert "gristmill/csrc/include/ptx.h" in names
    assert not [name for name in names if name.startswith(("gristmill_packs", "tests", "build"))]
    assert "build = gristmill.aot.commands.build" in points
    assert metadata(made / f"gristmill-{VERSION}-py3-none-any.whl")["License-Expression"] == "Apache-2.0"


def test_core_wheel_of_a_platform_is_the_other_with_the_extension(made, source):
    cores = {path.name.split("-")[2]: zipfile.ZipFile(path) for path in made.glob("gristmill-*")}
    info = f"gristmill-{VERSION}.dist-info"
    differing = {EXTENSION, f"{info}/WHEEL", f"{info}/RECORD"}
    pure, native = ({name: cores[tag].read(name) for name in cores[tag].namelist()} for tag in ("py3", "cp310"))
    assert native.keys() - pure.keys() == {EXTENSION}
    assert {name: native[name] for name in pure.keys() - differing} == {
        name: pure[name] for name in pure.keys() - differing
    }
    assert b"Root-Is-Purelib: false\nTag: cp310-abi3-manylinux_2_17_x86_64" in native[f"{info}/WHEEL"]
    code = native[EXTENSION]
    for place in (str(source), sys.prefix, sys.base_prefix, str(Path.home()) + "/", tempfile.gettempdir() + "/"):
        assert place.encode() not in code
    # Nothing newer than the platform's glibc, and no library but that one.
    assert max(tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([0-9.]+)", code)) <= (2, 17)
    assert set(re.findall(rb"lib[\w.+-]*\.so[.0-9]*", code)) == {b"libc.so.6"}


TRY_EXTENSION = """
import sys, gristmill._fastcall as native
assert native.__file__.startswith(sys.argv[1]), native.__file__
assert len(native.record(1, (1, 1, 1), (32, 1, 1), 0, False, 0, b"")) > 0
"""


def test_headers_beside_the_folder_of_pythons_are_found(tmp_path, monkeypatch):
    """As Debian has them: /usr/include/python3.11/pyconfig.h includes <x86_64-linux-gnu/python3.11/pyconfig.h>."""
    (tmp_path / "include" / "multiarch").mkdir(parents=True)
    (tmp_path / "include" / "multiarch" / "pyconfig.h").write_text("#define FOUND 1\n")
    (tmp_path / "a.c").write_text("#include <stdio.h>\n#include <multiarch/pyconfig.h>\nint a = FOUND;\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "include" / "python3.11"))
    environment = zig_environment()
    command = shlex.split(f"{environment['CC']} {environment['CFLAGS']} -c a.c")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0


def test_an_extension_that_does_not_compile_stops_the_wheel_with_its_error(source, tmp_path):
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    (broken / "csrc/host/fastcall.c").write_text("not C\n")
    with pytest.raises(WheelError, match=r"(?s)building a wheel failed:\n.*fastcall\.c:1:1: error: "):
        core_wheel(broken, tmp_path, PLATFORM)


def test_the_extension_loads_from_an_installed_wheel(made, tmp_path):
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip(f"the wheel is for {PLATFORM}")
    installed(sorted(made.glob("gristmill-*-cp310-*")), tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", TRY_EXTENSION, str(tmp_path)], cwd=tmp_path, env=environment, check=True)


def test_wheels_again_from_elsewhere_have_the_same_bytes(made, source, tiny_packs, tmp_path):
    moved = Path(shutil.copytree(tiny_packs, tmp_path / "moved" / "packs"))
    moved_source = copy_source(source, tmp_path / "moved" / "source")
    for path in (tmp_path / "moved").rglob("*"):
        path.chmod(0o700)
    result = subprocess.run(
        [sys.executable, "-m", "gristmill", "wheel", "--json", "--arch", "gfx1201,sm90",
         "--packs", moved, "--source", moved_source, "--out", tmp_path / "dist"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "HOME": str(tmp_path)},
        umask=0o077,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert len(document["wheels"]) == 4
    for wheel in document["wheels"]:
        path = Path(wheel["path"])
        assert path.read_bytes() == (made / path.name).read_bytes()
        assert wheel["bytes"] == path.stat().st_size
        assert wheel["entries"] == (3 if wheel["arch"] else 0)


FIND = """
import json, sys
from gristmill.packs import find_pack, installed_archs
packs = [find_pack(arch) for arch in sys.argv[1:]]
for pack in packs:
    for entry in pack.manifest.entries.values():
        pack.read_object(entry)
import gristmill_packs
print(json.dumps({"archs": sorted(installed_archs()), "file": getattr(gristmill_packs, "__file__", None),
                  "core": sys.modules["gristmill"].__file__, "names": [p.manifest.arch for p in packs]}))
"""


def installed(wheels: list[Path], target: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
        "-q",
    ]
    subprocess.run([*pip, "--target", str(target), *map(str, wheels)], check=True, capture_output=True)


def test_two_packs_install_side_by_side_and_are_found(made, tmp_path):
    _, core, *packs = sorted(made.iterdir())
    installed([core], tmp_path / "core")
    installed(packs[:1], tmp_path / "site")
    installed(packs[1:], tmp_path / "other")
    paths = os.pathsep.join(str(tmp_path / name) for name in ("core", "site", "other"))
    result = subprocess.run(
        [sys.executable, "-c", FIND, "gfx1201", "sm90"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["names"] == ["gfx1201", "sm90"]
    assert set(found["archs"]) >= {"gfx1201", "sm90"}
    assert found["file"] is None, "gristmill_packs must be a namespace package"
    assert found["core"].startswith(str(tmp_path))


def test_packs_in_one_site_do_not_touch_each_other(made, tmp_path):
    packs = sorted(made.glob("gristmill_*"))
    installed(packs, tmp_path / "site")
    folder = tmp_path / "site" / "gristmill_packs"
    assert sorted(path.name for path in folder.iterdir()) == ["gfx1201", "sm90"]


def test_wheel_over_budget_is_refused_and_not_left(pack, tmp_path):
    size = pack_wheel(pack, tmp_path / "dist", "licence").bytes
    with pytest.raises(WheelError, match=rf"has {size} bytes, more than the budget of {size - 1}"):
        pack_wheel(pack, tmp_path / "tight", "licence", budget_bytes=size - 1)
    assert not list((tmp_path / "tight").iterdir())
    assert pack_wheel(pack, tmp_path / "just", "licence", budget_bytes=size).bytes == size


def test_core_wheel_has_the_budget_too(source, tmp_path):
    with pytest.raises(WheelError, match="more than the budget of 1000"):
        core_wheel(source, tmp_path / "dist", budget_bytes=1000)


def test_budget_is_ten_megabytes():
    assert BUDGET_BYTES == pack_wheel.__defaults__[-1] == core_wheel.__defaults__[-1] == 10_000_000


def test_sizes_are_those_in_the_wheel_by_kernel(pack, tmp_path):
    wheel = pack_wheel(pack, tmp_path / "dist", "licence")
    with zipfile.ZipFile(wheel.path) as archive:
        stored = {Path(info.filename).stem: info for info in archive.infolist() if "/objects/" in info.filename}
    assert {kernel.object for kernel in wheel.kernels} == stored.keys()
    for kernel in wheel.kernels:
        info = stored[kernel.object]
        assert (kernel.op, kernel.bytes, kernel.compressed_bytes) == ("w4a16_gemm", info.file_size, info.compress_size)
    assert sorted(kernel.entries for kernel in wheel.kernels) == [("tiny", "floor"), ("tiny_16",)]
    sizes = [kernel.compressed_bytes for kernel in wheel.kernels]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) < wheel.bytes


def test_command_reports_sizes_as_text_and_as_json(pack, source, tmp_path, capsys):
    arguments = ["wheel", "--no-core", "--packs", str(pack.parent), "--source", str(source)]
    arguments += ["--out", str(tmp_path / "dist")]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["budget_bytes"] == 10_000_000
    (wheel,) = document["wheels"]
    for kernel in wheel["kernels"]:
        assert kernel["share"] == kernel["compressed_bytes"] / wheel["bytes"]
    assert main([*arguments, "--sizes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    first = wheel["kernels"][0]
    assert lines[1].split()[:2] == [str(first["compressed_bytes"]), "bytes"]
    assert lines[1].endswith(f"w4a16_gemm  {', '.join(first['entries'])}")
    assert main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_pack_that_covers_less_than_the_table_says_makes_no_wheel(pack, source, tmp_path, capsys):
    copy = copy_source(source, tmp_path / "source")
    (copy / "docs").mkdir()
    table = copy / "docs" / "coverage.md"
    assert main(["coverage", "--packs", str(pack.parent), "--write", str(table)]) == 0
    arguments = ["wheel", "--no-core", "--packs", str(pack.parent), "--source", str(copy)]
    assert main([*arguments, "--out", str(tmp_path / "dist")]) == 0
    table.write_text(table.read_text().replace("3 entries", "4 entries"))
    assert main([*arguments, "--out", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "-Pack gfx1151, 4 entries" in said
    assert "+Pack gfx1151, 3 entries" in said
    assert not (tmp_path / "none").exists()


def test_packs_alone_are_held_to_the_table_of_the_tree_that_gristmill_runs_from(pack, tmp_path, capsys, monkeypatch):
    arguments = ["wheel", "--no-core", "--packs", str(pack.parent), "--out", str(tmp_path / "dist")]
    assert main(arguments) == 1
    assert "the packs do not cover what" in capsys.readouterr().err

    def no_tree():
        raise WheelError("gristmill runs from an installed wheel")

    monkeypatch.setattr("gristmill.aot.wheel.source_tree", no_tree)
    assert main(arguments) == 0


def test_pack_without_an_object_is_refused(pack, tmp_path):
    next((pack / "objects").iterdir()).unlink()
    with pytest.raises(PackError, match="No such file or directory; reinstall gristmill-gfx1151"):
        pack_wheel(pack, tmp_path / "dist", "licence")


def test_pack_with_an_altered_object_is_refused(pack, tmp_path):
    path = next((pack / "objects").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(PackError, match="the manifest says"):
        pack_wheel(pack, tmp_path / "dist", "licence")


def test_pack_with_a_stray_file_is_refused(pack, tmp_path):
    (pack / "notes.txt").write_text("mine")
    with pytest.raises(ObjectError, match=r"files that no entry names: notes\.txt"):
        pack_wheel(pack, tmp_path / "dist", "licence")


def test_pack_with_an_entry_that_never_ran_is_refused(pack, tmp_path):
    records = read_records((pack / "verified.json").read_bytes(), "test")
    del records["floor"]
    (pack / "verified.json").write_bytes(dump_records(records))
    with pytest.raises(WheelError, match="1 entries have no record of having run, floor first"):
        pack_wheel(pack, tmp_path / "dist", "licence")


def test_record_of_another_object_counts_for_nothing(pack, tmp_path):
    records = read_records((pack / "verified.json").read_bytes(), "test")
    records = {name: replace(record, object="0" * 64) for name, record in records.items()}
    (pack / "verified.json").write_bytes(dump_records(records))
    with pytest.raises(WheelError, match="3 entries have no record of having run"):
        pack_wheel(pack, tmp_path / "dist", "licence")


def test_pack_of_another_version_is_refused(pack, tmp_path):
    path = pack / "manifest.json"
    path.write_text(path.read_text().replace(f'"version": "{VERSION}"', '"version": "0.0.1"'))
    with pytest.raises(WheelError, match=rf"was built by gristmill 0\.0\.1, this is {re.escape(VERSION)}"):
        pack_wheel(pack, tmp_path / "dist", "licence")


def test_file_that_pyproject_leaves_out_is_named(source, tmp_path):
    copy = copy_source(source, tmp_path / "source")
    (copy / "dispatch" / "forgotten").mkdir()
    (copy / "dispatch" / "forgotten" / "__init__.py").write_text("")
    (copy / "dispatch" / "table.json").write_text("{}")
    lost = r"lacks gristmill/forgotten/__init__\.py, gristmill/table\.json; are package and data listed"
    with pytest.raises(WheelError, match=lost):
        core_wheel(copy, tmp_path / "dist")


def test_what_is_missing_for_wheels_is_said(tmp_path, capsys, monkeypatch, tiny_packs):
    assert main(["wheel", "--packs", str(tmp_path), "--out", str(tmp_path / "dist")]) == 1
    assert f"no packs in {tmp_path}; run: gristmill build --out {tmp_path}" in capsys.readouterr().err
    with pytest.raises(WheelError, match=r"is not the source tree of gristmill: no pyproject\.toml"):
        core_wheel(tmp_path, tmp_path / "dist")
    arguments = [
        "wheel",
        "--packs",
        str(tiny_packs),
        "--arch",
        "sm80",
        "--no-core",
        "--out",
        str(tmp_path / "dist"),
    ]
    monkeypatch.setitem(sys.modules, "build", None)
    assert main(arguments) == 1
    assert "making wheels needs build; run: pip install 'gristmill[build]'" in capsys.readouterr().err


def test_license_comes_from_the_source_tree_or_the_installation():
    assert "Apache License" in find_license(source_tree())
    assert find_license(None) == find_license(source_tree())
