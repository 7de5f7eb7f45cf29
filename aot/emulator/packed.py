"""VOP3P: packed 16-bit math, mixed-precision fma, dot products and WMMA.

op_sel and op_sel_hi say which half of each source feeds the low and the high result; neg and neg_hi negate
them. For mixed fma, op_sel_hi says that a source is f16, op_sel which half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import float_formats as ff
from . import matrix
from . import packed_math as pm
from .decode import Instruction
from .errors import UnimplementedInstruction, UninitialisedRead
from .float_formats import FloatMode
from .operands import RegisterLimits, Source, constant_bits, source
from .vector import Step, Writer
from .waves import ALL_BITS, EXEC, VECTOR, Waves

_BINARY = {"v_pk_add_f16": pm.pk_add_f16, "v_pk_mul_f16": pm.pk_mul_f16}
_EXTREMA = {
    "v_pk_min_f16": (pm.pk_min_f16, ff.GFX11),
    "v_pk_max_f16": (pm.pk_max_f16, ff.GFX11),
    "v_pk_min_num_f16": (pm.pk_min_f16, ff.NUM),
    "v_pk_max_num_f16": (pm.pk_max_f16, ff.NUM),
    "v_pk_minimum_f16": (pm.pk_min_f16, ff.PROPAGATE),
    "v_pk_maximum_f16": (pm.pk_max_f16, ff.PROPAGATE),
}
_FLOAT_DOTS = {"v_dot2_f32_f16": (pm.dot2_f32_f16, "f16"), "v_dot2_f32_bf16": (pm.dot2_f32_bf16, "bf16")}
_SIGNED_DOTS = {"v_dot4_i32_iu8": pm.dot4_i32_iu8, "v_dot8_i32_iu4": pm.dot8_i32_iu4}
_UNSIGNED_DOTS = {"v_dot4_u32_u8": pm.dot4_u32_u8, "v_dot8_u32_u4": pm.dot8_u32_u4}
_HALF_BITS = (np.uint32(0x0000FFFF), np.uint32(0xFFFF0000))


def compile_packed(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """Compile a VOP3P instruction."""
    name = instruction.name
    if instruction.variant.startswith("DPP"):
        raise UnimplementedInstruction("VOP3P with DPP")
    if name.startswith("v_pk_"):
        return _packed_step(instruction, limits, mode)
    if name.startswith("v_fma_mix"):
        return _mix_step(instruction, limits, mode)
    if name.startswith("v_dot"):
        return _dot_step(instruction, limits)
    if name.startswith("v_wmma_"):
        return _wmma_step(instruction, limits)
    raise UnimplementedInstruction("no semantics for this instruction")


def _select(instruction: Instruction) -> pm.Select:
    op_sel_hi = instruction["opsel_hi"] | instruction["opsel_hi2"] << 2
    return pm.Select(instruction["opsel"], op_sel_hi, instruction["neg"], instruction["neg_hi"])


def _operand(instruction: Instruction, field: str, kind: str, limits: RegisterLimits) -> Source:
    """A packed operand as a whole register. A constant is a 32-bit value: for f16 and bf16 a float constant
    is one in the low half and zero in the high one, an integer constant is sign-extended."""
    code = instruction[field]
    if kind in ("f16", "bf16") and 240 <= code <= 248:
        value = np.array(constant_bits(code, kind, None), np.uint32)
        return Source(lambda st: value.reshape(1), "b32", (), lambda st: None)
    if kind == "b32" and 240 <= code <= 248:
        raise UnimplementedInstruction("a float constant in a packed integer instruction")
    if bits := constant_bits(code, "b32", instruction.literal):
        value = np.array([bits], np.uint32)
        return Source(lambda st: value, "b32", (), lambda st: None)
    plain = source(code, "b32", instruction, limits)
    if plain.constant:
        return Source(lambda st: plain.read(st).reshape(1), "b32", (), lambda st: None)
    return plain


def _packed_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    name, select, saturate = instruction.name, _select(instruction), bool(instruction["clmp"])
    count = 3 if name in ("v_pk_fma_f16", "v_pk_mad_i16", "v_pk_mad_u16") else 2
    kind = "f16" if name.endswith("_f16") else "b32"
    sources = [_operand(instruction, f"src{i}", kind, limits) for i in range(count)]
    if name in _BINARY:
        function = _BINARY[name]
        return _finish(instruction, limits, sources, lambda a, b: function(a, b, select, mode, saturate), select)
    if name in _EXTREMA:
        extremum, rule = _EXTREMA[name]
        return _finish(instruction, limits, sources, lambda a, b: extremum(a, b, rule, select, mode, saturate), select)
    if name == "v_pk_fma_f16":
        return _finish(
            instruction,
            limits,
            sources,
            lambda a, b, c: pm.pk_fma_f16(a, b, c, select, mode, saturate),
            select,
        )
    operation = name.removeprefix("v_pk_")
    if operation not in pm.pk_integer_names() or saturate or select.neg_lo or select.neg_hi:
        raise UnimplementedInstruction("no semantics for this packed instruction, or for clamp or neg on it")
    return _finish(instruction, limits, sources, lambda *x: pm.pk_integer(operation, *x, select=select), select)


def _mix_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    name, select = instruction.name, _select(instruction)
    sources = []
    for i in range(3):
        is_half = bool(select.op_sel_hi >> i & 1)
        code = instruction[f"src{i}"]
        if is_half and select.op_sel >> i & 1 and constant_bits(code, "f32", instruction.literal) is not None:
            raise UnimplementedInstruction("the high half of a constant in a mixed-precision fma")
        sources.append(_operand(instruction, f"src{i}", "f16" if is_half else "f32", limits))
    used = [_HALF_BITS[select.op_sel >> i & 1] if select.op_sel_hi >> i & 1 else ALL_BITS for i in range(3)]
    fields: dict[str, Any] = {
        "op_sel": select.op_sel,
        "op_sel_hi": select.op_sel_hi,
        "neg": select.neg_lo,
        "absolute": select.neg_hi,
        "mode": mode,
        "saturate": bool(instruction["clmp"]),
    }
    if name == "v_fma_mix_f32":
        return _finish(instruction, limits, sources, lambda a, b, c: pm.fma_mix_f32(a, b, c, **fields), used=used)
    high = name == "v_fma_mixhi_f16"
    function = pm.fma_mixhi_f16 if high else pm.fma_mixlo_f16
    old = source(instruction["vdst"], "b32", instruction, limits)
    return _finish(
        instruction,
        limits,
        sources,
        lambda a, b, c, d: function(d, a, b, c, **fields),
        old=old,
        written=_HALF_BITS[high],
        used=used,
    )


def _dot_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    name, select, saturate = instruction.name, _select(instruction), bool(instruction["clmp"])
    if name in _FLOAT_DOTS:
        function, kind = _FLOAT_DOTS[name]
        sources = [_operand(instruction, f"src{i}", kind if i < 2 else "f32", limits) for i in range(3)]
        if select.neg_hi & 4:
            raise UnimplementedInstruction("neg_hi on the addend of a dot product")
        return _finish(instruction, limits, sources, lambda a, b, c: function(a, b, c, select, saturate))
    sources = [_operand(instruction, f"src{i}", "u32", limits) for i in range(3)]
    if name in _SIGNED_DOTS:
        signed = _SIGNED_DOTS[name]
        compute = lambda a, b, c: signed(a, b, c, select.neg_lo, saturate)  # noqa: E731
    elif name in _UNSIGNED_DOTS and not select.neg_lo:
        unsigned = _UNSIGNED_DOTS[name]
        compute = lambda a, b, c: unsigned(a, b, c, saturate)  # noqa: E731
    else:
        raise UnimplementedInstruction("no semantics for this dot product")
    if select.op_sel & 7 or select.op_sel_hi & 3 != 3:
        raise UnimplementedInstruction("op_sel on an integer dot product")
    return _finish(instruction, limits, sources, compute)


def _finish(
    instruction: Instruction,
    limits: RegisterLimits,
    sources: list[Source],
    compute: Callable,
    packed: pm.Select | None = None,
    *,
    old: Source | None = None,
    written: np.uint32 = ALL_BITS,
    used: list[np.uint32] | None = None,
) -> Step:
    """The closure: compute, write, follow undefined bits.

    Parameters
    ----------
    packed : the result's halves depend on halves of the sources, as op_sel says
    old : the destination's old value, passed last
    written : bits of the destination that change
    used : bits of each source that matter; all when None
    """
    limits.check_vector(instruction["vdst"], 1)
    write = Writer(instruction["vdst"] - VECTOR, "b32", False)
    d = instruction["vdst"]
    inputs = [*sources, old] if old is not None else sources
    reads = [s.read for s in inputs]
    watched = tuple({n for s in sources for n in s.registers} | {d})

    def undefined(st: Waves) -> np.ndarray | None:
        shadows = [s.poison(st) for s in sources]
        if all(s is None for s in shadows):
            return None
        if packed is not None:
            low, high = False, False
            for i, s in enumerate(shadows):
                if s is not None:
                    low = low | (s & _HALF_BITS[packed.op_sel >> i & 1] != 0)
                    high = high | (s & _HALF_BITS[packed.op_sel_hi >> i & 1] != 0)
            return np.where(low, _HALF_BITS[0], np.uint32(0)) | np.where(high, _HALF_BITS[1], np.uint32(0))
        bad = False
        for i, s in enumerate(shadows):
            if s is not None:
                bad = bad | (s & (ALL_BITS if used is None else used[i]) != 0)
        return np.where(bad, ALL_BITS, np.uint32(0))

    def step(st: Waves) -> None:
        mask = st.mask
        for n in watched:
            if st.shadow[n] is not None:
                bits = undefined(st)
                write.store(st, compute(*(read(st) for read in reads)), mask)
                st.set_shadow(d, bits, mask, written)
                return
        write.store(st, compute(*(read(st) for read in reads)), mask)

    return step


# -- WMMA ------------------------------------------------------------------------------------------------


def _wmma_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    """v_wmma_<d>_16x16x<k>_<a>: the register counts come from the decoder's operand table."""
    gfx11 = instruction.generation == "rdna3"
    parts = instruction.name.removeprefix("v_wmma_").split("_")
    kind = f"{parts[0]}_{parts[-1]}"
    known = kind in matrix.INTEGER_KINDS or kind in matrix.FLOAT_KINDS
    if not known or len(parts) != 3:
        raise UnimplementedInstruction("no semantics for this matrix instruction")
    op_sel, op_sel_hi, neg, neg_hi = _select(instruction)
    if op_sel & 3 or op_sel_hi & 3 != 3:
        raise UnimplementedInstruction("op_sel on A or B of a matrix instruction")
    counts = [_registers(instruction, field) for field in ("src0", "src1", "src2", "vdst")]
    for field, count in zip(("src0", "src1", "vdst"), (counts[0], counts[1], counts[3]), strict=False):
        if instruction[field] < VECTOR:
            raise UnimplementedInstruction("a matrix operand that is no vector register")
        limits.check_vector(instruction[field], count)
    a, b, d = (instruction[f] - VECTOR for f in ("src0", "src1", "vdst"))
    c, constant = instruction["src2"] - VECTOR, None
    result_kind = kind.split("_")[0]
    if c >= 0:
        limits.check_vector(instruction["src2"], counts[2])
    else:
        constant = _accumulator_constant(instruction, "b32" if result_kind == "i32" else result_kind, gfx11)
    options: dict[str, Any] = {
        "neg": tuple(neg >> i & 1 for i in range(3)),
        "neg_hi": tuple(neg_hi >> i & 1 for i in range(3)),
        "clamp": bool(instruction["clmp"]),
    }
    half_result = gfx11 and result_kind in ("f16", "bf16")
    high = bool(op_sel & 4)
    a_range, b_range = range(VECTOR + a, VECTOR + a + counts[0]), range(VECTOR + b, VECTOR + b + counts[1])
    c_range = range(VECTOR + c, VECTOR + c + counts[2]) if constant is None else range(0)
    d_range = range(VECTOR + d, VECTOR + d + counts[3])
    watched = tuple({*a_range, *b_range, *c_range, *d_range})

    def multiply(st: Waves, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        if not gfx11:
            return matrix.wmma_gfx12(kind, x, y, z, **options)
        old = st.vgpr[d : d + counts[3]] if half_result else None
        return matrix.wmma_gfx11(kind, x, y, z, high=high, old=old, **options)

    def step(st: Waves) -> None:
        if st.mask is not None:
            wave = int((st.s[EXEC] != ALL_BITS).argmax())
            raise UnimplementedInstruction(
                "a matrix instruction with lanes switched off: the ISA leaves its result undefined",
                block=int(st.block[wave]), wave=int(st.wave[wave]),
            )  # fmt: skip
        x, y = st.vgpr[a : a + counts[0]], st.vgpr[b : b + counts[1]]
        z = st.vgpr[c : c + counts[2]] if constant is None else np.full((counts[2], st.count, 32), constant)
        undefined = None
        if any(st.shadow[n] is not None for n in watched):
            undefined = _wmma_poison(st, a_range, b_range, c_range, d_range, gfx11)
        if gfx11:
            _check_replicated(st, x, y, undefined is None)
        st.vgpr[d : d + counts[3]] = multiply(st, x, y, z)
        for v, n in enumerate(d_range):
            if undefined is None:
                st.shadow[n] = None
            else:
                st.set_shadow(n, undefined[v], None)

    return step


def _registers(instruction: Instruction, field: str) -> int:
    names = (field, f"v{field}")
    for name in names:
        if name in instruction.operands:
            return instruction.operands[name][1] // 32
    raise UnimplementedInstruction(f"the operand table has no {field} for this matrix instruction")


def _accumulator_constant(instruction: Instruction, kind: str, gfx11: bool) -> np.uint32:
    bits = constant_bits(instruction["src2"], kind, instruction.literal)
    if bits is None:
        raise UnimplementedInstruction("a scalar register as C of a matrix instruction")
    if kind in ("f16", "bf16") and not gfx11:
        bits |= bits << 16
    return np.uint32(bits)


def _check_replicated(st: Waves, x: np.ndarray, y: np.ndarray, all_defined: bool) -> None:
    """gfx11 wants A and B twice, in lanes 0-15 and 16-31; if they differ the result is undefined."""
    if not all_defined:
        return
    for name, operand in (("A", x), ("B", y)):
        differ = matrix.halves_differ(operand)
        if differ.any():
            wave = int(differ.argmax())
            raise UninitialisedRead(
                f"lanes 16-31 of {name} do not repeat lanes 0-15, so the result is undefined",
                block=int(st.block[wave]), wave=int(st.wave[wave]),
            )  # fmt: skip


def _wmma_poison(st: Waves, a: range, b: range, c: range, d: range, gfx11: bool) -> list[np.ndarray]:
    """Undefined lanes of each register of D, uint32 [waves, 32]: an undefined row of A or column of B spoils
    the row or column of D, an undefined element of C its own."""

    def lanes(n: int) -> np.ndarray:
        shadow = st.shadow[n]
        return np.zeros((st.count, 32), bool) if shadow is None else shadow != 0

    rows, columns = (
        np.logical_or.reduce([lanes(n) for n in operand]).reshape(-1, 2, 16).any(axis=1) for operand in (a, b)
    )
    lane = np.arange(32)
    result = []
    for v in range(len(d)):
        bad = columns[:, lane % 16]
        if len(d) == 8:
            bad = bad | rows[:, 2 * v + lane // 16 if gfx11 else 8 * (lane // 16) + v]
        else:  # gfx12, 16-bit: two rows in each register
            first = 8 * (lane // 16) + 2 * v
            bad = bad | rows[:, first] | rows[:, first + 1]
        if len(c):
            bad = bad | lanes(c[v])
        result.append(np.where(bad, ALL_BITS, np.uint32(0)))
    return result
