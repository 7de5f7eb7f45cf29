"""Vector and scalar memory instructions: global, flat, scratch, buffer, LDS, scalar loads.

Addresses and stored values must be defined in every active lane. Every access is checked against what it may
touch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import cross_lane
from .decode import Instruction
from .errors import (
    AlignmentError,
    EmulatorError,
    LdsAccessError,
    MemoryAccessError,
    ScratchAccessError,
    UnimplementedInstruction,
    UninitialisedRead,
)
from .operands import RegisterLimits, source
from .vector import Step, Writer, check_lanes
from .waves import ALL_BITS, LANES, NULL, VECTOR, Waves

_LOW, _HIGH = np.uint32(0xFFFF), np.uint32(0xFFFF0000)


@dataclass(frozen=True)
class Access:
    """What a load or store mnemonic says after its prefix, e.g. "load_d16_hi_b16"."""

    store: bool
    unit: int  # bytes of one memory unit: 1, 2 or 4
    count: int  # units
    signed: bool
    half: str  # "": whole registers; "low" or "high": 16 bits of one register, the others kept

    @property
    def nbytes(self) -> int:
        return self.unit * self.count

    @property
    def data_bits(self) -> np.uint32:
        """Which bits of a stored register matter."""
        if self.half == "high":
            return np.uint32(((1 << 8 * self.unit) - 1) << 16)
        return ALL_BITS if self.unit == 4 else np.uint32((1 << 8 * self.unit) - 1)


_ACCESS = re.compile(r"(load|store)_(?:(d16_hi|d16)_)?([bui])(8|16|32|64|96|128)(?:_(d16_hi|d16))?$")


def parse_access(operation: str) -> Access | None:
    """`operation` without its prefix, in the spelling of global memory or of LDS (where d16 comes last)."""
    match = _ACCESS.fullmatch(operation)
    if match is None:
        return None
    bits = int(match[4])
    half = {None: "", "d16": "low", "d16_hi": "high"}[match[2] or match[5]]
    return Access(match[1] == "store", min(bits // 8, 4), max(bits // 32, 1), match[3] == "i", half)


# -- moving values between registers and memory ----------------------------------------------------------


def _extended(values: np.ndarray, access: Access) -> np.ndarray:
    if not access.signed or access.unit == 4:
        return values
    shift = np.int32(32 - 8 * access.unit)
    return ((values.view(np.int32) << shift) >> shift).view(np.uint32)


def _write_loaded(
    st: Waves,
    d: int,
    access: Access,
    values: np.ndarray,
    mask: np.ndarray | None,
    undefined: np.ndarray | None = None,
) -> None:
    """Values [count, active lanes] to registers from `d`; `undefined` has their undefined bits, likewise."""
    shape = (st.count, 32)
    for i in range(access.count):
        value = _extended(values[i], access)
        if access.half:
            target, value = (st.high if access.half == "high" else st.low)[d], value.astype(np.uint16)
        else:
            target = st.v[d + i]
        if mask is None:
            target[...] = value.reshape(shape)
        else:
            target[mask] = value
        n = VECTOR + d + i
        if undefined is None and st.shadow[n] is None:
            continue
        bits = None
        if undefined is not None:
            bits = np.zeros(shape, np.uint32)
            bits[slice(None) if mask is None else mask] = undefined[i].reshape(shape) if mask is None else undefined[i]
            if access.half == "high":
                bits = bits << np.uint32(16)
        written = {"": ALL_BITS, "low": _LOW, "high": _HIGH}[access.half]
        st.set_shadow(n, bits, mask, written)


def _stored(st: Waves, data: int, access: Access, mask: np.ndarray | None) -> np.ndarray:
    """Registers from `data` as values [count, active lanes]."""
    rows = []
    for i in range(access.count):
        row = st.v[data + i] if access.half != "high" else st.v[data + i] >> np.uint32(16)
        rows.append(row.reshape(-1) if mask is None else row[mask])
    return np.stack(rows)


def _active(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return values.reshape(-1) if mask is None else values[mask]


def _blame(st: Waves, mask: np.ndarray | None, error: EmulatorError, position: int | None) -> EmulatorError:
    """Name the lane of the `position`-th active one."""
    if position is not None:
        places = np.argwhere(np.ones((st.count, 32), bool) if mask is None else mask)
        wave, lane = (int(i) for i in places[position])
        error.block, error.wave, error.lane = int(st.block[wave]), int(st.wave[wave]), lane
    return error


def _none_active(mask: np.ndarray | None) -> bool:
    return mask is not None and not mask.any()


# -- global memory ---------------------------------------------------------------------------------------


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


def _instruction_offset(instruction: Instruction) -> int:
    if "ioffset" in instruction.fields:
        return _signed(instruction["ioffset"], 24)
    return _signed(instruction["offset"], 13)


_CACHE_CONTROL = {
    "buffer_gl0_inv", "buffer_gl1_inv", "global_inv", "global_wb", "global_wbinv",
}  # fmt: skip


def is_cache_control(instruction: Instruction) -> bool:
    """Cache maintenance: nothing to do where there is no cache."""
    return instruction.name in _CACHE_CONTROL


def compile_global(instruction: Instruction, limits: RegisterLimits) -> Step:
    """GLOBAL and FLAT. A flat address into LDS or scratch lies outside every allocation and faults."""
    operation = instruction.name.split("_", 1)[1]
    if operation.startswith("atomic_"):
        return _atomic_step(instruction, limits, operation.removeprefix("atomic_"))
    access = parse_access(operation)
    if access is None:
        raise UnimplementedInstruction("no semantics for this instruction")
    addresses, check = _global_addresses(instruction, limits)
    register = (
        instruction.get("data", instruction.get("vsrc")) if access.store else instruction["vdst"]
    )  # fmt: skip
    count = access.count
    limits.check_vector(register, count)
    d = register - VECTOR

    def load(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        where = _active(addresses(st), mask)
        try:
            values = st.machine.memory.load(where, access.unit, access.count)
        except (MemoryAccessError, AlignmentError) as error:
            raise _blame(st, mask, error, getattr(error, "position", None)) from None
        st.machine.counts.bytes_read += where.size * access.nbytes
        _write_loaded(st, d, access, values, mask)

    def store(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        for i in range(count):
            st.require_defined_lanes(register + i, "stored", bits=access.data_bits)
        where = _active(addresses(st), mask)
        try:
            st.machine.memory.store(where, _stored(st, d, access, mask), access.unit)
        except (MemoryAccessError, AlignmentError) as error:
            raise _blame(st, mask, error, getattr(error, "position", None)) from None
        st.machine.counts.bytes_written += where.size * access.nbytes

    return store if access.store else load


def _global_addresses(instruction: Instruction, limits: RegisterLimits):
    """The lanes' addresses, uint64 [waves, 32], and the check that they are defined."""
    vaddr = instruction.get("vaddr", instruction.get("addr"))
    saddr, offset = instruction["saddr"], np.uint64(_instruction_offset(instruction) & (1 << 64) - 1)
    if saddr == NULL or (instruction.format == "FLAT" and instruction.generation == "rdna3"):
        s = source(vaddr, "u64", instruction, limits)
        registers = (vaddr, vaddr + 1)
        if not offset:
            return s.read, _address_check(registers)
        return (lambda st: s.read(st) + offset), _address_check(registers)
    limits.check_vector(vaddr, 1)
    base = source(saddr, "u64", instruction, limits)
    index = vaddr - VECTOR
    return (lambda st: base.read(st) + offset + st.v[index]), _address_check((vaddr, saddr, saddr + 1))


