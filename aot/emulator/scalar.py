"""The scalar ALU: SOP1, SOP2, SOPC and SOPK, except what changes the program counter.

A row of the table gives kinds, the function, and the rule for SCC: None (kept), "nonzero" (of the result), or
"returned" (the function gives it as a second value).

Source: AMD RDNA3, RDNA3.5 and RDNA4 instruction set architecture reference guides, SALU instruction
descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import conversions as cv
from . import float_formats as ff
from .decode import Instruction
from .errors import UnimplementedInstruction, UninitialisedRead
from .float_formats import FloatMode
from .operands import BITS, Reader, RegisterLimits, source
from .vector_ops import (
    _all_if_any,
    _and_poison,
    _bit_reverse,
    _either,
    _or_poison,
    _same,
    _sum_poison,
    count_bits,
    leading_sign_bits,
    leading_zeros,
    trailing_zeros,
)
from .waves import ALL_BITS, EXEC, NULL, SCC, Waves

U16, U32, U64 = np.uint16, np.uint32, np.uint64
I32, I64 = np.int32, np.int64


@dataclass(frozen=True)
class ScalarOp:
    """One row. `saves_exec`: the result goes to exec and the old exec to the destination."""

    result: str | None
    sources: tuple[str, ...]
    compute: Callable
    scc: str | None = None
    poison: Callable | None = None
    saves_exec: bool = False
    moded: bool = False


OPS: dict[str, ScalarOp] = {}


def _op(names: str, result: str | None, sources: str, compute: Callable, scc: str | None = None, **more: Any) -> None:
    for name in names.split():
        OPS[name] = ScalarOp(result, tuple(sources.split()), compute, scc, **more)


# -- moves, selections, logic ----------------------------------------------------------------------------

_op("s_mov_b32", "b32", "b32", lambda a: a, poison=_same)
_op("s_mov_b64", "b64", "b64", lambda a: a)
_op("s_movk_i32", "i32", "i32", lambda a: a)
_op("s_cselect_b32", "b32", "b32 b32 scc", lambda a, b, scc: np.where(scc, a, b))
_op("s_cselect_b64", "b64", "b64 b64 scc", lambda a, b, scc: np.where(scc, a, b))
_op("s_cmov_b32", "b32", "b32 d scc", lambda a, old, scc: np.where(scc, a, old))
_op("s_cmovk_i32", "i32", "i32 d scc", lambda a, old, scc: np.where(scc, a, old.view(I32)))

_LOGIC = {
    "and": (lambda a, b: a & b, _and_poison),
    "or": (lambda a, b: a | b, _or_poison),
    "xor": (lambda a, b: a ^ b, _either),
    "nand": (lambda a, b: ~(a & b), _and_poison),
    "nor": (lambda a, b: ~(a | b), _or_poison),
    "xnor": (lambda a, b: ~(a ^ b), _either),
    "and_not1": (lambda a, b: a & ~b, lambda v, u: _and_poison((v[0], ~v[1]), u)),
    "or_not1": (lambda a, b: a | ~b, lambda v, u: _or_poison((v[0], ~v[1]), u)),
}
for _name, (_function, _precise) in _LOGIC.items():
    _op(f"s_{_name}_b32", "b32", "b32 b32", _function, "nonzero", poison=_precise)
    _op(f"s_{_name}_b64", "b64", "b64 b64", _function, "nonzero")
    # Operand order in saveexec: the source first, exec second.
    _op(f"s_{_name}_saveexec_b32", "b32", "b32 exec", _function, "nonzero", poison=_precise, saves_exec=True)
_op("s_and_not0_saveexec_b32", "b32", "b32 exec", lambda a, e: ~a & e, "nonzero", saves_exec=True)
_op("s_or_not0_saveexec_b32", "b32", "b32 exec", lambda a, e: ~a | e, "nonzero", saves_exec=True)
_op("s_and_not1_wrexec_b32", "b32", "b32 exec", lambda a, e: a & ~e, "nonzero", saves_exec=True)
_op("s_and_not0_wrexec_b32", "b32", "b32 exec", lambda a, e: ~a & e, "nonzero", saves_exec=True)
_op("s_not_b32", "b32", "b32", lambda a: ~a, "nonzero", poison=_same)
_op("s_not_b64", "b64", "b64", lambda a: ~a, "nonzero")

# -- shifts and bit fields -------------------------------------------------------------------------------

_op(
    "s_lshl_b32", "b32", "u32 u32", lambda a, b: a << (b & U32(31)), "nonzero",
    poison=lambda v, u: u[0] << (v[1] & U32(31)) | _all_if_any(u[1]),
)  # fmt: skip
_op(
    "s_lshr_b32", "b32", "u32 u32", lambda a, b: a >> (b & U32(31)), "nonzero",
    poison=lambda v, u: u[0] >> (v[1] & U32(31)) | _all_if_any(u[1]),
)  # fmt: skip
_op("s_ashr_i32", "i32", "i32 u32", lambda a, b: a >> (b & U32(31)).view(I32), "nonzero")
_op("s_lshl_b64", "b64", "u64 u32", lambda a, b: a << (b & U32(63)).astype(U64), "nonzero")
_op("s_lshr_b64", "b64", "u64 u32", lambda a, b: a >> (b & U32(63)).astype(U64), "nonzero")
_op("s_ashr_i64", "i64", "i64 u32", lambda a, b: a >> (b & U32(63)).astype(I64), "nonzero")


def _field(control):
    """Offset and width of a bit field: bits 4:0 and 22:16 of the control operand."""
    return control & U32(31), control >> U32(16) & U32(0x7F)


def _bfe_u32(a, control):
    offset, width = _field(control)
    mask = (U64(1) << np.minimum(width, U32(32)).astype(U64)) - U64(1)
    return (a.astype(U64) >> offset.astype(U64) & mask).astype(U32)


def _bfe_i32(a, control):
    offset, width = _field(control)
    width = np.minimum(width, U32(32) - offset).astype(I64)
    shifted = (a.astype(I64) >> offset.astype(I64)) & ((I64(1) << width) - I64(1))
    sign = np.where(width > 0, I64(1) << np.maximum(width - I64(1), I64(0)), I64(0))
    return ((shifted ^ sign) - sign).astype(I32)


def _bfe_u64(a, control):
    offset, width = (
        (control & U32(63)).astype(U64),
        np.minimum(control >> U32(16) & U32(0x7F), U32(64)).astype(U64),
    )
    mask = np.where(width == 64, ~U64(0), (U64(1) << (width & U64(63))) - U64(1))
    return a >> offset & mask


_op(
    "s_bfe_u32", "b32", "u32 u32", _bfe_u32, "nonzero",
    poison=lambda v, u: _bfe_u32(u[0], v[1]) | _all_if_any(u[1]),
)  # fmt: skip
_op("s_bfe_i32", "i32", "u32 u32", _bfe_i32, "nonzero")
_op("s_bfe_u64", "b64", "u64 u32", _bfe_u64, "nonzero")
_op("s_bfm_b32", "b32", "u32 u32", lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)))
_op("s_brev_b32", "b32", "u32", _bit_reverse)
_op("s_bcnt1_i32_b32", "b32", "u32", count_bits, "nonzero")
_op("s_bcnt0_i32_b32", "b32", "u32", lambda a: U32(32) - count_bits(a), "nonzero")
_op("s_ctz_i32_b32", "i32", "u32", trailing_zeros)
_op("s_clz_i32_u32", "i32", "u32", leading_zeros)
_op("s_cls_i32", "i32", "u32", leading_sign_bits)
_op("s_bitset0_b32", "b32", "u32 d", lambda a, old: old & ~(U32(1) << (a & U32(31))))
_op("s_bitset1_b32", "b32", "u32 d", lambda a, old: old | U32(1) << (a & U32(31)))
_op("s_sext_i32_i8", "i32", "u32", lambda a: (a << U32(24)).view(I32) >> I32(24))
_op("s_sext_i32_i16", "i32", "u32", lambda a: (a << U32(16)).view(I32) >> I32(16))
_op("s_pack_ll_b32_b16", "b32", "b32 b32", lambda a, b: a & U32(0xFFFF) | b << U32(16))
_op("s_pack_lh_b32_b16", "b32", "b32 b32", lambda a, b: a & U32(0xFFFF) | b & U32(0xFFFF0000))
_op("s_pack_hh_b32_b16", "b32", "b32 b32", lambda a, b: a >> U32(16) | b & U32(0xFFFF0000))
_op("s_pack_hl_b32_b16", "b32", "b32 b32", lambda a, b: a >> U32(16) | b << U32(16))
_op("s_wqm_b32", "b32", "b32", lambda a: _quads(a) * U32(15), "nonzero")


def _quads(a):
    return (a | a >> U32(1) | a >> U32(2) | a >> U32(3)) & U32(0x11111111)


# -- arithmetic ------------------------------------------------------------------------------------------


def _carry(total):
    return total.astype(U32), total >> U64(32) != 0


def _borrow(difference):
    return difference.astype(U32), difference < 0


def _overflow(wide):
    narrow = wide.astype(I32)
    return narrow, narrow != wide


def _wide(a):
    return np.asarray(a).astype(I64)


_op(
    "s_add_u32 s_add_co_u32",
    "b32",
    "u32 u32",
    lambda a, b: _carry(a.astype(U64) + b),
    "returned",
    poison=_sum_poison,
)
_op(
    "s_sub_u32 s_sub_co_u32",
    "b32",
    "u32 u32",
    lambda a, b: _borrow(_wide(a) - b),
    "returned",
    poison=_sum_poison,
)
_op(
    "s_addc_u32 s_add_co_ci_u32",
    "b32",
    "u32 u32 scc",
    lambda a, b, c: _carry(a.astype(U64) + b + c.astype(U64)),
    "returned",
)
_op(
    "s_subb_u32 s_sub_co_ci_u32",
    "b32",
    "u32 u32 scc",
    lambda a, b, c: _borrow(_wide(a) - b - c.astype(I64)),
    "returned",
)
_op(
    "s_add_i32 s_add_co_i32",
    "i32",
    "i32 i32",
    lambda a, b: _overflow(_wide(a) + b),
    "returned",
    poison=_sum_poison,
)
_op(
    "s_sub_i32 s_sub_co_i32",
    "i32",
    "i32 i32",
    lambda a, b: _overflow(_wide(a) - b),
    "returned",
    poison=_sum_poison,
)
_op("s_addk_i32 s_addk_co_i32", "i32", "i32 d", lambda k, a: _overflow(_wide(a.view(I32)) + k), "returned")
_op("s_mulk_i32", "i32", "i32 d", lambda k, a: a.view(I32) * k)
_op("s_mul_i32", "i32", "i32 i32", lambda a, b: a * b, poison=_sum_poison)
_op("s_mul_hi_u32", "b32", "u32 u32", lambda a, b: (a.astype(U64) * b >> U64(32)).astype(U32))
_op("s_mul_hi_i32", "i32", "i32 i32", lambda a, b: (_wide(a) * b >> I64(32)).astype(I32))
_op("s_add_nc_u64", "b64", "u64 u64", lambda a, b: a + b)
_op("s_sub_nc_u64", "b64", "u64 u64", lambda a, b: a - b)
_op("s_mul_u64", "b64", "u64 u64", lambda a, b: a * b)


def _shift_and_add(places: int) -> None:
    shift = U64(places)
    _op(
        f"s_lshl{places}_add_u32",
        "b32",
        "u32 u32",
        lambda a, b: _carry((a.astype(U64) << shift) + b),
        "returned",
    )


for _places in range(1, 5):
    _shift_and_add(_places)
_op("s_min_i32", "i32", "i32 i32", lambda a, b: (np.minimum(a, b), a < b), "returned")
_op("s_max_i32", "i32", "i32 i32", lambda a, b: (np.maximum(a, b), a >= b), "returned")
_op("s_min_u32", "b32", "u32 u32", lambda a, b: (np.minimum(a, b), a < b), "returned")
_op("s_max_u32", "b32", "u32 u32", lambda a, b: (np.maximum(a, b), a >= b), "returned")
_op("s_abs_i32", "i32", "i32", lambda a: np.where(a < 0, -a, a), "nonzero")
_op("s_absdiff_i32", "i32", "i32 i32", lambda a, b: np.abs(_wide(a) - b).astype(U32).view(I32), "nonzero")

# -- comparisons -----------------------------------------------------------------------------------------

_TESTS: dict[str, Callable] = {
    "eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "lt": np.less, "le": np.less_equal,
}  # fmt: skip
for _name, _test in _TESTS.items():
    _op(f"s_cmp_{_name}_i32", None, "i32 i32", _test, "result")
    _op(f"s_cmp_{_name}_u32", None, "u32 u32", _test, "result")
    _op(f"s_cmp_{_name}_u64", None, "u64 u64", _test, "result")
    _op(f"s_cmpk_{_name}_i32", None, "i32 d", lambda k, a, test=_test: test(a.view(I32), k), "result")
    _op(f"s_cmpk_{_name}_u32", None, "k16 d", lambda k, a, test=_test: test(a, k), "result")
_op("s_bitcmp0_b32", None, "u32 u32", lambda a, b: a >> (b & U32(31)) & U32(1) == 0, "result")
_op("s_bitcmp1_b32", None, "u32 u32", lambda a, b: a >> (b & U32(31)) & U32(1) != 0, "result")
_op("s_bitcmp0_b64", None, "u64 u32", lambda a, b: a >> (b & U32(63)).astype(U64) & U64(1) == 0, "result")
_op("s_bitcmp1_b64", None, "u64 u32", lambda a, b: a >> (b & U32(63)).astype(U64) & U64(1) != 0, "result")

# -- scalar float (RDNA3.5 and RDNA4) --------------------------------------------------------------------


def _moded(names: str, result: str | None, sources: str, compute: Callable, scc: str | None = None) -> None:
    _op(names, result, sources, compute, scc, moded=True)


_moded("s_add_f32", "f32", "f32 f32", ff.add_f32)
_moded("s_sub_f32", "f32", "f32 f32", lambda a, b, mode: ff.add_f32(a, b ^ U32(0x80000000), mode))
_moded("s_mul_f32", "f32", "f32 f32", ff.mul_f32)
_moded("s_fmac_f32", "f32", "f32 f32 d", lambda a, b, d, mode: ff.fma_f32(a, b, d, mode))
_moded("s_fmamk_f32", "f32", "f32 k f32", ff.fma_f32)
_moded("s_fmaak_f32", "f32", "f32 f32 k", ff.fma_f32)
_moded("s_cvt_f32_i32", "f32", "b32", cv.cvt_f32_i32)
_moded("s_cvt_f32_u32", "f32", "b32", cv.cvt_f32_u32)
_op("s_cvt_i32_f32", "b32", "f32", cv.cvt_i32_f32)
_op("s_cvt_u32_f32", "b32", "f32", cv.cvt_u32_f32)
_moded("s_cvt_f16_f32", "b32", "f32", lambda a, mode: cv.cvt_f16_f32(a, mode).astype(U32))
_moded("s_cvt_f32_f16", "f32", "f16", cv.cvt_f32_f16)
_moded("s_cvt_hi_f32_f16", "f32", "b32", lambda a, mode: cv.cvt_f32_f16((a >> U32(16)).astype(U16), mode))
_moded("s_min_num_f32", "f32", "f32 f32", lambda a, b, mode: ff.minimum(a, b, ff.NUM, mode))
_moded("s_max_num_f32", "f32", "f32 f32", lambda a, b, mode: ff.maximum(a, b, ff.NUM, mode))
_moded("s_min_f32", "f32", "f32 f32", lambda a, b, mode: ff.minimum(a, b, ff.GFX11, mode))
_moded("s_max_f32", "f32", "f32 f32", lambda a, b, mode: ff.maximum(a, b, ff.GFX11, mode))
for _name, _round in {"ceil": cv.ceil, "floor": cv.floor, "trunc": cv.trunc, "rndne": cv.rndne}.items():
    _moded(f"s_{_name}_f32", "f32", "f32", _round)
_FLOAT_TESTS: dict[str, Callable] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b),
}
_OPPOSITES = {"lt": "nlt", "eq": "neq", "le": "nle", "gt": "ngt", "ge": "nge", "lg": "nlg", "o": "u"}


def _float_compare(name: str, test: Callable) -> None:
    def compare(a, b, mode):
        return test(ff.decode_f32(a, mode), ff.decode_f32(b, mode))

    _moded(f"s_cmp_{name}_f32", None, "f32 f32", compare, "result")
    _moded(f"s_cmp_{_OPPOSITES[name]}_f32", None, "f32 f32", lambda a, b, mode: ~compare(a, b, mode), "result")


for _name, _test in _FLOAT_TESTS.items():
    _float_compare(_name, _test)


# -- compiling -------------------------------------------------------------------------------------------


def compile_scalar(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Callable[[Waves], None]:
    """Compile one scalar ALU instruction."""
    op = OPS.get(instruction.name)
    if op is None:
        raise UnimplementedInstruction("no semantics for this instruction")
    readers, registers, poisons = [], [], []
    codes = [instruction[f] for f in ("ssrc0", "ssrc1") if f in instruction.fields]
    d = instruction.get("sdst", NULL)
    takes = iter(codes)
    for kind in op.sources:
        if kind == "scc":
            readers.append(lambda st: st.scc)
            registers.append(SCC)
            poisons.append(lambda st: st.shadow[SCC])
        elif kind == "exec":
            readers.append(lambda st: st.s[EXEC])
            poisons.append(lambda st: None)
        elif kind == "d":
            readers.append(lambda st: st.s[d])
            registers.append(d)
            poisons.append(lambda st: st.shadow[d])
        elif kind == "k":
            constant = np.array(instruction["literal"], U32)
            readers.append(_constant(constant))
            poisons.append(lambda st: None)
        elif instruction.format == "SOPK":
            k = instruction["simm16"]
            constant = np.array(k, U32) if kind == "k16" else np.array(k - 0x10000 if k & 0x8000 else k, I32)
            readers.append(_constant(constant))
            poisons.append(lambda st: None)
        else:
            s = source(next(takes), kind, instruction, limits, scalar=True)
            readers.append(s.read)
            registers.extend(s.registers)
            poisons.append(s.poison)
    if op.moded:
        readers.append(lambda st: mode)
    return _step(instruction, op, d, readers, tuple(registers), poisons)


def _constant(value: np.ndarray) -> Reader:
    return lambda st: value


def _step(instruction, op: ScalarOp, d: int, readers, registers, poisons) -> Callable[[Waves], None]:
    f, scc_rule, width = op.compute, op.scc, BITS.get(op.result or "", 0)
    to_exec = op.saves_exec or d == EXEC or (width == 64 and d == EXEC)

    def undefined_bits(st: Waves) -> np.ndarray | None:
        bits = [read(st) for read in poisons]
        if all(b is None or not b.any() for b in bits):
            return None
        if op.poison is None:
            bad = np.zeros(st.count, bool)
            for b in bits:
                if b is not None:
                    bad = bad | (b != 0)
            return np.where(bad, ALL_BITS, U32(0))
        values = [np.asarray(read(st)).view(U32) for read in readers]
        result = op.poison(values, [U32(0) if b is None else b for b in bits])
        return result if np.any(result) else None

    def step(st: Waves) -> None:
        undefined = None
        for n in registers:
            if st.shadow[n] is not None:
                undefined = undefined_bits(st)
                break
        value = f(readers[0](st), readers[1](st)) if len(readers) == 2 else f(*[read(st) for read in readers])
        scc = None
        if scc_rule == "returned":
            value, scc = value
        elif scc_rule == "result":
            scc = value
        elif scc_rule == "nonzero":
            scc = value != 0
        if width:
            if to_exec:
                if undefined is not None:
                    raise _undefined_exec(st, undefined)
                if op.saves_exec and d != NULL:
                    old = st.s[EXEC].copy()
                    st.s[EXEC][...] = value.view(U32)
                    st.s[d][...] = old
                    st.shadow[d] = None
                else:
                    st.s[EXEC][...] = value.astype(U32) if width == 64 else value.view(U32)
                st.exec_written()
            elif d != NULL:
                if width == 64:
                    value = value.view(U64)
                    st.s[d][...] = value.astype(U32)
                    st.s[d + 1][...] = (value >> U64(32)).astype(U32)
                    st.shadow[d] = st.shadow[d + 1] = _row(st, undefined)
                else:
                    st.s[d][...] = value if value.dtype == U32 else value.view(U32)
                    st.shadow[d] = None if undefined is None else _row(st, undefined)
        if scc is not None:
            st.scc = np.array(np.broadcast_to(scc, (st.count,)))
            st.shadow[SCC] = None if undefined is None else _row(st, np.where(undefined != 0, ALL_BITS, U32(0)))

    return step


def _row(st: Waves, undefined: np.ndarray | None) -> np.ndarray | None:
    return None if undefined is None else np.broadcast_to(undefined, (st.count,)).astype(U32)


def _undefined_exec(st: Waves, undefined: np.ndarray) -> UninitialisedRead:
    wave = int(np.flatnonzero(np.broadcast_to(undefined, (st.count,)))[0])
    return UninitialisedRead(
        "the exec mask depends on a register that was never written "
        f"(undefined bits {int(np.ravel(undefined)[0]):#010x})",
        block=int(st.block[wave]), wave=int(st.wave[wave]),
    )  # fmt: skip
