"""WMMA, the matrix multiply-accumulate of a whole wave32, in both register layouts.

D[16,16] = A[16,K] @ B[K,16] + C[16,16]; K is 16 (32 for one gfx12 instruction). EXEC is ignored. Registers
are uint32 [regs, waves, 32].

gfx11  A  8 VGPRs (16-bit), 4 (iu8), 2 (iu4): lane l holds row l % 16, all k ascending, low bits first;
          lanes 16-31 must repeat lanes 0-15.
       B  the same, with columns in place of rows.
       C  8 VGPRs: VGPR v of lane l is row 2v + l // 16, column l % 16. A 16-bit C or D fills the half of each
          VGPR that op_sel[2] names, and leaves the other alone.
gfx12  A  4 VGPRs (16-bit), 2 (iu8), 1 (iu4), 2 (iu4, K = 32): lane l holds row l % 16;
          lanes 0-15 have the first half of K, lanes 16-31 the second.
       B  the same, with columns in place of rows.
       C  8 VGPRs (32-bit): VGPR v of lane l is row 8 * (l // 16) + v, column l % 16; 16-bit: 4 VGPRs, two rows
          each.

The order of k inside a lane cannot be seen in a result: A and B use the same one, and the sum below does not
depend on order.

Numbers. AMD does not document in what order, with how many bits and with how many roundings the hardware adds
the 17 terms of an element. Integer results are exact (modulo 2^32, or saturated). A floating-point element is
computed here as the sum in float64 (products are exact, the sum is within 2^-48 of the sum of magnitudes) and
rounded once, to nearest even, to the type of D; denormals are kept on both sides. That is the right model for
a verifier whose criterion is a bound on the error against an exact reference, K * 2^-24 * (|A| @ |W|) for
fp32 accumulation: the bound already pays for any order with one rounding per added term, so a kernel is
judged by what it does (indexes, scales, the number of WMMAs, the type it keeps its sum in), and hardware that
adds in another order stays inside the same bound. It is the wrong model for predicting bits: do not compare
WMMA results of the emulator and of a device for equality.

Source: the layouts of C and D agree with what public kernels report from gfx1151 and gfx1201 devices; op_sel
follows LLVM D158059. Not checked against a document or a device: neg, neg_hi, denormals. AMD's pseudocode
gives only D = A * B + C.
"""

from __future__ import annotations

import numpy as np

from .float_formats import bf16_to_f32, encode_bf16

FLOAT_KINDS = {  # name in the mnemonic: (type of A and B, type of C and D)
    "f32_f16": ("f16", "f32"),
    "f32_bf16": ("bf16", "f32"),
    "f16_f16": ("f16", "f16"),
    "bf16_bf16": ("bf16", "bf16"),
}
INTEGER_KINDS = {"i32_iu8": 8, "i32_iu4": 4}  # bits of an element of A and B


def wmma_gfx11(
    kind: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    neg: tuple[int, int, int] = (0, 0, 0),
    neg_hi: tuple[int, int, int] = (0, 0, 0),
    clamp: bool = False,
    high: bool = False,
    old: np.ndarray | None = None,
) -> np.ndarray:
    """Execute a gfx11 WMMA.

    Parameters
    ----------
    kind : "f32_f16", "f32_bf16", "f16_f16", "bf16_bf16", "i32_iu8" or "i32_iu4", as in the mnemonic
    a, b : uint32 [8, 4 or 2, waves, 32]
    c : uint32 [8, waves, 32]
    neg, neg_hi : the modifier bits of A, B and C. Floating point: neg[0:2] negates the even k of A and B, neg_hi[0:2]
        the odd ones; neg_hi[2] takes |C|, then neg[2] negates it. Integer: neg[0] and neg[1] make A and B signed.
    clamp : integer only: saturate to int32 instead of wrapping
    high : op_sel[2]: a 16-bit C and D are in the high halves
    old : uint32 [8, waves, 32], D before the instruction; needed for a 16-bit D, whose other halves stay

    Returns
    -------
    uint32 [8, waves, 32]: D
    """
    if kind in INTEGER_KINDS:
        bits = INTEGER_KINDS[kind]
        a, b = (_elements(x[..., :16], bits, bool(signed)) for x, signed in zip((a, b), neg[:2], strict=True))
        return _scatter_gfx11(_integer_sum(a, b, _gather_gfx11(c).view(np.int32), clamp))
    operand, result = FLOAT_KINDS[kind]
    a = _float_elements(a[..., :16], operand, neg[0], neg_hi[0])
    b = _float_elements(b[..., :16], operand, neg[1], neg_hi[1])
    if result != "f32":
        c = (c >> np.uint32(16) if high else c).astype(np.uint16)
    d = _scatter_gfx11(_float_sum(a, b, _gather_gfx11(c), result, neg[2], neg_hi[2]))
    if result == "f32":
        return d
    if old is None:
        raise ValueError(f"v_wmma {kind} writes half of each register of D: pass `old`, D before the instruction")
    if high:
        return old & np.uint32(0xFFFF) | d.astype(np.uint32) << np.uint32(16)
    return old & np.uint32(0xFFFF0000) | d


