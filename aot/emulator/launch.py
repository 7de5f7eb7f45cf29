"""Loading a code object and launching a kernel, as driver and command processor do it."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ..amdgpu_code_object import KernelInfo
from .decode import generation
from .errors import LaunchError
from .machine import Counts, Machine
from .memory import DeviceMemory
from .module import Kernel
from .program import tally
from .schedule import SCHEDULES, Batch
from .waves import EXEC, LANES, VECTOR, Waves

MAX_LDS_BYTES = 65536  # of one block, on every RDNA3 and RDNA4 device
MAX_BLOCK_THREADS = 1024
BATCH_WAVES = 64  # waves that run together: enough to hide the interpreter, few enough to stay in the host's cache
DEFAULT_BUDGET = 4_000_000_000  # wave-instructions
_TTMP7, _TTMP8, _TTMP9 = 115, 116, 117
_WAVE_ID_SHIFT, _WAVE_ID_MASK = 25, 31 << 25  # of TTMP8: which wave of its block this is
_DX10_CLAMP, _IEEE = 1 << 8, 1 << 9  # where FloatMode.from_register looks for them


@dataclass(frozen=True)
class LaunchReport:
    """What a launch did. Instruction counts are wave-instructions: one per wave that executed it."""

    kernel: str
    arch: str
    schedule: str
    blocks: int
    waves: int
    instructions: dict[str, int]  # by class: salu, valu, vopd, vop3p, dot, wmma, lds, global, smem, branch, wait, ...
    mnemonics: dict[str, int] = field(repr=False)
    bytes_read: int  # global memory, summed over lanes
    bytes_written: int
    scalar_bytes_read: int
    lds_bytes_read: int
    lds_bytes_written: int
    seconds: float

    @property
    def total_instructions(self) -> int:
        return sum(self.instructions.values())


def launch(
    kernel: Kernel,
    memory: DeviceMemory,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    dynamic_shared_bytes: int = 0,
    kernarg: bytes = b"",
    schedule: str = "lockstep",
    seed: int = 0,
    budget: int = DEFAULT_BUDGET,
) -> LaunchReport:
    """Run a kernel to its end.

    Parameters
    ----------
    grid : blocks in x, y, z
    block : threads in x, y, z
    dynamic_shared_bytes : LDS after the kernel's static LDS
    kernarg : the explicit arguments, laid out as the code object says; hidden ones are filled in here
    schedule : "lockstep" (fast), or "forward", "reverse", "random": one wave at a time between barriers
    seed : of the random schedule
    budget : wave-instructions after which RunawayError is raised

    Raises
    ------
    LaunchError : the launch does not fit the kernel
    EmulatorError : a fault of the kernel, located at its instruction
    """
    started = time.perf_counter()
    info = kernel.info
    if schedule not in SCHEDULES:
        raise LaunchError(f"unknown schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    _check_shape(info, grid, block, dynamic_shared_bytes)
    lds_bytes = info.group_segment_bytes + dynamic_shared_bytes
    blocks = grid[0] * grid[1] * grid[2]
    waves_per_block = -(-block[0] * block[1] * block[2] // LANES)
    counts = Counts()
    runs: Counter[int] = Counter()
    generator = random.Random(seed)

    image = memory.map(kernel.module.image, f"code object of {info.name}", read_only=True)
    temporaries = [image]
    try:
        arguments = _kernarg(info, kernarg, grid, block, dynamic_shared_bytes)
        kernarg_address = memory.map(arguments, f"arguments of {info.name}", read_only=True)
        temporaries.append(kernarg_address)
        packet = _dispatch_packet(info, grid, block, lds_bytes, image, kernarg_address)
        packet_address = memory.map(packet, f"dispatch packet of {info.name}", read_only=True)
        temporaries.append(packet_address)
        pointers = {"kernarg_segment_ptr": kernarg_address, "dispatch_ptr": packet_address}

        per_batch = max(1, BATCH_WAVES // waves_per_block)
        with np.errstate(all="ignore"):
            for first in range(0, blocks, per_batch):
                count = min(per_batch, blocks - first)
                machine = Machine(memory, first, count, lds_bytes, image, counts)
                waves = _initial_waves(kernel, machine, first, count, waves_per_block, grid, block, pointers)
                batch = Batch(
                    kernel.program,
                    info.name,
                    machine,
                    waves,
                    count,
                    waves_per_block,
                    schedule,
                    generator,
                    budget,
                )
                batch.run()
                budget = batch.budget
                runs += batch.runs
    finally:
        for address in temporaries:
            memory.free(address)

    classes, mnemonics = tally(kernel.program.blocks, runs)
    return LaunchReport(
        kernel=info.name,
        arch=kernel.module.arch,
        schedule=schedule,
        blocks=blocks,
        waves=blocks * waves_per_block,
        instructions=dict(classes),
        mnemonics=dict(mnemonics),
        bytes_read=counts.bytes_read,
        bytes_written=counts.bytes_written,
        scalar_bytes_read=counts.scalar_bytes_read,
        lds_bytes_read=counts.lds_bytes_read,
        lds_bytes_written=counts.lds_bytes_written,
        seconds=time.perf_counter() - started,
    )


def _check_shape(info: KernelInfo, grid: tuple, block: tuple, dynamic_shared_bytes: int) -> None:
    if len(grid) != 3 or len(block) != 3 or min(*grid, *block) < 1:
        raise LaunchError(f"{info.name}: grid {grid} and block {block} must be three positive numbers each")
    threads = block[0] * block[1] * block[2]
    limit = min(info.max_threads, MAX_BLOCK_THREADS)
    if threads > limit:
        raise LaunchError(f"{info.name}: a block of {threads} threads, the kernel was built for at most {limit}")
    lds = info.group_segment_bytes + dynamic_shared_bytes
    if dynamic_shared_bytes < 0 or lds > MAX_LDS_BYTES:
        raise LaunchError(
            f"{info.name}: {info.group_segment_bytes} static and {dynamic_shared_bytes} dynamic LDS bytes, "
            f"a block has at most {MAX_LDS_BYTES}"
        )
    if info.uses_dynamic_stack:
        raise LaunchError(f"{info.name}: needs a dynamic stack, which is not emulated")


def _kernarg(info: KernelInfo, given: bytes, grid: tuple, block: tuple, dynamic_shared_bytes: int) -> np.ndarray:
    """The kernarg segment: the given explicit arguments, then what the runtime adds."""
    explicit = max((a.offset + a.size for a in info.explicit_args), default=0)
    if not explicit <= len(given) <= max(info.kernarg_bytes, explicit):
        raise LaunchError(
            f"{info.name}: {len(given)} bytes of arguments, the kernel takes {explicit}"
            + (f" ({info.kernarg_bytes} with hidden ones)" if info.hidden_args else "")
        )
    size = -(-max(info.kernarg_bytes, 4) // 4) * 4
    segment = bytearray(size)
    segment[: len(given)] = given
    for argument in info.hidden_args:
        value = _hidden(info, argument.value_kind, grid, block, dynamic_shared_bytes)
        segment[argument.offset : argument.offset + argument.size] = value.to_bytes(argument.size, "little")
    return np.frombuffer(bytes(segment), np.uint32)


def _hidden(info: KernelInfo, kind: str, grid: tuple, block: tuple, dynamic_shared_bytes: int) -> int:
    for axis, letter in enumerate("xyz"):
        if kind == f"hidden_block_count_{letter}":
            return grid[axis]
        if kind == f"hidden_group_size_{letter}":
            return block[axis]
        if kind in (f"hidden_remainder_{letter}", f"hidden_global_offset_{letter}"):
            return 0  # the grid is whole blocks, and begins at 0
    if kind == "hidden_grid_dims":
        return 3 if grid[2] * block[2] > 1 else 2 if grid[1] * block[1] > 1 else 1
    if kind == "hidden_dynamic_lds_size":
        return dynamic_shared_bytes
    if kind in ("hidden_private_base", "hidden_shared_base"):
        raise LaunchError(f"{info.name}: asks for {kind}: generic pointers to LDS or scratch are not emulated")
    # Buffers for printf, host calls, malloc and the like: null, so that touching one faults.
    return 0


def _dispatch_packet(
    info: KernelInfo, grid: tuple, block: tuple, lds_bytes: int, image: int, kernarg_address: int
) -> np.ndarray:
    """The 64 bytes of an AQL kernel dispatch packet."""
    dimensions = 3
    threads = [g * b for g, b in zip(grid, block, strict=False)]
    raw = struct.pack(
        "<HHHHHHIIIIIQQQQ", 2, dimensions, *block, 0, *threads, info.private_segment_bytes, lds_bytes,
        image + info.descriptor_address, kernarg_address, 0, 0,
    )  # fmt: skip
    return np.frombuffer(raw, np.uint32)


def _initial_waves(
    kernel: Kernel, machine: Machine, first: int, blocks: int, waves_per_block: int,
    grid: tuple, block: tuple, pointers: dict[str, int],
) -> Waves:  # fmt: skip
    """Registers as the command processor sets them: user and system SGPRs, work-item ids, exec."""
    info, descriptor = kernel.info, kernel.info.descriptor
    gfx12 = generation(kernel.module.arch) == "rdna4"
    number = np.repeat(np.arange(first, first + blocks), waves_per_block)
    wave = np.tile(np.arange(waves_per_block), blocks)
    mode = descriptor.float_mode
    if gfx12 or descriptor.dx10_clamp:
        mode |= _DX10_CLAMP
    if gfx12 or descriptor.ieee_mode:
        mode |= _IEEE
    st = Waves(
        machine, descriptor.vgprs, number, wave, pc=info.entry_address, mode=mode,
        scratch_bytes=info.private_segment_bytes,
    )  # fmt: skip

    def set_scalar(n: int, value) -> None:
        st.s[n][...] = value
        st.shadow[n] = None

    at = 0
    for what, registers in descriptor.user_sgpr_layout():
        if what in pointers:
            set_scalar(at, pointers[what] & 0xFFFFFFFF)
            set_scalar(at + 1, pointers[what] >> 32)
        elif what == "private_segment_size":
            set_scalar(at, info.private_segment_bytes)
        elif what == "dispatch_id":
            set_scalar(at, 0)
            set_scalar(at + 1, 0)
        else:
            raise LaunchError(f"{info.name}: asks for {what} in user SGPRs, which is not emulated")
        at += registers
    if descriptor.fp16_overflow:
        raise LaunchError(f"{info.name}: asks for conversions to float16 that clamp, which are not emulated")
    if descriptor.kernarg_preload:
        raise LaunchError(f"{info.name}: asks for preloaded arguments, which gfx11 and gfx12 do not have")
    at = max(at, descriptor.user_sgprs)
    ids = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
    if gfx12:
        set_scalar(_TTMP9, ids[0])
        set_scalar(_TTMP7, ids[1] | ids[2] << 16)
        set_scalar(_TTMP8, wave << _WAVE_ID_SHIFT)
        st.shadow[_TTMP8] = np.full(st.count, ~np.uint32(_WAVE_ID_MASK))  # the rest is for debuggers
    else:
        for axis, enabled in enumerate(descriptor.workgroup_id_enabled):
            if enabled:
                set_scalar(at, ids[axis])
                at += 1
        if descriptor.workgroup_info_enabled:
            raise LaunchError(f"{info.name}: asks for workgroup info, which is not emulated")

    threads = block[0] * block[1] * block[2]
    thread = wave[:, None] * LANES + np.arange(LANES)
    position = (thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1]))
    packed = sum(p << (10 * axis) for axis, p in enumerate(position[: descriptor.workitem_id_axes]))
    st.v[0][...] = packed
    st.shadow[VECTOR] = None
    live = np.clip(threads - wave * LANES, 0, LANES)
    set_scalar(EXEC, ((1 << live.astype(np.uint64)) - 1).astype(np.uint32))
    st.exec_written()
    return st
