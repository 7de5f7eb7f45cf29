"""Formats, rounding and arithmetic of the emulator against exact rational arithmetic and the ISA's rules."""

from __future__ import annotations

from fractions import Fraction

import exact
import numpy as np
import pytest
from gristmill.aot.emulator import float_formats as ff
from gristmill.aot.emulator.float_formats import (
    FLUSH_IN,
    FLUSH_IN_OUT,
    FLUSH_OUT,
    GFX11,
    KEEP_DENORMALS,
    NEAREST_EVEN,
    NUM,
    PROPAGATE,
    TOWARD_NEGATIVE,
    TOWARD_POSITIVE,
    TOWARD_ZERO,
    FloatMode,
)

ROUNDINGS = [NEAREST_EVEN, TOWARD_POSITIVE, TOWARD_NEGATIVE, TOWARD_ZERO]
ALL_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def f32(*values):
    return np.array(values, np.float32).view(np.uint32)


def f16(*values):
    return np.array(values, np.float16).view(np.uint16)


def u32(*values):
    return np.array(values, np.uint32)


def mode_of(rounding):
    return FloatMode(round_f32=rounding, round_f16=rounding)


# Formats


def test_f16_decodes_as_the_format_says_for_all_patterns():
    finite = np.array([exact.F16.is_finite(int(x)) for x in ALL_16])
    expected = [float(exact.F16.decode(int(x))) for x in ALL_16[finite]]
    np.testing.assert_array_equal(ff.decode_f16(ALL_16[finite]), expected)
    np.testing.assert_array_equal(ff.decode_f16(ALL_16), ALL_16.view(np.float16).astype(np.float64))


def test_bf16_decodes_as_the_format_says_for_all_patterns():
    finite = np.array([exact.BF16.is_finite(int(x)) for x in ALL_16])
    expected = [float(exact.BF16.decode(int(x))) for x in ALL_16[finite]]
    np.testing.assert_array_equal(ff.decode_bf16(ALL_16[finite]), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_encode_f16_rounds_at_and_beside_every_value_and_every_tie(rounding):
    positive = ALL_16[:0x7C00].view(np.float16).astype(np.float64)
    ties = (positive[:-1] + positive[1:]) / 2
    points = np.concatenate([positive, ties, [65520.0, 65536.0, 1e300, 2.0**-26]])
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.inf)])
    points = np.concatenate([points, -points])
    sample = points[:: 1 if rounding == NEAREST_EVEN else 7]
    expected = [exact.F16.encode(Fraction(float(x)), rounding, bool(np.signbit(x))) for x in sample]
    np.testing.assert_array_equal(ff.encode_f16(sample, mode_of(rounding)), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_encode_f32_rounds_at_and_beside_values_and_ties(rounding):
    rng = np.random.default_rng(1)
    bits = exact.random_finite(rng, exact.F32, 3000) & np.uint32(0x7FFFFFFF)
    bits = np.concatenate([bits, u32(0, 1, 2, 0x007FFFFF, 0x00800000, 0x7F7FFFFE, 0x7F7FFFFF)])
    value = bits.view(np.float32).astype(np.float64)
    above = np.where(bits == 0x7F7FFFFF, 2.0**128, (bits + np.uint32(1)).view(np.float32).astype(np.float64))
    points = np.concatenate([value, (value + above) / 2])
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.inf)])
    points = np.concatenate([points, -points])
    expected = [exact.F32.encode(Fraction(float(x)), rounding, bool(np.signbit(x))) for x in points]
    np.testing.assert_array_equal(ff.encode_f32(points, mode_of(rounding)), expected)


def test_encode_bf16_rounds_once_at_and_beside_every_tie():
    value = ff.decode_bf16(ALL_16[:0x7F80])
    above = np.append(value[1:], 2.0**128)
    points = np.concatenate([value, (value + above) / 2])
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.inf)])
    points = np.concatenate([points, -points])[::5]
    expected = [exact.BF16.encode(Fraction(float(x)), NEAREST_EVEN, bool(np.signbit(x))) for x in points]
    np.testing.assert_array_equal(ff.encode_bf16(points), expected)


def test_f32_to_bf16_keeps_infinities_and_nans():
    x = u32(0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF)
    np.testing.assert_array_equal(ff.f32_to_bf16(x), [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F80])


