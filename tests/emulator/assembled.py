"""Kernels written in assembly, for tests: assembled by LLVM as the PyPI package ziglang carries it.

A kernel is given as a body. Around it goes a frame that loads inputs and stores outputs: input i of the lane
is v(10+i), output i is v(30+i); v0 is the thread, v1 its byte offset, s[4:5] and s[6:7] point to inputs and
outputs. v2 to v9 and s20 up are free, and hold what the hardware leaves in them: nothing defined.
"""

from __future__ import annotations

import functools
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gristmill.aot.emulator import DeviceMemory, LaunchReport, Module, launch

ARCHS = ("gfx1151", "gfx1201")
INPUT, OUTPUT = 10, 30


@dataclass(frozen=True)
class Source:
    """One kernel of an assembled module."""

    name: str
    body: str
    inputs: int = 2
    outputs: int = 1
    threads: int = 32
    lds_bytes: int = 0
    scratch_bytes: int = 0
    denorm_f32: int = 3
    fp16_overflow: int = 0
    framed: bool = True  # with the loads and stores described above


def wait_all(arch: str) -> str:
    if arch.startswith("gfx11"):
        return "s_waitcnt vmcnt(0) lgkmcnt(0)"
    return "s_wait_loadcnt_dscnt 0x0\n\ts_wait_kmcnt 0x0"


def barrier(arch: str) -> str:
    return "s_barrier" if arch.startswith("gfx11") else "s_barrier_signal -1\n\ts_barrier_wait -1"


def _kernel(arch: str, source: Source) -> str:
    lines = []
    if source.framed:
        stride = 4 * source.threads
        lines += ["s_load_b128 s[4:7], s[0:1], 0x0", wait_all(arch), "v_lshlrev_b32_e32 v1, 2, v0"]
        lines += [f"global_load_b32 v{INPUT + i}, v1, s[4:5] offset:{i * stride}" for i in range(source.inputs)]
        lines.append(wait_all(arch))
    lines += [line.strip() for line in source.body.replace("WAIT", wait_all(arch)).splitlines() if line.strip()]
    if source.framed:
        lines += [f"global_store_b32 v1, v{OUTPUT + i}, s[6:7] offset:{i * stride}" for i in range(source.outputs)]
    lines.append("s_endpgm")
    text = "\n\t".join(lines).replace("BARRIER", barrier(arch))
    return f"""
	.text
	.globl {source.name}
	.p2align 8
	.type {source.name},@function
{source.name}:
	{text}
.L{source.name}_end:
	.size {source.name}, .L{source.name}_end-{source.name}
	.rodata
	.p2align 6
	.amdhsa_kernel {source.name}
		.amdhsa_group_segment_fixed_size {source.lds_bytes}
		.amdhsa_private_segment_fixed_size {source.scratch_bytes}
		.amdhsa_enable_private_segment {int(source.scratch_bytes > 0)}
		.amdhsa_kernarg_size 16
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
		.amdhsa_next_free_vgpr 96
		.amdhsa_next_free_sgpr 96
		.amdhsa_wavefront_size32 1
		.amdhsa_float_denorm_mode_32 {source.denorm_f32}
		.amdhsa_float_denorm_mode_16_64 3
		.amdhsa_fp16_overflow {source.fp16_overflow}
	.end_amdhsa_kernel
"""


def _metadata(source: Source) -> str:
    return f"""  - .name: {source.name}
    .symbol: {source.name}.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {source.lds_bytes}
    .private_segment_fixed_size: {source.scratch_bytes}
    .wavefront_size: 32
    .sgpr_count: 96
    .vgpr_count: 96
    .max_flat_workgroup_size: 1024
    .args:
      - {{.size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 8, .value_kind: global_buffer, .address_space: global}}
"""


@functools.cache
def assemble(arch: str, sources: tuple[Source, ...]) -> Module:
    """One module with all kernels: starting the assembler costs more than its work."""
    text = f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\n\t.amdhsa_code_object_version 5\n'
    text += "".join(_kernel(arch, s) for s in sources)
    text += "\t.amdgpu_metadata\namdhsa.version: [1, 2]\namdhsa.kernels:\n"
    text += "".join(_metadata(s) for s in sources) + "\t.end_amdgpu_metadata\n"
    return Module(link(assemble_text(arch, text)))


def assemble_text(arch: str, text: str) -> bytes:
    """Assembly to an object file. 16-bit operands are written v1.l and v1.h on both archs."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.s", Path(folder) / "a.o"
        source.write_text(text)
        command = [sys.executable, "-m", "ziglang", "clang", "-cc1as", "-triple", "amdgcn-amd-amdhsa"]
        command += ["-target-cpu", arch, "-target-feature", "+real-true16", "-filetype", "obj"]
        _run([*command, "-o", str(target), str(source)])
        return target.read_bytes()


def link(object_file: bytes) -> bytes:
    """An object file to a code object."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.o", Path(folder) / "a.hsaco"
        source.write_bytes(object_file)
        _run([sys.executable, "-m", "ziglang", "ld.lld", "-shared", str(source), "-o", str(target)])
        return target.read_bytes()


class AssemblyError(Exception):
    """What the assembler said."""


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise AssemblyError(result.stderr)


@dataclass
class Outcome:
    outputs: np.ndarray  # uint32 [outputs, threads of all blocks]
    report: LaunchReport


def execute(
    arch: str, source: Source, *inputs: np.ndarray, among: tuple[Source, ...] = (), **options: object
) -> Outcome:
    """Assemble (with `among`, so that kernels share one module) and run one block."""
    module = assemble(arch, among or (source,))
    memory = DeviceMemory()
    data = np.zeros((max(source.inputs, 1), source.threads), np.uint32)
    for i, values in enumerate(inputs):
        data[i] = values
    x = memory.allocate(data.nbytes, "inputs", read_only=True)
    memory.write(x, data)
    out = memory.allocate(max(source.outputs, 1) * source.threads * 4, "outputs")
    report = launch(
        module.kernel(source.name), memory, (1, 1, 1), (source.threads, 1, 1),
        kernarg=struct.pack("<QQ", x, out), **options,
    )  # fmt: skip
    raw = np.frombuffer(memory.read(out, max(source.outputs, 1) * source.threads * 4), np.uint32)
    return Outcome(raw.reshape(-1, source.threads), report)
