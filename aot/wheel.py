"""Wheels: one of data for each pack, and from the source tree the core, with its extension in C and without.

A pack's wheel holds `gristmill_packs/<arch>/...` as a portion of a namespace package: no `__init__.py`, so
that the wheels of several archs lie side by side and any of them can go alone. It does not require
`gristmill`: a pack is complete in itself, may be mounted into an image whose gristmill came from elsewhere,
and must never make pip replace that one; what guards the pair is the manifest's schema number.

setuptools builds them, through `build` and without network. Files are staged with fixed modes and times, so
the same input gives the same bytes; what came out is compared with what went in, because a build backend
drops files silently.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gristmill
from gristmill.aot.environment import child_environment, source_date_epoch
from gristmill.aot.errors import WheelError
from gristmill.aot.pack import check_pack
from gristmill.aot.toolchain import WHEEL_PACKAGES, require
from gristmill.manifest import Entry, Manifest
from gristmill.packs import NAMESPACE, distribution_name

# The most that a wheel may have.
BUDGET_BYTES = 10_000_000

CORE_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")

# Where the extension is built for: zig links against any version of glibc, this one is that of manylinux2014.
PLATFORM = "manylinux_2_17_x86_64"
ZIG_TARGET = "x86_64-linux-gnu.2.17"
EXTENSION = "gristmill/_fastcall.abi3.so"

_PACK_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Gristmill's W4A16 GEMM kernels for {arch}, as machine code."
readme = "README.md"
requires-python = ">=3.10"
license = "Apache-2.0"
license-files = ["LICENSE"]

[tool.setuptools]
packages = ["{package}"]
include-package-data = false

[tool.setuptools.package-data]
"{package}" = ["*.json", "objects/*"]
"""

_PACK_README = """\
Kernels of Gristmill {version}, compiled ahead of time for {arch}: {entries} entries, {objects} code objects.
`gristmill` finds them once this wheel is installed; there is nothing to import.
"""


