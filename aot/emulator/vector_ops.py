"""What each vector ALU instruction computes: one row of a table per mnemonic, over kinds of `operands`.

A row gives the kind of the result, the kinds of the sources, and a pure function of NumPy arrays. Functions
of `float_formats` take the wave's FloatMode last; such rows are marked `moded`. How operands are fetched and
results written is the business of `vector`.

Where an instruction only moves or masks bits, the row also has a function that says which bits of the result
are undefined, given the values and the undefined bits of the sources: compilers build a register out of
halves, of which one is often not written yet. For all other rows an undefined bit anywhere makes the whole
result undefined.

Source: AMD RDNA3 and RDNA4 instruction set architecture reference guides, VALU instruction descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import conversions as cv
from . import float_formats as ff
from . import packed_math as pm

U16, U32, U64 = np.uint16, np.uint32, np.uint64
I16, I32, I64 = np.int16, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64


@dataclass(frozen=True)
class VectorOp:
    """One row. `accumulates`: the destination is also the last source. `saturating`: the function used with
    the clamp bit."""

    result: str
    sources: tuple[str, ...]
    compute: Callable
    moded: bool = False
    accumulates: bool = False
    poison: Callable | None = None
    saturating: Callable | None = None


OPS: dict[str, VectorOp] = {}


def _op(names: str, result: str, sources: str, compute: Callable, **more: Any) -> None:
    for name in names.split():
        OPS[name] = VectorOp(result, tuple(sources.split()), compute, **more)


def _moded(names: str, result: str, sources: str, compute: Callable, **more: Any) -> None:
    _op(names, result, sources, compute, moded=True, **more)


# -- moves and bits --------------------------------------------------------------------------------------

_same = lambda values, undefined: undefined[0]  # noqa: E731
_either = lambda values, undefined: undefined[0] | undefined[1]  # noqa: E731


def _and_poison(values, undefined):
    """A bit of a & b is defined where both are, or where one is a defined 0."""
    (a, b), (ua, ub) = values, undefined
    return (ua | ub) & (ua | a) & (ub | b)


def _or_poison(values, undefined):
    (a, b), (ua, ub) = values, undefined
    return (ua | ub) & (ua | ~a) & (ub | ~b)


_op("v_mov_b32", "b32", "b32", lambda a: a, poison=_same)
_op("v_mov_b16", "b16", "b16", lambda a: a, poison=_same)
_op("v_not_b32", "b32", "b32", lambda a: ~a, poison=_same)
_op("v_not_b16", "b16", "b16", lambda a: ~a, poison=_same)
_op("v_and_b32", "b32", "b32 b32", lambda a, b: a & b, poison=_and_poison)
_op("v_and_b16", "b16", "b16 b16", lambda a, b: a & b, poison=_and_poison)
_op("v_or_b32", "b32", "b32 b32", lambda a, b: a | b, poison=_or_poison)
_op("v_or_b16", "b16", "b16 b16", lambda a, b: a | b, poison=_or_poison)
_op("v_xor_b32", "b32", "b32 b32", lambda a, b: a ^ b, poison=_either)
_op("v_xor_b16", "b16", "b16 b16", lambda a, b: a ^ b, poison=_either)
_op("v_xnor_b32", "b32", "b32 b32", lambda a, b: ~(a ^ b), poison=_either)
_op("v_xor3_b32", "b32", "b32 b32 b32", lambda a, b, c: a ^ b ^ c, poison=lambda v, u: u[0] | u[1] | u[2])


def _or3_poison(values, undefined):
    (a, b, c), (ua, ub, uc) = values, undefined
    return _or_poison((a | b, c), (_or_poison((a, b), (ua, ub)), uc))


def _and_or_poison(values, undefined):
    (a, b, c), (ua, ub, uc) = values, undefined
    return _or_poison((a & b, c), (_and_poison((a, b), (ua, ub)), uc))


def upward(undefined):
    """Every bit from the lowest undefined one up: what a sum or a product does with them."""
    return undefined | (undefined.dtype.type(0) - undefined)


def _sum_poison(values, undefined):
    total = undefined[0]
    for more in undefined[1:]:
        total = total | more
    return upward(np.asarray(total))


def _lshl_add_poison(values, undefined):
    (_, shift, _), (ua, ub, uc) = values, undefined
    return upward(np.asarray(ua << (shift & U32(31)) | _all_if_any(ub) | uc))


def _add_lshl_poison(values, undefined):
    (_, _, shift), (ua, ub, uc) = values, undefined
    return upward(np.asarray(ua | ub)) << (shift & U32(31)) | _all_if_any(uc)


def _shift64_poison(values, undefined):
    """Of a left shift by a defined amount: the bits move along."""
    amount = (values[0] & U32(63)).astype(U64)
    moved = undefined[1].astype(U64) << amount
    return np.where(undefined[0] != 0, ~U64(0), moved)


def _all_if_any(undefined):
    return np.where(undefined != 0, U32(0xFFFFFFFF), U32(0))


def _lshl_or_poison(values, undefined):
    (a, b, c), (ua, ub, uc) = values, undefined
    shift = b & U32(31)
    return _or_poison((a << shift, c), (ua << shift | _all_if_any(ub), uc))


_op("v_or3_b32", "b32", "b32 b32 b32", lambda a, b, c: a | b | c, poison=_or3_poison)
_op("v_and_or_b32", "b32", "b32 b32 b32", lambda a, b, c: a & b | c, poison=_and_or_poison)
_op("v_lshl_or_b32", "b32", "b32 b32 b32", lambda a, b, c: (a << (b & U32(31))) | c, poison=_lshl_or_poison)

_op(
    "v_lshlrev_b32",
    "b32",
    "b32 b32",
    lambda a, b: b << (a & U32(31)),
    poison=lambda v, u: u[1] << (v[0] & U32(31)) | _all_if_any(u[0]),
)
_op(
    "v_lshrrev_b32",
    "b32",
    "b32 b32",
    lambda a, b: b >> (a & U32(31)),
    poison=lambda v, u: u[1] >> (v[0] & U32(31)) | _all_if_any(u[0]),
)
_op(
    "v_ashrrev_i32",
    "i32",
    "i32 i32",
    lambda a, b: b >> (a & I32(31)),
    poison=lambda v, u: (_i32(u[1]) >> (_i32(v[0]) & I32(31))).view(U32) | _all_if_any(u[0]),
)


def _i32(x):
    return np.asarray(x).view(I32)


_op("v_lshlrev_b16", "b16", "u16 u16", lambda a, b: b << (a & U16(15)))
_op("v_lshrrev_b16", "b16", "u16 u16", lambda a, b: b >> (a & U16(15)))
_op("v_ashrrev_i16", "i16", "i16 i16", lambda a, b: b >> (a & I16(15)))
_op("v_lshlrev_b64", "b64", "u32 u64", lambda a, b: b << (a & U32(63)).astype(U64), poison=_shift64_poison)
_op("v_lshrrev_b64", "b64", "u32 u64", lambda a, b: b >> (a & U32(63)).astype(U64))
_op("v_ashrrev_i64", "i64", "u32 i64", lambda a, b: b >> (a & U32(63)).astype(I64))


def _bfe_u32(a, offset, width):
    mask = (U32(1) << (width & U32(31))) - U32(1)
    return a >> (offset & U32(31)) & mask


def _bfe_i32(a, offset, width):
    width = width & U32(31)
    shift = (U32(32) - width) & U32(31)
    field = ((a >> (offset & U32(31))) << shift).view(I32) >> shift.view(I32)
    return np.where(width == 0, I32(0), field)


_op(
    "v_bfe_u32",
    "b32",
    "u32 u32 u32",
    _bfe_u32,
    poison=lambda v, u: _bfe_u32(u[0], v[1], v[2]) | _all_if_any(u[1] | u[2]),
)
_op(
    "v_bfe_i32",
    "i32",
    "u32 u32 u32",
    _bfe_i32,
    poison=lambda v, u: _bfe_i32(u[0], v[1], v[2]).view(U32) | _all_if_any(u[1] | u[2]),
)
_op(
    "v_bfi_b32",
    "b32",
    "b32 b32 b32",
    lambda m, a, b: (m & a) | (~m & b),
    poison=lambda v, u: _all_if_any(u[0]) | (v[0] & u[1]) | (~v[0] & u[2]),
)
_op("v_bfm_b32", "b32", "u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)))


def _alignbit(a, b, c, unit=1):
    both = (a.astype(U64) << U64(32)) | b
    shift = (c & U32(31 if unit == 1 else 3)).astype(U64) * U64(unit)
    return (both >> shift).astype(U32)


_op(
    "v_alignbit_b32",
    "b32",
    "b32 b32 u32",
    _alignbit,
    poison=lambda v, u: _alignbit(u[0], u[1], v[2]) | _all_if_any(u[2]),
)
_op(
    "v_alignbyte_b32",
    "b32",
    "b32 b32 u32",
    lambda a, b, c: _alignbit(a, b, c, 8),
    poison=lambda v, u: _alignbit(u[0], u[1], v[2], 8) | _all_if_any(u[2]),
)


def _perm(a, b, select):
    """Four bytes picked from {a, b}: 0-3 of b, 4-7 of a, 8-11 the sign of a 16-bit word spread, 12 zero,
    above ones."""
    if np.size(select) == 1 and _plain_selector(int(np.ravel(select)[0])):
        return _perm_bytes(a, b, int(np.ravel(select)[0]))
    both = (a.astype(U64) << U64(32)) | b
    result = U32(0)
    for i in range(4):
        s = (select >> U32(8 * i) & U32(0xFF)).astype(U64)
        byte = both >> (np.minimum(s, U64(7)) * U64(8)) & U64(0xFF)
        sign = U64(0xFF) * (both >> (U64(16) * (s & U64(3)) + U64(15)) & U64(1))
        byte = np.where(s <= 7, byte, np.where(s <= 11, sign, np.where(s == 12, U64(0), U64(0xFF))))
        result = result | byte.astype(U32) << U32(8 * i)
    return result


def _plain_selector(select: int) -> bool:
    return all((select >> 8 * i & 0xFF) <= 7 or (select >> 8 * i & 0xFF) == 12 for i in range(4))


def _perm_bytes(a, b, select: int):
    """The usual case of a constant selector: runs of neighbouring bytes move together."""
    result, i = None, 0
    while i < 4:
        first = select >> 8 * i & 0xFF
        if first == 12:
            i += 1
            continue
        length = 1
        while i + length < 4 and first % 4 + length < 4 and (select >> 8 * (i + length) & 0xFF) == first + length:
            length += 1
        word = (a if first >= 4 else b) >> U32(8 * (first % 4))
        part = (word & U32((1 << 8 * length) - 1)) << U32(8 * i)
        result = part if result is None else result | part
        i += length
    return np.zeros_like(b) if result is None else result


_op(
    "v_perm_b32",
    "b32",
    "b32 b32 b32",
    _perm,
    poison=lambda v, u: _perm(u[0], u[1], v[2]) & ~_twelves(v[2]) | _all_if_any(u[2]),
)


def _twelves(select):
    """Bytes that the selector makes constant: nothing undefined can get there."""
    mask = U32(0)
    for i in range(4):
        s = select >> U32(8 * i) & U32(0xFF)
        mask = mask | np.where(s >= 12, U32(0xFF << 8 * i), U32(0))
    return mask


def _select_poison(values, undefined):
    _a, _b, condition = values
    ua, ub, uc = undefined
    chosen = np.where(condition, ub, ua)
    return np.where(uc != 0, U32(0xFFFFFFFF), chosen)


_op("v_cndmask_b32", "b32", "f32 f32 mask", lambda a, b, c: np.where(c, b, a), poison=_select_poison)
_op("v_cndmask_b16", "b16", "f16 f16 mask", lambda a, b, c: np.where(c, b, a), poison=_select_poison)


def _bit_reverse(x):
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = x >> U32(shift) & U32(mask) | (x & U32(mask)) << U32(shift)
    return x


def bit_length(x):
    """Position of the highest set bit plus one, of uint32."""
    return np.frexp(x.astype(F64))[1].astype(I32)


def count_bits(x):
    """Number of set bits, of uint32."""
    x = x - (x >> U32(1) & U32(0x55555555))
    x = (x & U32(0x33333333)) + (x >> U32(2) & U32(0x33333333))
    x = x + (x >> U32(4)) & U32(0x0F0F0F0F)
    return x * U32(0x01010101) >> U32(24)


def leading_zeros(x):
    """Zeros above the highest set bit; -1 if there is none."""
    return np.where(x == 0, I32(-1), I32(32) - bit_length(x))


def trailing_zeros(x):
    """Zeros below the lowest set bit; -1 if there is none."""
    return np.where(x == 0, I32(-1), bit_length(x & (~x + U32(1))) - I32(1))


def leading_sign_bits(x):
    """Bits from the top that equal the sign; -1 if all do."""
    magnitude = x ^ np.where(x >> U32(31), U32(0xFFFFFFFF), U32(0))
    return np.where(magnitude == 0, I32(-1), I32(32) - bit_length(magnitude))


_BELOW = (U32(1) << np.arange(32, dtype=U32)) - U32(1)  # bits of the lanes below each lane
_op("v_bfrev_b32", "b32", "b32", _bit_reverse, poison=lambda v, u: _bit_reverse(u[0]))
_op("v_clz_i32_u32", "i32", "u32", leading_zeros)
_op("v_ctz_i32_b32", "i32", "u32", trailing_zeros)
_op("v_cls_i32", "i32", "u32", leading_sign_bits)
_op("v_bcnt_u32_b32", "b32", "u32 u32", lambda a, b: count_bits(a) + b)
_op("v_mbcnt_lo_u32_b32", "b32", "u32 u32", lambda a, b: count_bits(a & _BELOW) + b)
_op(
    "v_mbcnt_hi_u32_b32",
    "b32",
    "u32 u32",
    lambda a, b: np.broadcast_to(b, np.broadcast_shapes(np.shape(a), np.shape(b))),
)

# -- integers --------------------------------------------------------------------------------------------


def _saturated(low, high, dtype):
    return lambda x: np.clip(x, low, high).astype(dtype)


_u32_range = _saturated(0, 2**32 - 1, U32)
_i32_range = _saturated(-(2**31), 2**31 - 1, I32)
_u16_range = _saturated(0, 2**16 - 1, U16)
_i16_range = _saturated(-(2**15), 2**15 - 1, I16)


def _wide(x):
    return np.asarray(x).astype(I64)


_op(
    "v_add_nc_u32",
    "b32",
    "u32 u32",
    lambda a, b: a + b,
    saturating=lambda a, b: _u32_range(_wide(a) + b),
    poison=_sum_poison,
)
_op(
    "v_sub_nc_u32",
    "b32",
    "u32 u32",
    lambda a, b: a - b,
    saturating=lambda a, b: _u32_range(_wide(a) - b),
    poison=_sum_poison,
)
_op(
    "v_subrev_nc_u32",
    "b32",
    "u32 u32",
    lambda a, b: b - a,
    saturating=lambda a, b: _u32_range(_wide(b) - a),
    poison=_sum_poison,
)
_op(
    "v_add_nc_i32",
    "i32",
    "i32 i32",
    lambda a, b: a + b,
    saturating=lambda a, b: _i32_range(_wide(a) + b),
    poison=_sum_poison,
)
_op(
    "v_sub_nc_i32",
    "i32",
    "i32 i32",
    lambda a, b: a - b,
    saturating=lambda a, b: _i32_range(_wide(a) - b),
    poison=_sum_poison,
)
_op(
    "v_add_nc_u16",
    "b16",
    "u16 u16",
    lambda a, b: a + b,
    saturating=lambda a, b: _u16_range(_wide(a) + b),
    poison=_sum_poison,
)
_op(
    "v_sub_nc_u16",
    "b16",
    "u16 u16",
    lambda a, b: a - b,
    saturating=lambda a, b: _u16_range(_wide(a) - b),
    poison=_sum_poison,
)
_op(
    "v_add_nc_i16",
    "i16",
    "i16 i16",
    lambda a, b: a + b,
    saturating=lambda a, b: _i16_range(_wide(a) + b),
    poison=_sum_poison,
)
_op(
    "v_sub_nc_i16",
    "i16",
    "i16 i16",
    lambda a, b: a - b,
    saturating=lambda a, b: _i16_range(_wide(a) - b),
    poison=_sum_poison,
)
_op("v_mul_lo_u16", "b16", "u16 u16", lambda a, b: a * b, poison=_sum_poison)
_op("v_mul_lo_u32", "b32", "u32 u32", lambda a, b: a * b, poison=_sum_poison)
_op("v_mul_hi_u32", "b32", "u32 u32", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32))
_op("v_mul_hi_i32", "i32", "i32 i32", lambda a, b: (a.astype(I64) * b >> I64(32)).astype(I32))
_op("v_add3_u32", "b32", "u32 u32 u32", lambda a, b, c: a + b + c, poison=_sum_poison)
_op("v_lshl_add_u32", "b32", "u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) + c, poison=_lshl_add_poison)
_op("v_add_lshl_u32", "b32", "u32 u32 u32", lambda a, b, c: (a + b) << (c & U32(31)), poison=_add_lshl_poison)
_op("v_xad_u32", "b32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c, poison=_sum_poison)


def _u24(x):
    return x & U32(0xFFFFFF)


def _i24(x):
    return (x << I32(8)) >> I32(8)


_op("v_mul_u32_u24", "b32", "u32 u32", lambda a, b: _u24(a) * _u24(b))
_op("v_mul_i32_i24", "i32", "i32 i32", lambda a, b: _i24(a) * _i24(b))
_op("v_mul_hi_u32_u24", "b32", "u32 u32", lambda a, b: (_u24(a).astype(U64) * _u24(b) >> U64(32)).astype(U32))
_op("v_mul_hi_i32_i24", "i32", "i32 i32", lambda a, b: (_i24(a).astype(I64) * _i24(b) >> I64(32)).astype(I32))
_op("v_mad_u32_u24", "b32", "u32 u32 u32", lambda a, b, c: _u24(a) * _u24(b) + c)
_op("v_mad_i32_i24", "i32", "i32 i32 i32", lambda a, b, c: _i24(a) * _i24(b) + c)
_op("v_mad_u16", "b16", "u16 u16 u16", lambda a, b, c: a * b + c)
_op("v_mad_i16", "i16", "i16 i16 i16", lambda a, b, c: a * b + c)
_op("v_mad_u32_u16", "b32", "u16 u16 u32", lambda a, b, c: a.astype(U32) * b + c)
_op("v_mad_i32_i16", "i32", "i16 i16 i32", lambda a, b, c: a.astype(I32) * b + c)

for _kind, _form in (("u32", "u32"), ("i32", "i32"), ("u16", "u16"), ("i16", "i16")):
    _pair, _triple = f"{_kind} {_kind}", f"{_kind} {_kind} {_kind}"
    _op(f"v_min_{_kind}", _form, _pair, np.minimum)
    _op(f"v_max_{_kind}", _form, _pair, np.maximum)
    _op(f"v_min3_{_kind}", _form, _triple, lambda a, b, c: np.minimum(np.minimum(a, b), c))
    _op(f"v_max3_{_kind}", _form, _triple, lambda a, b, c: np.maximum(np.maximum(a, b), c))
    _op(
        f"v_med3_{_kind}",
        _form,
        _triple,
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    )
    _op(f"v_maxmin_{_kind}", _form, _triple, lambda a, b, c: np.minimum(np.maximum(a, b), c))
    _op(f"v_minmax_{_kind}", _form, _triple, lambda a, b, c: np.maximum(np.minimum(a, b), c))

_op("v_cvt_u32_u16", "b32", "u16", lambda a: a.astype(U32), poison=_same)
_op("v_cvt_i32_i16", "i32", "i16", lambda a: a.astype(I32))
_op("v_pack_b32_f16", "b32", "f16 f16", ff.pack_halves, poison=lambda v, u: u[0] | u[1] << U32(16))
_op("v_sad_u32", "b32", "u32 u32 u32", lambda a, b, c: np.where(a > b, a - b, b - a) + c)

# -- float arithmetic ------------------------------------------------------------------------------------


def _neg32(x):
    return x ^ U32(0x80000000)


def _neg16(x):
    return x ^ U16(0x8000)


_moded("v_add_f32", "f32", "f32 f32", ff.add_f32)
_moded("v_sub_f32", "f32", "f32 f32", lambda a, b, mode: ff.add_f32(a, _neg32(b), mode))
_moded("v_subrev_f32", "f32", "f32 f32", lambda a, b, mode: ff.add_f32(b, _neg32(a), mode))
_moded("v_mul_f32", "f32", "f32 f32", ff.mul_f32)
_moded("v_mul_dx9_zero_f32", "f32", "f32 f32", ff.mul_dx9_zero_f32)
_moded("v_fma_f32", "f32", "f32 f32 f32", ff.fma_f32)
_moded("v_fmac_f32", "f32", "f32 f32", ff.fma_f32, accumulates=True)
_moded("v_fmamk_f32 v_fmaak_f32", "f32", "f32 f32 f32", ff.fma_f32)
_moded("v_add_f16", "f16", "f16 f16", ff.add_f16)
_moded("v_sub_f16", "f16", "f16 f16", lambda a, b, mode: ff.add_f16(a, _neg16(b), mode))
_moded("v_subrev_f16", "f16", "f16 f16", lambda a, b, mode: ff.add_f16(b, _neg16(a), mode))
_moded("v_mul_f16", "f16", "f16 f16", ff.mul_f16)
_moded("v_fma_f16", "f16", "f16 f16 f16", ff.fma_f16)
_moded("v_fmac_f16", "f16", "f16 f16", ff.fma_f16, accumulates=True)
_moded("v_fmamk_f16 v_fmaak_f16", "f16", "f16 f16 f16", ff.fma_f16)
_op("v_add_f64", "f64", "f64 f64", lambda a, b: a + b)
_op("v_mul_f64", "f64", "f64 f64", lambda a, b: a * b)

for _kind in ("f32", "f16"):
    _pair, _triple = f"{_kind} {_kind}", f"{_kind} {_kind} {_kind}"
    for _name, _rule in ((f"{_kind}", ff.GFX11), (f"num_{_kind}", ff.NUM)):

        def _lesser(a, b, mode, rule=_rule):
            return ff.minimum(a, b, rule, mode)

        def _greater(a, b, mode, rule=_rule):
            return ff.maximum(a, b, rule, mode)

        _moded(f"v_min_{_name}", _kind, _pair, _lesser)
        _moded(f"v_max_{_name}", _kind, _pair, _greater)
        _moded(f"v_min3_{_name}", _kind, _triple, lambda a, b, c, mode, f=_lesser: f(f(a, b, mode), c, mode))
        _moded(f"v_max3_{_name}", _kind, _triple, lambda a, b, c, mode, f=_greater: f(f(a, b, mode), c, mode))
        _moded(
            f"v_med3_{_name}",
            _kind,
            _triple,
            lambda a, b, c, mode, rule=_rule: ff.median(a, b, c, rule, mode),
        )
        _moded(
            f"v_maxmin_{_name}",
            _kind,
            _triple,
            lambda a, b, c, mode, low=_lesser, high=_greater: low(high(a, b, mode), c, mode),
        )
        _moded(
            f"v_minmax_{_name}",
            _kind,
            _triple,
            lambda a, b, c, mode, low=_lesser, high=_greater: high(low(a, b, mode), c, mode),
        )
    _moded(f"v_minimum_{_kind}", _kind, _pair, lambda a, b, mode: ff.minimum(a, b, ff.PROPAGATE, mode))
    _moded(f"v_maximum_{_kind}", _kind, _pair, lambda a, b, mode: ff.maximum(a, b, ff.PROPAGATE, mode))

# -- float to float of one argument, conversions ----------------------------------------------------------

for _kind in ("f32", "f16"):
    for _name, _function in {
        "trunc": cv.trunc,
        "ceil": cv.ceil,
        "floor": cv.floor,
        "rndne": cv.rndne,
        "fract": cv.fract,
        "rcp": cv.rcp,
        "rsq": cv.rsq,
        "sqrt": cv.sqrt,
        "exp": cv.exp2,
        "log": cv.log2,
    }.items():
        _moded(f"v_{_name}_{_kind}", _kind, _kind, _function)
OPS["v_rcp_iflag_f32"] = OPS["v_rcp_f32"]
_moded("v_ldexp_f32", "f32", "f32 b32", cv.ldexp_f32)
_moded("v_ldexp_f16", "f16", "f16 b16", cv.ldexp_f16)
_op("v_frexp_exp_i32_f32", "b32", "f32", cv.frexp_exp)
_op("v_frexp_exp_i16_f16", "b16", "f16", cv.frexp_exp)
_op("v_frexp_mant_f32", "f32", "f32", cv.frexp_mant)
_op("v_frexp_mant_f16", "f16", "f16", cv.frexp_mant)

_moded("v_cvt_f32_i32", "f32", "b32", cv.cvt_f32_i32)
_moded("v_cvt_f32_u32", "f32", "b32", cv.cvt_f32_u32)
_moded("v_cvt_f16_f32", "f16", "f32", cv.cvt_f16_f32)
_moded("v_cvt_f32_f16", "f32", "f16", cv.cvt_f32_f16)
_moded("v_cvt_f16_u16", "f16", "u16", cv.cvt_f16_u16)
_moded("v_cvt_f16_i16", "f16", "u16", cv.cvt_f16_i16)
_moded("v_cvt_pk_rtz_f16_f32", "b32", "f32 f32", cv.cvt_pk_rtz_f16_f32)
_op("v_cvt_i32_f32", "b32", "f32", cv.cvt_i32_f32)
_op("v_cvt_u32_f32", "b32", "f32", cv.cvt_u32_f32)
_op("v_cvt_nearest_i32_f32", "b32", "f32", cv.cvt_nearest_i32_f32)
_op("v_cvt_floor_i32_f32", "b32", "f32", cv.cvt_floor_i32_f32)
_op("v_cvt_i16_f16", "b16", "f16", cv.cvt_i16_f16)
_op("v_cvt_u16_f16", "b16", "f16", cv.cvt_u16_f16)
_op("v_cvt_pk_i16_f32", "b32", "f32 f32", cv.cvt_pk_i16_f32)
_op("v_cvt_pk_u16_f32", "b32", "f32 f32", cv.cvt_pk_u16_f32)
_op("v_cvt_pk_i16_i32", "b32", "b32 b32", cv.cvt_pk_i16_i32)
_op("v_cvt_pk_u16_u32", "b32", "b32 b32", cv.cvt_pk_u16_u32)
_op("v_cvt_off_f32_i4", "f32", "b32", cv.cvt_off_f32_i4)


def _byte_to_float(byte: int) -> None:
    shift = U32(8 * byte)
    _op(
        f"v_cvt_f32_ubyte{byte}",
        "f32",
        "b32",
        lambda a: cv.cvt_f32_ubyte(a, byte),
        poison=lambda v, u: _all_if_any(u[0] >> shift & U32(0xFF)),
    )


for _byte in range(4):
    _byte_to_float(_byte)


def _f64_to_integer(x, low, high, dtype):
    """Truncated, saturated; NaN gives 0."""
    return np.clip(np.where(np.isnan(x), 0.0, np.trunc(x)), low, high).astype(I64).astype(dtype)


_op("v_cvt_f64_f32", "f64", "f32", lambda a: a.view(F32).astype(F64))
_op("v_cvt_f64_i32", "f64", "i32", lambda a: a.astype(F64))
_op("v_cvt_f64_u32", "f64", "u32", lambda a: a.astype(F64))
_moded("v_cvt_f32_f64", "f32", "f64", ff.encode_f32)
_op("v_cvt_i32_f64", "i32", "f64", lambda a: _f64_to_integer(a, -(2.0**31), 2.0**31 - 1, I32))
_op("v_cvt_u32_f64", "u32", "f64", lambda a: _f64_to_integer(a, 0, 2.0**32 - 1, U32))

# -- division helpers ------------------------------------------------------------------------------------


def _div_fixup(p, denominator, numerator, mode):
    """The quotient `p` where it is an ordinary number, else the special case that IEEE 754 asks for."""
    x, y = ff.decode_f32(numerator, mode), ff.decode_f32(denominator, mode)
    sign = (numerator ^ denominator) & U32(0x80000000)
    magnitude = p & U32(0x7FFFFFFF)
    special = np.where((y == 0) | np.isinf(x), U32(0x7F800000), U32(0))
    is_special = (x == 0) | (y == 0) | np.isinf(x) | np.isinf(y)
    invalid = np.isnan(x) | np.isnan(y) | ((x == 0) & (y == 0)) | (np.isinf(x) & np.isinf(y))
    return np.where(invalid, U32(0x7FC00000), np.where(is_special, special, magnitude) | sign)


_moded("v_div_fixup_f32", "f32", "f32 f32 f32", _div_fixup)

# -- dot products of VOP2 and VOP3 -----------------------------------------------------------------------

_op("v_dot2acc_f32_f16", "f32", "b32 b32", pm.dot2_f32_f16, accumulates=True)
_op("v_dot2acc_f32_bf16", "f32", "b32 b32", pm.dot2_f32_bf16, accumulates=True)
_moded("v_dot2_f16_f16", "f16", "b32 b32 f16", pm.dot2_f16_f16)
_op("v_dot2_bf16_bf16", "bf16", "b32 b32 bf16", pm.dot2_bf16_bf16)
_moded(
    "v_pk_fmac_f16",
    "b32",
    "b32 b32",
    lambda a, b, c, mode: pm.pk_fma_f16(a, b, c, mode=mode),
    accumulates=True,
)

# -- comparisons -----------------------------------------------------------------------------------------

_INTEGER_TESTS: dict[str, Callable] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater,
    "ne": np.not_equal, "lg": np.not_equal,
    "ge": np.greater_equal,
}  # fmt: skip
_FLOAT_TESTS: dict[str, Callable] = {
    **{name: test for name, test in _INTEGER_TESTS.items() if name not in ("ne", "lg")},
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
}


def _compare_f32(test):
    def compare(a, b, mode):
        if mode.flush_f32_in:
            a, b = ff.flush_f32(a), ff.flush_f32(b)
        return test(a.view(F32), b.view(F32))

    return compare


def _compare_f16(test):
    def compare(a, b, mode):
        if mode.flush_f16_in:
            a, b = ff.flush_f16(a), ff.flush_f16(b)
        return test(a.view(F16), b.view(F16))

    return compare


for _name, _test in _INTEGER_TESTS.items():
    for _kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
        _op(f"v_cmp_{_name}_{_kind}", "mask", f"{_kind} {_kind}", _test)
for _name, _test in _FLOAT_TESTS.items():
    _moded(f"v_cmp_{_name}_f32", "mask", "f32 f32", _compare_f32(_test))
    _moded(f"v_cmp_{_name}_f16", "mask", "f16 f16", _compare_f16(_test))
    _op(f"v_cmp_{_name}_f64", "mask", "f64 f64", _test)


def _class_f32(a, tests):
    """Whether `a` is of one of the ten classes that the bits of `tests` name."""
    exponent, fraction = a >> U32(23) & U32(0xFF), a & U32(0x7FFFFF)
    negative = a >> U32(31) != 0
    nan, infinite = (exponent == 255) & (fraction != 0), (exponent == 255) & (fraction == 0)
    zero, denormal = (exponent == 0) & (fraction == 0), (exponent == 0) & (fraction != 0)
    normal = (exponent != 0) & (exponent != 255)
    quiet = fraction & U32(0x400000) != 0
    classes = [
        nan & ~quiet, nan & quiet, infinite & negative, normal & negative, denormal & negative,
        zero & negative,
        zero & ~negative, denormal & ~negative, normal & ~negative, infinite & ~negative,
    ]  # fmt: skip
    result = False
    for i, members in enumerate(classes):
        result = result | members & (tests >> U32(i) & U32(1) != 0)
    return result


_op("v_cmp_class_f32", "mask", "f32 u32", _class_f32)
