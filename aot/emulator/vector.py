"""Compiling a vector ALU instruction to a closure over its resolved operands.

A closure takes the group of waves, computes on all its lanes and writes the active ones. What an inactive
lane computes is thrown away, so no fault may come from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from . import conversions, cross_lane
from .decode import LITERAL, Instruction
from .errors import InactiveLaneRead, UnimplementedInstruction, UninitialisedRead
from .float_formats import FloatMode, clamp, output_scale_f32
from .operands import BITS, FLOAT_KINDS, RegisterLimits, Source, any_undefined, mask_source, source
from .vector_ops import OPS, VectorOp, upward
from .waves import EXEC, LANES, NULL, VCC, VECTOR, Waves, masks_of

Step = Callable[[Waves], None]
Compute = Callable[[Waves], np.ndarray]
Poison = Callable[[Waves], np.ndarray | None]

_LOW, _HIGH = np.uint32(0xFFFF), np.uint32(0xFFFF0000)


def compile_vector(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """VOP1, VOP2, VOP3 and VOPC, with DPP."""
    name = instruction.name
    writes_exec = name.startswith("v_cmpx_")
    op = OPS.get(name.replace("v_cmpx_", "v_cmp_") if writes_exec else name)
    if op is None:
        raise UnimplementedInstruction("no semantics for this instruction")
    if instruction.variant.startswith("DPP"):
        return _dpp_step(instruction, op, limits, mode)
    sources = _sources(instruction, op, limits)
    compute = _with_output_modifiers(_bind(op, sources, mode), instruction, op, sources, mode)
    if op.result == "mask":
        destination = EXEC if writes_exec else VCC if instruction.format == "VOPC" else instruction["vdst"] & 0xFF
        return _mask_step(destination, compute, sources)
    return _step(compute, op, sources, _writer(instruction, op, limits))


def _step(compute: Compute, op: VectorOp, sources: list[Source], write: Writer) -> Step:
    watched = tuple({n for s in sources for n in s.registers} | set(write.registers))
    poison = _poison(op, sources)
    store, registers = write.store, write

    def step(st: Waves) -> None:
        shadow = st.shadow
        for n in watched:
            if shadow[n] is not None:
                bits = poison(st)
                store(st, compute(st), st.mask)
                registers.store_shadow(st, bits, st.mask)
                return
        store(st, compute(st), st.mask)

    return step


def compile_dual(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """VOPD: two operations that both read before either writes."""
    halves = [_dual_half(instruction, half, limits, mode) for half in ("x", "y")]
    (compute_x, sources_x, op_x, write_x), (compute_y, sources_y, op_y, write_y) = halves
    watched = tuple(
        {n for _, sources, _, write in halves for s in sources for n in s.registers}
        | set(write_x.registers) | set(write_y.registers)
    )  # fmt: skip
    poison_x, poison_y = _poison(op_x, sources_x), _poison(op_y, sources_y)
    store_x, store_y = write_x.store, write_y.store
    # A plain move returns its source itself, which the X half may overwrite.
    keeps_view = instruction.second == "v_dual_mov_b32"

    def step(st: Waves) -> None:
        shadow = st.shadow
        tracked, bits_x, bits_y = False, None, None
        for n in watched:
            if shadow[n] is not None:
                tracked, bits_x, bits_y = True, poison_x(st), poison_y(st)
                break
        x, y = compute_x(st), compute_y(st)
        if keeps_view:
            y = np.array(y)
        mask = st.mask
        store_x(st, x, mask)
        store_y(st, y, mask)
        if tracked:
            write_x.store_shadow(st, bits_x, mask)
            write_y.store_shadow(st, bits_y, mask)

    return step


def _dual_half(instruction: Instruction, half: str, limits: RegisterLimits, mode: FloatMode):
    name = (instruction.name if half == "x" else instruction.second).replace("v_dual_", "v_")
    op = OPS.get(name)
    if op is None:
        raise UnimplementedInstruction(f"no semantics for {name} in a dual instruction")
    first, second = instruction[f"src{half}0"], instruction[f"vsrc{half}1"]
    destination = instruction[f"vdst{half}"]
    codes = [first, second][: len(op.sources)]
    if name == "v_cndmask_b32":
        codes = [first, second, VCC]
    elif name == "v_fmamk_f32":
        codes = [first, LITERAL, second]
    elif name == "v_fmaak_f32":
        codes = [first, second, LITERAL]
    kinds = list(op.sources)
    if op.accumulates:
        codes.append(destination)
        kinds.append("f32")
    sources = [
        mask_source(c) if k == "mask" else source(c, k, instruction, limits) for c, k in zip(codes, kinds, strict=True)
    ]
    limits.check_vector(destination, 1)
    return _bind(op, sources, mode), sources, op, Writer(destination - VECTOR, op.result, False)


# -- sources ---------------------------------------------------------------------------------------------


def split_half(code: int, kind: str, instruction: Instruction, position: int) -> tuple[int, bool]:
    """Register and half of a 16-bit operand: bit 7 of the register number, or op_sel in VOP3."""
    if BITS[kind] != 16:
        return code, False
    if instruction.format == "VOP3":
        return code, bool(instruction.get("opsel") >> position & 1)
    if code >= VECTOR:
        return VECTOR + (code - VECTOR & 0x7F), bool(code - VECTOR & 0x80)
    return code, False


def _codes(instruction: Instruction, op: VectorOp) -> list[int]:
    """Operand codes in the order of the row's sources."""
    fields = instruction.fields
    first = fields["vsrc0"] if "vsrc0" in fields else fields["src0"]
    second = fields.get("vsrc1", fields.get("src1"))
    if second is None:
        return [first]  # VOP1
    name = instruction.name
    if name.startswith("v_fmamk_"):
        return [first, LITERAL, second]
    if name.startswith("v_fmaak_"):
        return [first, second, LITERAL]
    codes = [first, second, fields.get("src2", VCC)]  # without src2 only v_cndmask has a third
    return codes[: len(op.sources)]


