"""Floating point as the RDNA3 and RDNA4 vector ALUs do it: formats, MODE, rounding, arithmetic, minimum and
maximum.

Operands are bit patterns: uint32 arrays for f32, uint16 arrays for f16 and bf16, of any one shape (a register
is [waves, 32]; a packed register viewed as halves is [waves, 64]). Results have the same type. Nothing is
modified.

Rounding. A result is computed in float64 and rounded once. Where float64 itself has to round (the sum in an
fma), the float64 value is rounded to odd first: its last bit is set when anything was lost, so that the
rounding that follows, in any direction and to any format of at most 51 bits, still sees on which side of a
tie the exact value lies.

Denormals. MODE says per width whether denormal operands and results are flushed; a flushed value keeps its
sign. A result is flushed after rounding.

NaN. A NaN result is a NaN; its sign and payload are not promised (AMD documents them for min and max only,
where they are followed).

NOTES: call under np.errstate(all="ignore"). Entering that context costs as much as an f32 add, so it is
entered once around a run and not in here.

Source: AMD's pseudocode of each instruction, as tinygrad carries it from the RDNA3 and RDNA4 ISA guides.
MODE's fields and the order of flushing and rounding are not in it, and were not checked against anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

# MODE.FP_ROUND
NEAREST_EVEN, TOWARD_POSITIVE, TOWARD_NEGATIVE, TOWARD_ZERO = range(4)
# MODE.FP_DENORM
FLUSH_IN_OUT, FLUSH_OUT, FLUSH_IN, KEEP_DENORMALS = range(4)

U16, U32, U64 = np.uint16, np.uint32, np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64


@dataclass(frozen=True)
class FloatMode:
    """The floating-point part of a wave's MODE; the defaults are what compilers set for compute kernels."""

    round_f32: int = NEAREST_EVEN
    round_f16: int = NEAREST_EVEN  # of f64 too
    denorm_f32: int = KEEP_DENORMALS
    denorm_f16: int = KEEP_DENORMALS  # of f64 too
    ieee: bool = True  # gfx11 only: min and max quiet a signalling NaN instead of passing over it
    dx10_clamp: bool = True  # gfx11 only, always so on gfx12: clamp turns NaN into 0

    @staticmethod
    @cache
    def from_register(mode: int) -> FloatMode:
        """Decode a MODE register: round in bits 0-3, denormals in bits 4-7, DX10_CLAMP bit 8, IEEE bit 9.

        gfx12 has no bits 8 and 9: pass `mode | 0x300` there.
        """
        return FloatMode(
            mode & 3, mode >> 2 & 3, mode >> 4 & 3, mode >> 6 & 3, bool(mode >> 9 & 1), bool(mode >> 8 & 1)
        )

    @cached_property
    def f32_is_default(self) -> bool:
        return self.round_f32 == NEAREST_EVEN and self.denorm_f32 == KEEP_DENORMALS

    @cached_property
    def f16_is_default(self) -> bool:
        return self.round_f16 == NEAREST_EVEN and self.denorm_f16 == KEEP_DENORMALS

    @cached_property
    def flush_f32_in(self) -> bool:
        return self.denorm_f32 in (FLUSH_IN_OUT, FLUSH_IN)

    @cached_property
    def flush_f32_out(self) -> bool:
        return self.denorm_f32 in (FLUSH_IN_OUT, FLUSH_OUT)

    @cached_property
    def flush_f16_in(self) -> bool:
        return self.denorm_f16 in (FLUSH_IN_OUT, FLUSH_IN)

    @cached_property
    def flush_f16_out(self) -> bool:
        return self.denorm_f16 in (FLUSH_IN_OUT, FLUSH_OUT)


DEFAULT_MODE = FloatMode()


# Halves of registers


def pack_halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """uint16 pairs into uint32."""
    return low.astype(U32) | high.astype(U32) << U32(16)


def insert_low(register: np.ndarray, half: np.ndarray) -> np.ndarray:
    """`register` with bits 15:0 replaced: since gfx10 a 16-bit result leaves the other half alone."""
    return register & U32(0xFFFF0000) | half


def insert_high(register: np.ndarray, half: np.ndarray) -> np.ndarray:
    """`register` with bits 31:16 replaced."""
    return register & U32(0xFFFF) | half.astype(U32) << U32(16)


