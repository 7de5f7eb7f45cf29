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

# A K that gives a number of groups with which the scales of a row are copied in one piece, where a group is one span.
IN_ONE_PIECE = 1280

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


def _skinny_cases(tokens: int, span: int) -> list[Case]:
    cases = {
        128: [Case(1, 1, 32, -1), Case(3, 40, 288, 128, True), Case(8, 600, 672, 256), Case(2, 128, 576, -1)],
        64: [Case(2, 33, 352, 64, True), Case(8, 140, 1088, 64), Case(2, 33, 736, 192, True)],
        32: [Case(2, 33, 352, 32, True), Case(8, 140, 1120, 32), Case(2, 33, 352, 96, True), Case(8, 140, 1152, 160)],
    }[span]
    cases += [Case(3, 40, IN_ONE_PIECE, span)]
    if tokens > 8:
        cases.append(Case(tokens, 20, 160, span))
    return [*cases, Case(tokens + 3, 20, 160, span)]


def _wgmma_cases(tokens: int, span: int, rows: int, resident_k: int) -> list[Case]:
    """`rows` of output features are a tile; up to `resident_k` the activations stay in shared memory."""
    narrow, wide, widest = {128: (128, 256, -1), 64: (64, 192, 320), 32: (32, 96, 160)}[span]
    return [
        Case(3, 1, 32 if widest == -1 else widest + 32, widest),  # most blocks and warps have no work
        Case(tokens - 7, 2 * rows + 2, 1440, narrow, True, multiprocessors=5),
        Case(tokens, 4 * rows + 17, resident_k + 352, wide, multiprocessors=5),  # x is staged again for every tile
        Case(tokens + 1, rows + 1, 352, widest, True),
        Case(2, 2 * rows, 512, narrow),
        Case(2, 2 * rows, 576, widest),  # the last scale of all may belong to many units
        Case(2, rows + 3, IN_ONE_PIECE, narrow),
    ]


def _cases(variant: CxxVariant) -> list[Case]:
    d = variant.defines
    if variant.source == skinny.SOURCE:
        return _skinny_cases(d["TOKENS"], d["SPAN"])
    return _wgmma_cases(d["TOKENS"], d["SPAN"], 64 * d["WG_N"], 128 * d["X_SLOTS"] * d["CLUSTER"])


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
def test_every_zero_point_is_subtracted_with_one_rounding(dtype, folder):
    z = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))
    z = z[np.isfinite(z.astype(np.float32))]
    unpacked, lost, for_scaling, less_z = _unpack(z, dtype, 1, folder)

    z = z.astype(np.float64)
    q = np.arange(16)[:, None]
    assert not lost[(z == 0) | (abs(z) >= {"float16": 2.0**-5, "bfloat16": 2.0**-120}[dtype])].any()
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    kept = (z - lost)[:, None, None]  # what unpack() was given
    assert (abs(unpacked - (q - kept)) <= unit * abs(q - kept)).all()

    assert (for_scaling == q).all()
    with np.errstate(invalid="ignore"):  # the largest zero points of float16 pass its range
        exact = q - z[:, None, None]
        assert (abs(less_z - exact) <= unit * abs(exact))[np.isfinite(less_z)].all()
    assert np.isfinite(less_z[(abs(exact) < 2.0**15.9).repeat(8, axis=2)]).all()
    assert (_unpack(z[:2].astype(numpy_dtype(dtype)), dtype, 0, folder)[2] == q - 8).all()


def _unpack(z: np.ndarray, dtype: str, zeros: int, folder: Path) -> tuple[np.ndarray, ...]:
    """All that cuda_on_host/unpack.cpp gives for the zero points `z`."""
    macros = {"BF16": int(dtype == "bfloat16"), "ZEROS": zeros, "CLUSTER": 1}
    library = _compile(HERE / "cuda_on_host" / "unpack.cpp", macros, folder / f"{dtype}_{zeros}")
    shapes = (len(z), 16, 8), (len(z),), (16, 8), (len(z), 16, 8)
    found = tuple(np.empty(shape, np.float32) for shape in shapes)
    library.unpack_all(ctypes.c_void_p(z.ctypes.data), len(z), *(ctypes.c_void_p(a.ctypes.data) for a in found))
    return found


