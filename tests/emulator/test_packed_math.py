"""Packed, mixed and dot arithmetic, lane by lane against exact arithmetic and the ISA's pseudocode."""

from __future__ import annotations

from fractions import Fraction

import exact
import numpy as np
import pytest
from gristmill.aot.emulator import packed_math as pm
from gristmill.aot.emulator.float_formats import GFX11, NUM, PROPAGATE, TOWARD_ZERO, FloatMode
from gristmill.aot.emulator.packed_math import Select

SHAPE = (2, 32)


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def pairs(rng, fmt=exact.F16):
    """Registers that hold two finite 16-bit numbers each."""
    low, high = (exact.random_finite(rng, fmt, 64).astype(np.uint32) for _ in range(2))
    return (low | high << np.uint32(16)).reshape(SHAPE)


def words(rng):
    return rng.integers(0, 1 << 32, SHAPE, np.uint32)


def take(x, operand, select, high):
    """The half of operand `x` that goes into one half of the result, negated if the modifiers say so."""
    from_high = (select.op_sel_hi if high else select.op_sel) >> operand & 1
    negate = (select.neg_hi if high else select.neg_lo) >> operand & 1
    return (int(x) >> (16 if from_high else 0) & 0xFFFF) ^ (0x8000 if negate else 0)


def per_half(function, select, *operands):
    result = np.zeros(SHAPE, np.uint32)
    for place in np.ndindex(SHAPE):
        low, high = (
            function(*(take(x[place], i, select, half) for i, x in enumerate(operands))) & 0xFFFF for half in (0, 1)
        )
        result[place] = low | high << 16
    return result


SELECTS = [
    Select(),
    Select(op_sel=0b111, op_sel_hi=0b000),
    Select(op_sel=0b001, op_sel_hi=0b110),
    Select(op_sel=0b010, op_sel_hi=0b010, neg_lo=0b001, neg_hi=0b010),
    Select(neg_lo=0b110, neg_hi=0b011),
    Select(op_sel=0b101, op_sel_hi=0b011, neg_lo=0b111, neg_hi=0b111),
]


@pytest.mark.parametrize("select", SELECTS)
def test_packed_f16(select):
    rng = np.random.default_rng(1)
    a, b, c = pairs(rng), pairs(rng), pairs(rng)
    f16 = exact.F16
    expected = per_half(lambda x, y: exact.add(f16, x, y), select, a, b)
    np.testing.assert_array_equal(pm.pk_add_f16(a, b, select), expected)
    expected = per_half(lambda x, y: exact.mul(f16, x, y), select, a, b)
    np.testing.assert_array_equal(pm.pk_mul_f16(a, b, select), expected)
    expected = per_half(lambda x, y, z: exact.fma(f16, x, y, z), select, a, b, c)
    np.testing.assert_array_equal(pm.pk_fma_f16(a, b, c, select), expected)

    def key(x):
        return f16.decode(x), not x & 0x8000

    for rule in (GFX11, NUM, PROPAGATE):
        np.testing.assert_array_equal(
            pm.pk_min_f16(a, b, rule, select), per_half(lambda x, y: min(x, y, key=key), select, a, b)
        )
        np.testing.assert_array_equal(
            pm.pk_max_f16(a, b, rule, select), per_half(lambda x, y: max(x, y, key=key), select, a, b)
        )


def test_packed_f16_follow_mode_and_clamp():
    rng = np.random.default_rng(2)
    a, b, c = pairs(rng), pairs(rng), pairs(rng)
    expected = per_half(lambda x, y, z: exact.fma(exact.F16, x, y, z, TOWARD_ZERO), Select(), a, b, c)
    np.testing.assert_array_equal(pm.pk_fma_f16(a, b, c, mode=FloatMode(round_f16=TOWARD_ZERO)), expected)
    clamped = pm.pk_fma_f16(a, b, c, saturate=True).view(np.float16)
    np.testing.assert_array_equal(clamped, np.clip(pm.pk_fma_f16(a, b, c).view(np.float16), 0, 1))


def test_packed_operands_may_be_scalar_or_strided():
    rng = np.random.default_rng(3)
    a, b = pairs(rng), pairs(rng)
    scalar = b[:, :1]
    wide = np.ascontiguousarray(np.broadcast_to(scalar, SHAPE))
    for select in SELECTS[:3]:
        np.testing.assert_array_equal(pm.pk_mul_f16(a, scalar, select), pm.pk_mul_f16(a, wide, select))
        np.testing.assert_array_equal(
            pm.pk_mul_f16(a, np.broadcast_to(scalar, SHAPE), select), pm.pk_mul_f16(a, wide, select)
        )
    registers = np.stack([a, b], -1)  # lanes two words apart
    np.testing.assert_array_equal(pm.pk_add_f16(registers[..., 0], registers[..., 1]), pm.pk_add_f16(a, b))
    np.testing.assert_array_equal(pm.dot4_u32_u8(registers[..., 0], scalar, a), pm.dot4_u32_u8(a, wide, a))


def signed16(x):
    return x - 0x10000 if x & 0x8000 else x