def _sources(instruction: Instruction, op: VectorOp, limits: RegisterLimits) -> list[Source]:
    codes, kinds = _codes(instruction, op), list(op.sources)
    if op.accumulates:
        codes.append(instruction["vdst"])
        kinds.append(op.result)
    negate, absolute = instruction.get("neg"), instruction.get("abs")
    if instruction.variant == "DPP16" and instruction.format != "VOP3":
        # VOP3 with DPP has its modifiers in the VOP3 word, the short forms in the DPP word.
        negate = instruction["src0_neg"] | instruction["src1_neg"] << 1
        absolute = instruction["src0_abs"] | instruction["src1_abs"] << 1
    sources = []
    for position, (code, kind) in enumerate(zip(codes, kinds, strict=True)):
        if kind == "mask":
            sources.append(mask_source(code))
            continue
        accumulator = op.accumulates and position == len(codes) - 1
        code, high = split_half(code, kind, instruction, 3 if accumulator else position)
        flips = not accumulator and (negate >> position & 1 or absolute >> position & 1)
        if flips and kind not in FLOAT_KINDS and kind != "b32" and kind != "b16":
            raise UnimplementedInstruction("neg or abs on an integer operand")
        sources.append(
            source(
                code, kind, instruction, limits, high=high,
                negate=bool(flips and negate >> position & 1),
                absolute=bool(flips and absolute >> position & 1),
            )
        )  # fmt: skip
    return sources


def _bind(op: VectorOp, sources: list[Source], mode: FloatMode) -> Compute:
    f = op.compute
    reads = [s.read for s in sources]
    if op.moded:
        if len(reads) == 1:
            (a,) = reads
            return lambda st: f(a(st), mode)
        if len(reads) == 2:
            a, b = reads
            return lambda st: f(a(st), b(st), mode)
        a, b, c = reads
        return lambda st: f(a(st), b(st), c(st), mode)
    if len(reads) == 1:
        (a,) = reads
        return lambda st: f(a(st))
    if len(reads) == 2:
        a, b = reads
        return lambda st: f(a(st), b(st))
    a, b, c = reads
    return lambda st: f(a(st), b(st), c(st))