def _address_check(registers: tuple[int, ...]) -> Callable[[Waves], None]:
    def check(st: Waves) -> None:
        for n in registers:
            if st.shadow[n] is not None:
                st.require_defined_lanes(n, "address register")

    return check


_ATOMICS = {
    "add_u32": lambda old, new: old + new,
    "sub_u32": lambda old, new: old - new,
    "swap_b32": lambda old, new: new,
    "and_b32": lambda old, new: old & new,
    "or_b32": lambda old, new: old | new,
    "xor_b32": lambda old, new: old ^ new,
    "min_u32": lambda old, new: np.minimum(old, new),
    "max_u32": lambda old, new: np.maximum(old, new),
    "min_i32": lambda old, new: np.minimum(old.view(np.int32), new.view(np.int32)).view(np.uint32),
    "max_i32": lambda old, new: np.maximum(old.view(np.int32), new.view(np.int32)).view(np.uint32),
    "add_f32": lambda old, new: (old.view(np.float32) + new.view(np.float32)).view(np.uint32),
}


def _atomic_step(instruction: Instruction, limits: RegisterLimits, operation: str) -> Step:
    """32-bit atomics, lane after lane in rising order."""
    combine = _ATOMICS.get(operation)
    compares = operation == "cmpswap_b32"
    if combine is None and not compares:
        raise UnimplementedInstruction("no semantics for this atomic")
    addresses, check = _global_addresses(instruction, limits)
    data = instruction.get("data", instruction.get("vsrc"))
    # Whether the old value is returned: bit glc on gfx11, bit 0 of th on gfx12.
    returns = bool(instruction.get("glc") or instruction.get("th") & 1)
    words = 2 if compares else 1
    limits.check_vector(data, words)
    access = Access(False, 4, 1, False, "")

    def step(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        for i in range(words):
            st.require_defined_lanes(data + i, "atomic operand")
        where = _active(addresses(st), mask)
        operands = [_active(st.v[data - VECTOR + i], mask) for i in range(words)]
        memory, old = st.machine.memory, np.empty(where.size, np.uint32)
        for i in range(where.size):
            one = where[i : i + 1]
            try:
                before = memory.load(one, 4, 1)[0]
                if combine is None:
                    after = np.where(before == operands[1][i], operands[0][i], before)
                else:
                    after = combine(before, operands[0][i : i + 1])
                memory.store(one, after[None], 4)
            except (MemoryAccessError, AlignmentError) as error:
                raise _blame(st, mask, error, i) from None
            old[i] = before[0]
        counts = st.machine.counts
        counts.bytes_read += 4 * where.size
        counts.bytes_written += 4 * where.size
        if returns:
            _write_loaded(st, instruction["vdst"] - VECTOR, access, old[None], mask)

    return step


# -- scratch ---------------------------------------------------------------------------------------------


def compile_scratch(instruction: Instruction, limits: RegisterLimits) -> Step:
    """Private memory: per lane, `private_segment_bytes` long."""
    access = parse_access(instruction.name.split("_", 1)[1])
    if access is None:
        raise UnimplementedInstruction("no semantics for this instruction")
    vaddr = instruction.get("vaddr", instruction.get("addr"))
    saddr, offset = instruction["saddr"], _instruction_offset(instruction)
    uses_vector = bool(instruction["sve"])
    register = (
        instruction.get("data", instruction.get("vsrc")) if access.store else instruction["vdst"]
    )  # fmt: skip
    limits.check_vector(register, access.count)

    def step(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        where = np.full((st.count, 32), offset, np.int64)
        if uses_vector:
            st.require_defined_lanes(vaddr, "address register")
            where = where + st.v[vaddr - VECTOR].view(np.int32)
        if saddr != NULL:
            st.require_defined(saddr, "address register")
            where = where + st.s_column[saddr].view(np.int32)
        size = 0 if st.scratch is None else st.scratch.shape[2]
        active = _active(where, mask)
        bad = (active < 0) | (active + access.nbytes > size)
        if bad.any():
            position = int(bad.argmax())
            error = ScratchAccessError(f"private access at byte {int(active[position])} of {size}")
            raise _blame(st, mask, error, position)
        scratch, scratch_undefined = st.scratch, st.scratch_undefined
        assert scratch is not None, "without scratch no access is within its size"
        assert scratch_undefined is not None
        places = np.nonzero(np.ones((st.count, 32), bool) if mask is None else mask)
        if access.store:
            values = _stored(st, register - VECTOR, access, mask)
            shadows = _shadow_rows(st, register, access, mask)
            for i in range(access.count):
                for k in range(access.unit):
                    shift, byte = np.uint32(8 * k), active + access.unit * i + k
                    scratch[(*places, byte)] = (values[i] >> shift).astype(np.uint8)
                    undefined = 0 if shadows is None else (shadows[i] >> shift & np.uint32(0xFF)) != 0
                    scratch_undefined[(*places, byte)] = undefined
            return
        values = np.zeros((access.count, active.size), np.uint32)
        undefined = np.zeros((access.count, active.size), np.uint32)
        for i in range(access.count):
            for k in range(access.unit):
                shift, byte = np.uint32(8 * k), active + access.unit * i + k
                values[i] |= scratch[(*places, byte)].astype(np.uint32) << shift
                undefined[i] |= np.where(scratch_undefined[(*places, byte)], np.uint32(0xFF), np.uint32(0)) << shift
        _write_loaded(st, register - VECTOR, access, values, mask, undefined if undefined.any() else None)

    return step


def _shadow_rows(st: Waves, register: int, access: Access, mask: np.ndarray | None) -> list[np.ndarray] | None:
    """Undefined bits of the registers that a store reads, per active lane; None when all are defined."""
    shadows = [st.shadow[register + i] for i in range(access.count)]
    if all(s is None for s in shadows):
        return None
    rows = []
    for s in shadows:
        s = np.zeros((st.count, 32), np.uint32) if s is None else s
        s = s >> np.uint32(16) if access.half == "high" else s
        rows.append(_active(np.ascontiguousarray(s), mask))
    return rows


# -- buffers ---------------------------------------------------------------------------------------------


def compile_buffer(instruction: Instruction, limits: RegisterLimits) -> Step:
    """Raw buffer loads and stores: out of range reads as zero and stores nothing, dword by dword."""
    access = parse_access(instruction.name.split("_", 1)[1])
    if access is None or instruction["idxen"] or instruction["tfe"]:
        raise UnimplementedInstruction("a buffer instruction other than a plain load or store by byte offset")
    resource = instruction.get("srsrc", instruction.get("rsrc"))
    resource = resource & 0x7F
    soffset = source(instruction["soffset"], "u32", instruction, limits)
    offset = instruction["ioffset"] if "ioffset" in instruction.fields else instruction["offset"]
    vaddr, register = instruction["vaddr"], instruction["vdata"]
    by_lane = bool(instruction["offen"])
    limits.check_vector(register, access.count)

    def step(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        for n in (*range(resource, resource + 4), *soffset.registers):
            st.require_defined(n, "buffer resource")
        words = [st.s[resource + i].astype(np.uint64) for i in range(4)]
        if ((words[1] >> np.uint64(16)) & np.uint64(0x3FFF)).any():
            raise UnimplementedInstruction("a buffer with a stride")
        base = (words[0] | (words[1] & np.uint64(0xFFFF)) << np.uint64(32))[:, None]
        within = np.zeros((st.count, 32), np.uint64) + np.uint64(offset) + soffset.read(st)
        if by_lane:
            st.require_defined_lanes(vaddr, "buffer offset")
            within = within + st.v[vaddr - VECTOR]
        records = np.broadcast_to(words[2][:, None], within.shape)
        active, limit = _active(within, mask), _active(np.ascontiguousarray(records), mask)
        where = _active(base + within, mask)
        counts = st.machine.counts
        if access.store:
            for i in range(access.count):
                st.require_defined_lanes(register + i, "stored", bits=access.data_bits)
            values = _stored(st, register - VECTOR, access, mask)
        else:
            values = np.zeros((access.count, active.size), np.uint32)
        for i in range(access.count):
            step_bytes = np.uint64(access.unit * i)
            inside = active + step_bytes + np.uint64(access.unit) <= limit
            if not inside.any():
                continue
            try:
                if access.store:
                    st.machine.memory.store(where[inside] + step_bytes, values[i : i + 1, inside], access.unit)
                    counts.bytes_written += int(inside.sum()) * access.unit
                else:
                    values[i, inside] = st.machine.memory.load(where[inside] + step_bytes, access.unit, 1)[0]
                    counts.bytes_read += int(inside.sum()) * access.unit
            except (MemoryAccessError, AlignmentError) as error:
                position = getattr(error, "position", None)
                position = None if position is None else int(np.flatnonzero(inside)[position])
                raise _blame(st, mask, error, position) from None
        if not access.store:
            _write_loaded(st, register - VECTOR, access, values, mask)

    return step


# -- LDS -------------------------------------------------------------------------------------------------


def compile_lds(instruction: Instruction, limits: RegisterLimits) -> Step:
    """DS instructions."""
    name = instruction.name
    if instruction.get("gds"):
        raise UnimplementedInstruction("global data share")
    operation = name.removeprefix("ds_")
    if operation in ("bpermute_b32", "permute_b32", "swizzle_b32", "bpermute_fi_b32"):
        return _crossbar_step(instruction, limits, operation)
    if operation == "nop":
        return lambda st: None
    pair = re.fullmatch(r"(load|store)_2addr(_stride64)?_b(32|64)", operation)
    if pair:
        return _pair_step(instruction, limits, pair[1] == "store", int(pair[3]) // 8, bool(pair[2]))
    access = parse_access(operation)
    if access is not None:
        return _lds_step(instruction, limits, access)
    atomic = re.fullmatch(r"([a-z]+)(_rtn)?_([ubif]32)", operation)
    if atomic:
        kind = f"{atomic[1]}_{atomic[3]}".replace("storexchg", "swap")
        if kind in _ATOMICS:
            return _lds_atomic_step(instruction, limits, kind, bool(atomic[2]))
    raise UnimplementedInstruction("no semantics for this instruction")


def _lds_places(st: Waves, address: int, offset: int, access: Access, mask: np.ndarray | None) -> np.ndarray:
    """Checked unit indices of an LDS access, for the active lanes."""
    where = st.v[address - VECTOR].astype(np.int64) + offset
    where = _active(where, mask)
    machine = st.machine
    if int(where.max()) + access.nbytes > machine.lds_bytes:
        position = int(where.argmax())
        error: EmulatorError = LdsAccessError(
            f"access of {access.nbytes} bytes at LDS byte {int(where[position])}, the block has {machine.lds_bytes}"
        )
        raise _blame(st, mask, error, position)
    if access.unit > 1:
        bad = (where & (access.unit - 1)) != 0
        if bad.any():
            position = int(bad.argmax())
            error = AlignmentError(f"LDS byte {int(where[position])} is not a multiple of {access.unit}")
            raise _blame(st, mask, error, position)
    base = np.broadcast_to(st.lds_base, (st.count, 32))
    shift = {1: 0, 2: 1, 4: 2}[access.unit]
    return (where + (base.reshape(-1) if mask is None else base[mask])) >> shift


def _lds_load(st: Waves, places: np.ndarray, access: Access, d: int, mask: np.ndarray | None) -> None:
    machine = st.machine
    data, shadow = machine.lds[access.unit], machine.lds_undefined[access.unit]
    index = places + np.arange(access.count)[:, None]
    values, undefined = data[index], shadow[index]
    machine.counts.lds_bytes_read += values.size * access.unit
    if machine.races is not None:
        machine.races.load(*_who(st, mask), index, access.unit)
    any_undefined = undefined.any()
    if access.unit != 4:
        values = values.astype(np.uint32)
        undefined = undefined.astype(np.uint32)
        if any_undefined and not access.half:
            # The extension of an undefined byte is undefined too when it copies the sign.
            undefined = _extended(undefined, access)
    _write_loaded(st, d, access, values, mask, undefined if any_undefined else None)


def _lds_store(st: Waves, places: np.ndarray, access: Access, data: int, mask: np.ndarray | None) -> None:
    machine = st.machine
    values = _stored(st, data - VECTOR, access, mask)
    shadows = _shadow_rows(st, data, access, mask)
    index = places + np.arange(access.count)[:, None]
    target, shadow = machine.lds[access.unit], machine.lds_undefined[access.unit]
    values = values.astype(target.dtype, copy=False)
    if machine.races is not None:
        changed = (target[index] != values) | (shadow[index] != 0)
        machine.races.store(*_who(st, mask), index, access.unit, changed)
    target[index] = values
    shadow[index] = 0 if shadows is None else _bytewise(np.stack(shadows)).astype(shadow.dtype)
    machine.counts.lds_bytes_written += values.size * access.unit


def _who(st: Waves, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Block and wave of each active lane."""
    if mask is None:
        return np.repeat(st.block, LANES), np.repeat(st.wave, LANES)
    waves = np.nonzero(mask)[0]
    return st.block[waves], st.wave[waves]


def _bytewise(bits: np.ndarray) -> np.ndarray:
    """A byte is undefined if any of its bits is."""
    raw = np.ascontiguousarray(bits).view(np.uint8)
    return np.where(raw != 0, np.uint8(0xFF), np.uint8(0)).view(np.uint32)


def _lds_step(instruction: Instruction, limits: RegisterLimits, access: Access) -> Step:
    address, offset = instruction["addr"], instruction["offset0"] | instruction["offset1"] << 8
    register = instruction["data0"] if access.store else instruction["vdst"]
    limits.check_vector(address, 1)
    limits.check_vector(register, access.count)
    check = _address_check((address,))

    def load(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        _lds_load(st, _lds_places(st, address, offset, access, mask), access, register - VECTOR, mask)

    def store(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        _lds_store(st, _lds_places(st, address, offset, access, mask), access, register, mask)

    return store if access.store else load


def _pair_step(instruction: Instruction, limits: RegisterLimits, store: bool, element: int, stride64: bool) -> Step:
    """Two elements at two offsets, which count elements (or 64 of them)."""
    access = Access(store, 4, element // 4, False, "")
    scale = element * (64 if stride64 else 1)
    offsets = [instruction["offset0"] * scale, instruction["offset1"] * scale]
    address = instruction["addr"]
    if store:
        registers = [instruction["data0"], instruction["data1"]]
    else:
        registers = [instruction["vdst"], instruction["vdst"] + access.count]
    for register in registers:
        limits.check_vector(register, access.count)
    check = _address_check((address,))

    def step(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        # Both places first: a load may overwrite the address register.
        places = [_lds_places(st, address, offset, access, mask) for offset in offsets]
        for place, register in zip(places, registers, strict=False):
            if store:
                _lds_store(st, place, access, register, mask)
            else:
                _lds_load(st, place, access, register - VECTOR, mask)

    return step


def _lds_atomic_step(instruction: Instruction, limits: RegisterLimits, kind: str, returns: bool) -> Step:
    combine, access = _ATOMICS[kind], Access(False, 4, 1, False, "")
    address, data = instruction["addr"], instruction["data0"]
    offset = instruction["offset0"] | instruction["offset1"] << 8
    limits.check_vector(data, 1)
    check = _address_check((address, data))

    def step(st: Waves) -> None:
        mask = st.mask
        if _none_active(mask):
            return
        check(st)
        places = _lds_places(st, address, offset, access, mask)
        operands, words = _active(st.v[data - VECTOR], mask), st.machine.lds[4]
        if st.machine.lds_undefined[4][places].any():
            position = int((st.machine.lds_undefined[4][places] != 0).argmax())
            raise _blame(st, mask, UninitialisedRead("atomic on LDS that was never written"), position)
        old = np.empty(places.size, np.uint32)
        for i, place in enumerate(places):
            old[i] = words[place]
            words[place : place + 1] = combine(words[place : place + 1].copy(), operands[i : i + 1])
        if returns:
            _write_loaded(st, instruction["vdst"] - VECTOR, access, old[None], mask)

    return step


def _crossbar_step(instruction: Instruction, limits: RegisterLimits, operation: str) -> Step:
    offset = instruction["offset0"] | instruction["offset1"] << 8
    address, data, d = instruction["addr"], instruction["data0"], instruction["vdst"]
    swizzle = operation == "swizzle_b32"
    if operation == "bpermute_fi_b32":
        raise UnimplementedInstruction("no semantics for this instruction")
    if swizzle:
        data = address  # the value to move is the address operand's register

        def move(st: Waves, values: np.ndarray, lanes: np.ndarray) -> cross_lane.Moved:
            return cross_lane.ds_swizzle(values, lanes, offset)
    else:
        permute = cross_lane.ds_bpermute if operation == "bpermute_b32" else cross_lane.ds_permute

        def move(st: Waves, values: np.ndarray, lanes: np.ndarray) -> cross_lane.Moved:
            return permute(st.v[address - VECTOR], values, lanes, offset)

    for register in (address, data, d):
        limits.check_vector(register, 1)
    write = Writer(d - VECTOR, "b32", False)

    def step(st: Waves) -> None:
        lanes = st.lanes
        if not swizzle:
            st.require_defined_lanes(address, "lane address")
        moved = move(st, st.v[data - VECTOR], lanes)
        check_lanes(st, moved.read_inactive & lanes, instruction.name)
        shadow = st.shadow[data]
        bits = None if shadow is None else move(st, np.ascontiguousarray(shadow), lanes).values
        write.store(st, moved.values, st.mask)
        if bits is not None or st.shadow[d] is not None:
            write.store_shadow(st, bits, st.mask)

    return step


# -- scalar memory ---------------------------------------------------------------------------------------

_SCALAR_LOAD = re.compile(r"s_(buffer_)?load_([bui])(8|16|32|64|96|128|256|512)$")
_SCALAR_HINTS = ("s_dcache_inv", "s_gl1_inv", "s_prefetch_", "s_buffer_prefetch_data")


def compile_scalar_memory(instruction: Instruction, limits: RegisterLimits) -> Step:
    """SMEM loads. Waves that load from one address, as they do for arguments, share the access."""
    name = instruction.name
    if name.startswith(_SCALAR_HINTS):
        return lambda st: None
    match = _SCALAR_LOAD.fullmatch(name)
    if match is None or match[1]:
        raise UnimplementedInstruction("no semantics for this instruction")
    bits = int(match[3])
    if bits < 32:
        return _small_scalar_load(instruction, limits, bits // 8, match[2] == "i")
    dwords, d = bits // 32, instruction["sdata"]
    addresses, check = _scalar_addresses(instruction, limits)

    def step(st: Waves) -> None:
        check(st)
        where = addresses(st)
        memory = st.machine.memory
        first = int(where[0])
        if (where == where[0]).all():
            st.sgpr[d : d + dwords] = memory.load_scalar(first, dwords)[:, None]
        else:
            for address in np.unique(where):
                st.sgpr[d : d + dwords, where == address] = memory.load_scalar(int(address), dwords)[:, None]
        st.machine.counts.scalar_bytes_read += 4 * dwords * st.count
        for n in range(d, d + dwords):
            st.shadow[n] = None

    return step


def _scalar_addresses(instruction: Instruction, limits: RegisterLimits):
    base, soffset = instruction["sbase"], instruction["soffset"]
    if "ioffset" in instruction.fields:
        offset = _signed(instruction["ioffset"], 24)
    else:
        offset = _signed(instruction["offset"], 21)
    immediate = np.uint64(offset & (1 << 64) - 1)
    pointer = source(base, "u64", instruction, limits, scalar=True)
    registers = (base, base + 1) if soffset == NULL else (base, base + 1, soffset)

    def addresses(st: Waves) -> np.ndarray:
        where = pointer.read(st) + immediate
        return where if soffset == NULL else where + st.s[soffset]

    def check(st: Waves) -> None:
        for n in registers:
            if st.shadow[n] is not None:
                st.require_defined(n, "address register")

    return addresses, check


def _small_scalar_load(instruction: Instruction, limits: RegisterLimits, nbytes: int, signed: bool) -> Step:
    addresses, check = _scalar_addresses(instruction, limits)
    d, access = instruction["sdata"], Access(False, nbytes, 1, signed, "")

    def step(st: Waves) -> None:
        check(st)
        st.s[d][...] = _extended(st.machine.memory.load(addresses(st), nbytes, 1)[0], access)
        st.shadow[d] = None
        st.machine.counts.scalar_bytes_read += nbytes * st.count

    return step