# Far out, but so that sums of bfloat16 do not pass float32, and around the smallest of which nothing is lost.
ZERO_POINTS = {
    "float16": (65504, -65504, 1015.5, 7.25, 2.0**-5, 2.0**-5 - 2.0**-16, -(2.0**-14) - 2.0**-24, 2.0**-24),
    "bfloat16": (1e35, -1e35, 1015.5, 7.25, 2.0**-120, 2.0**-121 + 2.0**-128, -(2.0**-126) - 2.0**-133, 2.0**-133),
}


@pytest.mark.parametrize("number", range(8))
def test_any_zero_point_keeps_the_bound(number, folder):
    for variant in _skinny_variants_with_zero_points():
        zero_point = ZERO_POINTS[variant.dtype][number]
        dtype = numpy_dtype(variant.dtype)
        x = abs(np.random.default_rng(1).standard_normal((2, 256))).astype(dtype)
        # Errors that do not average out; where all q are 0, the zero point is all there is.
        codes = np.random.default_rng(2).integers(0, 16, (32, 256))
        codes[:16] = np.arange(16)[:, None]
        # A scale that brings what the zero point adds into the middle of the dtype's range.
        scale = min(
            2.0 ** (-6 - np.floor(np.log2(abs(zero_point)))), {"float16": 1, "bfloat16": 2.0**100}[variant.dtype]
        )
        scales, zero_points = np.full((2, 32, 256 // variant.defines["SPAN"]), [[[scale]], [[zero_point]]])
        _check_weight(variant, x, codes, scales, zero_points, folder)


@pytest.mark.parametrize(
    ("zero_point", "scale", "x"), [(2.0**-133, 3 * 2.0**-12, 1000), (2.0**-128, 2.0**110, 2.0**20)]
)
def test_the_smallest_zero_points_neither_vanish_nor_overflow(zero_point, scale, x, folder):
    for variant in _skinny_variants_with_zero_points():
        if variant.dtype == "bfloat16":
            x_row = np.full((1, 256), x, numpy_dtype("bfloat16"))
            scales, zero_points = np.full((2, 16, 256 // variant.defines["SPAN"]), [[[scale]], [[zero_point]]])
            _check_weight(variant, x_row, np.zeros((16, 256), int), scales, zero_points, folder)


@pytest.mark.parametrize("rows", [skinny, wgmma], ids=["skinny", "wgmma"])
def test_scales_are_copied_in_one_piece_only_where_they_are_aligned(rows, folder):
    rng = np.random.default_rng(0)
    for variant in _one_for_each(rows, "SPAN", "CHUNKS"):
        if variant.dtype == "float16":
            scales = rng.uniform(0.001, 0.02, (20, IN_ONE_PIECE // variant.defines["SPAN"]))
            x = rng.standard_normal((2, IN_ONE_PIECE)).astype(np.float16)
            codes = rng.integers(0, 16, (20, IN_ONE_PIECE))
            for skew, zeros_skew in ((0, 0), (1, 1), (2, 2), (4, 4), (0, 1), (0, 2), (0, 4), (1, 0)):
                zero_points = _zero_points(rng, *scales.shape)
                skews = {"scales_skew": skew, "zeros_skew": zeros_skew}
                _check_weight(variant, x, codes, scales, zero_points, folder, **skews)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scaled_sums_round_no_weight(dtype, folder):
    """With scales which times 7 are far from a number of the dtype: in sums of one sign a rounding would show."""
    candidates = np.arange(1, 2, 2.0**-10 if dtype == "float16" else 2.0**-7)
    off = abs((7 * candidates).astype(numpy_dtype(dtype)) / (7 * candidates) - 1)
    scales = candidates[np.argsort(off)[-16:]].repeat(2).reshape(16, 2) / 64
    x = np.random.default_rng(0).uniform(1, 2, (8, 256)).astype(numpy_dtype(dtype))
    tokens = set()
    for variant in wgmma.variants("sm90"):
        if (variant.dtype, variant.zero_points, variant.weights_in_dtype) == (dtype, False, False):
            tokens.add(variant.defines["TOKENS"])
            _check_weight(variant, x, np.ones((16, 256), int), scales, None, folder)
    assert tokens == {16, 32}


def test_the_smallest_bfloat16_weights_keep_the_bound(folder):
    """With zero points: weights of one subnormal step, which a quarter of could not be told from zero."""
    of_wgmma = [v for v in wgmma.variants("sm90") if v.zero_points and v.dtype == "bfloat16"]
    both_ways = (next(v for v in of_wgmma if v.weights_in_dtype is way) for way in (False, True))
    for variant in (*_skinny_variants_with_zero_points(), *both_ways):
        if variant.dtype == "bfloat16":
            x = np.ones((2, 256), numpy_dtype("bfloat16"))
            for zero_point in (2, 2.5):
                shape = (16, 256 // variant.defines["SPAN"])
                scales, zero_points = np.full(shape, 2.0**-133), np.full(shape, zero_point)
                _check_weight(variant, x, np.full((16, 256), 4), scales, zero_points, folder)


def test_a_lost_zero_point_makes_no_nan_in_other_rows(folder):
    for variant in _skinny_variants_with_zero_points():
        x = np.ones((1, 256), numpy_dtype(variant.dtype))
        x[0, 5] = np.inf
        scales, zero_points = np.ones((2, 16, 256 // variant.defines["SPAN"]))
        zero_points *= 7
        zero_points[3] = ZERO_POINTS[variant.dtype][-1]  # inf less inf there
        weight = pack(
            np.full((16, 256), 8), scales, zero_points, group_size=variant.defines["SPAN"], dtype=variant.dtype
        )
        out, fault = _run(_build(variant, folder), variant, x, weight)
        assert fault is None
        assert np.isposinf(np.delete(out.astype(np.float32), 3, axis=1)).all(), variant.name


def _skinny_variants_with_zero_points() -> list[CxxVariant]:
    return _one_for_each(skinny, "SPAN", "CHUNKS", "TOKENS")


def _one_for_each(rows, *names: str) -> list[CxxVariant]:
    """A variant with zero points for each dtype and values of these macros."""
    chosen = {
        (variant.dtype, *(variant.defines[name] for name in names)): variant
        for variant in rows.variants("sm90")
        if variant.zero_points
    }
    assert {key[1:3] for key in chosen} == {(span, chunks) for span in (32, 64, 128) for chunks in (1, 2)}
    return list(chosen.values())


def _check_weight(variant: CxxVariant, x, codes, scales, zero_points, folder, **skews: int) -> None:
    weight = pack(codes, scales, zero_points, group_size=variant.defines["SPAN"], dtype=variant.dtype)
    out, fault = _run(_build(variant, folder), variant, x, weight, **skews)
    assert fault is None, variant.name
    assert worst_error_over_bound(out, *_reference_and_bound(variant, x, weight)) <= 1, variant.name


def _reference_and_bound(variant: CxxVariant, x, weight) -> tuple[np.ndarray, np.ndarray]:
    dense = dequantize(weight)
    bias = None if weight.bias is None else np.asarray(weight.bias)
    bound = error_bound(
        x.astype(np.float64), dense, bias,
        dtype=variant.dtype, roundings=variant.roundings, weights_in_dtype=variant.weights_in_dtype,
    )  # fmt: skip
    return linear_float64(x, dense, bias), bound


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
    reference, bound = _reference_and_bound(variant, x, weight)
    for late in (True, False):
        # Scales that start at an odd half of 4 bytes, save where a row's can be copied in one piece.
        skew = int(late and case.K != IN_ONE_PIECE)
        out, fault = _run(library, variant, x, weight, case.multiprocessors, late=late, seed=case.K, scales_skew=skew)
        where = f"{case}, {late=}"
        assert fault is None, f"{where}: {fault}"
        ratio = worst_error_over_bound(out, reference, bound)
        assert ratio <= 1, f"{where}: {ratio} of the bound"


def _zero_points(rng, N: int, groups: int) -> np.ndarray:
    """Half of the rows whole, as most checkpoints have them, half real."""
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
    zeros_skew: int | None = None,
) -> tuple[np.ndarray, str | None]:
    """Call the kernel as a launch would; returns its output, and what it did wrong first or None.

    x and out get wider rows than they need, filled with NaN, and out one row more before and behind. The scales start
    `scales_skew` elements behind 16 bytes and the zero points `zeros_skew`; if None, as if right behind the scales.
    `late` and `seed`: see cuda_on_host/machine.h and run.cpp.
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
    scales = _aligned(np.asarray(weight.scales), scales_skew)
    zeros_skew = (scales_skew + scales.size) % 8 if zeros_skew is None else zeros_skew
    zero_points = _aligned(np.asarray(weight.zero_points), zeros_skew) if variant.zero_points else None
    inputs = [padded_x, qweight, scales, zero_points, weight.bias]
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
