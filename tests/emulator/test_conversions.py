"""Conversions of the emulator: exhaustive over f16, else at the edges that the ISA defines."""

from __future__ import annotations

from fractions import Fraction

import exact
import numpy as np
import pytest
from gristmill.aot.emulator import conversions as cv
from gristmill.aot.emulator.float_formats import (
    FLUSH_IN,
    FLUSH_IN_OUT,
    FLUSH_OUT,
    NEAREST_EVEN,
    TOWARD_NEGATIVE,
    TOWARD_POSITIVE,
    TOWARD_ZERO,
    FloatMode,
)

ALL_16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
INF, NAN = np.inf, np.nan


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def f32(*values):
    return np.array(values, np.float32).view(np.uint32)


def f16(*values):
    return np.array(values, np.float16).view(np.uint16)


def f32_around_f16():
    """f32 patterns at every f16 value and every tie between two, and one unit to either side."""
    positive = ALL_16[:0x7C00].view(np.float16).astype(np.float32)
    points = np.concatenate([positive, (positive[:-1] + positive[1:]) / 2, np.float32([65520, 65536, 2.0**-26, 3e38])])
    bits = points.view(np.uint32)
    bits = np.concatenate([bits, bits[bits > 0] - np.uint32(1), bits + np.uint32(1)])
    return np.concatenate([bits, bits | np.uint32(0x80000000)])


# f32 and f16


def test_f16_to_f32_is_numpys_for_all_patterns():
    result = cv.cvt_f32_f16(ALL_16).view(np.float32)
    np.testing.assert_array_equal(result, ALL_16.view(np.float16).astype(np.float32))
    back = cv.cvt_f16_f32(result.view(np.uint32))
    numbers = ~np.isnan(result)
    np.testing.assert_array_equal(back[numbers], ALL_16[numbers])


@pytest.mark.parametrize("rounding", [NEAREST_EVEN, TOWARD_POSITIVE, TOWARD_NEGATIVE, TOWARD_ZERO])
def test_f32_to_f16_at_and_beside_every_value_and_tie(rounding):
    bits = f32_around_f16()[:: 1 if rounding == NEAREST_EVEN else 5]
    expected = [exact.F16.encode(exact.F32.decode(int(x)), rounding, bool(x >> np.uint32(31))) for x in bits]
    np.testing.assert_array_equal(cv.cvt_f16_f32(bits, FloatMode(round_f16=rounding)), expected)


def test_pk_rtz_rounds_toward_zero_in_any_mode():
    low = f32_around_f16()[::11]
    high = np.roll(low, 1)
    toward_zero = [exact.F16.encode(exact.F32.decode(int(x)), TOWARD_ZERO, bool(x >> np.uint32(31))) for x in low]
    expected = np.array(toward_zero, np.uint32) | np.roll(np.array(toward_zero, np.uint32), 1) << np.uint32(16)
    for mode in (FloatMode(), FloatMode(round_f16=TOWARD_POSITIVE), FloatMode(round_f16=TOWARD_ZERO)):
        np.testing.assert_array_equal(cv.cvt_pk_rtz_f16_f32(low, high, mode), expected)
    assert cv.cvt_pk_rtz_f16_f32(f32(1e6), f32(-INF))[0] == 0xFC007BFF
    assert np.isnan(cv.cvt_pk_rtz_f16_f32(f32(NAN), f32(0)).view(np.float16)[0])


def test_f16_denormals_follow_mode():
    flushing = FloatMode(denorm_f16=FLUSH_IN_OUT)
    assert cv.cvt_f32_f16(np.array([0x8001, 0x0400], np.uint16), flushing).tolist() == f32(-0.0, 2.0**-14).tolist()
    assert cv.cvt_f16_f32(f32(-(2.0**-20), 2.0**-14), flushing).tolist() == [0x8000, 0x0400]
    assert cv.cvt_f16_f32(f32(2.0**-20), FloatMode(denorm_f16=FLUSH_IN)).tolist() == f16(2.0**-20).tolist()
    up = FloatMode(round_f16=TOWARD_POSITIVE)
    assert cv.cvt_f16_f32(f32(2.0**-140), up)[0] == 1  # the smallest f16
    assert cv.cvt_f16_f32(f32(2.0**-140), FloatMode(round_f16=TOWARD_POSITIVE, denorm_f32=FLUSH_IN))[0] == 0


# Integers to floating point


def test_integers_to_f32_round_as_mode_says():
    x = np.array([0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0x01000001, 0x01000003, 0xFF000001], np.uint32)
    for rounding in (NEAREST_EVEN, TOWARD_POSITIVE, TOWARD_NEGATIVE, TOWARD_ZERO):
        mode = FloatMode(round_f32=rounding)
        signed = [exact.F32.encode(Fraction(int(v)), rounding) for v in x.view(np.int32)]
        unsigned = [exact.F32.encode(Fraction(int(v)), rounding) for v in x]
        assert cv.cvt_f32_i32(x, mode).tolist() == signed
        assert cv.cvt_f32_u32(x, mode).tolist() == unsigned