@pytest.mark.parametrize("select", SELECTS[:3])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add_u16", lambda x, y: x + y),
        ("sub_u16", lambda x, y: x - y),
        ("add_i16", lambda x, y: x + y),
        ("sub_i16", lambda x, y: x - y),
        ("mul_lo_u16", lambda x, y: x * y),
        ("min_u16", min),
        ("max_u16", max),
        ("min_i16", lambda x, y: min(x, y, key=signed16)),
        ("max_i16", lambda x, y: max(x, y, key=signed16)),
        ("lshlrev_b16", lambda x, y: y << (x & 15)),
        ("lshrrev_b16", lambda x, y: y >> (x & 15)),
        ("ashrrev_i16", lambda x, y: signed16(y) >> (x & 15)),
        ("mad_u16", lambda x, y, z: x * y + z),
        ("mad_i16", lambda x, y, z: x * y + z),
    ],
)
def test_packed_integers(name, function, select):
    rng = np.random.default_rng(4)
    operands = [words(rng) for _ in range(function.__code__.co_argcount if hasattr(function, "__code__") else 2)]
    np.testing.assert_array_equal(pm.pk_integer(name, *operands, select=select), per_half(function, select, *operands))


def test_every_packed_integer_is_tested():
    mark = next(m for m in test_packed_integers.pytestmark if m.args[0] == ("name", "function"))
    assert {name for name, _ in mark.args[1]} == pm.pk_integer_names()


# Mixed precision


def mix_value(x, i, op_sel, op_sel_hi, neg, absolute):
    half = x >> (16 if op_sel >> i & 1 else 0) & 0xFFFF
    value = exact.F16.decode(half) if op_sel_hi >> i & 1 else exact.F32.decode(x)
    value = abs(value) if absolute >> i & 1 else value
    return -value if neg >> i & 1 else value


@pytest.mark.parametrize("op_sel_hi", range(8))
@pytest.mark.parametrize(("op_sel", "neg", "absolute"), [(0, 0, 0), (0b111, 0b100, 0b001), (0b010, 0b011, 0b110)])
def test_fma_mix(op_sel_hi, op_sel, neg, absolute):
    rng = np.random.default_rng(5)
    operands = []
    for i in range(3):
        if op_sel_hi >> i & 1:
            operands.append(pairs(rng) | np.uint32(0x00010001))  # odd: no zeros, so no sign of zero to decide
        else:
            half = exact.random_finite(rng, exact.F16, 64).view(np.float16).astype(np.float32)
            operands.append((half.view(np.uint32) | np.uint32(0x3)).reshape(SHAPE))
    fields = {"op_sel": op_sel, "op_sel_hi": op_sel_hi, "neg": neg, "absolute": absolute}
    expected = np.zeros(SHAPE, np.uint32)
    for place in np.ndindex(SHAPE):
        a, b, c = (mix_value(int(x[place]), i, **fields) for i, x in enumerate(operands))
        expected[place] = exact.F32.encode(a * b + c)
    np.testing.assert_array_equal(pm.fma_mix_f32(*operands, **fields), expected)

    old = words(rng)
    half = np.array([exact.F16.encode(exact.F32.decode(int(x))) for x in expected.ravel()], np.uint32).reshape(SHAPE)
    low, high = (f(old, *operands, **fields) for f in (pm.fma_mixlo_f16, pm.fma_mixhi_f16))
    np.testing.assert_array_equal(low, old & np.uint32(0xFFFF0000) | half)
    np.testing.assert_array_equal(high, old & np.uint32(0xFFFF) | half << np.uint32(16))


def test_fma_mixlo_rounds_to_f32_first():
    # 1 + 2^-11 + 2^-40 is above a tie of f16; rounded to f32 it is the tie, which goes to even
    a, b, c = (np.full(SHAPE, x, np.float32).view(np.uint32) for x in (2.0**-20, 2.0**-20, 1 + 2.0**-11))
    assert (pm.fma_mixlo_f16(np.zeros(SHAPE, np.uint32), a, b, c) == 0x3C00).all()


# Dot products


@pytest.mark.parametrize(("function", "fmt"), [(pm.dot2_f32_f16, exact.F16), (pm.dot2_f32_bf16, exact.BF16)])
def test_dot2_f32_adds_low_then_high_rounding_each_time(function, fmt):
    rng = np.random.default_rng(6)
    one = fmt.encode(Fraction(1)) >> (fmt.precision - 1)
    spread = rng.integers(one - 9, one + 10, (4, *SHAPE))
    halves = (spread << (fmt.precision - 1)) | rng.integers(0, 1 << (fmt.precision - 1), spread.shape)
    halves |= rng.integers(0, 2, spread.shape) << 15
    a, b = (halves[0] | halves[1] << 16).astype(np.uint32), (halves[2] | halves[3] << 16).astype(np.uint32)
    c = (rng.standard_normal(SHAPE) * 8).astype(np.float32).view(np.uint32)
    for select in (Select(), Select(neg_lo=0b101, neg_hi=0b010), Select(op_sel=0b01, op_sel_hi=0b10)):
        expected = np.zeros(SHAPE, np.uint32)
        for place in np.ndindex(SHAPE):
            total = exact.F32.decode(int(c[place])) * (-1 if select.neg_lo & 4 else 1)
            for half in (0, 1):
                total += fmt.decode(take(a[place], 0, select, half)) * fmt.decode(take(b[place], 1, select, half))
                total = exact.F32.decode(exact.F32.encode(total))
            expected[place] = exact.F32.encode(total)
        np.testing.assert_array_equal(function(a, b, c, select), expected)