def _with_output_modifiers(
    compute: Compute, instruction: Instruction, op: VectorOp, sources: list[Source], mode: FloatMode
) -> Compute:
    """Clamp and output scale."""
    if instruction.get("omod"):
        if op.result != "f32":
            raise UnimplementedInstruction("an output scale (omod) on a result that is not f32")
        plain, omod = compute, instruction["omod"]
        compute = lambda st: output_scale_f32(plain(st), omod, mode)  # noqa: E731
    if instruction.get("clmp"):
        if op.result in ("f32", "f16"):
            unclamped = compute
            return lambda st: clamp(unclamped(st), mode)
        if op.result == "mask" and op.moded:
            return compute  # clamp on a comparison only asks for exceptions
        if op.saturating is None:
            raise UnimplementedInstruction("the clamp bit on this integer instruction")
        return _bind(VectorOp(op.result, op.sources, op.saturating), sources, mode)
    return compute


def _poison(op: VectorOp, sources: list[Source]) -> Poison:
    """Undefined bits of the result, or None."""
    readers = [s.poison for s in sources]
    if op.poison is None:

        def any_lane(st: Waves):
            total = None
            for read in readers:
                bits = read(st)
                if bits is not None:
                    bad = bits != 0
                    total = bad if total is None else total | bad
            return any_undefined(total)

        return any_lane
    precise, reads = op.poison, [s.read for s in sources]

    def bitwise(st: Waves):
        undefined = [read(st) for read in readers]
        if all(u is None for u in undefined):
            return None
        values = [_as_unsigned(read(st)) for read in reads]
        return precise(values, [np.uint32(0) if u is None else u for u in undefined])

    return bitwise


def _as_unsigned(value: np.ndarray) -> np.ndarray:
    if value.dtype == bool:
        return value
    if value.dtype.itemsize == 8:
        return value.view(np.uint64)
    return value.astype(np.uint32) if value.dtype.itemsize == 2 else value.view(np.uint32)


# -- results ---------------------------------------------------------------------------------------------


class Writer:
    """Writing a vector result: a register, one half of it, or a pair."""

    def __init__(self, index: int, kind: str, high: bool):
        self.index, self.width, self.high = index, BITS[kind], high
        self.registers = (VECTOR + index, VECTOR + index + 1)[: 2 if self.width == 64 else 1]
        self.store = {16: self._half, 32: self._whole, 64: self._pair}[self.width](index, high)

    @staticmethod
    def _whole(d: int, high: bool) -> Callable:
        def store(st: Waves, value: np.ndarray, mask: np.ndarray | None) -> None:
            if value.dtype != np.uint32:
                value = value.view(np.uint32)
            if mask is None:
                st.v[d][...] = value
            else:
                np.copyto(st.v[d], value, where=mask)

        return store

    @staticmethod
    def _half(d: int, high: bool) -> Callable:
        def store(st: Waves, value: np.ndarray, mask: np.ndarray | None) -> None:
            if value.dtype != np.uint16:
                value = value.view(np.uint16)
            target = st.high[d] if high else st.low[d]
            if mask is None:
                target[...] = value
            else:
                np.copyto(target, value, where=mask)

        return store

    @staticmethod
    def _pair(d: int, high: bool) -> Callable:
        def store(st: Waves, value: np.ndarray, mask: np.ndarray | None) -> None:
            value = value.view(np.uint64)
            for i, half in enumerate((value.astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32))):
                if mask is None:
                    st.v[d + i][...] = half
                else:
                    np.copyto(st.v[d + i], half, where=mask)

        return store

    def store_shadow(self, st: Waves, bits: np.ndarray | None, mask: np.ndarray | None) -> None:
        n = VECTOR + self.index
        if self.width == 16:
            if bits is not None and self.high:
                bits = bits << np.uint32(16)
            st.set_shadow(n, bits, mask, _HIGH if self.high else _LOW)
            return
        if bits is not None and bits.dtype == np.uint64:
            st.set_shadow(n, bits.astype(np.uint32), mask)
            st.set_shadow(n + 1, (bits >> np.uint64(32)).astype(np.uint32), mask)
            return
        for i in range(len(self.registers)):
            st.set_shadow(n + i, bits, mask)