def test_integers_to_f16_for_all_patterns():
    signed = [exact.F16.encode(Fraction(int(v))) for v in ALL_16.view(np.int16)]
    unsigned = [exact.F16.encode(Fraction(int(v))) for v in ALL_16]
    np.testing.assert_array_equal(cv.cvt_f16_i16(ALL_16), signed)
    np.testing.assert_array_equal(cv.cvt_f16_u16(ALL_16), unsigned)


def test_bytes_and_nibbles_to_f32():
    x = np.array([0x80FF017F], np.uint32)
    assert [cv.cvt_f32_ubyte(x, i).view(np.float32)[0] for i in range(4)] == [127, 1, 255, 128]
    table = cv.cvt_off_f32_i4(np.arange(0x50, 0x60, dtype=np.uint32)).view(np.float32)
    assert table.tolist() == [i / 16 for i in (*range(8), *range(-8, 0))]


# Floating point to integers


@pytest.mark.parametrize(
    ("x", "i32", "u32"),
    [
        (1.9, 1, 1),
        (-1.9, -1, 0),
        (-0.0, 0, 0),
        (NAN, 0, 0),
        (INF, 2**31 - 1, 2**32 - 1),
        (-INF, -(2**31), 0),
        (2.0**31, 2**31 - 1, 2**31),
        (-(2.0**31), -(2**31), 0),
        (2147483520.0, 2147483520, 2147483520),
        (2.0**32, 2**31 - 1, 2**32 - 1),
        (4294967040.0, 2**31 - 1, 4294967040),
    ],
)
def test_f32_to_integers_truncate_and_saturate(x, i32, u32):
    assert cv.cvt_i32_f32(f32(x)).view(np.int32)[0] == i32
    assert cv.cvt_u32_f32(f32(x))[0] == u32


def test_f32_to_integers_nearest_and_floor():
    x = f32(0.5, 1.5, -0.5, -1.5, 2.49, -2.51, NAN, 1e10, -1e10)
    most, least = 2**31 - 1, -(2**31)
    assert cv.cvt_nearest_i32_f32(x).view(np.int32).tolist() == [1, 2, 0, -1, 2, -3, 0, most, least]
    assert cv.cvt_floor_i32_f32(x).view(np.int32).tolist() == [0, 1, -1, -2, 2, -3, 0, most, least]


def test_f16_to_integers_for_all_patterns():
    value = ALL_16.view(np.float16).astype(np.float64)
    whole = [0 if np.isnan(v) else int(np.clip(v, -1e9, 1e9)) for v in value]
    np.testing.assert_array_equal(cv.cvt_i16_f16(ALL_16).view(np.int16), np.clip(whole, -(2**15), 2**15 - 1))
    np.testing.assert_array_equal(cv.cvt_u16_f16(ALL_16), np.clip(whole, 0, 2**16 - 1))


def test_packed_conversions_saturate():
    assert cv.cvt_pk_i16_f32(f32(-1e9), f32(3.7))[0] == 0x00038000
    assert cv.cvt_pk_u16_f32(f32(-1.0), f32(1e9))[0] == 0xFFFF0000
    assert cv.cvt_pk_i16_f32(f32(NAN), f32(-3.7))[0] == 0xFFFD0000
    low, high = np.array([0xFFFF0000], np.uint32), np.array([0x00012345], np.uint32)
    assert cv.cvt_pk_i16_i32(low, high)[0] == 0x7FFF8000
    assert cv.cvt_pk_u16_u32(low, high)[0] == 0xFFFFFFFF


# Rounding to integers


def test_rounding_to_integers():
    x = f32(0.5, 1.5, 2.5, -0.5, -1.5, 2.0**30, -0.0, -INF)
    assert cv.rndne(x).tolist() == f32(0, 2, 2, -0.0, -2, 2.0**30, -0.0, -INF).tolist()
    assert cv.trunc(x).tolist() == f32(0, 1, 2, -0.0, -1, 2.0**30, -0.0, -INF).tolist()
    assert cv.floor(x).tolist() == f32(0, 1, 2, -1, -2, 2.0**30, -0.0, -INF).tolist()
    assert cv.ceil(x).tolist() == f32(1, 2, 3, -0.0, -1, 2.0**30, -0.0, -INF).tolist()
    assert cv.rndne(f16(2.5, -3.5)).tolist() == f16(2, -4).tolist()
    assert cv.fract(f32(1.25, -1.25, -(2.0**-40))).tolist() == f32(0.25, 0.75, 1.0).tolist()
    assert cv.fract(f16(1.25, -1.25)).tolist() == f16(0.25, 0.75).tolist()
    assert cv.ceil(f32(2.0**-140), FloatMode(denorm_f32=FLUSH_IN))[0] == 0
    assert cv.ceil(f32(2.0**-140)).tolist() == f32(1).tolist()