def test_dot2_f32_flushes_denormals():
    tiny, zero = np.full(SHAPE, 0x00400000, np.uint32), np.zeros(SHAPE, np.uint32)
    assert not pm.dot2_f32_f16(zero, zero, tiny).any()
    assert not pm.dot2_f32_bf16(zero, zero, tiny).any()
    # bf16: 2^-100 * 2^-30 is denormal in f32
    assert not pm.dot2_f32_bf16(zero + np.uint32(0x0D80), zero + np.uint32(0x3080), zero).any()
    # a bf16 denormal times 2^127
    assert not pm.dot2_f32_bf16(zero + np.uint32(0x0040), zero + np.uint32(0x7F00), zero).any()
    # f16 denormals count: 2^-24 * 1
    result = pm.dot2_f32_f16(zero + np.uint32(1), zero + np.uint32(0x3C00), zero)
    assert (result.view(np.float32) == 2.0**-24).all()


@pytest.mark.parametrize("saturate", [False, True])
def test_dot2_f32_clamp(saturate):
    ones, c = np.full(SHAPE, 0x3C003C00, np.uint32), np.full(SHAPE, 1.5, np.float32).view(np.uint32)
    result = pm.dot2_f32_f16(ones, ones, c, saturate=saturate)
    assert (result.view(np.float32) == (1 if saturate else 3.5)).all()


def test_dot2_in_16_bits_rounds_every_step():
    rng = np.random.default_rng(7)
    a, b = pairs(rng), pairs(rng)
    c = exact.random_finite(rng, exact.F16, 64).reshape(SHAPE)
    result = pm.dot2_f16_f16(a, b, c)
    for place in np.ndindex(SHAPE):
        total = int(c[place])
        for shift in (0, 16):
            product = exact.mul(exact.F16, int(a[place]) >> shift & 0xFFFF, int(b[place]) >> shift & 0xFFFF)
            if not (exact.F16.is_finite(product) and exact.F16.is_finite(total)):
                break
            total = exact.add(exact.F16, total, product)
        else:
            assert int(result[place]) == total
    one, half_ulp = 0x3F80, 0x3B80  # bf16 1 and 2^-8: 1 + 2^-8 is a tie and goes to 1, twice
    pair = np.full(SHAPE, half_ulp | half_ulp << 16, np.uint32)
    ones = np.full(SHAPE, one | one << 16, np.uint32)
    assert (pm.dot2_bf16_bf16(pair, ones, np.full(SHAPE, one, np.uint16)) == one).all()


def parts(x, bits, signed):
    values = [int(x) >> i & (1 << bits) - 1 for i in range(0, 32, bits)]
    return [v - (1 << bits) if signed and v >> (bits - 1) else v for v in values]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("neg_lo", range(4))
@pytest.mark.parametrize(("function", "bits"), [(pm.dot4_i32_iu8, 8), (pm.dot8_i32_iu4, 4)])
def test_integer_dots_of_any_signs(function, bits, neg_lo, saturate):
    rng = np.random.default_rng(8)
    a, b = words(rng), words(rng)
    offset = rng.integers(-400, 400, SHAPE)
    c = np.where(offset % 2 == 0, 2**31 - 401 + offset, -(2**31) + 401 + offset).astype(np.int64).astype(np.uint32)
    result = function(a, b, c, neg_lo, saturate)
    for place in np.ndindex(SHAPE):
        products = zip(parts(a[place], bits, neg_lo & 1), parts(b[place], bits, neg_lo & 2), strict=True)
        total = int(c.view(np.int32)[place]) + sum(x * y for x, y in products)
        if saturate:
            total = max(min(total, 2**31 - 1), -(2**31))
        assert int(result[place]) == total & 0xFFFFFFFF


@pytest.mark.parametrize(("function", "bits"), [(pm.dot4_u32_u8, 8), (pm.dot8_u32_u4, 4)])
def test_unsigned_dots(function, bits):
    rng = np.random.default_rng(9)
    a, b, c = words(rng), words(rng), words(rng) | np.uint32(0xFFFFFF00)
    for place in np.ndindex(SHAPE):
        products = zip(parts(a[place], bits, False), parts(b[place], bits, False), strict=True)
        total = int(c[place]) + sum(x * y for x, y in products)
        assert int(function(a, b, c)[place]) == total & 0xFFFFFFFF
        assert int(function(a, b, c, True)[place]) == min(total, 2**32 - 1)
        if place[1] > 8:
            break
