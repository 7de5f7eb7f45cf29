"""All environment variables that the build reads, in one place.

| variable | meaning |
|---|---|
| XDG_CACHE_HOME | parent of the default build cache `gristmill`; ~/.cache when unset |
| GRISTMILL_HIP_COMPILER | ROCm's clang for HIP kernels, by path or name; ziglang's clang when unset |
| SOURCE_DATE_EPOCH | time stamp of the files in a wheel, seconds since 1970; 1980-01-01 when unset |

Variables that steer Triton, LLVM or nvcc are not read but removed: what is built depends on the sources, the rows
and the compilers alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

# The earliest time that a zip file can hold.
EPOCH_1980 = 315532800

_STEERING_PREFIXES = (
    "AMDGCN_", "DISABLE_LLVM", "DISABLE_PTXAS", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "TRITON_", "USE_IR_LOC",
)  # fmt: skip


def default_cache_folder() -> Path:
    """Where compiled objects are kept when no folder is given."""
    parent = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(parent) if parent else Path.home() / ".cache") / "gristmill"


def hip_compiler_program() -> str:
    """ROCm's compiler, where the user wants it; else empty."""
    return os.environ.get("GRISTMILL_HIP_COMPILER", "")


def source_date_epoch() -> int:
    """Time stamp of the files in a wheel, in seconds."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    return max(int(text), EPOCH_1980) if text.isdigit() else EPOCH_1980


def child_environment(without: Collection[str] = (), **changes: str) -> dict[str, str]:
    """The environment of this process with `changes`, and `without` some variables, for a process it starts."""
    return {name: value for name, value in {**os.environ, **changes}.items() if name not in without}


@contextmanager
def compiler_environment(scratch: Path) -> Iterator[None]:
    """Let Triton see none of the caller's settings, keep its files under `scratch`, and emit no line info.

    Line info would put absolute paths into the object. Triton reads its settings from the environment when it
    uses them, so this has to enclose the compilation, and for a few of them the import of triton too.
    """
    settings = {
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_HOME": str(scratch),
    }
    saved = {name: value for name, value in os.environ.items() if name.startswith(_STEERING_PREFIXES)}
    for name in saved:
        del os.environ[name]
    os.environ.update(settings)
    temporary_folder, tempfile.tempdir = (
        tempfile.tempdir,
        str(scratch),
    )  # ptxas's input stays behind when it fails
    try:
        yield
    finally:
        tempfile.tempdir = temporary_folder
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(saved)
