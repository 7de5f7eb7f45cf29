"""One C++ variant -> one cubin, without a GPU: by NVRTC from PyPI, or by an nvcc when asked for.

The kernels include no vendor header, so NVRTC alone will do: it gets the source and our headers as text and
sees no folder of this machine. An nvcc runs in the source's folder and sees relative names. Either way the
same sources, macros, target and compiler give the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from gristmill.aot.code_object import check_object
from gristmill.aot.compiled_object import CompiledObject
from gristmill.aot.cxx_sources import argument_layout, headers, macros, source_digests, source_file
from gristmill.aot.environment import child_environment
from gristmill.aot.errors import BuildError, CompileError, ToolchainError
from gristmill.aot.targets import Target
from gristmill.aot.toolchain import INSTALL, files_digest
from gristmill.kernels.variant import CxxVariant

# Which multiply and add are fused is written in the kernels' formulas; the compiler may fuse the rest too.
OPTIONS = ("--std=c++17", "--fmad=true")

# What would make nvcc's result depend on more than its arguments.
_STEERING = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")

NVRTC_PACKAGE = "nvidia-cuda-nvrtc"


def compile_variant(variant: CxxVariant, target: Target, nvcc: str | None = None) -> CompiledObject:
    """Compile one variant; needs no GPU and leaves nothing on disk.

    Parameters
    ----------
    nvcc : path of an nvcc, or its name on PATH; default: NVRTC

    Raises
    ------
    CompileError : the source does not compile; the message has the compiler's words
    ObjectError : the object is not what the row says
    ToolchainError : the compiler is not there
    """
    if target.backend != "cuda":
        raise BuildError(f"{variant.name}: {variant.source} is CUDA, {target.arch} is not")
    # The exact arch and no "compute_": machine code, never PTX that a driver would have to compile.
    options = (f"--gpu-architecture=sm_{target.processor}{variant.features}", *OPTIONS, *macros(variant))
    ptx = ""
    if nvcc is None:
        (code, ptx), compilers = _by_nvrtc(variant, options), {"nvrtc": _nvrtc_version()}
    else:
        program = _find_nvcc(nvcc)
        code, compilers = _by_nvcc(variant, options, program), {"nvcc": _nvcc_version(program)}
    result = CompiledObject(
        code=code,
        symbol=variant.symbol,
        threads=variant.block[0] * variant.block[1] * variant.block[2],
        dynamic_shared_bytes=0,  # the row has a formula
        compilers=compilers,
        assembly=ptx,
    )
    check_object(result.code, target, result.symbol, argument_layout(variant), result.threads)
    return result


def key_facts(variant: CxxVariant, target: Target) -> dict[str, object]:
    """All that the object depends on when NVRTC makes it: what its key in the build cache is made of."""
    return {
        "target": target.arch + variant.features,
        "source": variant.source,
        "symbol": variant.symbol,
        "defines": sorted(variant.defines.items()),
        "sources": dict(source_digests(variant)),
        "options": list(OPTIONS),
        "recipe": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "compiler": nvrtc_identity(),
    }


@lru_cache
def nvrtc_identity() -> dict[str, str]:
    """What tells this NVRTC from any other, for the build cache: its version and the digests of its files."""
    _bindings()
    return {"nvrtc": importlib.metadata.version(NVRTC_PACKAGE), "files": files_digest(NVRTC_PACKAGE)}


def _bindings() -> Any:
    """cuda.bindings.nvrtc with its library loaded."""
    try:
        importlib.metadata.distribution(NVRTC_PACKAGE)
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the first call loads the library; RuntimeError where it is not there
    except (ImportError, importlib.metadata.PackageNotFoundError, RuntimeError) as error:
        raise ToolchainError(
            f"compiling CUDA kernels needs {NVRTC_PACKAGE} and cuda-bindings ({error}); run: {INSTALL}"
        ) from None
    return nvrtc


def _by_nvrtc(variant: CxxVariant, options: tuple[str, ...]) -> tuple[bytes, str]:
    """The machine code, and the PTX that it was made from."""
    nvrtc = _bindings()
    source = source_file(variant)
    included = {name: path.read_bytes() for name, path in headers(source).items()}
    names, texts = [name.encode() for name in included], list(included.values())
    program = _nvrtc_call("nvrtcCreateProgram", source.read_bytes(), source.name.encode(), len(names), texts, names)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytes(_nvrtc_call("nvrtcGetProgramLogSize", program))
        nvrtc.nvrtcGetProgramLog(program, log)
        if int(status):
            words = log.rstrip(b"\0\n").decode(errors="replace") or _nvrtc_text(status)
            raise CompileError(f"{variant.name}: {variant.source} does not compile\n{words}")
        code = bytes(_nvrtc_call("nvrtcGetCUBINSize", program))
        _nvrtc_call("nvrtcGetCUBIN", program, code)
        ptx = bytes(_nvrtc_call("nvrtcGetPTXSize", program))
        _nvrtc_call("nvrtcGetPTX", program, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code, ptx.rstrip(b"\0").decode()


def _nvrtc_call(name: str, *arguments: Any) -> Any:
    status, *values = getattr(_bindings(), name)(*arguments)
    if int(status):
        raise ToolchainError(f"{name} failed: {_nvrtc_text(status)}")
    return values[0] if values else None


def _nvrtc_text(status: Any) -> str:
    return _bindings().nvrtcGetErrorString(status)[1].decode(errors="replace")


def _nvrtc_version() -> str:
    status, major, minor = _bindings().nvrtcVersion()
    if int(status):
        raise ToolchainError(f"nvrtcVersion failed: {_nvrtc_text(status)}")
    return f"{major}.{minor} ({NVRTC_PACKAGE} {nvrtc_identity()['nvrtc']})"


def _find_nvcc(nvcc: str) -> str:
    found = shutil.which(nvcc)
    if found is None:
        raise ToolchainError(f"no nvcc {nvcc!r}; install the CUDA toolkit, or build without it: {INSTALL}")
    return found


def _by_nvcc(variant: CxxVariant, options: tuple[str, ...], nvcc: str) -> bytes:
    source = source_file(variant)
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        out = Path(folder) / "kernel.cubin"
        files = ("--include-path", "../include", "--output-file", str(out), source.name)
        done = _run((nvcc, "--cubin", *options, *files), source.parent)
        if done.returncode:
            words = (done.stdout + done.stderr).strip()
            raise CompileError(f"{variant.name}: {variant.source} does not compile\n{words}")
        return out.read_bytes()


@lru_cache
def _nvcc_version(nvcc: str) -> str:
    done = _run((nvcc, "--version"))
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    if done.returncode or found is None:
        words = (done.stdout + done.stderr).strip()[-200:]
        raise ToolchainError(f"{nvcc} --version says {words!r}, not a version")
    return found[1]


def _run(command: tuple[str, ...], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = child_environment(without=_STEERING)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