@pytest.mark.parametrize("flush", [ff.flush_f32, ff.flush_f16, ff.flush_bf16])
def test_flush_keeps_the_sign_and_everything_but_denormals(flush):
    dtype, smallest_normal = {
        ff.flush_f32: (np.uint32, 0x00800000),
        ff.flush_f16: (np.uint16, 0x0400),
        ff.flush_bf16: (np.uint16, 0x0080),
    }[flush]
    sign = 1 << (np.dtype(dtype).itemsize * 8 - 1)
    x = np.array([0, 1, smallest_normal - 1, smallest_normal, sign, sign | 1, sign | smallest_normal], dtype)
    expected = [0, 0, 0, smallest_normal, sign, sign, sign | smallest_normal]
    np.testing.assert_array_equal(flush(x), expected)
    assert flush(x).dtype == dtype


def test_mode_register_fields():
    # round f32 = 1, round f16 = 2, denorm f32 = 0, denorm f16 = 3, DX10_CLAMP set, IEEE clear
    mode = FloatMode.from_register(0b01_1100_1001)
    assert mode == FloatMode(TOWARD_POSITIVE, TOWARD_NEGATIVE, FLUSH_IN_OUT, KEEP_DENORMALS, False, True)
    assert FloatMode.from_register(0x3F0) == FloatMode()


# Arithmetic


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fma_f32_rounds_once(rounding):
    rng = np.random.default_rng(2)
    a, b, c = exact.close_operands(rng, exact.F32, 6000)
    rows = zip(a, b, c, strict=True)
    expected = [exact.fma(exact.F32, *map(int, row), rounding) for row in rows]
    np.testing.assert_array_equal(ff.fma_f32(a, b, c, mode_of(rounding)), expected)


# a * b + c beside a tie of f32, by less than float64 can hold: (a, b, c). (1 + 2^-16)(1 - 2^-16) = 1 - 2^-32.
_MORE, _LESS = 1 + 2.0**-16, 1 - 2.0**-16
DOUBLE_ROUNDING = [
    (2.0**-12 * _MORE, 2.0**-12 * _LESS, 1 + 2.0**-23),  # exact in float64 still: no harm
    (2.0**-75 * _MORE, 2.0**-75 * _LESS, 2.0**-127 + 2.0**-149),  # denormal sum just below a tie
    (-(2.0**-75) * _MORE, 2.0**-75 * _LESS, 2.0**-127 + 2.0**-149),  # just above a tie
    (
        2.0**-75 * _MORE,
        2.0**-75 * _LESS,
        2.0**-126 - 2.0**-149,
    ),  # by the least normal
]


def test_fma_f32_is_right_where_rounding_through_float64_is_not():
    rng = np.random.default_rng(3)
    # 1 + e with e a hair off 2^-24, and the like at other places: ties of f32 that float64 cannot tell from
    # near-ties
    rows = []
    for _ in range(4000):
        shift = int(rng.integers(0, 24))
        c = np.float32(1 + int(rng.integers(0, 1 << 23)) * 2.0**-23)
        a = np.float32(2.0**-12 * (1 + int(rng.integers(-3, 4)) * 2.0**-23))
        b = np.float32(2.0**-12 * (1 + int(rng.integers(-3, 4)) * 2.0**-23))
        scale = np.float32(2.0**-shift)
        rows.append((a * scale, b, c * scale))
    a, b, c = (f32(*column) for column in zip(*rows, *DOUBLE_ROUNDING, strict=False))
    expected = u32(*(exact.fma(exact.F32, int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)))
    naive = a.view(np.float32).astype(np.float64) * b.view(np.float32) + c.view(np.float32)
    assert (naive.astype(np.float32).view(np.uint32) != expected).sum() > 20  # the cases are of the hard kind
    np.testing.assert_array_equal(ff.fma_f32(a, b, c), expected)


@pytest.mark.parametrize(("a", "b", "c"), DOUBLE_ROUNDING)
def test_fma_f32_near_a_tie(a, b, c):
    assert ff.fma_f32(f32(a), f32(b), f32(c))[0] == exact.fma(exact.F32, *(int(f32(x)[0]) for x in (a, b, c)))


