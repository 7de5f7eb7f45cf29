"""WMMA against a formulation per element: where the ISA puts element (i, j), and exact rational sums."""

from __future__ import annotations

from fractions import Fraction

import exact
import numpy as np
import pytest
from gristmill.aot.emulator import matrix

WAVES = 2
FORMATS = {"f32": exact.F32, "f16": exact.F16, "bf16": exact.BF16}
FLOAT_KINDS = {
    "f32_f16": ("f16", "f32"),
    "f32_bf16": ("bf16", "f32"),
    "f16_f16": ("f16", "f16"),
    "bf16_bf16": ("bf16", "bf16"),
}
INTEGER_KINDS = {"i32_iu8": 8, "i32_iu4": 4}
BITS = {"f16": 16, "bf16": 16, "iu8": 8, "iu4": 4}


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


# Where things live, one element at a time: (register, lane, bit)


def operand_place(arch, bits, K, row, k):
    """Element k of row (or column) `row` of A (or B)."""
    if arch == "gfx11":
        return k * bits // 32, row, k * bits % 32
    per_lane = K // 2
    return k % per_lane * bits // 32, row + 16 * (k // per_lane), k % per_lane * bits % 32


def result_place(arch, bits, row, column, high):
    """Element (row, column) of C and D."""
    if arch == "gfx11":
        return row // 2, column + 16 * (row % 2), 16 if high else 0
    lane, within = column + 16 * (row // 8), row % 8
    return (within, lane, 0) if bits == 32 else (within // 2, lane, 16 * (within % 2))


def put(registers, wave, place, bits, value):
    register, lane, shift = place
    mask = (1 << bits) - 1
    old = int(registers[register, wave, lane])
    registers[register, wave, lane] = old & ~(mask << shift) & 0xFFFFFFFF | (value & mask) << shift


def get(registers, wave, place, bits):
    register, lane, shift = place
    return int(registers[register, wave, lane]) >> shift & (1 << bits) - 1


def operand_registers(arch, bits, elements):
    """Registers of patterns [waves, 16, K]."""
    waves, _, K = elements.shape
    count = K * bits // 32 if arch == "gfx11" else K * bits // 64
    registers = np.zeros((count, waves, 32), np.uint32)
    for wave, row, k in np.ndindex(elements.shape):
        put(registers, wave, operand_place(arch, bits, K, row, k), bits, int(elements[wave, row, k]))
    if arch == "gfx11":
        registers[..., 16:] = registers[..., :16]
    return registers


def result_registers(arch, bits, elements, high=False, fill=0):
    """Registers of patterns [waves, 16, 16]."""
    registers = np.full((4 if arch == "gfx12" and bits == 16 else 8, elements.shape[0], 32), fill, np.uint32)
    for wave, row, column in np.ndindex(elements.shape):
        put(
            registers,
            wave,
            result_place(arch, bits, row, column, high),
            bits,
            int(elements[wave, row, column]),
        )
    return registers


def run(arch, kind, a, b, c, **modifiers):
    return (matrix.wmma_gfx11 if arch == "gfx11" else matrix.wmma_gfx12)(kind, a, b, c, **modifiers)


def moderate(rng, fmt, shape, spread=6):
    """Patterns of random sign and significand with exponents within `spread` of 0."""
    bias = 1 - fmt.emin
    exponents = rng.integers(bias - spread, bias + spread + 1, shape)
    significands = rng.integers(0, 1 << (fmt.precision - 1), shape)
    return rng.integers(0, 2, shape) << (fmt.bits - 1) | exponents << (fmt.precision - 1) | significands


# Layouts: one nonzero in A and one in B must meet in the right element of D, and nowhere else


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
@pytest.mark.parametrize("kind", [*FLOAT_KINDS, *INTEGER_KINDS])
def test_every_element_of_a_and_b_reaches_its_row_and_column(arch, kind):
    if kind in FLOAT_KINDS:
        operand, result = FLOAT_KINDS[kind]
        bits, one, fmt = 16, FORMATS[operand].encode(Fraction(1)), FORMATS[result]
        encode = lambda value: fmt.encode(Fraction(value))  # noqa: E731
        result_bits = fmt.bits
    else:
        bits, one, result_bits = INTEGER_KINDS[kind], 1, 32
        encode = lambda value: value & 0xFFFFFFFF  # noqa: E731
    rows = [(0, 0, 0), (1, 0, 3), (3, 5, 7), (8, 9, 8), (15, 14, 15), (7, 8, 9), (2, 15, 12), (13, 1, 4)]
    for row, column, k in rows:
        a, b = np.zeros((1, 16, 16), int), np.zeros((1, 16, 16), int)
        a[0, row, k] = b[0, column, k] = one
        c = np.array([[[encode((i * 16 + j) % 61 - 30) for j in range(16)] for i in range(16)]])
        c_registers = result_registers(arch, result_bits, c)
        modifiers = {"old": c_registers} if arch == "gfx11" and kind in FLOAT_KINDS else {}
        d = run(
            arch,
            kind,
            operand_registers(arch, bits, a),
            operand_registers(arch, bits, b),
            c_registers,
            **modifiers,
        )
        c[0, row, column] = encode((row * 16 + column) % 61 - 30 + 1)
        np.testing.assert_array_equal(d, result_registers(arch, result_bits, c))


def test_gfx12_iu4_with_k_32():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 16, (WAVES, 16, 32)), rng.integers(0, 16, (WAVES, 16, 32))
    c = rng.integers(-1000, 1000, (WAVES, 16, 16))
    registers = operand_registers("gfx12", 4, a), operand_registers("gfx12", 4, b)
    assert registers[0].shape[0] == 2
    d = run("gfx12", "i32_iu4", *registers, result_registers("gfx12", 32, c))
    np.testing.assert_array_equal(d, result_registers("gfx12", 32, np.einsum("wik,wjk->wij", a, b) + c))


def test_layouts_as_the_guides_draw_them():
    """A few places spelled out, so that the formulas above cannot share a mistake with the code."""
    ones = np.zeros((1, 16, 16), int)
    ones[0, :, 0] = 0x3C00  # k = 0
    # row 0, 1, 2 of D = 10, 11, 12 in every column
    a = np.zeros((1, 16, 16), int)
    a[0, :, 0] = [exact.F16.encode(Fraction(10 + row)) for row in range(16)]
    zero = np.zeros((8, 1, 32), np.uint32)

    d = run("gfx11", "f32_f16", operand_registers("gfx11", 16, a), operand_registers("gfx11", 16, ones), zero)
    d = d.view(np.float32)[:, 0]
    assert (d[0, :16] == 10).all()  # VGPR 0: row 0 in lanes 0-15, row 1 in lanes 16-31
    assert (d[0, 16:] == 11).all()
    assert (d[1, :16] == 12).all()
    assert (d[7, 16:] == 25).all()

    d = run("gfx12", "f32_f16", operand_registers("gfx12", 16, a), operand_registers("gfx12", 16, ones), zero)
    d = d.view(np.float32)[:, 0]
    assert (d[0, :16] == 10).all()  # VGPR 0: row 0 in lanes 0-15, row 8 in lanes 16-31
    assert (d[0, 16:] == 18).all()
    assert (d[1, :16] == 11).all()
    assert (d[7, 16:] == 25).all()

    registers = operand_registers("gfx12", 16, a), operand_registers("gfx12", 16, ones)
    d = run("gfx12", "f16_f16", *registers, zero[:4])
    halves = d.view(np.float16).reshape(4, 32, 2)
    assert (halves[0, :16] == [10, 11]).all()  # VGPR 0: rows 0 and 1 in lanes 0-15, 8 and 9 in lanes 16-31
    assert (halves[0, 16:] == [18, 19]).all()


def test_gfx12_k_is_split_across_the_half_waves():
    """Lanes 0-15 hold k = 0..7, lanes 16-31 k = 8..15 of the same row: a lane meets only its own half."""
    a, b = np.zeros((4, 1, 32), np.uint32), np.zeros((4, 1, 32), np.uint32)
    a[0, 0, 3], b[0, 0, 16 + 5] = 0x3C00, 0x3C00  # k = 0 of row 3, k = 8 of column 5
    zero = np.zeros((8, 1, 32), np.uint32)
    assert not matrix.wmma_gfx12("f32_f16", a, b, zero).any()
    b[0, 0, 5] = 0x3C00
    d = matrix.wmma_gfx12("f32_f16", a, b, zero).view(np.float32)
    assert np.argwhere(d).tolist() == [[3, 0, 5]]


# Numbers


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_float_results_are_the_exact_sum_rounded_once(arch, kind):
    operand, result = FLOAT_KINDS[kind]
    rng = np.random.default_rng(1)
    fmt, out = FORMATS[operand], FORMATS[result]
    a, b = (moderate(rng, fmt, (WAVES, 16, 16), 4) for _ in range(2))
    c = moderate(rng, out, (WAVES, 16, 16), 4)
    registers = [operand_registers(arch, 16, x) for x in (a, b)] + [result_registers(arch, out.bits, c)]
    modifiers = {"old": registers[2]} if arch == "gfx11" else {}
    d = run(arch, kind, *registers, **modifiers)
    expected = np.zeros(c.shape, np.int64)
    for wave, row, column in np.ndindex(c.shape):
        total = out.decode(int(c[wave, row, column]))
        for x, y in zip(a[wave, row], b[wave, column], strict=True):
            total += fmt.decode(int(x)) * fmt.decode(int(y))
        expected[wave, row, column] = out.encode(total)
    np.testing.assert_array_equal(d, result_registers(arch, out.bits, expected))


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
@pytest.mark.parametrize(("kind", "tie", "small"), [("f16_f16", -11, -14), ("bf16_bf16", -8, -20)])
def test_16_bit_results_are_not_rounded_through_f32(arch, kind, tie, small):
    """1 + half a unit + a term too small for f32: goes up. By way of f32 it is a tie, and goes to even."""
    fmt = FORMATS[FLOAT_KINDS[kind][0]]
    a, b = np.zeros((1, 16, 16), int), np.zeros((1, 16, 16), int)
    a[..., :3] = [fmt.encode(Fraction(2) ** e) for e in (0, tie, small)]
    b[..., :3] = [fmt.encode(Fraction(2) ** e) for e in (0, 0, small)]
    zero = np.zeros((8 if arch == "gfx11" else 4, 1, 32), np.uint32)
    modifiers = {"old": zero} if arch == "gfx11" else {}
    d = run(arch, kind, operand_registers(arch, 16, a), operand_registers(arch, 16, b), zero, **modifiers)
    assert get(d, 0, result_place(arch, 16, 6, 9, False), 16) == fmt.encode(Fraction(1)) + 1


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("signs", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_integer_results_wrap_or_saturate(arch, kind, signs, clamp):
    bits = INTEGER_KINDS[kind]
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 1 << bits, (WAVES, 16, 16)) for _ in range(2))
    near = rng.integers(-40, 40, (WAVES, 16, 16))
    c = np.where(rng.integers(0, 2, near.shape) == 1, 2**31 - 41 + near, -(2**31) + 41 + near)
    registers = [operand_registers(arch, bits, x) for x in (a, b)] + [result_registers(arch, 32, c)]
    d = run(arch, kind, *registers, neg=(*signs, 0), clamp=clamp)

    def value(x, signed):
        return int(x) - (1 << bits) if signed and int(x) >> (bits - 1) else int(x)

    expected = np.zeros(c.shape, np.int64)
    overflowed = False
    for wave, row, column in np.ndindex(c.shape):
        total = int(c[wave, row, column])
        for x, y in zip(a[wave, row], b[wave, column], strict=True):
            total += value(x, signs[0]) * value(y, signs[1])
        overflowed |= not -(2**31) <= total < 2**31
        expected[wave, row, column] = max(min(total, 2**31 - 1), -(2**31)) if clamp else total
    assert overflowed
    np.testing.assert_array_equal(d, result_registers(arch, 32, expected))


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
def test_infinities_and_nans(arch):
    a, b = np.zeros((1, 16, 16), int), np.full((1, 16, 16), 0x3C00)
    a[0, 1, 2] = 0x7C00  # row 1: inf
    a[0, 2, 3], a[0, 2, 4] = 0x7C00, 0xFC00  # row 2: inf - inf
    a[0, 3, 0] = 0x7E00  # row 3: NaN
    a[0, 4, :2] = 0x7BFF  # row 4: 2 * 65504 is no f16
    zero = np.zeros((8, 1, 32), np.uint32)
    registers = operand_registers(arch, 16, a), operand_registers(arch, 16, b)
    d = run(arch, "f32_f16", *registers, zero)
    patterns = [get(d, 0, result_place(arch, 32, row, 7, False), 32) for row in range(5)]
    values = np.array(patterns, np.uint32).view(np.float32)
    assert values[0] == 0
    assert values[1] == np.inf
    assert np.isnan(values[2])
    assert np.isnan(values[3])
    assert values[4] == 131008
    modifiers = {"old": zero} if arch == "gfx11" else {}
    narrow = run(arch, "f16_f16", *registers, zero if arch == "gfx11" else zero[:4], **modifiers)
    assert get(narrow, 0, result_place(arch, 16, 4, 7, False), 16) == 0x7C00