def _writer(instruction: Instruction, op: VectorOp, limits: RegisterLimits) -> Writer:
    code, high = split_half(instruction["vdst"], op.result, instruction, 3)
    limits.check_vector(code, 2 if BITS[op.result] == 64 else 1)
    return Writer(code - VECTOR, op.result, high)


def store_mask(st: Waves, d: int, lanes: np.ndarray, undefined: np.ndarray | None) -> None:
    """Write one bit per lane to scalar register `d`; bits of inactive lanes become 0."""
    mask = st.mask
    lanes = np.broadcast_to(lanes, (st.count, 32))
    bits = masks_of(lanes if mask is None else lanes & mask)
    if undefined is not None:
        undefined = np.broadcast_to(undefined != 0, (st.count, 32))
        undefined = masks_of(undefined if mask is None else undefined & mask)
        undefined = undefined if undefined.any() else None
    if d == NULL:
        return
    if d == EXEC:
        if undefined is not None:
            raise UninitialisedRead("the exec mask depends on a register that was never written")
        st.exec_written()
    st.s[d][...] = bits
    st.shadow[d] = undefined


def _mask_step(destination: int, compute: Compute, sources: list[Source]) -> Step:
    watched = tuple({n for s in sources for n in s.registers})
    poison = _poison(VectorOp("mask", (), compute), sources)

    def step(st: Waves) -> None:
        undefined = None
        for n in watched:
            if st.shadow[n] is not None:
                undefined = poison(st)
                break
        store_mask(st, destination, compute(st), undefined)

    return step


# -- carries ---------------------------------------------------------------------------------------------


def _add_carry(a, b, carry):
    total = a.astype(np.uint64) + b + carry
    return total.astype(np.uint32), total >> np.uint64(32) != 0


def _sub_borrow(a, b, borrow):
    result = a.astype(np.int64) - b - borrow
    return result.astype(np.uint32), result < 0


def _mad_u64(a, b, c):
    product = a.astype(np.uint64) * b
    total = product + c
    return total, total < product


def _mad_i64(a, b, c):
    product = a.astype(np.int64) * b
    total = product + c
    return total, np.zeros(np.shape(total), bool)


def _carry_poison(values, undefined):
    """Undefined bits of a sum spread upward; an undefined carry-in or factor spoils all of it."""
    a, b, *rest = undefined
    if len(rest) == 1 and values[2].dtype == np.uint64:
        factors = np.where((a | b) != 0, ~np.uint64(0), np.uint64(0))
        return upward(factors | rest[0])
    total = a | b
    if rest:
        total = total | np.where(rest[0] != 0, np.uint32(1), np.uint32(0))
    return upward(total)


_NO_CARRY = np.uint64(0)
# name: (kinds of the sources, kind of the result, function of the sources that gives result and carry)
_CARRY_OPS: dict[str, tuple[str, str, Callable]] = {
    "v_add_co_u32": ("u32 u32", "u32", lambda a, b: _add_carry(a, b, _NO_CARRY)),
    "v_sub_co_u32": ("u32 u32", "u32", lambda a, b: _sub_borrow(a, b, np.int64(0))),
    "v_subrev_co_u32": ("u32 u32", "u32", lambda a, b: _sub_borrow(b, a, np.int64(0))),
    "v_add_co_ci_u32": ("u32 u32 mask", "u32", lambda a, b, c: _add_carry(a, b, c.astype(np.uint64))),
    "v_sub_co_ci_u32": ("u32 u32 mask", "u32", lambda a, b, c: _sub_borrow(a, b, c.astype(np.int64))),
    "v_subrev_co_ci_u32": ("u32 u32 mask", "u32", lambda a, b, c: _sub_borrow(b, a, c.astype(np.int64))),
    "v_mad_u64_u32": ("u32 u32 u64", "u64", _mad_u64),
    "v_mad_co_u64_u32": ("u32 u32 u64", "u64", _mad_u64),
    "v_mad_i64_i32": ("i32 i32 i64", "i64", _mad_i64),
    "v_mad_co_i64_i32": ("i32 i32 i64", "i64", _mad_i64),
}


