"""The skinny CUDA kernel run on the CPU: its own source, the instructions of csrc/include/ptx.h replaced.

What this shows without a GPU: every index, tail, barrier and reduction, accesses to the arrays given and no
others, results within the bound. What it cannot show: the compiler's work and the order of memory on the
device; tests/gpu does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gristmill.arrays import numpy_dtype
from gristmill.csrc import w4a16_skinny_cuda_variants as rows
from gristmill.formula import Formula
from gristmill.kernels.variant import CxxVariant
from gristmill.packed_weight import dequantize, pack
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound

HERE = Path(__file__).parent
MULTIPROCESSORS = 9  # few, so that persistent blocks take several turns
LDS_BYTES = 232448

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler: apt install g++")


@dataclass(frozen=True)
class Case:
    M: int
    N: int
    K: int
    group_size: int
    bias: bool = False


CASES = {
    128: [Case(1, 1, 8, -1), Case(3, 40, 264, 128, True), Case(8, 600, 648, 256)],
    64: [Case(2, 33, 328, 64, True), Case(8, 140, 1152, 192)],
    32: [Case(2, 33, 328, 32, True), Case(8, 140, 1152, 96)],
}


def _variants() -> list[CxxVariant]:
    """One per shape and span, dtype and zero points in turn."""
    chosen: dict[tuple, CxxVariant] = {}
    for arch in rows.ARCHES:
        for variant in rows.variants(arch):
            key = tuple(sorted((k, v) for k, v in variant.defines.items() if k not in ("BF16", "ZEROS")))
            kind = (variant.defines["BF16"], variant.defines["ZEROS"])
            if key not in chosen and kind in (divmod(len(chosen) % 4, 2), (1, 1)):
                chosen[key] = variant
    return list(chosen.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_on_host")


@pytest.mark.parametrize("variant", _variants(), ids=lambda variant: variant.name)
def test_results_are_within_the_bound_and_accesses_inside(variant, folder):
    library = _build(variant, folder)
    rng = np.random.default_rng(len(variant.name))
    tokens = variant.defines["TOKENS"]
    for case in CASES[variant.defines["SPAN"]]:
        _check(library, variant, case, rng)
    if tokens > 8:
        _check(library, variant, Case(tokens, 20, 136, -1), rng)
    _check(library, variant, Case(tokens + 3, 20, 136, -1), rng)


def test_zero_weights_give_zero_whatever_x_is(folder):
    variant = next(v for v in rows.variants("sm90") if v.zero_points)
    library = _build(variant, folder)
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float16)
    zero_points = np.full((16, 2), 11, np.float16)
    weight = pack(np.full((16, 256), 11), np.ones((16, 2), np.float16), zero_points, group_size=128)
    out, faults = _run(library, variant, x, weight)
    assert faults == 0
    assert not out.any()


def _check(library, variant: CxxVariant, case: Case, rng) -> None:
    dtype = numpy_dtype(variant.dtype)
    groups = 1 if case.group_size == -1 else -(-case.K // case.group_size)
    weight = pack(
        rng.integers(0, 16, (case.N, case.K)),
        rng.uniform(0.001, 0.02, (case.N, groups)),
        rng.uniform(0, 15, (case.N, groups)) if variant.zero_points else None,
        rng.standard_normal(case.N) if case.bias else None,
        group_size=case.group_size,
        dtype=variant.dtype,
    )
    padding = weight.qweight.base.view(np.uint32)[:, weight.qweight.shape[1] :]
    padding[...] = 0xA5C3F017  # may hold anything
    x = rng.standard_normal((case.M, case.K)).astype(dtype)
    out, faults = _run(library, variant, x, weight)
    dense = dequantize(weight)
    bias = None if weight.bias is None else np.asarray(weight.bias)
    bound = error_bound(
        x.astype(np.float64), dense, bias,
        dtype=variant.dtype, roundings=variant.roundings, weights_in_dtype=variant.weights_in_dtype,
    )  # fmt: skip
    ratio = worst_error_over_bound(out, linear_float64(x, dense, bias), bound)
    assert faults == 0, f"{case}: {faults} accesses outside an array, or threads that wait for ever"
    assert ratio <= 1, f"{case}: {ratio} of the bound"


def _run(library, variant: CxxVariant, x: np.ndarray, weight) -> tuple[np.ndarray, int]:
    """Call the kernel as a launch would; x and out get wider rows than they need, filled with NaN."""
    M, K = x.shape
    padded_x = _aligned(np.full((M, K + 8), np.nan, x.dtype))
    padded_x[:, :K] = x
    qweight = _aligned(np.ascontiguousarray(weight.qweight.base))
    out = np.full((M, weight.N + 3), np.nan, x.dtype)
    values = {
        "M": M, "N": weight.N, "K": K, "group_size": weight.group_size,
        "num_groups": weight.num_groups, "multiprocessor_count": MULTIPROCESSORS, "lds_bytes": LDS_BYTES,
    }  # fmt: skip
    inputs = [padded_x, qweight, weight.scales, weight.zero_points, weight.bias]
    # The last row of x ends at K: what lies behind it is not x.
    sizes = [(M - 1) * padded_x.strides[0] + 2 * K, *(0 if a is None else a.nbytes for a in inputs[1:])]
    pointers = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (*inputs, out)]
    strides = (K + 8, qweight.shape[1], weight.num_groups, weight.N + 3)
    faults = library.run(
        *pointers,
        *(ctypes.c_int(values[name]) for name in ("M", "N", "K", "group_size")),
        *(ctypes.c_longlong(stride) for stride in strides),
        (ctypes.c_longlong * 5)(*sizes),
        *(ctypes.c_int(Formula(text)(values)) for text in variant.grid[:2]),
        ctypes.c_int(Formula(variant.dynamic_shared_bytes)(values)),
    )
    assert np.isnan(out[:, weight.N :].astype(np.float32)).all()
    return out[:, : weight.N], faults


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 16 bytes."""
    memory = np.zeros(array.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _build(variant: CxxVariant, folder: Path):
    path = folder / f"{variant.name}.so"
    if not path.exists():
        macros = [f"-D{name}={value}" for name, value in variant.defines.items()]
        includes = ["-I", HERE / "cuda_on_host", "-I", HERE.parent / "csrc" / "include"]
        command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", *includes, *macros]
        source = HERE / "cuda_on_host" / "run.cpp"
        done = subprocess.run([*command, source, "-o", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(path))
    library.run.restype = ctypes.c_long
    return library
