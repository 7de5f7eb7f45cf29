"""Whether a kernel waits for what its loads bring before it uses it.

Loads of RDNA run on while the wave goes ahead; a counter tells how many are still on their way, and the code must wait
until it is low enough. The emulator finishes a load at once, so that a wait too few changes no result there, and on
hardware only now and then. Here each path through the code is followed instead of run: a proof over all paths, for
the registers that instructions name.

How. For each register that a load will write, the number of loads behind it in the same queue is kept. They come in
in order, so a wait until no more than `n` are left has brought each load that has `n` or more behind it. Scalar loads
come in any order: only a wait for none brings one. Where paths meet, the smaller number holds, which only asks for
more. LDS itself is kept like a register that all waves share: a wave that comes to a barrier must have no access to it
on its way.

Not followed: order in global memory between waves (no kernel here passes anything on there), waits between arithmetic
units, and what is on its way when a wave gives its registers back (MSG_DEALLOC_VGPRS), where LLVM and Mesa wait for
stores to scratch alone.

Source: AMD RDNA3.5 and RDNA4 ISA, "Data dependency resolution" and "S_WAITCNT"; LLVM's AMDGPU usage guide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..amdgpu_code_object import CodeObject
from .decode import Instruction
from .errors import UndecodableInstruction, UnimplementedInstruction
from .hazards import instructions_of
from .memory_ops import is_cache_control

# What is waited for, and how it is counted:
VECTOR_LOADS = "vector loads"  # global, scratch, buffer
LDS_ACCESSES = "LDS accesses"
SCALAR_LOADS = "scalar loads"

LDS = "LDS"

_QUEUES = (VECTOR_LOADS, LDS_ACCESSES, SCALAR_LOADS)


@dataclass(frozen=True, slots=True)
class MissingWait:
    """An instruction that may run before a load has brought what it needs."""

    instruction: Instruction
    register: str  # or "LDS"
    load: Instruction

    def __str__(self) -> str:
        return (
            f"{self.instruction.address:#x}: {self.instruction}: does not wait for {self.register}, which "
            f"{self.load.address:#x}: {self.load}: accesses"
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    behind: int  # accesses of the same queue that were issued later
    load: Instruction


# For each queue: what is on its way.
_State = dict[str, dict[str, _Pending]]


def missing_waits(code_object: CodeObject) -> dict[str, list[MissingWait]]:
    """Instructions that may run before a load they depend on is done.

    Returns
    -------
    kernel name -> what is missing, kernels without any left out

    Raises
    ------
    UnimplementedInstruction : the code jumps to a computed address, or has an access to memory that is not known here
    """
    found = {
        name: _missing(kernel.entry_address, instructions_of(code_object, name))
        for name, kernel in code_object.kernels.items()
    }
    return {name: missing for name, missing in found.items() if missing}


def _missing(entry: int, instructions: Iterable[Instruction]) -> list[MissingWait]:
    effects = {instruction.address: _effect(instruction) for instruction in instructions}
    before: dict[int, _State] = {entry: {queue: {} for queue in _QUEUES}}
    missing: dict[tuple[int, str], MissingWait] = {}
    heads = {effect.instruction.target for effect in effects.values() if _branches(effect.instruction)}
    due = [entry]
    while due:
        address = due.pop()
        state = {queue: dict(pending) for queue, pending in before[address].items()}
        while True:
            effect = effects.get(address)
            if effect is None:
                raise UndecodableInstruction(f"{address:#x}: no instruction of the kernel begins here")
            for lack in _follow(effect, state):
                missing[lack.instruction.address, lack.register] = lack
            instruction = effect.instruction
            if _branches(instruction) and _join(before, instruction.target, state):
                due.append(instruction.target)
            if instruction.name in ("s_branch", "s_endpgm"):
                break
            address = instruction.end
            if address in heads:
                if _join(before, address, state):
                    due.append(address)
                break
    return [missing[key] for key in sorted(missing)]


def _branches(instruction: Instruction) -> bool:
    return instruction.name == "s_branch" or instruction.name.startswith("s_cbranch_")


def _join(before: dict[int, _State], address: int, state: _State) -> bool:
    """Let a path with `state` lead to `address`. True if that asks for more than the paths so far."""
    known = before.get(address)
    if known is None:
        before[address] = {queue: dict(pending) for queue, pending in state.items()}
        return True
    changed = False
    for queue, pending in state.items():
        for register, load in pending.items():
            other = known[queue].get(register)
            if other is None or load.behind < other.behind:
                known[queue][register] = load
                changed = True
    return changed


def _follow(effect: _Effect, state: _State) -> Iterator[MissingWait]:
    """What the instruction lacks; `state` becomes that behind it."""
    for queue, most in effect.waits.items():
        state[queue] = {r: load for r, load in state[queue].items() if not _arrived(queue, load, most)}
    access = effect.access
    for queue, pending in state.items():
        touched = effect.touched
        if access and (access.queue != queue or queue == SCALAR_LOADS):  # in one queue the later load writes later
            touched += access.brought
        for register in touched:
            if register in pending:
                yield MissingWait(effect.instruction, register, pending[register].load)
    if access:
        pending = state[access.queue]
        for register, load in pending.items():
            pending[register] = _Pending(min(load.behind + 1, _MOST_BEHIND), load.load)
        for register in access.brought:
            pending[register] = _Pending(0, effect.instruction)


# More than a counter can ask to be left.
_MOST_BEHIND = 64


def _arrived(queue: str, load: _Pending, most: int) -> bool:
    return most == 0 or (queue != SCALAR_LOADS and load.behind >= most)


# -- what an instruction means here ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Access:
    """An access to memory that goes on while the wave does."""

    queue: str
    brought: tuple[str, ...]  # registers that it writes, or LDS


@dataclass(frozen=True, slots=True)
class _Effect:
    instruction: Instruction
    waits: dict[str, int]  # queue -> the most that may be left
    touched: tuple[str, ...]  # registers read or written at once; LDS where the accesses of other waves come next
    access: _Access | None


# gfx12 has an instruction for each counter, or for two, with the bits of its immediate that hold the limit.
_LOW, _HIGH = (0, 63), (8, 63)
_COUNTERS: dict[str, dict[str, tuple[int, int]]] = {
    "s_wait_loadcnt": {VECTOR_LOADS: _LOW},
    "s_wait_dscnt": {LDS_ACCESSES: _LOW},
    "s_wait_kmcnt": {SCALAR_LOADS: _LOW},
    "s_wait_loadcnt_dscnt": {VECTOR_LOADS: _HIGH, LDS_ACCESSES: _LOW},
    "s_wait_storecnt_dscnt": {LDS_ACCESSES: _LOW},
    # gfx11 counts accesses to LDS and scalar loads together.
    "s_waitcnt": {VECTOR_LOADS: (10, 63), LDS_ACCESSES: (4, 63), SCALAR_LOADS: (4, 63)},
    "s_waitcnt_vmcnt": {VECTOR_LOADS: _LOW},
    "s_waitcnt_lgkmcnt": {LDS_ACCESSES: _LOW, SCALAR_LOADS: _LOW},
}
_BARRIERS = ("s_barrier", "s_barrier_signal")
# Registers that an instruction reads without a word in its text.
_READS_VCC = ("s_cbranch_vccz", "s_cbranch_vccnz", "v_dual_cndmask_b32", "v_div_fmas_f32", "v_div_fmas_f64")
# Jumps to an address that is computed, registers that are, messages that come back, barriers of other kinds.
_NOT_FOLLOWED = re.compile(
    r"s_(setpc|swappc|call|rfe)_|.*_movrel|.*swaprel|s_sendmsg_rtn_"
    r"|s_barrier_(signal_isfirst|init|join|leave)|s_get_barrier_state"
)
_QUEUE_OF_FORMAT = {
    "GLOBAL": VECTOR_LOADS,
    "SCRATCH": VECTOR_LOADS,
    "BUFFER": VECTOR_LOADS,
    "DS": LDS_ACCESSES,
    "SMEM": SCALAR_LOADS,
}
_BRINGS = re.compile(r"_(load|permute|bpermute|swizzle)(_|$)")
_STORES = re.compile(r"_store(_|$)")
_HINTS = re.compile(r"s_(buffer_)?prefetch_|s_dcache_inv|s_gl1_inv|ds_nop")
_NAMED = re.compile(r"\b(v|s|ttmp)(\d+)\b|\b(v|s|ttmp)\[(\d+):(\d+)\]|\b(vcc|exec|m0)(_lo|_hi)?\b")


def _effect(instruction: Instruction) -> _Effect:
    if _NOT_FOLLOWED.match(instruction.name):
        raise _not_followed(instruction)
    counters = _COUNTERS.get(instruction.name, {})
    waits = {queue: instruction["simm16"] >> shift & mask for queue, (shift, mask) in counters.items()}
    if instruction.name == "s_wait_idle":
        waits = dict.fromkeys(_QUEUES, 0)
    if instruction.name in _BARRIERS:
        return _Effect(instruction, waits, (LDS,), None)
    access = _access(instruction)
    operands = str(instruction).split(", ")
    at_once = operands[1:] if access and _BRINGS.search(instruction.name) else operands
    touched = tuple(_registers(", ".join(at_once)))
    if instruction.name in _READS_VCC or instruction.second in _READS_VCC:
        touched += ("vcc_lo",)
    return _Effect(instruction, waits, touched, access)


def _not_followed(instruction: Instruction) -> UnimplementedInstruction:
    return UnimplementedInstruction(f"{instruction.address:#x}: {instruction}: waits are not followed through this")


def _access(instruction: Instruction) -> _Access | None:
    """The access to memory that the instruction sets off, if what it brings has to be waited for."""
    name, form = instruction.name, instruction.format
    if is_cache_control(instruction) or _HINTS.match(name) or form not in (*_QUEUE_OF_FORMAT, "FLAT"):
        return None
    stores, brings = _STORES.search(name), _BRINGS.search(name)
    if form == "FLAT" or not (stores or brings):
        raise _not_followed(instruction)
    queue = _QUEUE_OF_FORMAT[form]
    destination = tuple(_registers(str(instruction).split(", ")[0])) if brings else ()
    if queue == LDS_ACCESSES:  # permutations go through its queue, not into it
        return _Access(queue, (*destination, LDS) if "load" in name or stores else destination)
    return _Access(queue, destination) if brings else None


def _registers(text: str) -> Iterator[str]:
    """The registers in an instruction's text, one by one."""
    for kind, number, kinds, first, last, special, part in _NAMED.findall(text):
        if kind:
            yield kind + number
        elif kinds:
            yield from (f"{kinds}{n}" for n in range(int(first), int(last) + 1))
        elif special == "m0":
            yield special
        else:
            yield from [special + part] if part else [f"{special}_lo", f"{special}_hi"]
