"""A kernel's code, compiled block by block into closures as execution reaches it.

A basic block is a run of instructions that only its end can leave. What ends it is described by `Exit`: the
scheduler decides what that means for groups of waves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .decode import Instruction, decode, generation
from .errors import RegisterError, UndecodableInstruction, UnimplementedInstruction, UninitialisedRead
from .float_formats import FloatMode
from .memory_ops import (
    compile_buffer,
    compile_global,
    compile_lds,
    compile_scalar_memory,
    compile_scratch,
    is_cache_control,
)
from .operands import RegisterLimits
from .packed import compile_packed
from .scalar import compile_scalar
from .vector import (
    LANE_MOVES,
    Step,
    compile_carry,
    compile_dual,
    compile_lane_move,
    compile_pseudo_scalar,
    compile_vector,
    is_carry,
    is_pseudo_scalar,
)
from .waves import EXEC, SCC, VCC, Waves

_NO_EFFECT = {
    "s_nop", "s_sleep", "s_clause", "s_delay_alu", "s_setprio", "s_sendmsg", "s_icache_inv", "s_version",
    "s_set_inst_prefetch_distance", "s_ttracedata", "s_ttracedata_imm", "s_singleuse_vdst",
    "v_nop", "s_wakeup",
    "s_waitcnt", "s_waitcnt_depctr", "s_wait_idle", "s_wait_event", "s_wait_alu",
    "s_wait_loadcnt", "s_wait_storecnt",
    "s_wait_samplecnt", "s_wait_bvhcnt", "s_wait_expcnt", "s_wait_dscnt",
    "s_wait_kmcnt", "s_wait_loadcnt_dscnt",
    "s_wait_storecnt_dscnt", "s_waitcnt_vscnt", "s_waitcnt_vmcnt", "s_waitcnt_expcnt", "s_waitcnt_lgkmcnt",
}  # fmt: skip
_SIGNAL_WORKGROUP = 193  # operand -1: the barrier of the whole block


@dataclass(frozen=True)
class Exit:
    """How a block ends.

    kind : "fall", "jump", "branch", "end", "barrier", "signal", "wait", "computed", "mode" or "fault"
    target : address that "jump" and "branch" go to
    taken : "branch": bool [waves], who jumps to `target`; "computed": uint64 [waves], device addresses; "fault": raises
    mode : "mode": the new MODE
    """

    kind: str
    instruction: Instruction | None
    next: int  # address after the block
    target: int = 0
    taken: Callable[[Waves], np.ndarray] | None = None
    exec_zero: bool = False  # a branch that skips code when no lane is on
    mode: int = 0


@dataclass
class Block:
    """One basic block. `lane_only`: it writes nothing but active lanes, so that running it with exec 0 is
    running nothing."""

    index: int
    address: int
    steps: list[Step]
    step_instructions: list[Instruction]
    instructions: list[Instruction]
    exit: Exit
    lane_only: bool


class Program:
    """The code from one entry point. MODE is known when a block is compiled, so a block exists once per
    MODE."""

    def __init__(self, arch: str, text: bytes, text_address: int, entry: int, code_bytes: int, vgprs: int):
        self.generation = generation(arch)
        self.text, self.text_address = text, text_address
        self.limits = RegisterLimits(vgprs)
        self.blocks: list[Block] = []
        self._by_place: dict[tuple[int, int], Block] = {}
        self._instructions: dict[int, Instruction] = {}
        self.leaders = self._find_leaders(entry, entry + code_bytes if code_bytes else text_address + len(text))

    def instruction_at(self, address: int) -> Instruction:
        found = self._instructions.get(address)
        if found is None:
            offset = address - self.text_address
            if not 0 <= offset < len(self.text):
                error = UndecodableInstruction("the program counter left the code")
                error.locate("", address, "")
                raise error
            found = self._instructions[address] = decode(self.text, offset, address, self.generation)
        return found

    def block(self, address: int, mode: int) -> Block:
        found = self._by_place.get((address, mode))
        if found is None:
            found = self._by_place[address, mode] = self._compile_block(address, mode)
        return found

    def _find_leaders(self, entry: int, end: int) -> set[int]:
        """Addresses that a branch goes to. Code that cannot be decoded is an error only if it is reached."""
        leaders, address = set(), entry
        while address < end:
            try:
                instruction = self.instruction_at(address)
            except UndecodableInstruction:
                break
            if instruction.name == "s_branch" or instruction.name.startswith("s_cbranch_"):
                leaders.add(instruction.target)
            address = instruction.end
        return leaders

    def _compile_block(self, start: int, mode: int) -> Block:
        float_mode = FloatMode.from_register(mode)
        steps: list[Step] = []
        step_instructions: list[Instruction] = []
        instructions: list[Instruction] = []
        address, lane_only = start, True
        leave: Exit | None
        while True:
            if address != start and address in self.leaders:
                leave = Exit("fall", None, address)
                break
            try:
                instruction = self.instruction_at(address)
            except UndecodableInstruction as error:
                leave = Exit("fault", None, address, taken=_raiser(error))
                break
            instructions.append(instruction)
            address = instruction.end
            leave = _exit(instruction, mode)
            if leave is not None:
                break
            try:
                step = compile_step(instruction, self.limits, float_mode)
            except (UnimplementedInstruction, RegisterError) as error:
                step = _raiser(error)
            if step is not None:
                steps.append(step)
                step_instructions.append(instruction)
                lane_only = lane_only and _writes_lanes_only(instruction)
        block = Block(
            len(self.blocks),
            start,
            steps,
            step_instructions,
            instructions,
            leave,
            lane_only and leave.kind == "fall",
        )
        self.blocks.append(block)
        return block


def _raiser(error: Exception) -> Callable:
    def fail(st: Waves):
        raise type(error)(getattr(error, "message", str(error)))

    return fail


def compile_step(instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step | None:
    """The closure for one instruction that does not end a block; None if it has no effect here."""
    name, form = instruction.name, instruction.format
    if name in _NO_EFFECT or is_cache_control(instruction):
        return None
    if form == "VOPD":
        return compile_dual(instruction, limits, mode)
    if form == "VOP3P":
        return compile_packed(instruction, limits, mode)
    if is_carry(instruction):
        return compile_carry(instruction, limits, mode)
    if is_pseudo_scalar(instruction):
        return compile_pseudo_scalar(instruction, limits, mode)
    if name in LANE_MOVES:
        return compile_lane_move(instruction, limits, mode)
    if form in ("VOP1", "VOP2", "VOP3", "VOPC", "VOP3SD"):
        return compile_vector(instruction, limits, mode)
    if form in ("GLOBAL", "FLAT"):
        return compile_global(instruction, limits)
    if form == "SCRATCH":
        return compile_scratch(instruction, limits)
    if form == "BUFFER":
        return compile_buffer(instruction, limits)
    if form == "DS":
        return compile_lds(instruction, limits)
    if form == "SMEM":
        return compile_scalar_memory(instruction, limits)
    if name == "s_getpc_b64":
        return _getpc_step(instruction)
    if form in ("SOP1", "SOP2", "SOPC", "SOPK"):
        return compile_scalar(instruction, limits, mode)
    raise UnimplementedInstruction("no semantics for this instruction")


def _getpc_step(instruction: Instruction) -> Step:
    d, end = instruction["sdst"], instruction.end

    def step(st: Waves) -> None:
        address = st.machine.image_base + end
        st.s[d][...], st.s[d + 1][...] = address & 0xFFFFFFFF, address >> 32
        st.shadow[d] = st.shadow[d + 1] = None

    return step


def _exit(instruction: Instruction, mode: int) -> Exit | None:
    name, after = instruction.name, instruction.end
    if name == "s_branch":
        return Exit("jump", instruction, after, instruction.target)
    if name.startswith("s_cbranch_"):
        condition = _CONDITIONS.get(name.removeprefix("s_cbranch_"))
        if condition is None:
            return Exit("fault", instruction, after, taken=_raiser(UnimplementedInstruction("a debugger branch")))
        return Exit("branch", instruction, after, instruction.target, condition, name == "s_cbranch_execz")
    if name in ("s_endpgm", "s_endpgm_saved"):
        return Exit("end", instruction, after)
    if name == "s_barrier":
        return Exit("barrier", instruction, after)
    if name in ("s_barrier_signal", "s_barrier_wait"):
        which = instruction["ssrc0"] if name == "s_barrier_signal" else instruction["simm16"]
        if which != (_SIGNAL_WORKGROUP if name == "s_barrier_signal" else 0xFFFF):
            return Exit("fault", instruction, after, taken=_raiser(UnimplementedInstruction("a named barrier")))
        return Exit(name.removeprefix("s_barrier_"), instruction, after)
    if name in ("s_setpc_b64", "s_swappc_b64"):
        return Exit("computed", instruction, after, taken=_computed(instruction))
    if name == "s_call_b64":
        return Exit("computed", instruction, after, taken=_call(instruction))
    if name in ("s_round_mode", "s_denorm_mode"):
        k, shift = instruction["simm16"] & 15, 0 if name == "s_round_mode" else 4
        return Exit("mode", instruction, after, mode=mode & ~(15 << shift) | k << shift)
    if name == "s_setreg_imm32_b32":
        return _set_register(instruction, mode)
    if name in ("s_trap", "s_code_end", "s_sethalt"):
        return Exit("fault", instruction, after, taken=_raiser(UnimplementedInstruction("the program stops here")))
    return None


_HARDWARE_MODE = 1  # number of the MODE register


def _set_register(instruction: Instruction, mode: int) -> Exit:
    control = instruction["simm16"]
    register, offset, width = control & 63, control >> 6 & 31, (control >> 11 & 31) + 1
    if register != _HARDWARE_MODE or offset + width > 8:
        error = UnimplementedInstruction("setting a hardware register other than rounding and denormals")
        return Exit("fault", instruction, instruction.end, taken=_raiser(error))
    mask = ((1 << width) - 1) << offset
    return Exit("mode", instruction, instruction.end, mode=mode & ~mask | (instruction["literal"] << offset) & mask)


def _scc(st: Waves) -> np.ndarray:
    shadow = st.shadow[SCC]
    if shadow is not None and shadow.any():
        raise UninitialisedRead("the branch depends on a register that was never written")
    return st.scc


def _vccz(st: Waves) -> np.ndarray:
    st.require_defined(VCC, "branch condition")
    return st.s[VCC] == 0


_CONDITIONS = {
    "scc0": lambda st: ~_scc(st),
    "scc1": _scc,
    "vccz": _vccz,
    "vccnz": lambda st: ~_vccz(st),
    "execz": lambda st: st.s[EXEC] == 0,
    "execnz": lambda st: st.s[EXEC] != 0,
}


def _computed(instruction: Instruction) -> Callable[[Waves], np.ndarray]:
    register = instruction["ssrc0"]
    link = instruction["sdst"] if instruction.name == "s_swappc_b64" else None

    def target(st: Waves) -> np.ndarray:
        st.require_defined(register, "jump target")
        st.require_defined(register + 1, "jump target")
        where = st.s[register] | st.s[register + 1].astype(np.uint64) << np.uint64(32)
        if link is not None:
            _store_link(st, link, instruction.end)
        return where

    return target


def _call(instruction: Instruction) -> Callable[[Waves], np.ndarray]:
    def target(st: Waves) -> np.ndarray:
        _store_link(st, instruction["sdst"], instruction.end)
        return np.full(st.count, st.machine.image_base + instruction.target, np.uint64)

    return target


def _store_link(st: Waves, d: int, address: int) -> None:
    address += st.machine.image_base
    st.s[d][...], st.s[d + 1][...] = address & 0xFFFFFFFF, address >> 32
    st.shadow[d] = st.shadow[d + 1] = None


def _writes_lanes_only(instruction: Instruction) -> bool:
    """Whether the instruction changes active lanes and memory behind them, and nothing of the wave as a
    whole."""
    if instruction.format in ("GLOBAL", "FLAT", "SCRATCH", "DS", "BUFFER", "VOPD"):
        return True
    if instruction.format in ("VOP1", "VOP2", "VOP3"):
        return (
            instruction.name not in LANE_MOVES
            and not instruction.name.startswith(("v_cmp", "v_s_"))
            and not is_carry(instruction)
        )
    return instruction.format == "VOP3P" and not instruction.name.startswith("v_wmma")


def classify(instruction: Instruction) -> str:
    """The class that a launch report counts an instruction under."""
    name, form = instruction.name, instruction.format
    if form == "SOPP" or name.startswith(("s_wait", "s_barrier", "s_setpc", "s_swappc", "s_call")):
        if name.startswith(("s_branch", "s_cbranch")) or name in (
            "s_setpc_b64",
            "s_swappc_b64",
            "s_call_b64",
        ):
            return "branch"
        if name.startswith("s_wait"):
            return "wait"
        return "barrier" if name.startswith("s_barrier") else "control"
    if name.startswith("v_dot"):
        return "dot"
    if form == "VOP3P":
        return "wmma" if name.startswith("v_wmma") else "vop3p"
    by_format = {
        "SMEM": "smem", "DS": "lds", "GLOBAL": "global", "FLAT": "global", "SCRATCH": "scratch",
        "BUFFER": "buffer",
        "VOPD": "vopd",
    }  # fmt: skip
    if form in by_format:
        return "cache" if is_cache_control(instruction) else by_format[form]
    return "salu" if form.startswith("SOP") else "valu"


def tally(blocks: list[Block], runs: Counter[int]) -> tuple[Counter[str], Counter[str]]:
    """Wave-instructions by class and by mnemonic, from how many waves ran each block."""
    classes: Counter[str] = Counter()
    mnemonics: Counter[str] = Counter()
    for index, count in runs.items():
        for instruction in blocks[index].instructions:
            classes[classify(instruction)] += count
            name = instruction.name if not instruction.second else f"{instruction.name}::{instruction.second}"
            mnemonics[name] += count
    return classes, mnemonics