def compile_carry(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """VOP3SD, and the VOP2 forms that carry through VCC."""
    row = _CARRY_OPS.get(instruction.name)
    if row is None or instruction.variant.startswith("DPP") or instruction.get("clmp"):
        raise UnimplementedInstruction("no semantics for this instruction")
    kinds, result, function = row[0].split(), row[1], row[2]
    carry_to = instruction.get("sdst", VCC)
    if "_i64_" in instruction.name and carry_to != NULL:
        raise UnimplementedInstruction("the overflow bit of a 64-bit signed multiply-add")
    codes = [
        instruction["src0"],
        instruction.get("vsrc1", instruction.get("src1")),
        instruction.get("src2", VCC),
    ]
    sources = [
        mask_source(c) if k == "mask" else source(c, k, instruction, limits)
        for c, k in zip(codes[: len(kinds)], kinds, strict=True)
    ]
    op = VectorOp(result, tuple(kinds), function, poison=_carry_poison)
    write = _writer(instruction, op, limits)
    watched = tuple({n for s in sources for n in s.registers} | set(write.registers))
    poison, compute = _poison(op, sources), _bind(op, sources, mode)

    def step(st: Waves) -> None:
        undefined = None
        tracked = any(st.shadow[n] is not None for n in watched)
        if tracked:
            undefined = poison(st)
        value, carry = compute(st)
        mask = st.mask
        write.store(st, value, mask)
        if tracked:
            write.store_shadow(st, undefined, mask)
        store_mask(st, carry_to, carry, undefined)

    return step


def is_carry(instruction: Instruction) -> bool:
    return instruction.name in _CARRY_OPS


# -- lanes -----------------------------------------------------------------------------------------------


def check_lanes(st: Waves, read_inactive: np.ndarray, how: str) -> None:
    """InactiveLaneRead for the first lane that read one which is switched off."""
    if read_inactive.any():
        wave, lane = (int(i) for i in np.argwhere(read_inactive)[0])
        raise InactiveLaneRead(
            f"{how} reads a lane that is switched off (exec {int(st.s[EXEC][wave]):#010x})",
            block=int(st.block[wave]), wave=int(st.wave[wave]), lane=lane,
        )  # fmt: skip


@dataclass
class _Fetched:
    """What the lanes got as the first source of a DPP instruction; each step fills it before the operation reads it."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    undefined: np.ndarray | None = None


def _dpp_step(instruction: Instruction, op: VectorOp, limits: RegisterLimits, mode: FloatMode) -> Step:
    """The first source is fetched from other lanes; lanes without a source may be left unwritten."""
    kind = op.sources[0]
    if op.result == "mask":
        raise UnimplementedInstruction("a comparison with DPP")
    if BITS[kind] != 32:
        raise UnimplementedInstruction("DPP on an operand that is not 32 bits wide")
    register = instruction["vsrc0"]
    move = dpp_move(instruction)
    negate, absolute = _first_modifiers(instruction)
    fetched = _Fetched()
    sources = _sources(instruction, op, limits)
    sources[0] = Source(
        lambda st: _apply(fetched.values, kind, absolute, negate), kind, (register,), lambda st: fetched.undefined
    )
    compute = _with_output_modifiers(_bind(op, sources, mode), instruction, op, sources, mode)
    undefined = _poison(op, sources)
    write = _writer(instruction, op, limits)

    def step(st: Waves) -> None:
        lanes = st.lanes
        moved = move(st.v[register - VECTOR], lanes)
        check_lanes(st, moved.read_inactive & lanes, "DPP")
        shadow = st.shadow[register]
        fetched.values = moved.values
        fetched.undefined = None if shadow is None else move(np.ascontiguousarray(shadow), lanes).values
        bits = undefined(st)
        mask = lanes & moved.write
        write.store(st, compute(st), mask)
        write.store_shadow(st, bits, mask)

    return step


def _first_modifiers(instruction: Instruction) -> tuple[bool, bool]:
    if instruction.variant == "DPP16" and instruction.format != "VOP3":
        return bool(instruction["src0_neg"]), bool(instruction["src0_abs"])
    return bool(instruction.get("neg") & 1), bool(instruction.get("abs") & 1)


def _apply(value: np.ndarray, kind: str, absolute: bool, negate: bool) -> np.ndarray:
    if absolute:
        value = value & np.uint32(0x7FFFFFFF)
    if negate:
        value = value ^ np.uint32(0x80000000)
    return value.view(np.int32) if kind == "i32" else value


def dpp_move(instruction: Instruction) -> Callable[[np.ndarray, np.ndarray], cross_lane.Moved]:
    """The lane move of an instruction's DPP word."""
    if instruction.variant == "DPP8":
        select = sum(instruction[f"lane_sel_{i}"] << 3 * i for i in range(8))
        fetch = bool(instruction["fi"])
        return lambda values, lanes: cross_lane.dpp8(values, lanes, select, fetch_inactive=fetch)
    move = partial(
        cross_lane.dpp16,
        dpp_ctrl=instruction["dpp"],
        row_mask=instruction["row_mask"],
        bank_mask=instruction["bank_mask"],
        bound_ctrl=bool(instruction["bc"]),
        fetch_inactive=bool(instruction["fi"]),
    )
    move(np.zeros((1, 32), np.uint32), np.ones((1, 32), bool))  # raises here, not at run time, for a reserved control
    return move


_PERMLANES: dict[str, Callable[..., cross_lane.Moved]] = {
    "v_permlane16_b32": cross_lane.permlane16,
    "v_permlanex16_b32": cross_lane.permlanex16,
    "v_permlane16_var_b32": cross_lane.permlane16_var,
    "v_permlanex16_var_b32": cross_lane.permlanex16_var,
}


def compile_lane_move(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """Instructions that move values between lanes or between the vector and scalar registers."""
    name = instruction.name
    if name in _PERMLANES:
        return _permlane_step(instruction, limits)
    if name in ("v_readlane_b32", "v_readfirstlane_b32"):
        return _read_step(instruction, limits)
    if name == "v_writelane_b32":
        return _write_lane_step(instruction, limits)
    if name == "v_swap_b32":
        return _swap_step(instruction, limits)
    raise UnimplementedInstruction("no semantics for this instruction")


LANE_MOVES = {*_PERMLANES, "v_readlane_b32", "v_readfirstlane_b32", "v_writelane_b32", "v_swap_b32"}


def _permlane_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    move = _PERMLANES[instruction.name]
    register, destination = instruction["src0"], instruction["vdst"]
    if register < VECTOR:
        raise UnimplementedInstruction("a permlane of a scalar operand")
    limits.check_vector(register, 1)
    limits.check_vector(destination, 1)
    codes = [instruction["src1"], instruction["src2"]][: 1 if "_var_" in instruction.name else 2]
    selects = [source(c, "b32", instruction, limits) for c in codes]
    controls = {
        "fetch_inactive": bool(instruction["opsel"] & 1),
        "bound_ctrl": bool(instruction["opsel"] & 2),
    }
    write = Writer(destination - VECTOR, "b32", False)

    def step(st: Waves) -> None:
        lanes = st.lanes
        for select in selects:
            for n in select.registers:
                st.require_defined_lanes(n, "lane select")
        choice = [np.broadcast_to(s.read(st), (st.count, 32)) for s in selects]
        moved = move(st.v[register - VECTOR], lanes, *choice, **controls)
        check_lanes(st, moved.read_inactive & lanes, instruction.name)
        shadow = st.shadow[register]
        bits = None
        if shadow is not None:
            bits = move(np.ascontiguousarray(shadow), lanes, *choice, **controls).values
        mask = lanes & moved.write
        full = st.mask is None and mask.all()
        write.store(st, moved.values, None if full else mask)
        if bits is not None or st.shadow[destination] is not None:
            write.store_shadow(st, bits, None if full else mask)

    return step


def _read_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    register, d = instruction["src0"], instruction["vdst"] & 0xFF
    value = source(register, "b32", instruction, limits)
    lane = None
    if instruction.name == "v_readlane_b32":
        lane = source(instruction["src1"], "b32", instruction, limits, scalar=True)
    if register >= VECTOR:

        def pick(st: Waves, registers: np.ndarray) -> np.ndarray:
            if lane is None:
                return cross_lane.readfirstlane(registers, st.lanes)[0]
            return cross_lane.readlane(registers, st.lanes, np.atleast_1d(lane.read(st)))[0]
    else:

        def pick(st: Waves, registers: np.ndarray) -> np.ndarray:
            return np.broadcast_to(registers, (st.count, 1))[:, 0]

    def step(st: Waves) -> None:
        if lane is not None:
            for n in lane.registers:
                st.require_defined(n, "lane number")
        result = pick(st, value.read(st))
        shadow = value.poison(st)
        bits = None if shadow is None else pick(st, shadow)
        if d == NULL:
            return
        if d == EXEC:
            st.exec_written()
        st.s[d][...] = result
        st.shadow[d] = None if bits is None or not bits.any() else bits

    return step


def _write_lane_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    d = instruction["vdst"] - VECTOR
    limits.check_vector(instruction["vdst"], 1)
    value = source(instruction["src0"], "b32", instruction, limits, scalar=True)
    lane = source(instruction["src1"], "b32", instruction, limits, scalar=True)

    def step(st: Waves) -> None:
        for n in lane.registers:
            st.require_defined(n, "lane number")
        index = np.broadcast_to(lane.read(st) & np.uint32(31), (st.count,)).astype(np.intp)
        rows = np.arange(st.count)
        st.v[d][rows, index] = value.read(st)
        shadow, poison = st.shadow[VECTOR + d], value.poison(st)
        if shadow is not None or poison is not None:  # spills of whole register pairs move undefined halves, too
            shadow = np.zeros((st.count, LANES), np.uint32) if shadow is None else shadow.copy()
            shadow[rows, index] = 0 if poison is None else poison
            st.shadow[VECTOR + d] = shadow if shadow.any() else None

    return step


def _swap_step(instruction: Instruction, limits: RegisterLimits) -> Step:
    a, b = instruction["vdst"], instruction["src0"]
    limits.check_vector(a, 1)
    limits.check_vector(b, 1)
    to_a, to_b = Writer(a - VECTOR, "b32", False), Writer(b - VECTOR, "b32", False)

    def step(st: Waves) -> None:
        mask, old_a, old_b = st.mask, st.v[a - VECTOR].copy(), st.v[b - VECTOR].copy()
        shadow_a, shadow_b = st.shadow[a], st.shadow[b]
        to_a.store(st, old_b, mask)
        to_b.store(st, old_a, mask)
        to_a.store_shadow(st, shadow_b, mask)
        to_b.store_shadow(st, shadow_a, mask)

    return step


# -- transcendentals of scalars (gfx12) --------------------------------------------------------------------

_PSEUDO_SCALAR = {
    "v_s_rcp_f32": conversions.rcp,
    "v_s_rsq_f32": conversions.rsq,
    "v_s_sqrt_f32": conversions.sqrt,
    "v_s_exp_f32": conversions.exp2,
    "v_s_log_f32": conversions.log2,
}


def is_pseudo_scalar(instruction: Instruction) -> bool:
    return instruction.name.startswith("v_s_")


def compile_pseudo_scalar(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step:
    """v_s_rcp_f32 and its kin: the vector unit computes on a scalar register, whatever exec says."""
    function = _PSEUDO_SCALAR.get(instruction.name)
    if function is None or instruction["clmp"] or instruction["omod"]:
        raise UnimplementedInstruction("no semantics for this instruction")
    operand = source(
        instruction["src0"],
        "f32",
        instruction,
        limits,
        scalar=True,
        negate=bool(instruction["neg"] & 1),
        absolute=bool(instruction["abs"] & 1),
    )
    d = instruction["vdst"] & 0xFF

    def step(st: Waves) -> None:
        shadow = operand.poison(st)
        st.s[d][...] = function(np.atleast_1d(operand.read(st)), mode)
        st.shadow[d] = None if shadow is None or not shadow.any() else any_undefined(shadow)

    return step
