# ruff: noqa: E501 - one case a line
"""Instructions, assembled by LLVM, executed, and compared with what the ISA documents say, lane by lane in
Python."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from assembled import ARCHS, Source, execute

M32 = 0xFFFFFFFF
GFX11, GFX12 = ("gfx1151",), ("gfx1201",)


def s32(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def s16(x: int) -> int:
    x &= 0xFFFF
    return x - (1 << 16) if x & 0x8000 else x


def f32(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x & M32))[0]


def bits32(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def f16(x: int) -> float:
    return struct.unpack("<e", struct.pack("<H", x & 0xFFFF))[0]


def bits16(x: float) -> int:
    return int(np.float16(x).view(np.uint16))


# Values that reach the edges: small, large, negative, all ones, floats and pairs of halves.
A = np.array(
    [0, 1, 2, 0x7FFFFFFF, 0x80000000, M32, 0xFFFF, 0x10000, 0x3F800000, 0xBF800000, 0x40490FDB, 0x3C003C00, 0xC1480000,
     0x0000BC00, 0x12345678, 0x9ABCDEF0] * 2, np.uint32,
)  # fmt: skip
B = np.array(
    [3, M32, 5, 1, 0x80000000, 2, 0x1F, 0x10, 0x40000000, 0x3F000000, 0xC0200000, 0x3800C000, 0x41200000, 0x00004000,
     0x0F0F0F0F, 0x13579BDF] * 2, np.uint32,
)  # fmt: skip
C = np.roll(A, 5)
FLOATS_A = np.array([1.0, -2.5, 3e38, 1e-40, 0.1, -0.0, 7.0, 1e10] * 4, np.float32).view(np.uint32)
FLOATS_B = np.array([3.0, 0.5, 3e38, 2.0, 0.2, 0.0, -7.0, 1e-10] * 4, np.float32).view(np.uint32)
FLOATS_C = np.array([0.25, 1e-3, -1.0, 1e-40, 0.3, -0.0, 49.0, -1.0] * 4, np.float32).view(np.uint32)
# Low and high halves that are ordinary f16 numbers.
HALVES_A = np.array([0x3C004000, 0xBC003555, 0x7BFF0001, 0x00018000] * 8, np.uint32)
HALVES_B = np.array([0x40003C00, 0x3C00C000, 0x3C003C00, 0x3800BC00] * 8, np.uint32)
HALVES_C = np.array([0x38003800, 0x3C000000, 0x04000400, 0x00003C00] * 8, np.uint32)
INTEGERS, SINGLES, HALVES = (A, B, C), (FLOATS_A, FLOATS_B, FLOATS_C), (HALVES_A, HALVES_B, HALVES_C)


@dataclass(frozen=True)
class Case:
    """`expected` gets the inputs of one lane and gives the outputs, one number or several."""

    name: str
    body: str
    expected: Callable
    operands: tuple = INTEGERS
    outputs: int = 1
    archs: tuple[str, ...] = ARCHS

    @property
    def source(self) -> Source:
        count = self.expected.__code__.co_argcount
        return Source(self.name, self.body, inputs=max(count, 1), outputs=self.outputs)


def _bfe_i(a: int, offset: int, width: int) -> int:
    field = a >> offset & ((1 << width) - 1)
    return (field - (1 << width) if field >> (width - 1) else field) & M32


def _perm(a: int, b: int, select: int) -> int:
    both, result = a << 32 | b, 0
    for i in range(4):
        s = select >> 8 * i & 0xFF
        byte = both >> 8 * s & 0xFF if s <= 7 else 0 if s == 12 else 0xFF
        result |= byte << 8 * i
    return result


def _fma(a: float, b: float, c: float) -> float:
    """Rounded once: long double holds the 48-bit product, the sum is exact in Fraction."""
    from fractions import Fraction

    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    sign, size = (-1 if exact < 0 else 1), abs(exact)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 25, -149)
    while size / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    while size / Fraction(2) ** exponent < 1 << 23 and exponent > -149:
        exponent -= 1
    units = round(size / Fraction(2) ** exponent)  # ties to even
    try:
        return sign * float(Fraction(units) * Fraction(2) ** exponent)
    except OverflowError:
        return sign * math.inf


CASES = [
    # Integers
    Case("add_nc", "v_add_nc_u32 v30, v10, v11", lambda a, b: a + b),
    Case("sub_nc", "v_sub_nc_u32 v30, v10, v11", lambda a, b: a - b),
    Case("subrev_nc", "v_subrev_nc_u32 v30, v10, v11", lambda a, b: b - a),
    Case("add_clamped", "v_add_nc_u32_e64 v30, v10, v11 clamp", lambda a, b: min(a + b, M32)),
    Case("sub_clamped", "v_sub_nc_u32_e64 v30, v10, v11 clamp", lambda a, b: max(a - b, 0)),
    Case("add3", "v_add3_u32 v30, v10, v11, v12", lambda a, b, c: a + b + c),
    Case("mul_lo", "v_mul_lo_u32 v30, v10, v11", lambda a, b: a * b),
    Case("mul_hi_u", "v_mul_hi_u32 v30, v10, v11", lambda a, b: a * b >> 32),
    Case("mul_hi_i", "v_mul_hi_i32 v30, v10, v11", lambda a, b: s32(a) * s32(b) >> 32),
    Case("mad_u24", "v_mad_u32_u24 v30, v10, v11, v12", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    Case("min_i", "v_min_i32 v30, v10, v11", lambda a, b: min(s32(a), s32(b))),
    Case("max_u", "v_max_u32 v30, v10, v11", lambda a, b: max(a, b)),
    Case("med3_i", "v_med3_i32 v30, v10, v11, v12", lambda a, b, c: sorted(map(s32, (a, b, c)))[1]),
    Case("lshl_add", "v_lshl_add_u32 v30, v10, 5, v11", lambda a, b: (a << 5) + b),
    Case("add_lshl", "v_add_lshl_u32 v30, v10, v11, 3", lambda a, b: (a + b) << 3),
    Case("xad", "v_xad_u32 v30, v10, v11, v12", lambda a, b, c: (a ^ b) + c),
    Case("literal", "v_add_nc_u32 v30, 0x12345, v10", lambda a: a + 0x12345),
    Case("inline_negative", "v_add_nc_u32 v30, -16, v10", lambda a: a - 16),
    Case(
        "mad_u64",
        """v_mov_b32 v2, v12
           v_mov_b32 v3, v10
           v_mad_u64_u32 v[30:31], null, v10, v11, v[2:3]""",
        lambda a, b, c: ((a * b + c + (a << 32)) & M32, (a * b + c + (a << 32)) >> 32),
        outputs=2,
        archs=GFX11,
    ),
    Case(
        "mad_co_u64",
        """v_mov_b32 v2, v12
           v_mov_b32 v3, v10
           v_mad_co_u64_u32 v[30:31], null, v10, v11, v[2:3]""",
        lambda a, b, c: ((a * b + c + (a << 32)) & M32, (a * b + c + (a << 32)) >> 32),
        outputs=2,
        archs=GFX12,
    ),
    Case(
        "scalar_rcp",
        """s_mov_b32 s20, 0x40400000
           v_s_rcp_f32 s21, s20
           v_mov_b32 v30, s21""",
        lambda: bits32(1 / 3),
        archs=GFX12,
    ),
    Case(
        "add_co",
        """v_add_co_u32 v30, vcc_lo, v10, v11
           v_add_co_ci_u32_e32 v31, vcc_lo, v11, v12, vcc_lo
           v_cndmask_b32_e64 v32, 0, 1, vcc_lo""",
        lambda a, b, c: (a + b, b + c + (a + b >> 32), b + c + (a + b >> 32) >> 32),
        outputs=3,
    ),
    Case(
        "sub_co_to_sgpr",
        """v_sub_co_u32 v30, s20, v10, v11
           v_cndmask_b32_e64 v31, 0, 1, s20""",
        lambda a, b: (a - b, a < b),
        outputs=2,
    ),
    # Bits
    Case("and_or", "v_and_or_b32 v30, v10, v11, v12", lambda a, b, c: a & b | c),
    Case("or3", "v_or3_b32 v30, v10, v11, v12", lambda a, b, c: a | b | c),
    Case("xor3", "v_xor3_b32 v30, v10, v11, v12", lambda a, b, c: a ^ b ^ c),
    Case("not", "v_not_b32 v30, v10", lambda a: ~a),
    Case("lshl_or", "v_lshl_or_b32 v30, v10, 4, v11", lambda a, b: a << 4 | b),
    Case("lshrrev", "v_lshrrev_b32 v30, v11, v10", lambda a, b: a >> (b & 31)),
    Case("ashrrev", "v_ashrrev_i32 v30, v11, v10", lambda a, b: s32(a) >> (b & 31)),
    Case("bfe_u", "v_bfe_u32 v30, v10, 5, 7", lambda a: a >> 5 & 127),
    Case("bfe_i", "v_bfe_i32 v30, v10, 12, 4", lambda a: _bfe_i(a, 12, 4)),
    Case("bfi", "v_bfi_b32 v30, v10, v11, v12", lambda a, b, c: a & b | ~a & c),
    Case("perm", "v_perm_b32 v30, v10, v11, v12", lambda a, b, c: _perm(a, b, c & 0x07070707),
         operands=(A, B, C & 0x07070707)),
    Case("perm_constants", "v_perm_b32 v30, v10, v11, 0xd0c0602", lambda a, b: _perm(a, b, 0x0D0C0602)),
    Case("alignbit", "v_alignbit_b32 v30, v10, v11, 9", lambda a, b: (a << 32 | b) >> 9),
    Case("bfrev", "v_bfrev_b32 v30, v10", lambda a: int(f"{a:032b}"[::-1], 2)),
    Case("clz", "v_clz_i32_u32 v30, v10", lambda a: 32 - a.bit_length() if a else -1),
    Case("ctz", "v_ctz_i32_b32 v30, v10", lambda a: (a & -a).bit_length() - 1),
    Case("bcnt", "v_bcnt_u32_b32 v30, v10, v11", lambda a, b: bin(a).count("1") + b),
    Case("lshl64", """v_mov_b32 v2, v10
                      v_mov_b32 v3, v11
                      v_lshlrev_b64 v[30:31], 7, v[2:3]""",
         lambda a, b: ((b << 32 | a) << 7 & M32, (b << 32 | a) << 7 >> 32), outputs=2),
    # 16-bit halves
    Case("mov_low_to_high", """v_mov_b32 v30, v10
                               v_mov_b16 v30.h, v11.l""", lambda a, b: a & 0xFFFF | b << 16),
    Case("mov_high_to_low", """v_mov_b32 v30, v10
                               v_mov_b16 v30.l, v11.h""", lambda a, b: a & 0xFFFF0000 | b >> 16),
    Case("add_u16_halves", """v_mov_b32 v30, v10
                              v_add_nc_u16 v30.h, v10.l, v11.h""",
         lambda a, b: a & 0xFFFF | ((a + (b >> 16)) & 0xFFFF) << 16),
    Case("ashr_i16", """v_mov_b32 v30, 0
                        v_ashrrev_i16 v30.l, 3, v10.h""", lambda a: s16(a >> 16) >> 3 & 0xFFFF),
    Case("cvt_u32_u16", "v_cvt_u32_u16 v30, v10.h", lambda a: a >> 16),
    Case("mad_u16", """v_mov_b32 v30, 0
                       v_mad_u16 v30.l, v10.l, v11.l, v12.h""",
         lambda a, b, c: ((a & 0xFFFF) * (b & 0xFFFF) + (c >> 16)) & 0xFFFF),
    # Floats
    Case("add_f32", "v_add_f32 v30, v10, v11", lambda a, b: bits32(np.float32(f32(a)) + np.float32(f32(b))), SINGLES),
    Case("sub_abs", "v_sub_f32_e64 v30, |v10|, -v11", lambda a, b: bits32(np.float32(abs(f32(a))) + np.float32(f32(b))), SINGLES),
    Case("mul_f32_inline", "v_mul_f32 v30, -4.0, v10", lambda a: bits32(np.float32(f32(a)) * np.float32(-4.0)), SINGLES),
    Case("fma_f32", "v_fma_f32 v30, v10, v11, v12", lambda a, b, c: bits32(_fma(f32(a), f32(b), f32(c))), SINGLES),
    Case("fmac_f32", """v_mov_b32 v30, v12
                        v_fmac_f32 v30, v10, v11""", lambda a, b, c: bits32(_fma(f32(a), f32(b), f32(c))),
                        SINGLES),
    Case("fmamk", "v_fmamk_f32 v30, v10, 0x40490fdb, v11",
         lambda a, b: bits32(_fma(f32(a), f32(0x40490FDB), f32(b))), SINGLES),
    Case("fmaak", "v_fmaak_f32 v30, v10, v11, 0x40490fdb",
         lambda a, b: bits32(_fma(f32(a), f32(b), f32(0x40490FDB))), SINGLES),
    Case("clamp", "v_add_f32_e64 v30, v10, v11 clamp",
         lambda a, b: bits32(min(max(np.float32(f32(a)) + np.float32(f32(b)), 0.0), 1.0)), SINGLES),
    Case("cvt_f16", """v_mov_b32 v30, 0
                       v_cvt_f16_f32 v30.h, v10""", lambda a: bits16(f32(a)) << 16, SINGLES),
    Case("cvt_from_f16", "v_cvt_f32_f16 v30, v10.h", lambda a: bits32(f16(a >> 16)), HALVES),
    Case("cvt_f32_i32", "v_cvt_f32_i32 v30, v10", lambda a: bits32(s32(a))),
    Case("cvt_f32_u32", "v_cvt_f32_u32 v30, v10", lambda a: bits32(a)),
    Case("cvt_ubyte2", "v_cvt_f32_ubyte2 v30, v10", lambda a: bits32(a >> 16 & 255)),
    Case("rcp", "v_rcp_f32 v30, v10", lambda a: bits32(1.0 / f32(a)),
         (np.array([1.0, 3.0, -7.0, 0.1] * 8, np.float32).view(np.uint32),)),
    Case("mul_f16", """v_mov_b32 v30, 0
                       v_mul_f16 v30.l, v10.l, v11.h""",
         lambda a, b: bits16(np.float16(f16(a)) * np.float16(f16(b >> 16))), HALVES),
    # Comparisons and selection
    Case("cmp_cndmask", """v_cmp_lt_i32 vcc_lo, v10, v11
                           v_cndmask_b32 v30, v10, v11, vcc_lo""", lambda a, b: max(s32(a), s32(b))),
    Case("cmp_to_sgpr", """v_cmp_ge_u32 s20, v10, v11
                           v_cndmask_b32 v30, 0, 1, s20""", lambda a, b: a >= b),
    Case("cmp_f32", """v_cmp_nlt_f32 s20, v10, v11
                       v_cndmask_b32 v30, 0, 1, s20""", lambda a, b: not f32(a) < f32(b), SINGLES),
    Case("cmp_i16", """v_cmp_gt_i16 vcc_lo, v10.l, v11.h
                       v_cndmask_b32 v30, 0, 1, vcc_lo""", lambda a, b: s16(a) > s16(b >> 16)),
    Case("cmpx", """v_mov_b32 v30, 7
                    s_mov_b32 s20, exec_lo
                    v_cmpx_gt_u32 v10, v11
                    v_mov_b32 v30, 9
                    s_mov_b32 exec_lo, s20""", lambda a, b: 9 if a > b else 7),
    Case("cndmask_b16", """v_mov_b32 v30, 0
                           v_cmp_eq_u32 vcc_lo, v10, v11
                           v_cndmask_b16 v30.h, v10.l, v11.h, vcc_lo""",
         lambda a, b: ((b >> 16) if a == b else a & 0xFFFF) << 16),
    Case("cndmask_negates", "v_cndmask_b32_e64 v30, -v10, |v11|, exec_lo", lambda a, b: b & 0x7FFFFFFF),
    # Dual issue
    Case("dual", "v_dual_add_f32 v30, v10, v11 :: v_dual_mul_f32 v31, v12, v13",
         lambda a, b, c, d: (bits32(np.float32(f32(a)) + np.float32(f32(b))), bits32(np.float32(f32(c)) * np.float32(f32(d)))),
         (*SINGLES, FLOATS_A), outputs=2),
    Case("dual_swap", """v_mov_b32 v2, v10
                         v_mov_b32 v3, v11
                         v_dual_mov_b32 v2, v3 :: v_dual_mov_b32 v3, v2
                         v_mov_b32 v30, v2
                         v_mov_b32 v31, v3""", lambda a, b: (b, a), outputs=2),
    Case("dual_literal", "v_dual_mov_b32 v31, 0xff0 :: v_dual_and_b32 v30, 0xff0, v11",
         lambda a, b: (b & 0xFF0, 0xFF0), outputs=2),
    Case("dual_fmac", """v_mov_b32 v30, v12
                         v_mov_b32 v31, v10
                         v_dual_fmac_f32 v30, v10, v11 :: v_dual_add_nc_u32 v31, 5, v12""",
         lambda a, b, c: (bits32(_fma(f32(a), f32(b), f32(c))), c + 5), SINGLES, outputs=2),
    # Packed and mixed
    Case("pk_add", "v_pk_add_f16 v30, v10, v11",
         lambda a, b: bits16(np.float16(f16(a)) + np.float16(f16(b))) | bits16(np.float16(f16(a >> 16)) + np.float16(f16(b >> 16))) << 16,
         HALVES),
    Case("pk_mul_swapped", "v_pk_mul_f16 v30, v10, v11 op_sel:[0,1] op_sel_hi:[1,0] neg_lo:[1,0]",
         lambda a, b: bits16(-np.float16(f16(a)) * np.float16(f16(b >> 16))) | bits16(np.float16(f16(a >> 16)) * np.float16(f16(b))) << 16,
         HALVES),
    Case("pk_constant", "v_pk_add_f16 v30, v10, 1.0 op_sel_hi:[1,0]",
         lambda a: bits16(np.float16(f16(a)) + np.float16(1)) | bits16(np.float16(f16(a >> 16)) + np.float16(1)) << 16, HALVES),
    Case("pk_add_u16", "v_pk_add_u16 v30, v10, v11",
         lambda a, b: (a + b) & 0xFFFF | ((a >> 16) + (b >> 16) & 0xFFFF) << 16),
    Case("pk_lshrrev", "v_pk_lshrrev_b16 v30, 4, v10 op_sel_hi:[0,1]", lambda a: (a & 0xFFFF) >> 4 | (a >> 20) << 16),
    Case("fma_mix", "v_fma_mix_f32 v30, v10, v11, v12 op_sel:[1,0,0] op_sel_hi:[1,1,0]",
         lambda a, b, c: bits32(_fma(f16(a >> 16), f16(b), f32(c))), (HALVES_A, HALVES_B, FLOATS_C)),
    Case("fma_mix_constant", "v_fma_mix_f32 v30, -v10, 1.0, v11 op_sel_hi:[1,1,0]",
         lambda a, b: bits32(_fma(-f16(a), 1.0, f32(b))), (HALVES_A, FLOATS_C)),
    Case("fma_mixhi", """v_mov_b32 v30, v10
                         v_fma_mixhi_f16 v30, v11, v12, 0 op_sel_hi:[0,1,0]""",
         lambda a, b, c: a & 0xFFFF | bits16(np.float32(f32(b)) * np.float32(f16(c)) + np.float32(0)) << 16, (A, FLOATS_B, HALVES_A)),
    Case("dot2", "v_dot2_f32_f16 v30, v10, v11, v12",
         lambda a, b, c: bits32(f16(a) * f16(b) + f16(a >> 16) * f16(b >> 16) + f32(c)),
         (np.array([0x3C004000] * 32, np.uint32), np.array([0x42003800] * 32, np.uint32), FLOATS_A[:1].repeat(32))),
    Case("dot4_mixed_signs", "v_dot4_i32_iu8 v30, v10, v11, v12 neg_lo:[1,0]",
         lambda a, b, c: c + sum((x - 256 if x > 127 else x) * y for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True))),
    # Lanes
    Case("dpp_xmask", "v_mov_b32_dpp v30, v10 row_xmask:5 row_mask:0xf bank_mask:0xf", lambda a: 0),
    Case("dpp_shr", """v_mov_b32 v30, 77
                       v_mov_b32_dpp v30, v10 row_shr:3 row_mask:0xf bank_mask:0xf""", lambda a: 0),
    Case("readfirstlane", """v_readfirstlane_b32 s20, v10
                             v_mov_b32 v30, s20""", lambda a: int(A[0])),
    Case("readlane", """v_readlane_b32 s20, v10, 13
                        v_mov_b32 v30, s20""", lambda a: int(A[13])),
    Case("mbcnt", "v_mbcnt_lo_u32_b32 v30, -1, 100", lambda a: 0),
]  # fmt: skip
LANES = np.arange(32)
BY_LANE = {  # what a lane gets depends on the others
    "dpp_xmask": lambda: A[LANES & 16 | (LANES & 15 ^ 5)],
    "dpp_shr": lambda: np.where(LANES % 16 >= 3, A[np.maximum(LANES - 3, 0)], 77),
    "mbcnt": lambda: LANES + 100,
}


def _sources(arch: str) -> tuple[Source, ...]:
    return tuple(case.source for case in CASES if arch in case.archs)


RUNS = [pytest.param(case, arch, id=f"{arch}-{case.name}") for arch in ARCHS for case in CASES if arch in case.archs]


@pytest.mark.parametrize(("case", "arch"), RUNS)
def test_instruction(case: Case, arch: str):
    with np.errstate(all="ignore"):
        count = case.expected.__code__.co_argcount
        inputs = case.operands[:count]
        got = execute(arch, case.source, *inputs, among=_sources(arch)).outputs
        if case.name in BY_LANE:
            want = BY_LANE[case.name]()[None]
        else:
            rows = [case.expected(*(int(x[lane]) for x in inputs)) for lane in range(32)]
            want = np.array([row if isinstance(row, tuple) else (row,) for row in rows], object).T
    want = np.array([[int(value) & M32 for value in row] for row in want], np.uint32)
    wrong = np.flatnonzero((got != want).any(axis=0))
    assert wrong.size == 0, (
        f"lane {wrong[0]}: {[hex(int(x[wrong[0]])) for x in inputs]} gave {[hex(v) for v in got[:, wrong[0]]]}, "
        f"expected {[hex(v) for v in want[:, wrong[0]]]}"
    )