def test_the_denormal_cases_are_of_the_hard_kind():
    for a, b, c in DOUBLE_ROUNDING[1:]:
        naive = f32(a * b + c)[0]
        assert naive != exact.fma(exact.F32, *(int(f32(x)[0]) for x in (a, b, c)))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("function", [ff.add_f32, ff.mul_f32])
def test_add_and_mul_f32_round_once(function, rounding):
    rng = np.random.default_rng(4)
    a = exact.random_finite(rng, exact.F32, 3000)
    near = a ^ rng.integers(0, 1 << 26, a.size, np.uint32)  # like exponents, some cancelling
    far = exact.random_finite(rng, exact.F32, a.size)
    b = np.where(rng.integers(0, 2, a.size) == 1, near, far)
    b = np.where((b & np.uint32(0x7F800000)) == 0x7F800000, a, b)
    b[::10] = a[::10] ^ np.uint32(0x80000000)
    reference = exact.add if function is ff.add_f32 else exact.mul
    expected = [reference(exact.F32, int(x), int(y), rounding) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(function(a, b, mode_of(rounding)), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fma_f16_rounds_once(rounding):
    rng = np.random.default_rng(5)
    a, b, c = exact.close_operands(rng, exact.F16, 6000)
    d = exact.random_finite(rng, exact.F16, 6000)
    a, b, c = np.concatenate([a, a]), np.concatenate([b, b]), np.concatenate([c, d])
    rows = zip(a, b, c, strict=True)
    expected = [exact.fma(exact.F16, *map(int, row), rounding) for row in rows]
    np.testing.assert_array_equal(ff.fma_f16(a, b, c, mode_of(rounding)), expected)


def test_fma_f16_sees_a_product_too_small_for_float64():
    # 2^-24 * 2^-24 = 2^-48 beside 32768 is 64 bits wide; rounding up must still notice it
    up, down = mode_of(TOWARD_POSITIVE), mode_of(TOWARD_NEGATIVE)
    tiny, large = f16(2.0**-24), f16(32768.0)
    assert ff.fma_f16(tiny, tiny, large, up)[0] == large[0] + 1
    assert ff.fma_f16(tiny, tiny, large, down)[0] == large[0]
    assert ff.fma_f16(tiny, tiny ^ np.uint16(0x8000), large, down)[0] == large[0] - 1


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("function", [ff.add_f16, ff.mul_f16])
def test_add_and_mul_f16_round_once(function, rounding):
    rng = np.random.default_rng(6)
    a, b = exact.random_finite(rng, exact.F16, 5000), exact.random_finite(rng, exact.F16, 5000)
    b[::10] = a[::10] ^ np.uint16(0x8000)
    reference = exact.add if function is ff.add_f16 else exact.mul
    expected = [reference(exact.F16, int(x), int(y), rounding) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(function(a, b, mode_of(rounding)), expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fma_of_infinities_and_nans(rounding):
    inf, nan = np.inf, np.nan
    rows = [  # a, b, c, a * b + c
        (inf, 2, 1, inf),
        (inf, -2, 1, -inf),
        (inf, 0, 1, nan),
        (inf, 1, -inf, nan),
        (1, 1, -inf, -inf),
        (nan, 1, 1, nan),
        (1, 1, nan, nan),
        (2.0**100, 2.0**100, -inf, -inf),
    ]
    a, b, c, expected = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    result = ff.fma_f32(a.view(np.uint32), b.view(np.uint32), c.view(np.uint32), mode_of(rounding))
    np.testing.assert_array_equal(result.view(np.float32), expected)
    a, b, c, expected = (x.astype(np.float16) for x in (a[:-1], b[:-1], c[:-1], expected[:-1]))
    result = ff.fma_f16(a.view(np.uint16), b.view(np.uint16), c.view(np.uint16), mode_of(rounding))
    np.testing.assert_array_equal(result.view(np.float16), expected)


@pytest.mark.parametrize(
    ("denorm", "operand_kept", "result_kept"),
    [
        (FLUSH_IN_OUT, False, False),
        (FLUSH_OUT, True, False),
        (FLUSH_IN, False, True),
        (KEEP_DENORMALS, True, True),
    ],
)
def test_denormal_modes(denorm, operand_kept, result_kept):
    mode = FloatMode(denorm_f32=denorm, denorm_f16=denorm)
    denormal, small, sign = f32(2.0**-130), f32(2.0**-100), np.uint32(0x80000000)
    big = f32(2.0**20)
    # a denormal operand, a normal result
    assert ff.mul_f32(denormal, big, mode)[0] == (f32(2.0**-110)[0] if operand_kept else 0)
    assert ff.fma_f32(denormal | sign, big, f32(0), mode)[0] == (f32(-(2.0**-110))[0] if operand_kept else 0)
    # normal operands, a denormal result
    assert ff.mul_f32(small | sign, f32(2.0**-30), mode)[0] == (f32(-(2.0**-130))[0] if result_kept else sign)
    difference = ff.add_f32(f32(2.0**-126), f32(-(2.0**-126) * 1.5), mode)[0]
    assert difference == (f32(-(2.0**-127))[0] if result_kept else sign)
    half = f16(2.0**-20)
    assert ff.mul_f16(half, f16(2.0**10), mode)[0] == (f16(2.0**-10)[0] if operand_kept else 0)
    assert ff.mul_f16(f16(2.0**-10), f16(2.0**-10), mode)[0] == (half[0] if result_kept else 0)
    assert ff.fma_f16(f16(2.0**-10), f16(2.0**-10), f16(0), mode)[0] == (half[0] if result_kept else 0)


def test_mul_dx9_zero():
    a, b = f32(0.0, -0.0, 2.0, 0.0), f32(np.inf, np.nan, 3.0, -5.0)
    np.testing.assert_array_equal(ff.mul_dx9_zero_f32(a, b), f32(0.0, 0.0, 6.0, 0.0))


def test_arithmetic_takes_scalar_operands_of_one_lane():
    rng = np.random.default_rng(7)
    x = exact.random_finite(rng, exact.F32, 128).reshape(4, 32)
    s = exact.random_finite(rng, exact.F32, 4).reshape(4, 1)
    wide = np.broadcast_to(s, (4, 32))
    np.testing.assert_array_equal(ff.fma_f32(x, s, s), ff.fma_f32(x, wide.copy(), wide.copy()))
    np.testing.assert_array_equal(ff.fma_f32(s, wide, x), ff.fma_f32(wide.copy(), wide.copy(), x))


# Minimum and maximum. Q is a quiet NaN, S a signalling one, SQ the same made quiet.

Q, S, SQ = 0x7FC00001, 0x7F800001, 0x7FC00001
ONE, TWO, PLUS_0, MINUS_0 = 0x3F800000, 0x40000000, 0, 0x80000000
MINUS_INF = 0xFF800000


@pytest.mark.parametrize(
    ("rule", "ieee", "a", "b", "least", "greatest"),
    [
        (GFX11, True, ONE, TWO, ONE, TWO),
        (GFX11, True, MINUS_INF, ONE, MINUS_INF, ONE),
        (GFX11, True, PLUS_0, MINUS_0, MINUS_0, PLUS_0),
        (GFX11, True, MINUS_0, PLUS_0, MINUS_0, PLUS_0),
        (GFX11, True, Q, ONE, ONE, ONE),
        (GFX11, True, ONE, Q, ONE, ONE),
        (GFX11, True, 0x7FC0000A, 0x7FC0000B, 0x7FC0000A, 0x7FC0000A),
        (GFX11, True, S, ONE, SQ, SQ),
        (GFX11, True, ONE, S, SQ, SQ),
        (GFX11, False, S, ONE, ONE, ONE),
        (GFX11, False, ONE, S, ONE, ONE),
        (GFX11, False, Q, S, Q, Q),
        (NUM, True, PLUS_0, MINUS_0, MINUS_0, PLUS_0),
        (NUM, True, S, ONE, ONE, ONE),
        (NUM, True, ONE, S, ONE, ONE),
        (NUM, True, S, 0x7FC0000B, SQ, SQ),
        (PROPAGATE, True, PLUS_0, MINUS_0, MINUS_0, PLUS_0),
        (PROPAGATE, True, Q, ONE, Q, Q),
        (PROPAGATE, True, ONE, Q, Q, Q),
        (PROPAGATE, True, ONE, S, SQ, SQ),
        (PROPAGATE, True, 0x7FC0000A, 0x7F80000B, 0x7FC0000B, 0x7FC0000B),  # the signalling one goes first
        (PROPAGATE, True, 0x7FC0000A, 0x7FC0000B, 0x7FC0000A, 0x7FC0000A),
    ],
)
def test_min_and_max(rule, ieee, a, b, least, greatest):
    mode = FloatMode(ieee=ieee)
    assert ff.minimum(u32(a), u32(b), rule, mode)[0] == least
    assert ff.maximum(u32(a), u32(b), rule, mode)[0] == greatest


@pytest.mark.parametrize("rule", [GFX11, NUM, PROPAGATE])
def test_min_and_max_f16_order_all_pairs_of_a_sample(rule):
    sample = np.array([0, 0x8000, 1, 0x8001, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00], np.uint16)
    a, b = (x.ravel() for x in np.meshgrid(sample, sample))
    key = {int(x): (float(x.view(np.float16)), not x & 0x8000) for x in sample}
    np.testing.assert_array_equal(
        ff.minimum(a, b, rule), [min(int(x), int(y), key=key.get) for x, y in zip(a, b, strict=True)]
    )
    np.testing.assert_array_equal(
        ff.maximum(a, b, rule), [max(int(x), int(y), key=key.get) for x, y in zip(a, b, strict=True)]
    )
    assert ff.minimum(np.array([0x7E00], np.uint16), np.array([0x3C00], np.uint16), rule)[0] == (
        0x7E00 if rule == PROPAGATE else 0x3C00
    )


def test_min_refuses_an_unknown_rule():
    with pytest.raises(ValueError, match="unknown NaN rule 'gfx13'"):
        ff.minimum(u32(Q), u32(ONE), "gfx13")


def test_median_of_all_orders():
    x, y, z = f32(-1.0)[0], f32(2.0)[0], f32(5.0)[0]
    for a, b, c in [(x, y, z), (x, z, y), (y, x, z), (y, z, x), (z, x, y), (z, y, x)]:
        assert ff.median(u32(a), u32(b), u32(c), GFX11)[0] == y
    assert ff.median(u32(Q), u32(z), u32(y), GFX11)[0] == y  # with a NaN: the least
    assert ff.median(u32(PLUS_0), u32(MINUS_0), u32(ONE), NUM)[0] == PLUS_0


# Modifiers


def test_source_modifiers_take_the_magnitude_before_the_sign():
    x = f32(1.5, -1.5)
    np.testing.assert_array_equal(ff.source_modifiers(x, True, False), f32(1.5, 1.5))
    np.testing.assert_array_equal(ff.source_modifiers(x, False, True), f32(-1.5, 1.5))
    np.testing.assert_array_equal(ff.source_modifiers(x, True, True), f32(-1.5, -1.5))
    np.testing.assert_array_equal(ff.source_modifiers(f16(1.5, -1.5), True, True), f16(-1.5, -1.5))


def test_clamp():
    x = f32(-1.0, -0.0, 0.25, 1.0, 2.0, np.inf, -np.inf, np.nan)
    np.testing.assert_array_equal(ff.clamp(x), f32(0, 0, 0.25, 1, 1, 1, 0, 0))
    assert ff.is_nan(ff.clamp(x, FloatMode(dx10_clamp=False)))[-1]
    half = f16(-1.0, -0.0, 0.25, 1.0, 2.0, np.nan)
    np.testing.assert_array_equal(ff.clamp(half), f16(0, 0, 0.25, 1, 1, 0))


@pytest.mark.parametrize(("omod", "factor"), [(0, 1), (1, 2), (2, 4), (3, 0.5)])
def test_output_scale_works_only_where_denormal_results_are_flushed(omod, factor):
    flushing = FloatMode(denorm_f32=FLUSH_OUT)
    assert ff.output_scale_f32(f32(3.0), omod, flushing)[0] == f32(3.0 * factor)[0]
    assert ff.output_scale_f32(f32(3.0), omod)[0] == f32(3.0)[0]


def test_halves():
    x = u32(0x12345678)
    half = np.array([0xABCD], np.uint16)
    assert ff.insert_low(x, half)[0] == 0x1234ABCD
    assert ff.insert_high(x, half)[0] == 0xABCD5678
    assert ff.pack_halves(half, (x >> 16).astype(np.uint16))[0] == 0x1234ABCD
    assert all(y.dtype == np.uint32 for y in (ff.insert_low(x, half), ff.insert_high(x, half)))