def wmma_gfx12(
    kind: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    *,
    neg: tuple[int, int, int] = (0, 0, 0),
    neg_hi: tuple[int, int, int] = (0, 0, 0),
    clamp: bool = False,
) -> np.ndarray:
    """Execute a gfx12 WMMA. `kind` and the modifiers are those of `wmma_gfx11`; K follows from the size of
    `a`.

    Parameters
    ----------
    a, b : uint32 [4 (16-bit), 2 (iu8; iu4 with K = 32) or 1 (iu4), waves, 32]
    c : uint32 [8, waves, 32], or [4, waves, 32] when 16-bit

    Returns
    -------
    D, shaped like `c`
    """
    if kind in INTEGER_KINDS:
        bits = INTEGER_KINDS[kind]
        a, b = (_elements(_join_halves(x), bits, bool(s)) for x, s in zip((a, b), neg[:2], strict=True))
        return _scatter_gfx12(_integer_sum(a, b, _gather_gfx12(c).view(np.int32), clamp))
    operand, result = FLOAT_KINDS[kind]
    a = _float_elements(_join_halves(a), operand, neg[0], neg_hi[0])
    b = _float_elements(_join_halves(b), operand, neg[1], neg_hi[1])
    if result == "f32":
        return _scatter_gfx12(_float_sum(a, b, _gather_gfx12(c), result, neg[2], neg_hi[2]))
    return _scatter_packed_gfx12(_float_sum(a, b, _gather_packed_gfx12(c), result, neg[2], neg_hi[2]))


def halves_differ(operand: np.ndarray) -> np.ndarray:
    """bool [waves]: lanes 16-31 of a gfx11 A or B do not repeat lanes 0-15, so that the result is undefined.

    `wmma_gfx11` reads lanes 0-15.
    """
    return (operand[..., :16] != operand[..., 16:]).any((0, 2))


# Elements of A and B: [waves, row or column, k]


def _words(x: np.ndarray) -> np.ndarray:
    """uint32 [regs, waves, lanes] to [waves, lanes, regs], contiguous: a view gives elements by rising k."""
    return np.ascontiguousarray(x.transpose(1, 2, 0))


def _float_elements(x, kind, neg, neg_hi):
    words = _words(x)
    if neg or neg_hi:
        words = words ^ np.uint32((0x8000 if neg else 0) | (0x80000000 if neg_hi else 0))
    return _decode(words.view(np.uint16), kind)


def _elements(x, bits, signed):
    """Integer elements as float64: the products and their sums stay below 2^53."""
    packed = _words(x).view(np.uint8)
    if bits == 8:
        return packed.view(np.int8 if signed else np.uint8).astype(np.float64)
    nibbles = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=nibbles[..., 0])
    np.right_shift(packed, np.uint8(4), out=nibbles[..., 1])
    if signed:
        nibbles ^= np.uint8(8)
    values = nibbles.reshape(*packed.shape[:-1], -1).astype(np.float64)
    return values - 8 if signed else values


def _join_halves(x):
    """gfx12: [regs, waves, 32] to [2 * regs, waves, 16], the registers of a row in order of k."""
    return x.reshape(x.shape[0], -1, 2, 16).transpose(2, 0, 1, 3).reshape(-1, x.shape[1], 16)


def _decode(halves, kind):
    if kind == "f16":
        return halves.view(np.float16).astype(np.float64)
    return bf16_to_f32(halves).view(np.float32).astype(np.float64)


# C and D: [waves, row, column]


def _gather_gfx11(c):
    return c.reshape(8, -1, 2, 16).transpose(1, 0, 2, 3).reshape(-1, 16, 16)


def _scatter_gfx11(d):
    return np.ascontiguousarray(d.reshape(-1, 8, 2, 16).transpose(1, 0, 2, 3)).reshape(8, -1, 32)


def _gather_gfx12(c):
    return c.reshape(8, -1, 2, 16).transpose(1, 2, 0, 3).reshape(-1, 16, 16)


def _scatter_gfx12(d):
    return np.ascontiguousarray(d.reshape(-1, 2, 8, 16).transpose(2, 0, 1, 3)).reshape(8, -1, 32)


def _gather_packed_gfx12(c):
    halves = np.stack([c.astype(np.uint16), (c >> np.uint32(16)).astype(np.uint16)], 1)  # [4, 2, waves, 32]
    return _gather_gfx12(halves.reshape(8, *c.shape[1:]))


def _scatter_packed_gfx12(d):
    halves = _scatter_gfx12(d).astype(np.uint32)  # [8, waves, 32], one row each
    return halves[0::2] | halves[1::2] << np.uint32(16)


# Sums


def _products(a, b):
    """A @ B for each wave, from rows of A and columns of B."""
    return np.matmul(a, np.ascontiguousarray(b.transpose(0, 2, 1)))  # twice as fast as from the transposed view


def _float_sum(a, b, c, kind, neg, absolute):
    """float64 a, b [waves, 16, K] and bits of C to bits of D, [waves, 16, 16]."""
    addend = c.view(np.float32).astype(np.float64) if kind == "f32" else _decode(c, kind)
    if absolute:
        addend = np.abs(addend)
    if neg:
        addend = -addend
    total = _products(a, b)
    total += addend
    if kind == "f32":
        return total.astype(np.float32).view(np.uint32)
    return total.astype(np.float16).view(np.uint16) if kind == "f16" else encode_bf16(total)


def _integer_sum(a, b, c, clamp):
    total = _products(a, b) + c  # exact: below 2^53
    if clamp:
        total = np.clip(total, -(2.0**31), 2.0**31 - 1)
    return total.astype(np.int64).astype(np.uint32)
