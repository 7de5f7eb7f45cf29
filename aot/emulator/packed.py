"""VOP3P: packed 16-bit math, mixed-precision fma, dot products and WMMA.

op_sel and op_sel_hi say which half of each source feeds the low and the high result; neg and neg_hi negate them. For mixed
fma, op_sel_hi says that a source is f16, op_sel which half of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import float_formats as ff
from . import matrix
from .decode import Instruction
from .errors import UnimplementedInstruction, UninitialisedRead
from .float_formats import FloatMode
from .operands import RegisterLimits, Source, constant_bits, source
from .vector import Step, Writer
from .vector_ops import OPS, dot2_f32
from .waves import ALL_BITS, EXEC, VECTOR, Waves

_LOW = np.uint32(0xFFFF)

_PACKED = {  # name: the 16-bit operation that each half does
    "v_pk_fma_f16": "v_fma_f16", "v_pk_add_f16": "v_add_f16", "v_pk_mul_f16": "v_mul_f16",
    "v_pk_min_f16": "v_min_f16", "v_pk_max_f16": "v_max_f16",
    "v_pk_min_num_f16": "v_min_num_f16", "v_pk_max_num_f16": "v_max_num_f16",
    "v_pk_minimum_f16": "v_minimum_f16", "v_pk_maximum_f16": "v_maximum_f16",
    "v_pk_mad_i16": "v_mad_i16", "v_pk_mad_u16": "v_mad_u16", "v_pk_mul_lo_u16": "v_mul_lo_u16",
    "v_pk_add_i16": "v_add_nc_i16", "v_pk_sub_i16": "v_sub_nc_i16",
    "v_pk_add_u16": "v_add_nc_u16", "v_pk_sub_u16": "v_sub_nc_u16",
    "v_pk_lshlrev_b16": "v_lshlrev_b16", "v_pk_lshrrev_b16": "v_lshrrev_b16", "v_pk_ashrrev_i16": "v_ashrrev_i16",
    "v_pk_max_i16": "v_max_i16", "v_pk_min_i16": "v_min_i16", "v_pk_max_u16": "v_max_u16", "v_pk_min_u16": "v_min_u16",
}  # fmt: skip


def compile_packed(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """Compile a VOP3P instruction."""
    name = instruction.name
    if instruction.variant.startswith("DPP"):
        raise UnimplementedInstruction("VOP3P with DPP")
    if name in _PACKED:
        return _packed_step(instruction, limits, mode)
    if name.startswith("v_fma_mix"):
        return _mix_step(instruction, limits, mode)
    if name.startswith("v_dot"):
        return _dot_step(instruction, limits, mode)
    if name.startswith("v_wmma_"):
        return _wmma_step(instruction, limits)
    raise UnimplementedInstruction("no semantics for this instruction")


def _selections(instruction: Instruction) -> tuple[int, int, int, int]:
    """op_sel, op_sel_hi, neg, neg_hi, one bit per source."""
    op_sel_hi = instruction["opsel_hi"] | instruction["opsel_hi2"] << 2
    return instruction["opsel"], op_sel_hi, instruction["neg"], instruction["neg_hi"]


def _packed_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    op = OPS[_PACKED[instruction.name]]
    op_sel, op_sel_hi, neg, neg_hi = _selections(instruction)
    is_float = op.result == "f16"
    if (neg or neg_hi) and not is_float:
        raise UnimplementedInstruction("neg on a packed integer instruction")
    function = op.compute
    if instruction["clmp"] and not is_float:
        if op.saturating is None:
            raise UnimplementedInstruction("the clamp bit on this packed instruction")
        function = op.saturating
    codes = [instruction[f"src{i}"] for i in range(len(op.sources))]

    def operand(position: int, half: int) -> Source:
        select = (op_sel_hi if half else op_sel) >> position & 1
        flip = (neg_hi if half else neg) >> position & 1
        kind = op.sources[position]
        return _half_source(codes[position], kind, instruction, limits, bool(select), bool(flip))

    lows = [operand(i, 0) for i in range(len(codes))]
    highs = [operand(i, 1) for i in range(len(codes))]
    extra = (mode,) if op.moded else ()
    clamped = bool(instruction["clmp"]) and is_float
    d = instruction["vdst"] - VECTOR
    limits.check_vector(instruction["vdst"], 1)
    watched = tuple({n for s in (*lows, *highs) for n in s.registers} | {VECTOR + d})

    def compute(st: Waves, sources: list[Source]) -> np.ndarray:
        value = function(*(s.read(st) for s in sources), *extra)
        value = value.view(np.uint16) if value.dtype != np.uint16 else value
        return ff.clamp(value, mode) if clamped else value

    def step(st: Waves) -> None:
        low, high = compute(st, lows), compute(st, highs)
        mask = st.mask
        tracked = any(st.shadow[n] is not None for n in watched)
        if tracked:
            undefined = [_any_lane(st, sources) for sources in (lows, highs)]
        if low.base is not None or high.base is not None:
            low, high = low.copy(), high.copy()
        for target, value in ((st.low[d], low), (st.high[d], high)):
            if mask is None:
                target[...] = value
            else:
                np.copyto(target, value, where=mask)
        if tracked:
            bits = _spread(undefined[0], _LOW), _spread(undefined[1], ~_LOW)
            st.set_shadow(VECTOR + d, bits[0] | bits[1], mask)

    return step


def _half_source(
    code: int, kind: str, instruction: Instruction, limits: RegisterLimits, high: bool, negate: bool
) -> Source:
    """One half of a packed operand. An inline constant is a 32-bit value: a float one is f16 in the low half, zero above;
    for integer instructions it would be an f32, which no compiler we know emits."""
    return source(code, kind, instruction, limits, high=high, negate=negate)


def _any_lane(st: Waves, sources: list[Source]) -> np.ndarray | None:
    total = None
    for s in sources:
        bits = s.poison(st)
        if bits is not None:
            total = bits != 0 if total is None else total | (bits != 0)
    return total


def _spread(undefined: np.ndarray | None, bits: np.uint32) -> np.ndarray:
    return np.uint32(0) if undefined is None else np.where(undefined, bits, np.uint32(0))


# -- mixed-precision fma ----------------------------------------------------------------------------------------------


def _mix_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    op_sel, op_sel_hi, neg, absolute = _selections(instruction)
    reads: list[Callable] = []
    sources: list[Source] = []
    for i in range(3):
        code, half = instruction[f"src{i}"], op_sel_hi >> i & 1
        flips = {"negate": bool(neg >> i & 1), "absolute": bool(absolute >> i & 1)}
        if half and op_sel >> i & 1 and constant_bits(code, "f32", instruction.literal) is not None:
            raise UnimplementedInstruction("the high half of a constant in a mixed-precision fma")
        s = source(
            code, "f16" if half else "f32", instruction, limits, high=bool(half and op_sel >> i & 1), **flips
        )
        sources.append(s)
        decode = ff.decode_f16 if half else ff.decode_f32
        reads.append(lambda st, read=s.read, decode=decode: decode(read(st), mode))
    a, b, c = reads
    kind = "f32" if instruction.name == "v_fma_mix_f32" else "f16"
    encode = ff.encode_f32 if kind == "f32" else ff.encode_f16
    high = instruction.name == "v_fma_mixhi_f16"
    limits.check_vector(instruction["vdst"], 1)
    write = Writer(instruction["vdst"] - VECTOR, kind, high)
    clamped = bool(instruction["clmp"])
    watched = tuple({n for s in sources for n in s.registers} | set(write.registers))
    all_f32 = op_sel_hi == 0 and kind == "f32"

    def step(st: Waves) -> None:
        if all_f32:
            value = ff.fma_f32(*(s.read(st) for s in sources), mode)
        else:
            value = encode(ff.add_to_odd(a(st) * b(st), c(st)), mode)
        if clamped:
            value = ff.clamp(value, mode)
        mask = st.mask
        if any(st.shadow[n] is not None for n in watched):
            undefined = _any_lane(st, sources)
            write.store(st, value, mask)
            write.store_shadow(st, None if undefined is None else _spread(undefined, ALL_BITS), mask)
        else:
            write.store(st, value, mask)

    return step


# -- dot products -----------------------------------------------------------------------------------------------------


def _integer_dot(bits: int, signed: tuple[bool, bool], saturate: bool) -> Callable:
    count, mask = 32 // bits, (1 << bits) - 1

    def elements(x: np.ndarray, is_signed: bool) -> list[np.ndarray]:
        fields = [(x >> np.uint32(bits * i) & np.uint32(mask)).astype(np.int64) for i in range(count)]
        return [np.where(f >> (bits - 1), f - (1 << bits), f) for f in fields] if is_signed else fields

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        any_signed = any(signed)
        total = c.view(np.int32).astype(np.int64) if any_signed else c.astype(np.int64)
        for x, y in zip(elements(a, signed[0]), elements(b, signed[1]), strict=False):
            total = total + x * y
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1) if any_signed else np.clip(total, 0, 2**32 - 1)
        return total.astype(np.uint32)

    return compute


def _dot_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    op_sel, op_sel_hi, neg, _neg_hi = _selections(instruction)
    name, saturate = instruction.name, bool(instruction["clmp"])
    if name in ("v_dot2_f32_f16", "v_dot2_f32_bf16"):
        kind = "f16" if name.endswith("_f16") else "bf16"
        return _dot2_step(instruction, limits, mode, kind)
    if op_sel & 7 or op_sel_hi & 3 != 3:
        raise UnimplementedInstruction("op_sel on an integer dot product")
    if name in ("v_dot4_i32_iu8", "v_dot8_i32_iu4"):
        # neg says for A and B whether their elements are signed.
        function = _integer_dot(8 if "iu8" in name else 4, (bool(neg & 1), bool(neg & 2)), saturate)
        signed = bool(neg & 3)
        if not signed:
            raise UnimplementedInstruction("an i32 dot product of two unsigned operands")
    elif name in ("v_dot4_u32_u8", "v_dot8_u32_u4"):
        function = _integer_dot(8 if "u8" in name else 4, (False, False), saturate)
    else:
        raise UnimplementedInstruction("no semantics for this instruction")
    sources = [source(instruction[f"src{i}"], "u32", instruction, limits) for i in range(3)]
    return _three_source_step(instruction, limits, sources, lambda a, b, c: function(a, b, c))


def _dot2_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode, kind: str) -> Step:
    op_sel, op_sel_hi, neg, neg_hi = _selections(instruction)
    plain = op_sel & 3 == 0 and op_sel_hi & 3 == 3 and not (neg or neg_hi)
    decode = ff.decode_f16 if kind == "f16" else (lambda x, mode: ff.decode_bf16(x))
    c = source(
        instruction["src2"], "f32", instruction, limits, negate=bool(neg & 4), absolute=bool(neg_hi & 4)
    )  # fmt: skip
    clamped = bool(instruction["clmp"])
    dot = dot2_f32(decode)
    registers = [code for code in (instruction["src0"], instruction["src1"]) if code >= VECTOR]
    if plain and len(registers) == 2:
        a, b = (source(code, "b32", instruction, limits) for code in registers)

        def compute(x, y, z):
            value = dot(x, y, z, mode)
            return ff.clamp(value, mode) if clamped else value

        return _three_source_step(instruction, limits, [a, b, c], compute)
    halves = []
    for i in range(2):
        for select, flip in ((op_sel, neg), (op_sel_hi, neg_hi)):
            halves.append(
                _half_source(
                    instruction[f"src{i}"],
                    kind,
                    instruction,
                    limits,
                    bool(select >> i & 1),
                    bool(flip >> i & 1),
                )
            )

    def compute_halves(a_low, a_high, b_low, b_high, z):
        total = ff.add_to_odd(
            decode(a_low, mode) * decode(b_low, mode), decode(a_high, mode) * decode(b_high, mode)
        )
        value = ff.encode_f32(ff.add_to_odd(total, ff.decode_f32(z, mode)), mode)
        return ff.clamp(value, mode) if clamped else value

    return _three_source_step(instruction, limits, [*halves, c], compute_halves)


def _three_source_step(
    instruction: Instruction, limits: RegisterLimits, sources: list[Source], compute: Callable
) -> Step:
    limits.check_vector(instruction["vdst"], 1)
    write = Writer(instruction["vdst"] - VECTOR, "b32", False)
    reads = [s.read for s in sources]
    watched = tuple({n for s in sources for n in s.registers} | set(write.registers))

    def step(st: Waves) -> None:
        value, mask = compute(*(read(st) for read in reads)), st.mask
        for n in watched:
            if st.shadow[n] is not None:
                undefined = _any_lane(st, sources)
                write.store(st, value, mask)
                write.store_shadow(st, None if undefined is None else _spread(undefined, ALL_BITS), mask)
                return
        write.store(st, value, mask)

    return step


# -- WMMA -------------------------------------------------------------------------------------------------------------


def _wmma_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    """v_wmma_<d>_16x16x<k>_<a>: the register counts come from the decoder's operand table."""
    gfx11 = instruction.generation == "rdna3"
    parts = instruction.name.removeprefix("v_wmma_").split("_")
    kind = f"{parts[0]}_{parts[-1]}"
    known = kind in matrix.INTEGER_KINDS or kind in matrix.FLOAT_KINDS
    if not known or len(parts) != 3:
        raise UnimplementedInstruction("no semantics for this matrix instruction")
    op_sel, op_sel_hi, neg, neg_hi = _selections(instruction)
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
    options = {
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
    """Undefined lanes of each register of D, uint32 [waves, 32]: an undefined row of A or column of B spoils the row or
    column of D, an undefined element of C its own."""

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