@dataclass(frozen=True, slots=True)
class KernelSize:
    """What one code object takes of its wheel."""

    op: str
    entries: tuple[str, ...]  # that run it; such as differ in their needs alone share it
    object: str
    bytes: int
    compressed_bytes: int


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that was made."""

    path: Path
    bytes: int
    sha256: str
    arch: str | None  # None for the core
    entries: int
    kernels: tuple[KernelSize, ...]  # largest first


def pack_wheel(folder: Path, out: Path, license_text: str, budget_bytes: int = BUDGET_BYTES) -> Wheel:
    """Make the wheel of the pack in `folder`.

    Raises
    ------
    PackError, ObjectError : the pack is not complete
    WheelError : an entry was never run, the pack was built by another version, or its wheel is larger than the budget
    """
    pack = check_pack(folder)
    manifest = pack.manifest
    if manifest.version != gristmill.__version__:
        raise WheelError(
            f"{folder} was built by gristmill {manifest.version}, this is {gristmill.__version__}; run: gristmill build"
        )
    never_run = sorted(manifest.entries.keys() - pack.verified().keys())
    if never_run:
        raise WheelError(
            f"{folder}: {len(never_run)} entries have no record of having run, {never_run[0]} first; gristmill build "
            "runs AMD's in the emulator, gristmill selftest --record runs NVIDIA's on a GPU"
        )
    package = f"{NAMESPACE}.{manifest.arch}"
    files = {path: f"{NAMESPACE}/{manifest.arch}/{path.relative_to(folder).as_posix()}" for path in _files(folder)}
    texts = {
        "pyproject.toml": _PACK_PROJECT.format(
            name=distribution_name(manifest.arch),
            version=manifest.version,
            arch=manifest.arch,
            package=package,
        ),
        "README.md": _PACK_README.format(
            version=manifest.version,
            arch=manifest.arch,
            entries=len(manifest.entries),
            objects=len({entry.object for entry in manifest.entries.values()}),
        ),
        "LICENSE": license_text,
    }
    path = _build(files, texts, out, wanted=list(files.values()), budget_bytes=budget_bytes)
    return _wheel(path, manifest.arch, len(manifest.entries), _kernel_sizes(path, manifest))


def core_wheel(source: Path, out: Path, platform: str | None = None, budget_bytes: int = BUDGET_BYTES) -> Wheel:
    """Make the wheel of `gristmill` itself from the source tree `source`: for `PLATFORM`, or for any, in Python alone.

    Raises
    ------
    WheelError : no source tree, a file of it that pyproject.toml leaves out, or a wheel larger than the budget
    """
    missing = [name for name in CORE_FILES if not (source / name).exists()]
    if missing:
        raise WheelError(f"{source} is not the source tree of gristmill: no {', '.join(missing)}")
    files = {source / name: name for name in CORE_FILES}
    wanted = []
    for folder, place in core_folders(source).items():
        for path in _files(source / folder):
            within = path.relative_to(source / folder).as_posix()
            files[path] = f"{folder}/{within}"
            wanted.append(f"{place}/{within}")
    if platform is None:
        path = _build(files, {}, out, wanted, budget_bytes, {"GRISTMILL_EXTENSION": "none"})
    else:
        options = [f"--config-setting=--build-option=--plat-name={platform}"]
        environment = {"GRISTMILL_EXTENSION": "required", **zig_environment()}
        path = _build(files, {}, out, [*wanted, EXTENSION], budget_bytes, environment, options)
    return _wheel(path, None, 0, ())


def zig_environment() -> dict[str, str]:
    """What makes setuptools compile with ziglang; the object has no paths and no debug information."""
    require({"ziglang": "ziglang"}, "making the wheel with the extension")
    compiler = shlex.join([sys.executable, "-m", "ziglang", "cc", "-target", ZIG_TARGET])
    # Debian's Python.h includes a file from the folder above; ziglang has headers of its own and does not search there.
    headers = shlex.join(["-idirafter", str(Path(sysconfig.get_path("include")).parent)])
    return {"CC": compiler, "LDSHARED": f"{compiler} -shared", "CFLAGS": f"-O2 -g0 {headers}", "LDFLAGS": "-s"}


def core_folders(source: Path) -> dict[str, str]:
    """Folders of the source tree that the core wheel is made from -> where they lie in the wheel."""
    require(WHEEL_PACKAGES, "making wheels")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # `build` brings it
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    folders = project["tool"]["setuptools"]["package-dir"]
    return {folder: package.replace(".", "/") for package, folder in folders.items()}


def source_tree() -> Path:
    """The source tree that the running gristmill comes from; WheelError when there is none."""
    root = Path(gristmill.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        raise WheelError("gristmill runs from an installed wheel; name its source tree by --source, or give --no-core")
    return root


def find_license(source: Path | None) -> str:
    """The text of the licence: from the source tree, else from the installed distribution."""
    if source is not None and (source / "LICENSE").is_file():
        return (source / "LICENSE").read_text(encoding="utf-8")
    # More than one may be found: setuptools leaves its own, without the licence, beside a tree that it builds from.
    for distribution in importlib.metadata.distributions(name="gristmill"):
        text = distribution.read_text("licenses/LICENSE")
        if text is not None:
            return text
    raise WheelError("no LICENSE to put into the wheels; name the source tree by --source")


def _build(
    files: Mapping[Path, str],
    texts: Mapping[str, str],
    out: Path,
    wanted: list[str],
    budget_bytes: int,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Path:
    """Stage `files` (path -> place in the project) and `texts`, build the wheel and move it into `out`."""
    require(WHEEL_PACKAGES, "making wheels")
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()  # the backend runs in a folder of its own
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=out) as temporary:
        project, made = Path(temporary) / "project", Path(temporary) / "made"
        for path, place in files.items():
            _stage(project / place, path.read_bytes())
        for place, text in texts.items():
            _stage(project / place, text.encode())
        process = subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", *options, "--outdir", str(made), str(project)],
            cwd=project,
            env=child_environment(SOURCE_DATE_EPOCH=str(source_date_epoch()), **(environment or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0o022,
            check=False,
        )
        wheels = list(made.glob("*.whl"))
        if process.returncode or len(wheels) != 1:
            raise WheelError(f"building a wheel failed:\n{process.stdout[-6000:]}")
        wheel = wheels[0]
        with zipfile.ZipFile(wheel) as archive:
            lost = sorted(set(wanted) - set(archive.namelist()))
        if lost:
            raise WheelError(f"{wheel.name} lacks {', '.join(lost)}; are package and data listed in pyproject.toml?")
        size = wheel.stat().st_size
        if size > budget_bytes:
            raise WheelError(f"{wheel.name} has {size} bytes, more than the budget of {budget_bytes}")
        final = out / wheel.name
        wheel.replace(final)
    return final


def _stage(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o644)
    time = source_date_epoch()
    os.utime(path, (time, time))


def _files(folder: Path) -> list[Path]:
    """The files below `folder`, without what Python and an editable install leave there."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    )


def _kernel_sizes(wheel: Path, manifest: Manifest) -> tuple[KernelSize, ...]:
    users: dict[str, list[Entry]] = {}
    for entry in manifest.entries.values():
        users.setdefault(entry.object, []).append(entry)
    sizes = []
    with zipfile.ZipFile(wheel) as archive:
        for digest, entries in users.items():
            info = archive.getinfo(f"{NAMESPACE}/{manifest.arch}/objects/{digest}.{manifest.kind}")
            names = tuple(entry.name for entry in entries)
            sizes.append(KernelSize(entries[0].op, names, digest, info.file_size, info.compress_size))
    return tuple(sorted(sizes, key=lambda size: (-size.compressed_bytes, size.entries)))


def _wheel(path: Path, arch: str | None, entries: int, kernels: tuple[KernelSize, ...]) -> Wheel:
    data = path.read_bytes()
    return Wheel(path, len(data), hashlib.sha256(data).hexdigest(), arch, entries, kernels)
