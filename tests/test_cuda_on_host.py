"""The CUDA C++ kernels run on the CPU: their own sources, the instructions of csrc/include/{ptx,wgmma}.h replaced.

What this shows without a GPU: every index, tail, barrier and reduction, waits that are there when what goes on in the
background comes late and when it comes early, accesses to the arrays given and no others, results within the bound.
What it cannot show: the compiler's work and the order of memory on the device; tests/gpu does.
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
from gristmill.csrc import w4a16_skinny_cuda_variants as skinny
from gristmill.csrc import w4a16_wgmma_variants as wgmma
from gristmill.formula import Formula
from gristmill.kernels.variant import CxxVariant
from gristmill.packed_weight import dequantize, pack
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound

HERE = Path(__file__).parent
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
    multiprocessors: int = 9  # few, so that persistent blocks take several turns


def _skinny_cases(tokens: int, span: int, exact: int) -> list[Case]:
    cases = {
        (128, 0): [Case(1, 1, 32, -1), Case(3, 40, 288, 128, True), Case(8, 600, 672, 256), Case(2, 128, 576, -1)],
        # K = 1280 gives a number of groups with which the scales of a row are copied in one piece; the others do not.
        (64, 1): [Case(2, 33, 352, 64, True), Case(8, 140, 1088, 64), Case(3, 140, 1280, 64)],
        (32, 1): [Case(2, 33, 352, 32, True), Case(8, 140, 1120, 32), Case(3, 140, 1280, 32)],
        (32, 0): [Case(2, 33, 352, 96, True), Case(8, 140, 1152, 160), Case(2, 128, 768, 320)],
    }[span, exact]
    group_size = {(128, 0): -1, (32, 0): 96}.get((span, exact), span)
    if tokens > 8:
        cases.append(Case(tokens, 20, 160, group_size))
    return [*cases, Case(tokens + 3, 20, 160, group_size)]


def _wgmma_cases(tokens: int, span: int, exact: int, rows: int, resident_k: int) -> list[Case]:
    """`rows` of output features are a tile; up to `resident_k` the activations stay in shared memory."""
    narrow, wide, widest = {
        (128, 0): (128, 256, -1), (64, 1): (64, 64, 64), (32, 1): (32, 32, 32), (32, 0): (96, 160, 224),
    }[span, exact]  # fmt: skip
    return [
        Case(3, 1, 32 if widest == -1 else widest + 32, widest),  # most blocks and warps have no work
        Case(tokens - 7, 2 * rows + 2, 1440, narrow, True, multiprocessors=5),
        Case(tokens, 4 * rows + 17, resident_k + 352, wide, multiprocessors=5),  # x is staged again for every tile
        Case(tokens + 1, rows + 1, 352, widest, True),
        Case(2, 2 * rows, 512, narrow),
        Case(2, 2 * rows, 576, widest),  # the last scale of all may belong to many units
    ]


def _cases(variant: CxxVariant) -> list[Case]:
    d = variant.defines
    if variant.source == skinny.SOURCE:
        return _skinny_cases(d["TOKENS"], d["SPAN"], d["EXACT"])
    return _wgmma_cases(d["TOKENS"], d["SPAN"], d["EXACT"], 64 * d["WG_N"], 128 * d["X_SLOTS"] * d["CLUSTER"])


def _variants() -> list[CxxVariant]:
    """Each shape and groups without and with zero points, in one dtype and the other."""
    of_shape: dict[tuple, dict[tuple, CxxVariant]] = {}
    for rows in (skinny, wgmma):
        for variant in (variant for arch in skinny.ARCHES for variant in rows.variants(arch)):
            others = variant.defines.keys() - {"BF16", "ZEROS", "X_SLOTS"}
            shape = (variant.source, *sorted((name, variant.defines[name]) for name in others))
            kind = variant.defines["ZEROS"], variant.defines["BF16"]
            of_shape.setdefault(shape, {}).setdefault(kind, variant)
    return [
        kinds[zeros, bf16]
        for number, kinds in enumerate(of_shape.values())
        for zeros, bf16 in sorted(kinds)
        if bf16 == (zeros + number) % 2
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_on_host")


@pytest.mark.parametrize("variant", _variants(), ids=lambda variant: variant.name)
def test_results_are_within_the_bound_and_accesses_inside(variant, folder):
    library = _build(variant, folder)
    rng = np.random.default_rng(len(variant.name))
    for case in _cases(variant):
        _check(library, variant, case, rng)


@pytest.mark.parametrize("rows", [skinny, wgmma], ids=["skinny", "wgmma"])
def test_zero_weights_give_zero_whatever_x_is(rows, folder):
    variant = next(v for v in rows.variants("sm90") if v.zero_points)
    library = _build(variant, folder)
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float16)
    zero_points = np.full((16, 2), 11, np.float16)
    weight = pack(np.full((16, 256), 11), np.ones((16, 2), np.float16), zero_points, group_size=128)
    out, fault = _run(library, variant, x, weight)
    assert fault is None
    assert not out.any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_zero_point_is_taken_apart_within_one_rounding(dtype, folder):
    macros = {"BF16": int(dtype == "bfloat16"), "CLUSTER": 1}
    library = _compile(HERE / "cuda_on_host" / "apart.cpp", macros, folder / dtype)
    z = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))
    z = z[np.isfinite(z.astype(np.float32))]
    exact = np.arange(16) - z.astype(np.float64)[:, None]  # q - z
    for odd in (0, 1):
        rest, q_less_near, q_less_z = (np.empty(shape, np.float32) for shape in (len(z), (len(z), 16), (len(z), 16)))
        arrays = (ctypes.c_void_p(a.ctypes.data) for a in (rest, q_less_near, q_less_z))
        library.apart(ctypes.c_void_p(z.ctypes.data), len(z), odd, *arrays)
        unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        with np.errstate(invalid="ignore"):
            off = abs(q_less_z - exact)
        # Twice rounded; the largest zero points of float16 can pass its range.
        assert (off <= (2 + unit) * unit * abs(exact))[np.isfinite(q_less_z)].all()
        assert np.isfinite(q_less_z[abs(exact) < 2.0**15.9]).all()
        rest = rest.astype(np.float64)[:, None]
        assert (abs(q_less_near - rest - exact) <= unit * abs(exact)).all()
        # What the sums of both hold is in proportion to the weights.
        assert (abs(rest) <= (1 + unit) * abs(exact)).all()
        assert (abs(q_less_near.astype(np.float64)) <= 2 * (1 + unit) * abs(exact)).all()


@pytest.mark.parametrize("zero_point", [33024.0, -32896.0, -8216.0, -4128.0, 1015.5, 7.25, 2e-7, 3e-39])
def test_any_zero_point_keeps_the_bound(zero_point, folder):
    for variant in _plain_variants_with_zero_points():
        dtype = numpy_dtype(variant.dtype)
        x = abs(np.random.default_rng(1).standard_normal((2, 256))).astype(dtype)
        codes = np.random.default_rng(2).integers(0, 16, (32, 256))
        codes[:16] = np.arange(16)[:, None]  # errors that do not average out
        span = variant.defines["SPAN"]
        scales, zero_points = np.full((2, 32, 256 // span), [[[1e-4]], [[zero_point]]])
        weight = pack(codes, scales, zero_points, group_size=span, dtype=variant.dtype)
        out, fault = _run(_build(variant, folder), variant, x, weight)
        assert fault is None
        dense = dequantize(weight)
        bound = error_bound(
            x.astype(np.float64), dense, dtype=variant.dtype, roundings=variant.roundings, weights_in_dtype=False
        )
        assert worst_error_over_bound(out, linear_float64(x, dense, None), bound) <= 1, variant.name


def test_the_smallest_bfloat16_weights_keep_the_bound(folder):
    """With zero points: weights of one subnormal step, which a quarter of could not be told from zero."""
    small = [variant for variant in _plain_variants_with_zero_points() if variant.dtype == "bfloat16"]
    of_wgmma = next(v for v in wgmma.variants("sm90") if v.zero_points and v.dtype == "bfloat16")
    for variant in (*small, of_wgmma):
        x = np.ones((2, 256), numpy_dtype("bfloat16"))
        span = variant.defines["SPAN"]
        for zero_point in (2, 2.5):
            scales, zero_points = np.full((2, 16, 256 // span), [[[2.0**-133]], [[zero_point]]])
            weight = pack(np.full((16, 256), 4), scales, zero_points, group_size=span, dtype=variant.dtype)
            out, fault = _run(_build(variant, folder), variant, x, weight)
            assert fault is None
            dense = dequantize(weight)
            bound = error_bound(
                x.astype(np.float64), dense,
                dtype=variant.dtype, roundings=variant.roundings, weights_in_dtype=variant.weights_in_dtype,
            )  # fmt: skip
            assert worst_error_over_bound(out, linear_float64(x, dense, None), bound) <= 1, variant.name


def test_whole_zero_points_make_no_nan_of_an_infinite_x(folder):
    for variant in _plain_variants_with_zero_points():
        x = np.ones((1, 256), numpy_dtype(variant.dtype))
        x[0, 5] = np.inf
        span = variant.defines["SPAN"]
        scales, zero_points = np.full((2, 16, 256 // span), [[[1]], [[7]]])
        weight = pack(np.full((16, 256), 8), scales, zero_points, group_size=span, dtype=variant.dtype)
        out, fault = _run(_build(variant, folder), variant, x, weight)
        assert fault is None
        assert np.isposinf(out.astype(np.float32)).all(), variant.name


def _plain_variants_with_zero_points() -> list[CxxVariant]:
    """The skinny kernel, which takes zero points apart, once for each dtype and span."""
    chosen = {
        (variant.dtype, variant.defines["SPAN"]): variant
        for variant in skinny.variants("sm80")
        if variant.zero_points and (variant.defines["EXACT"] or variant.defines["SPAN"] == 128)
    }
    assert len(chosen) == 6
    return list(chosen.values())


def _check(library, variant: CxxVariant, case: Case, rng) -> None:
    dtype = numpy_dtype(variant.dtype)
    groups = 1 if case.group_size == -1 else -(-case.K // case.group_size)
    weight = pack(
        rng.integers(0, 16, (case.N, case.K)),
        rng.uniform(0.001, 0.02, (case.N, groups)),
        _zero_points(rng, case.N, groups) if variant.zero_points else None,
        rng.standard_normal(case.N) if case.bias else None,
        group_size=case.group_size,
        dtype=variant.dtype,
    )
    padding = weight.qweight.base.view(np.uint32)[:, weight.qweight.shape[1] :]
    padding[...] = 0xA5C3F017  # may hold anything
    x = rng.standard_normal((case.M, case.K)).astype(dtype)
    dense = dequantize(weight)
    bias = None if weight.bias is None else np.asarray(weight.bias)
    reference = linear_float64(x, dense, bias)
    bound = error_bound(
        x.astype(np.float64), dense, bias,
        dtype=variant.dtype, roundings=variant.roundings, weights_in_dtype=variant.weights_in_dtype,
    )  # fmt: skip
    for late in (True, False):
        out, fault = _run(library, variant, x, weight, case.multiprocessors, late=late, seed=case.K, scales_skew=late)
        where = f"{case}, {late=}"
        assert fault is None, f"{where}: {fault}"
        ratio = worst_error_over_bound(out, reference, bound)
        assert ratio <= 1, f"{where}: {ratio} of the bound"


def _zero_points(rng, N: int, groups: int) -> np.ndarray:
    """Whole for the first half of the rows, as most checkpoints have them; the kernels go a shorter way there."""
    zero_points = rng.uniform(0, 15, (N, groups))
    zero_points[: N // 2] = np.rint(zero_points[: N // 2])
    return zero_points


def _run(
    library,
    variant: CxxVariant,
    x: np.ndarray,
    weight,
    multiprocessors: int = 9,
    *,
    late: bool = True,
    seed: int = 0,
    scales_skew: int = 0,
) -> tuple[np.ndarray, str | None]:
    """Call the kernel as a launch would; returns its output, and what it did wrong first or None.

    x and out get wider rows than they need, filled with NaN, and out one row more before and behind. Zero points lie
    right behind the scales, so that they may start at another half of 4 bytes; the scales start `scales_skew` elements
    behind 16 bytes. `late` and `seed`: see cuda_on_host/machine.h and run.cpp.
    """
    M, K = x.shape
    padded_x = _aligned(np.full((M, K + 8), np.nan, x.dtype))
    padded_x[:, :K] = x
    qweight = _aligned(np.ascontiguousarray(weight.qweight.base))
    padded_out = np.full((M + 2, weight.N + 3), np.nan, x.dtype)
    out = padded_out[1:-1, : weight.N]
    values = {
        "M": M, "N": weight.N, "K": K, "group_size": weight.group_size, "num_groups": weight.num_groups,
        "multiprocessor_count": multiprocessors, "lds_bytes": LDS_BYTES, "alignment": 16,
    }  # fmt: skip
    assert all(Formula(condition)(values) for condition in variant.conditions), values
    scales = _aligned(np.stack([a for a in (weight.scales, weight.zero_points) if a is not None]), scales_skew)
    inputs = [padded_x, qweight, scales, scales[1] if variant.zero_points else None, weight.bias]
    # The last row of x ends at K: what lies behind it is not x.
    sizes = [(M - 1) * padded_x.strides[0] + 2 * K, *(0 if a is None else a.nbytes for a in inputs[1:])]
    pointers = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (*inputs, out)]
    strides = (K + 8, qweight.shape[1], weight.num_groups, weight.N + 3)
    shared_bytes = Formula(variant.dynamic_shared_bytes)(values)
    assert shared_bytes <= LDS_BYTES
    fault = library.run(
        *pointers,
        *(ctypes.c_int(values[name]) for name in ("M", "N", "K", "group_size")),
        *(ctypes.c_longlong(stride) for stride in strides),
        (ctypes.c_longlong * 5)(*sizes),
        *(ctypes.c_int(Formula(text)(values)) for text in variant.grid[:2]),
        ctypes.c_int(shared_bytes),
        ctypes.c_int(late),
        ctypes.c_int(seed),
    )
    result = out.copy()
    out[...] = np.nan
    assert np.isnan(padded_out.astype(np.float32)).all(), "stores outside the output"
    return result, fault and fault.decode()


def _aligned(array: np.ndarray, skew: int = 0) -> np.ndarray:
    """A copy that starts `skew` elements behind a multiple of 16 bytes."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + skew * array.itemsize
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _build(variant: CxxVariant, folder: Path):
    macros = {**variant.defines, "KERNEL": variant.symbol, "KERNEL_SOURCE": f'"{HERE.parent / variant.source}"'}
    library = _compile(HERE / "cuda_on_host" / "run.cpp", macros, folder / variant.name)
    library.run.restype = ctypes.c_char_p
    return library


def _compile(source: Path, macros: dict[str, int | str], path: Path):
    path = path.with_suffix(".so")
    if not path.exists():
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", *(f"-D{name}={value}" for name, value in macros.items())]
        includes = ["-I", HERE / "cuda_on_host", "-I", HERE.parent / "csrc" / "include"]
        done = subprocess.run([COMPILER, *options, *includes, source, "-o", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(path))
