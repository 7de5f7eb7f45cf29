"""Objects that real compilers make, for tests: a Triton W4A16 kernel and a HIP kernel, built once per session
and arch."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from assembled import link


@dataclass(frozen=True)
class Built:
    """A Triton kernel and what its launch needs."""

    code: bytes
    symbol: str
    threads: int
    shared_bytes: int
    tile: tuple[int, int, int]
    zero_points: bool


TILES = (((16, 32, 64), 2), ((32, 64, 32), 4))


@functools.cache
def triton_kernels(arch: str, dtype: str) -> tuple[Built, ...]:
    """The kernel of `triton_w4a16` in a few tiles, with and without zero points."""
    return tuple(_triton(arch, dtype, tile, warps, zero) for tile, warps in TILES for zero in (False, True))


def _triton(arch: str, dtype: str, tile: tuple[int, int, int], warps: int, zero_points: bool) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton_w4a16 import w4a16

    pointer = f"*{dtype}"
    signature = {
        "a": pointer, "q": "*i32", "s": pointer, "z": pointer, "bias": pointer, "c": pointer,
        "M": "i32", "N": "i32", "K": "i32", "groups": "i32",
    }  # fmt: skip
    constants = {"GROUP": 32, "ZERO": zero_points, "BM": tile[0], "BN": tile[1], "BK": tile[2]}
    names = list(w4a16.arg_names)
    source = ASTSource(
        w4a16,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("hip", arch, 32), options=options)
    return Built(built.asm["hsaco"], built.metadata.name, 32 * warps, built.metadata.shared, tile, zero_points)


@functools.cache
def hip_kernel(arch: str) -> bytes:
    """The kernel of `dot_reduce.hip` as clang 22 compiles it."""
    zig = [sys.executable, "-m", "ziglang", "clang"]
    with tempfile.TemporaryDirectory() as folder:
        ir, target = Path(folder) / "k.ll", Path(folder) / "k.o"
        source = Path(__file__).with_name("dot_reduce.hip")
        subprocess.run(
            [*zig, "-x", "hip", f"--offload-arch={arch}", "--offload-device-only", "-nogpuinc", "-nogpulib",
             "-O3",
             "-S", "-emit-llvm", str(source), "-o", str(ir)],
            check=True, capture_output=True,
        )  # fmt: skip
        subprocess.run(
            [*zig, "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib", "-O3",
             "-c", str(ir), "-o", str(target)],
            check=True, capture_output=True,
        )  # fmt: skip
        return link(target.read_bytes())