# Modifiers


@pytest.mark.parametrize("arch", ["gfx11", "gfx12"])
@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize(
    ("neg", "neg_hi"),
    [
        ((1, 0, 0), (0, 0, 0)),
        ((0, 0, 0), (1, 0, 0)),
        ((0, 1, 0), (1, 1, 0)),
        ((0, 0, 1), (0, 0, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((1, 1, 1), (1, 0, 1)),
    ],
)
def test_float_modifiers(arch, kind, neg, neg_hi):
    operand, result = FLOAT_KINDS[kind]
    rng = np.random.default_rng(3)
    fmt, out = FORMATS[operand], FORMATS[result]
    a, b = (moderate(rng, fmt, (1, 16, 16), 2) for _ in range(2))
    c = moderate(rng, out, (1, 16, 16), 2)
    c_registers = result_registers(arch, out.bits, c)
    modifiers = {"old": c_registers} if arch == "gfx11" else {}
    registers = [operand_registers(arch, 16, x) for x in (a, b)]
    d = run(arch, kind, *registers, c_registers, neg=neg, neg_hi=neg_hi, **modifiers)

    a[..., 0::2] ^= 0x8000 * neg[0]
    a[..., 1::2] ^= 0x8000 * neg_hi[0]
    b[..., 0::2] ^= 0x8000 * neg[1]
    b[..., 1::2] ^= 0x8000 * neg_hi[1]
    sign = 1 << (out.bits - 1)
    c = (c & ~sign if neg_hi[2] else c) ^ (sign if neg[2] else 0)
    c_registers = result_registers(arch, out.bits, c)
    modifiers = {"old": c_registers} if arch == "gfx11" else {}
    plain = run(arch, kind, *(operand_registers(arch, 16, x) for x in (a, b)), c_registers, **modifiers)
    np.testing.assert_array_equal(d, plain)


@pytest.mark.parametrize("kind", ["f16_f16", "bf16_bf16"])
@pytest.mark.parametrize("high", [False, True])
def test_gfx11_16_bit_results_fill_one_half_and_leave_the_other(kind, high):
    operand, _ = FLOAT_KINDS[kind]
    rng = np.random.default_rng(4)
    a, b, c = (moderate(rng, FORMATS[operand], (WAVES, 16, 16), 2) for _ in range(3))
    registers = [operand_registers("gfx11", 16, a), operand_registers("gfx11", 16, b)]
    old = rng.integers(0, 1 << 32, (8, WAVES, 32), np.uint32)
    c_registers = result_registers("gfx11", 16, c, high, fill=0x5A5A5A5A)
    d = matrix.wmma_gfx11(kind, *registers, c_registers, high=high, old=old)
    low = matrix.wmma_gfx11(kind, *registers, result_registers("gfx11", 16, c), old=np.zeros_like(old))
    shift, keep = (16, 0xFFFF) if high else (0, 0xFFFF0000)
    np.testing.assert_array_equal(d, old & np.uint32(keep) | low << np.uint32(shift))


def test_gfx11_16_bit_results_need_the_old_register():
    zero = np.zeros((8, 1, 32), np.uint32)
    with pytest.raises(ValueError, match="f16_f16 writes half of each register"):
        matrix.wmma_gfx11("f16_f16", zero, zero, zero)


def test_halves_differ_points_at_the_wave():
    operand = np.zeros((8, 3, 32), np.uint32)
    operand[4, 1, 30] = 1
    assert matrix.halves_differ(operand).tolist() == [False, True, False]
    operand[4, 1, 14] = 1
    assert not matrix.halves_differ(operand).any()
