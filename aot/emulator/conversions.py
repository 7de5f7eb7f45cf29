"""Conversions, rounding to integers, scaling by powers of two, and the approximate functions.

Operands and results are bit patterns as in `float_formats`: uint32 for f32 and 32-bit integers, uint16 for
f16 and 16-bit integers. Conventions on rounding, denormals and NaN are those of that file."""

from __future__ import annotations

import numpy as np

from .float_formats import (
    DEFAULT_MODE,
    F16,
    F32,
    F64,
    TOWARD_ZERO,
    U16,
    U32,
    FloatMode,
    decode_f16,
    decode_f32,
    encode_f16,
    encode_f32,
    flush_f16,
    flush_f32,
    pack_halves,
)

# Between f32 and f16


def cvt_f32_f16(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_f32_f16: exact."""
    if mode.flush_f16_in:
        x = flush_f16(x)
    return x.view(F16).astype(F32).view(U32)


def cvt_f16_f32(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_f16_f32: rounds as MODE says for f16."""
    if mode.f16_is_default and not mode.flush_f32_in:
        return x.view(F32).astype(F16).view(U16)
    return encode_f16(decode_f32(x, mode), mode)


def cvt_pk_rtz_f16_f32(low: np.ndarray, high: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_pk_rtz_f16_f32: two f32 to packed f16, toward zero: a finite operand never becomes infinite."""
    if mode.round_f16 != TOWARD_ZERO:
        mode = FloatMode(mode.round_f32, TOWARD_ZERO, mode.denorm_f32, mode.denorm_f16)
    return pack_halves(cvt_f16_f32(low, mode), cvt_f16_f32(high, mode))


# Integers to floating point


def cvt_f32_i32(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_f32_i32."""
    return encode_f32(x.view(np.int32).astype(F64), mode)


def cvt_f32_u32(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_f32_u32."""
    return encode_f32(x.astype(F64), mode)


def cvt_f32_ubyte(x: np.ndarray, byte: int) -> np.ndarray:
    """v_cvt_f32_ubyte0 to v_cvt_f32_ubyte3."""
    return (x >> U32(8 * byte) & U32(0xFF)).astype(F32).view(U32)


def cvt_off_f32_i4(x: np.ndarray) -> np.ndarray:
    """v_cvt_off_f32_i4: the low 4 bits, signed, over 16."""
    signed = ((x & U32(15)) ^ U32(8)).astype(np.int32) - 8
    return (signed.astype(F32) / F32(16)).view(U32)


def cvt_f16_i16(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_f16_i16."""
    return encode_f16(x.view(np.int16).astype(F64), mode)


def cvt_f16_u16(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_cvt_f16_u16."""
    return encode_f16(x.astype(F64), mode)


# Floating point to integers: toward zero, saturating, NaN to 0


def cvt_i32_f32(x: np.ndarray) -> np.ndarray:
    """v_cvt_i32_f32."""
    return _to_integer(x.view(F32).astype(F64), -(2**31), 2**31 - 1).astype(U32)


def cvt_u32_f32(x: np.ndarray) -> np.ndarray:
    """v_cvt_u32_f32."""
    return _to_integer(x.view(F32).astype(F64), 0, 2**32 - 1).astype(U32)


def cvt_nearest_i32_f32(x: np.ndarray) -> np.ndarray:
    """v_cvt_nearest_i32_f32: floor(x + 0.5), the sum rounded to f32 as the pseudocode has it."""
    return _to_integer(np.floor(x.view(F32) + F32(0.5)).astype(F64), -(2**31), 2**31 - 1).astype(U32)


def cvt_floor_i32_f32(x: np.ndarray) -> np.ndarray:
    """v_cvt_floor_i32_f32."""
    return _to_integer(np.floor(x.view(F32)).astype(F64), -(2**31), 2**31 - 1).astype(U32)


def cvt_i16_f16(x: np.ndarray) -> np.ndarray:
    """v_cvt_i16_f16."""
    return _to_integer(x.view(F16).astype(F64), -(2**15), 2**15 - 1).astype(U16)


def cvt_u16_f16(x: np.ndarray) -> np.ndarray:
    """v_cvt_u16_f16."""
    return _to_integer(x.view(F16).astype(F64), 0, 2**16 - 1).astype(U16)


def cvt_pk_i16_f32(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """v_cvt_pk_i16_f32."""
    return _pack_integers(low.view(F32).astype(F64), high.view(F32).astype(F64), -(2**15), 2**15 - 1)


def cvt_pk_u16_f32(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """v_cvt_pk_u16_f32."""
    return _pack_integers(low.view(F32).astype(F64), high.view(F32).astype(F64), 0, 2**16 - 1)


def cvt_pk_i16_i32(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """v_cvt_pk_i16_i32: saturating."""
    return _pack_integers(low.view(np.int32), high.view(np.int32), -(2**15), 2**15 - 1)


def cvt_pk_u16_u32(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """v_cvt_pk_u16_u32: saturating."""
    return _pack_integers(low, high, 0, 2**16 - 1)


def _to_integer(x, least, most):
    """Numbers to int64, toward zero, within bounds."""
    if x.dtype == F64:
        x = np.where(np.isnan(x), 0.0, x)
    return np.clip(x, least, most).astype(np.int64)


def _pack_integers(low, high, least, most):
    return pack_halves(_to_integer(low, least, most).astype(U16), _to_integer(high, least, most).astype(U16))


# Rounding to integers in the same format, of uint32 (f32) or uint16 (f16) bits


def trunc(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_trunc_f32, v_trunc_f16."""
    return _integral(np.trunc, x, mode)


def ceil(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_ceil_f32, v_ceil_f16."""
    return _integral(np.ceil, x, mode)


def floor(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_floor_f32, v_floor_f16."""
    return _integral(np.floor, x, mode)


def rndne(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_rndne_f32, v_rndne_f16: to nearest, ties to even, whatever MODE says."""
    return _integral(np.rint, x, mode)


def fract(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_fract_f32, v_fract_f16: x - floor(x), rounded, so 1.0 just below an integer."""
    if x.dtype == U32:
        value = decode_f32(x, mode)
        return encode_f32(value - np.floor(value), mode)
    value = decode_f16(x, mode)
    return encode_f16(value - np.floor(value), mode)


def _integral(function, x, mode):
    if x.dtype == U32:
        return function((flush_f32(x) if mode.flush_f32_in else x).view(F32)).view(U32)
    return function((flush_f16(x) if mode.flush_f16_in else x).view(F16)).view(U16)


# Exponent and significand


def ldexp_f32(x: np.ndarray, exponent: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_ldexp_f32: x * 2^exponent, rounded once; `exponent` holds int32."""
    bounded = np.clip(exponent.view(np.int32), -400, 400)  # past these every f32 is 0 or infinite
    return encode_f32(np.ldexp(decode_f32(x, mode), bounded), mode)


def ldexp_f16(x: np.ndarray, exponent: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_ldexp_f16: x * 2^exponent, rounded once; `exponent` holds int16."""
    bounded = np.clip(exponent.view(np.int16), -100, 100)  # past these every f16 is 0 or infinite
    return encode_f16(np.ldexp(decode_f16(x, mode), bounded.astype(np.int32)), mode)


def frexp_mant(x: np.ndarray) -> np.ndarray:
    """v_frexp_mant_f32, v_frexp_mant_f16: the signed significand in [0.5, 1); 0, infinity, NaN stay."""
    if x.dtype == U32:
        return np.frexp(x.view(F32))[0].view(U32)
    return np.frexp(x.view(F16))[0].view(U16)


def frexp_exp(x: np.ndarray) -> np.ndarray:
    """v_frexp_exp_i32_f32, v_frexp_exp_i16_f16: the exponent to `frexp_mant`; 0 for 0, infinity and NaN."""
    value = x.view(F32 if x.dtype == U32 else F16).astype(F64)
    exponent = np.frexp(value)[1]
    return np.where(np.isfinite(value), exponent, 0).astype(x.dtype)


# Approximate functions
#
# Taken as accurate to 1 unit in the last place, either neighbour. These return the float64 result rounded to
# nearest: within that, but a program must not be accepted because it relies on it. The f32 forms take and
# give no denormals, whatever MODE says; the f16 forms follow MODE. None of this was checked on a device.


def rcp(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_rcp_f32, v_rcp_iflag_f32, v_rcp_f16."""
    return _approximate(lambda v: 1.0 / v, x, mode)


def rsq(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_rsq_f32, v_rsq_f16."""
    return _approximate(lambda v: 1.0 / np.sqrt(v), x, mode)


def sqrt(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_sqrt_f32, v_sqrt_f16."""
    return _approximate(np.sqrt, x, mode)


def exp2(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_exp_f32, v_exp_f16: 2^x."""
    return _approximate(np.exp2, x, mode)


def log2(x: np.ndarray, mode: FloatMode = DEFAULT_MODE) -> np.ndarray:
    """v_log_f32, v_log_f16: the base-2 logarithm."""
    return _approximate(np.log2, x, mode)


def _approximate(function, x, mode):
    if x.dtype == U32:
        return flush_f32(function(flush_f32(x).view(F32).astype(F64)).astype(F32).view(U32))
    result = function(decode_f16(x, mode)).astype(F16).view(U16)
    return flush_f16(result) if mode.flush_f16_out else result