# Denormals


def flush_f32(x: np.ndarray) -> np.ndarray:
    """f32 denormals become zeros of their sign."""
    return np.where(x & U32(0x7F800000), x, x & U32(0x80000000))


def flush_f16(x: np.ndarray) -> np.ndarray:
    """f16 denormals become zeros of their sign."""
    return np.where(x & U16(0x7C00), x, x & U16(0x8000))


def flush_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 denormals become zeros of their sign."""
    return np.where(x & U16(0x7F80), x, x & U16(0x8000))


# Decoding to float64 (exact) and encoding from it (one rounding)


def decode_f32(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """f32 bits to float64, denormals flushed if MODE says so."""
    if mode.flush_f32_in:
        x = flush_f32(x)
    return x.view(F32).astype(F64)


def decode_f16(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """f16 bits to float64, denormals flushed if MODE says so."""
    if mode.flush_f16_in:
        x = flush_f16(x)
    return x.view(F16).astype(F64)


def decode_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits to float64."""
    return bf16_to_f32(x).view(F32).astype(F64)


def encode_f32(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """float64, exact or rounded to odd, to f32 bits under MODE."""
    bits = x.astype(F32).view(U32)
    if mode.f32_is_default:
        return bits
    bits = _redirect(bits, bits.view(F32), x, mode.round_f32, U32(0x80000000), U32(1))
    return flush_f32(bits) if mode.flush_f32_out else bits


def encode_f16(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """float64, exact or rounded to odd, to f16 bits under MODE."""
    bits = x.astype(F16).view(U16)
    if mode.f16_is_default:
        return bits
    bits = _redirect(bits, bits.view(F16), x, mode.round_f16, U16(0x8000), U16(1))
    return flush_f16(bits) if mode.flush_f16_out else bits


def encode_bf16(x: np.ndarray) -> np.ndarray:
    """float64, exact or rounded to odd, to the nearest even bf16 bits. Denormals are kept."""
    # Through f32 rounded to odd: 24 bits hold the 8 of bf16 and the two that decide the rounding, denormals
    # included.
    return f32_to_bf16(to_odd_f32(x))


def to_odd_f32(x: np.ndarray) -> np.ndarray:
    """float64 to f32 bits, truncated, the last bit set when anything was lost."""
    narrow = x.astype(F32)
    bits = narrow.view(U32)
    wide = narrow.astype(F64)
    truncated = bits - (np.abs(wide) > np.abs(x))
    return (truncated | (wide != x) & ~np.isnan(x)).astype(U32)


def _redirect(bits, rounded, exact, rounding, sign, one):
    """A nearest-even result to that of another rounding mode: one unit on where it lies on the wrong side."""
    if rounding == NEAREST_EVEN:
        return bits
    rounded = rounded.astype(F64)
    negative = (bits & sign) != 0
    if rounding == TOWARD_ZERO:
        away = np.abs(rounded) > np.abs(exact)
        return np.where(away, bits - one, bits)
    wrong = rounded < exact if rounding == TOWARD_POSITIVE else rounded > exact
    outward = negative == (rounding == TOWARD_NEGATIVE)  # the step makes the magnitude larger
    return np.where(wrong, np.where(outward, bits + one, bits - one), bits)


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    """bf16 bits to the f32 bits of the same number."""
    return x.astype(U32) << U32(16)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """f32 bits to the nearest even bf16 bits; a NaN stays one (quiet).

    gfx11 and gfx12 have no such instruction (it came with gfx950 and gfx1250): kernels do it with integer
    operations. This one rounds the bf16 results of dot products and WMMA.
    """
    rounded = x + U32(0x7FFF) + (x >> U32(16) & U32(1)) >> U32(16)
    return np.where(is_nan(x), x >> U32(16) | U32(0x40), rounded).astype(U16)


def add_to_odd(p: np.ndarray, c: np.ndarray) -> np.ndarray:
    """p + c in float64, rounded to odd. |p|, |c| < 2^1000."""
    total = np.add(p, c)
    back = total - p
    lost = (p - (total - back)) + (c - back)  # TwoSum: total + lost is exact
    bits = total.view(U64)
    adjust = (lost != 0) & np.isfinite(lost) & ((bits & U64(1)) == 0)
    if not adjust.any():
        return total
    outward = np.signbit(lost) == np.signbit(total)
    return np.where(adjust, np.where(outward, bits + U64(1), bits - U64(1)), bits).view(F64)


# Arithmetic


def add_f32(a: np.ndarray, b: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_add_f32; a subtraction negates an operand first."""
    if mode.f32_is_default:
        return (a.view(F32) + b.view(F32)).view(U32)
    return encode_f32(_exact_sum(decode_f32(a, mode), decode_f32(b, mode), mode.round_f32), mode)


def mul_f32(a: np.ndarray, b: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_mul_f32."""
    if mode.f32_is_default:
        return (a.view(F32) * b.view(F32)).view(U32)
    return encode_f32(decode_f32(a, mode) * decode_f32(b, mode), mode)  # 48 bits: exact


def mul_dx9_zero_f32(a: np.ndarray, b: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_mul_dx9_zero_f32: zero times anything is +0."""
    if mode.flush_f32_in:
        a, b = flush_f32(a), flush_f32(b)
    return np.where((a.view(F32) == 0) | (b.view(F32) == 0), U32(0), mul_f32(a, b, mode))


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_fma_f32 and its kin: a * b + c, rounded once."""
    if not mode.f32_is_default:
        product = decode_f32(a, mode) * decode_f32(b, mode)
        return encode_f32(_exact_sum(product, decode_f32(c, mode), mode.round_f32), mode)
    product = a.view(F32).astype(F64) * b.view(F32)  # 48 bits: exact
    addend = c.view(F32)
    total = product + addend
    result = total.astype(F32).view(U32)
    # Rounding twice differs from rounding once only where the float64 sum is a tie of f32: its low 29 bits
    # are 1 and zeros, or the result is denormal, where ties lie elsewhere. (A sum that rounds to 0 is exact:
    # both its terms are then near 2^-149 and the product's 48 bits end above float64's reach.)
    low = np.ascontiguousarray(total).view(U32)[..., ::2]
    suspect = (low & U32(0x1FFFFFFF)) == U32(0x10000000)
    suspect |= (result << U32(1)) - U32(1) <= U32(0x00FFFFFF)
    if suspect.any():
        return add_to_odd(product, addend.astype(F64)).astype(F32).view(U32)
    return result


def add_f16(a: np.ndarray, b: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_add_f16."""
    total, other = decode_f16(a, mode), decode_f16(b, mode)
    if mode.round_f16 == NEAREST_EVEN:
        return encode_f16(total + other, mode)  # 41 bits: exact
    return encode_f16(_exact_sum(total, other, mode.round_f16), mode)


def mul_f16(a: np.ndarray, b: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_mul_f16."""
    return encode_f16(decode_f16(a, mode) * decode_f16(b, mode), mode)  # 22 bits: exact


def fma_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_fma_f16 and its kin: a * b + c, rounded once."""
    product = decode_f16(a, mode) * decode_f16(b, mode)
    addend = decode_f16(c, mode)
    if mode.round_f16 == NEAREST_EVEN:
        # A sum at a tie of f16 is exact: the product supplies the tie's last bit, so the sum spans at most 34
        # bits. Elsewhere float64's rounding cannot carry the sum over a tie.
        return encode_f16(product + addend, mode)
    return encode_f16(_exact_sum(product, addend, mode.round_f16), mode)


def _exact_sum(p, c, rounding):
    """p + c rounded to odd; a sum that cancels to zero is -0 when rounding down, +0 otherwise."""
    total = add_to_odd(p, c)
    if rounding == TOWARD_NEGATIVE:
        return np.where((total == 0) & (np.signbit(p) | np.signbit(c)), -0.0, total)
    return total


# Minimum and maximum

GFX11 = "gfx11"  # v_min_*, v_max_*: a quiet NaN loses to a number; a signalling one wins if MODE.IEEE
NUM = "num"  # gfx12 v_min_num_*, v_max_num_*: any NaN loses to a number
PROPAGATE = "propagate"  # gfx12 v_minimum_*, v_maximum_*: any NaN wins


def minimum(a: np.ndarray, b: np.ndarray, rule: str, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_min_f32 (uint32 operands) or v_min_f16 (uint16) and their gfx12 forms; -0 is less than +0."""
    a, b = _flush_operands(a, b, mode)
    return _choose(a, b, _order(a) < _order(b), rule, mode)


def maximum(a: np.ndarray, b: np.ndarray, rule: str, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_max_f32 (uint32 operands) or v_max_f16 (uint16) and their gfx12 forms; +0 is greater than -0."""
    a, b = _flush_operands(a, b, mode)
    return _choose(a, b, _order(a) > _order(b), rule, mode)


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray, rule: str, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_med3_f32, v_med3_f16; with a NaN among the operands, the least of the three."""
    a, b = _flush_operands(a, b, mode)
    c, _ = _flush_operands(c, c, mode)
    any_nan = is_nan(a) | is_nan(b) | is_nan(c)
    least = minimum(minimum(a, b, rule, mode), c, rule, mode)
    low, high = minimum(a, b, rule, mode), maximum(a, b, rule, mode)
    middle = maximum(low, minimum(high, c, rule, mode), rule, mode)
    return np.where(any_nan, least, middle)


def is_nan(x: np.ndarray) -> np.ndarray:
    """NaN, of uint32 (f32) or uint16 (f16) bits."""
    if x.dtype == U32:
        return (x & U32(0x7FFFFFFF)) > U32(0x7F800000)
    return (x & U16(0x7FFF)) > U16(0x7C00)


def _quiet_bit(x):
    return U32(0x00400000) if x.dtype == U32 else U16(0x0200)


def _flush_operands(a, b, mode):
    if a.dtype == U32:
        return (flush_f32(a), flush_f32(b)) if mode.flush_f32_in else (a, b)
    return (flush_f16(a), flush_f16(b)) if mode.flush_f16_in else (a, b)


def _order(x):
    """Signed integers that sort as the numbers do, -0 below +0."""
    signed = x.view(np.int32 if x.dtype == U32 else np.int16)
    magnitude = signed.dtype.type(0x7FFFFFFF if x.dtype == U32 else 0x7FFF)
    return signed ^ (signed >> signed.dtype.type(x.itemsize * 8 - 1)) & magnitude


def _choose(a, b, first, rule, mode):
    result = np.where(first, a, b)
    a_nan, b_nan = is_nan(a), is_nan(b)
    if not (a_nan.any() or b_nan.any()):
        return result
    quiet = _quiet_bit(a)
    a_signals, b_signals = a_nan & ((a & quiet) == 0), b_nan & ((b & quiet) == 0)
    if rule == NUM:
        # Both NaN gives the first one, quiet.
        return np.where(b_nan, np.where(a_nan, a | quiet, a), np.where(a_nan, b, result))
    if rule == PROPAGATE:
        result = np.where(a_nan, a, np.where(b_nan, b, result))
    elif rule == GFX11:
        result = np.where(b_nan, a, np.where(a_nan, b, result))
        if not mode.ieee:
            return result
    else:
        raise ValueError(f"unknown NaN rule {rule!r}: expected {GFX11!r}, {NUM!r} or {PROPAGATE!r}")
    return np.where(a_signals, a | quiet, np.where(b_signals, b | quiet, result))


# Operand and result modifiers


def source_modifiers(x: np.ndarray, absolute: bool, negate: bool) -> np.ndarray:
    """|x| then -x, on the sign bit of uint32 (f32) or uint16 (f16)."""
    sign = U32(0x80000000) if x.dtype == U32 else U16(0x8000)
    if absolute:
        x = x & ~sign
    return x ^ sign if negate else x


def clamp(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """The clamp bit of VOP3: to [0, 1], of uint32 (f32) or uint16 (f16); NaN to 0 if MODE.DX10_CLAMP."""
    one = U32(0x3F800000) if x.dtype == U32 else U16(0x3C00)
    zero = x.dtype.type(0)
    value: np.ndarray = x.view(F32) if x.dtype == U32 else x.view(F16)
    result = np.where(value >= 1, one, np.where(value > 0, x, zero))
    return result if mode.dx10_clamp else np.where(is_nan(x), x, result)


def output_scale_f32(x: np.ndarray, omod: int, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """The omod field of VOP3: 0 none, 1 times 2, 2 times 4, 3 half; ignored if denormal results are kept."""
    if omod == 0 or not mode.flush_f32_out:
        return x
    factor = np.array([2.0, 4.0, 0.5], F32)[omod - 1]
    return flush_f32((x.view(F32) * factor).view(U32))
