"""VOP3P arithmetic: packed f16 and 16-bit integers, mixed precision fma, dot products.

Registers are uint32 [waves, 32] (or [waves, 1], a scalar operand). `Select` carries the operand modifiers
that these instructions share. Conventions on rounding, denormals and NaN are those of `float_formats`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .conversions import cvt_f16_f32
from .float_formats import (
    DEFAULT_MODE,
    F32,
    U16,
    U32,
    FloatMode,
    add_f16,
    bf16_to_f32,
    clamp,
    f32_to_bf16,
    flush_bf16,
    flush_f16,
    flush_f32,
    fma_f16,
    fma_f32,
    insert_high,
    insert_low,
    maximum,
    minimum,
    mul_f16,
)


class Select(NamedTuple):
    """Modifier fields as encoded: bit i belongs to operand i."""

    op_sel: int = 0  # the low result takes the operand's high half
    op_sel_hi: int = 7  # the high result takes the operand's high half
    neg_lo: int = 0  # negate what the low result takes
    neg_hi: int = 0  # negate what the high result takes


PLAIN = Select()


def halves(x: np.ndarray, operand: int, select: Select = PLAIN) -> np.ndarray:
    """Operand `operand` as uint16 [waves, 64]: per lane what the low result takes, then the high one."""
    op_sel, op_sel_hi, neg_lo, neg_hi = (field >> operand & 1 for field in select)
    if (op_sel, op_sel_hi) == (0, 0):
        x = (x & U32(0xFFFF)) * U32(0x10001)
    elif (op_sel, op_sel_hi) == (1, 1):
        x = (x >> U32(16)) * U32(0x10001)
    elif (op_sel, op_sel_hi) == (1, 0):
        x = x >> U32(16) | x << U32(16)
    if neg_lo or neg_hi:
        x = x ^ U32(neg_lo << 15 | neg_hi << 31)
    if x.shape[-1] != 32:
        x = np.broadcast_to(x, (*x.shape[:-1], 32))
    return np.ascontiguousarray(x).view(U16)


# Packed f16


def pk_add_f16(
    a: np.ndarray,
    b: np.ndarray,
    select: Select = PLAIN,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_pk_add_f16. `saturate` is the clamp bit, here and below."""
    return _packed_float(add_f16(halves(a, 0, select), halves(b, 1, select), mode), mode, saturate)