# Exponent and significand


def test_ldexp_f32_rounds_once():
    rng = np.random.default_rng(1)
    x = exact.random_finite(rng, exact.F32, 2000)
    n = rng.integers(-290, 290, x.size).astype(np.int32)
    n[:6] = [2**31 - 1, -(2**31), 1000, -1000, 0, -149]
    x[:2] = f32(2.0**-149, 3e38)
    expected = [
        exact.F32.encode(
            exact.F32.decode(int(v)) * Fraction(2) ** max(min(int(e), 999), -999), 0, bool(v >> np.uint32(31))
        )
        for v, e in zip(x, n, strict=True)
    ]
    np.testing.assert_array_equal(cv.ldexp_f32(x, n.view(np.uint32)), expected)


def test_ldexp_f16_rounds_once():
    rng = np.random.default_rng(2)
    x = exact.random_finite(rng, exact.F16, 2000)
    n = rng.integers(-45, 45, x.size).astype(np.int16)
    n[:2] = [2**15 - 1, -(2**15)]
    expected = [
        exact.F16.encode(exact.F16.decode(int(v)) * Fraction(2) ** int(e), 0, bool(v >> np.uint16(15)))
        for v, e in zip(x, np.clip(n, -999, 999), strict=True)
    ]
    np.testing.assert_array_equal(cv.ldexp_f16(x, n.view(np.uint16)), expected)


def test_frexp_splits_all_f16_and_edges_of_f32():
    finite = ALL_16[(ALL_16 & 0x7FFF) < 0x7C00]
    mantissa, exponent = cv.frexp_mant(finite).view(np.float16), cv.frexp_exp(finite).view(np.int16)
    nonzero = (finite & 0x7FFF) != 0
    assert ((np.abs(mantissa) >= 0.5) & (np.abs(mantissa) < 1))[nonzero].all()
    np.testing.assert_array_equal(np.ldexp(mantissa.astype(np.float64), exponent), finite.view(np.float16))
    assert not exponent[~nonzero].any()
    x = f32(2.0**-149, 1.0, -3.0, INF, 0.0)
    assert cv.frexp_exp(x).view(np.int32).tolist() == [-148, 1, 2, 0, 0]
    assert cv.frexp_mant(x).tolist() == f32(0.5, 0.5, -0.75, INF, 0.0).tolist()


# Approximate functions


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (cv.rcp, lambda x: 1 / x),
        (cv.rsq, lambda x: 1 / np.sqrt(x)),
        (cv.sqrt, np.sqrt),
        (cv.exp2, np.exp2),
        (cv.log2, np.log2),
    ],
)
def test_approximate_functions_are_within_one_unit(function, reference):
    rng = np.random.default_rng(3)
    x = np.exp2(rng.uniform(-6, 3.9, 2000)).astype(np.float32)
    expected = reference(x.astype(np.float64))
    error = np.abs(function(x.view(np.uint32)).view(np.float32) - expected)
    assert (error <= np.spacing(np.abs(expected).astype(np.float32))).all()
    half = x.astype(np.float16)
    expected = reference(half.astype(np.float64))
    error = np.abs(function(half.view(np.uint16)).view(np.float16).astype(np.float64) - expected)
    assert (error <= np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64)).all()


def test_approximate_functions_at_the_edges():
    assert cv.rcp(f32(0.0, -0.0, INF, -INF, 2.0**-140, 2.0**127)).tolist() == f32(INF, -INF, 0, -0.0, INF, 0).tolist()
    assert cv.rsq(f32(0.0, -0.0, INF)).tolist() == f32(INF, -INF, 0).tolist()
    assert cv.sqrt(f32(-0.0, INF)).tolist() == f32(-0.0, INF).tolist()
    assert cv.exp2(f32(-INF, INF, -127.0, -126.0, 128.0)).tolist() == f32(0, INF, 0, 2.0**-126, INF).tolist()
    assert cv.log2(f32(0.0, INF, 2.0**-140)).tolist() == f32(-INF, INF, -INF).tolist()
    for function in (cv.rsq, cv.sqrt, cv.log2):
        assert np.isnan(function(f32(-1.0)).view(np.float32)[0])
    assert cv.rcp(f16(2.0**15), FloatMode(denorm_f16=FLUSH_OUT))[0] == 0
    assert cv.rcp(f16(2.0**15))[0] == f16(2.0**-15)[0]
