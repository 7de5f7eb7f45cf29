"""The compilers and build tools: are they there, and which exactly."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from functools import lru_cache
from pathlib import Path

from gristmill.aot.errors import ToolchainError

# Module that the build imports or runs -> the package that has it.
BUILD_PACKAGES = {
    "triton": "triton",
    "ninja": "ninja",
    "elftools": "pyelftools",
    "msgpack": "msgpack",
    "tinygrad": "tinygrad",
}
WHEEL_PACKAGES = {"build": "build", "setuptools": "setuptools"}

INSTALL = "pip install 'gristmill[build]'"


def require(packages: dict[str, str], purpose: str) -> None:
    """Raise ToolchainError naming each of `packages` that is not installed."""
    missing = [package for module, package in packages.items() if not _is_installed(module)]
    if missing:
        raise ToolchainError(f"{purpose} needs {', '.join(missing)}; run: {INSTALL}")


def _is_installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # a folder `build` beside us has no origin


@lru_cache
def triton_identity() -> dict[str, str]:
    """What tells this Triton from any other, found without importing it.

    The installer's record has a digest of each file of the wheel, ptxas and the AMD code generator included.
    Where there is none (a source build), the version has to do.
    """
    require({"triton": "triton"}, "compiling kernels")
    return {"triton": importlib.metadata.version("triton"), "files": files_digest("triton", "triton/")}


@lru_cache
def files_digest(package: str, folder: str = "") -> str:
    """Digest of the installer's record of a package, which has the sha256 of each of its files, below `folder` alone
    where one is given."""
    record = importlib.metadata.distribution(package).read_text("RECORD") or ""
    lines = sorted(line for line in record.splitlines() if line.startswith(folder) and "sha256=" in line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def ninja_program() -> Path:
    """The ninja of the PyPI package."""
    require({"ninja": "ninja"}, "building packs")
    import ninja

    program = Path(ninja.BIN_DIR) / ("ninja.exe" if os.name == "nt" else "ninja")
    if not program.is_file():
        raise ToolchainError(f"the ninja package has no program at {program}; run: pip install --force-reinstall ninja")
    return program


def processor_count() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