def pk_mul_f16(
    a: np.ndarray,
    b: np.ndarray,
    select: Select = PLAIN,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_pk_mul_f16."""
    return _packed_float(mul_f16(halves(a, 0, select), halves(b, 1, select), mode), mode, saturate)


def pk_fma_f16(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    select: Select = PLAIN,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_pk_fma_f16, and v_pk_fmac_f16 with the destination as `c`."""
    result = fma_f16(halves(a, 0, select), halves(b, 1, select), halves(c, 2, select), mode)
    return _packed_float(result, mode, saturate)


def pk_min_f16(
    a: np.ndarray,
    b: np.ndarray,
    rule: str,
    select: Select = PLAIN,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_pk_min_f16 (rule GFX11), v_pk_min_num_f16 (NUM), v_pk_minimum_f16 (PROPAGATE)."""
    result = minimum(halves(a, 0, select), halves(b, 1, select), rule, mode)
    return _packed_float(result, mode, saturate)


def pk_max_f16(
    a: np.ndarray,
    b: np.ndarray,
    rule: str,
    select: Select = PLAIN,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_pk_max_f16 (rule GFX11), v_pk_max_num_f16 (NUM), v_pk_maximum_f16 (PROPAGATE)."""
    result = maximum(halves(a, 0, select), halves(b, 1, select), rule, mode)
    return _packed_float(result, mode, saturate)


def _packed_float(result, mode, saturate):
    return (clamp(result, mode) if saturate else result).view(U32)


# Packed 16-bit integers

_S16 = np.int16
_PACKED_INTEGER: dict[str, Callable[..., np.ndarray]] = {
    "add_u16": lambda a, b: a + b,
    "sub_u16": lambda a, b: a - b,
    "add_i16": lambda a, b: a + b,
    "sub_i16": lambda a, b: a - b,
    "mul_lo_u16": lambda a, b: a * b,
    "mad_u16": lambda a, b, c: a * b + c,
    "mad_i16": lambda a, b, c: a * b + c,
    "min_u16": np.minimum,
    "max_u16": np.maximum,
    "min_i16": lambda a, b: np.minimum(a.view(_S16), b.view(_S16)).view(U16),
    "max_i16": lambda a, b: np.maximum(a.view(_S16), b.view(_S16)).view(U16),
    "lshlrev_b16": lambda a, b: b << (a & U16(15)),
    "lshrrev_b16": lambda a, b: b >> (a & U16(15)),
    "ashrrev_i16": lambda a, b: (b.view(_S16) >> (a & U16(15)).view(_S16)).view(U16),
}


def pk_integer(name: str, *operands: np.ndarray, select: Select = PLAIN) -> np.ndarray:
    """v_pk_<name> without clamp, for the names in `pk_integer_names`; results wrap."""
    picked = [halves(x, i, select._replace(neg_lo=0, neg_hi=0)) for i, x in enumerate(operands)]
    return _PACKED_INTEGER[name](*picked).view(U32)


def pk_integer_names() -> frozenset[str]:
    return frozenset(_PACKED_INTEGER)


# Mixed precision


def fma_mix_f32(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    op_sel: int = 0,
    op_sel_hi: int = 0,
    neg: int = 0,
    absolute: int = 0,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_fma_mix_f32: a * b + c in f32, rounded once.

    Parameters
    ----------
    a, b, c : uint32 [waves, 32] or [waves, 1]
    op_sel_hi : bit i: operand i is f16, in the half that bit i of `op_sel` names; otherwise it is f32
    neg, absolute : the fields neg_lo and neg_hi, which are sign modifiers here: |x| first, then -x
    """
    a, b, c = (_mix_operand(x, i, op_sel, op_sel_hi, neg, absolute, mode) for i, x in enumerate((a, b, c)))
    result = fma_f32(a, b, c, mode)
    return clamp(result, mode) if saturate else result


def fma_mixlo_f16(
    old: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    op_sel: int = 0,
    op_sel_hi: int = 0,
    neg: int = 0,
    absolute: int = 0,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_fma_mixlo_f16: fma_mix_f32, rounded a second time to f16, into the low half of `old`."""
    half = _fma_mix_f16(a, b, c, op_sel, op_sel_hi, neg, absolute, mode, saturate)
    return insert_low(old, half)


def fma_mixhi_f16(
    old: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    op_sel: int = 0,
    op_sel_hi: int = 0,
    neg: int = 0,
    absolute: int = 0,
    mode: FloatMode = DEFAULT_MODE,
    saturate: bool = False,
) -> np.ndarray:
    """v_fma_mixhi_f16: as `fma_mixlo_f16`, into the high half."""
    half = _fma_mix_f16(a, b, c, op_sel, op_sel_hi, neg, absolute, mode, saturate)
    return insert_high(old, half)


def _mix_operand(x, i, op_sel, op_sel_hi, neg, absolute, mode):
    if op_sel_hi >> i & 1:
        half = (x >> U32(16) if op_sel >> i & 1 else x).astype(U16)
        if mode.flush_f16_in:
            half = flush_f16(half)
        x = half.view(np.float16).astype(F32).view(U32)
    if absolute >> i & 1:
        x = x & U32(0x7FFFFFFF)
    return x ^ U32(0x80000000) if neg >> i & 1 else x


def _fma_mix_f16(a, b, c, op_sel, op_sel_hi, neg, absolute, mode, saturate):
    fields = {"op_sel": op_sel, "op_sel_hi": op_sel_hi, "neg": neg, "absolute": absolute}
    half = cvt_f16_f32(fma_mix_f32(a, b, c, mode=mode, **fields), mode)
    return clamp(half, mode) if saturate else half


# Floating-point dot products
#
# AMD's pseudocode adds one product after the other, low half first, each step in the type of the result. That
# is what these do; it is also the reading with the most roundings. LLVM records that v_dot2_f32_f16 flushes
# f32 denormals whatever MODE says; the bf16 forms, whose denormals are those of f32, are taken to do the
# same. Rounding is to nearest even.


def dot2_f32_f16(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, select: Select = PLAIN, saturate: bool = False
) -> np.ndarray:
    """v_dot2_f32_f16, and v_dot2acc_f32_f16 with the destination as `c`: (c + a.lo * b.lo) + a.hi * b.hi."""
    products = halves(a, 0, select).view(np.float16).astype(F32)
    products *= halves(b, 1, select).view(np.float16).astype(F32)  # 22 bits: exact
    # No sum is denormal: what is not zero is a multiple of 2^-48, or a normal `c`.
    return _add_products(products, c, select, saturate)


def dot2_f32_bf16(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, select: Select = PLAIN, saturate: bool = False
) -> np.ndarray:
    """v_dot2_f32_bf16, and v_dot2acc_f32_bf16 with the destination as `c`; the sum of `dot2_f32_f16`."""
    products = bf16_to_f32(flush_bf16(halves(a, 0, select))).view(F32)
    products *= bf16_to_f32(flush_bf16(halves(b, 1, select))).view(F32)  # 16 bits: exact within f32's range
    products = flush_f32(products.view(U32)).view(F32)
    return flush_f32(_add_products(products, c, select, saturate))


def _add_products(products, c, select, saturate):
    if select.neg_lo >> 2 & 1:
        c = c ^ U32(0x80000000)
    total = flush_f32(c).view(F32) + products[..., 0::2]
    total += products[..., 1::2]
    return clamp(total.view(U32)) if saturate else total.view(U32)


def dot2_f16_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_dot2_f16_f16: uint32 pairs `a` and `b`, uint16 `c` and result."""
    products = mul_f16(halves(a, 0), halves(b, 1), mode)
    return add_f16(add_f16(c, products[..., 0::2], mode), products[..., 1::2], mode)


def dot2_bf16_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """v_dot2_bf16_bf16: uint32 pairs `a` and `b`, uint16 `c` and result."""

    def rounded(x):
        return flush_bf16(f32_to_bf16(x.view(U32)))

    def value(x):
        return bf16_to_f32(x).view(F32)

    # A product of two bf16 is exact in f32; so is, as far as bf16's rounding can see, their sum (24 >= 2 * 8
    # + 2).
    products = rounded(value(flush_bf16(halves(a, 0))) * value(flush_bf16(halves(b, 1))))
    total = rounded(value(flush_bf16(c)) + value(products[..., 0::2]))
    return rounded(value(total) + value(products[..., 1::2]))


# Integer dot products


def dot4_i32_iu8(a: np.ndarray, b: np.ndarray, c: np.ndarray, neg_lo: int = 0, saturate: bool = False) -> np.ndarray:
    """v_dot4_i32_iu8: c + four products. Bit 0 of neg_lo makes a signed, bit 1 b; `saturate` to int32."""
    a, b = (_bytes(x, bool(neg_lo >> i & 1)) for i, x in enumerate((a, b)))
    return _integer_dot(_sum_of_bytes(a * b), c.view(np.int32), saturate)


def dot8_i32_iu4(a: np.ndarray, b: np.ndarray, c: np.ndarray, neg_lo: int = 0, saturate: bool = False) -> np.ndarray:
    """v_dot8_i32_iu4: c + the sum of eight products; modifiers as in `dot4_i32_iu8`."""
    a, b = (_nibbles(x, bool(neg_lo >> i & 1)) for i, x in enumerate((a, b)))
    return _integer_dot(_sum_of_bytes(a[0] * b[0] + a[1] * b[1]), c.view(np.int32), saturate)


def dot4_u32_u8(a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool = False) -> np.ndarray:
    """v_dot4_u32_u8: all unsigned; `saturate` to uint32."""
    return _integer_dot(_sum_of_bytes(_bytes(a, False) * _bytes(b, False)), c, saturate)


def dot8_u32_u4(a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool = False) -> np.ndarray:
    """v_dot8_u32_u4: all unsigned; `saturate` to uint32."""
    a, b = _nibbles(a, False), _nibbles(b, False)
    return _integer_dot(_sum_of_bytes(a[0] * b[0] + a[1] * b[1]), c, saturate)


def _bytes(x, signed):
    """int32 [waves, 128]: four to a lane."""
    if x.shape[-1] != 32:
        x = np.broadcast_to(x, (*x.shape[:-1], 32))
    return np.ascontiguousarray(x).view(np.int8 if signed else np.uint8).astype(np.int32)


def _nibbles(x, signed):
    """The low and the high nibble of each byte, int32 [waves, 128] each."""
    x = _bytes(x, False)
    low, high = x & 15, x >> 4
    return ((low ^ 8) - 8, (high ^ 8) - 8) if signed else (low, high)


def _sum_of_bytes(x):
    """[waves, 128] to [waves, 32]."""
    return x[..., 0::4] + x[..., 1::4] + x[..., 2::4] + x[..., 3::4]


def _integer_dot(products, c, saturate):
    if not saturate:
        return products.view(U32) + c.view(U32)
    limits = np.iinfo(c.dtype)
    return np.clip(products + c.astype(np.int64), limits.min, limits.max).astype(U32)
