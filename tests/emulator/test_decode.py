"""The decoder against LLVM: what it says an instruction is, assembled again, gives back the same bytes.

The objects are those of real compilers: Triton's LLVM for a Triton kernel, clang 22 for a HIP kernel. Bits
that an instruction does not use (the third source of a two-source VOP3, which compilers fill differently) are
left out.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from assembled import ARCHS, AssemblyError, assemble_text
from compiled import hip_kernel, triton_kernels
from elftools.elf.elffile import ELFFile
from gristmill.aot.amdgpu_code_object import CodeObject
from gristmill.aot.emulator.decode import Instruction, decode, generation
from gristmill.packs import find_pack


def instructions(code_object: bytes) -> list[Instruction]:
    """All instructions of an object's kernels, each encoding once."""
    co = CodeObject.parse(code_object)
    seen: dict[bytes, Instruction] = {}
    for kernel in co.kernels.values():
        offset = kernel.entry_address - co.text_address
        end = offset + kernel.code_bytes
        assert kernel.code_bytes > 0
        while offset < end:
            found = decode(co.text, offset, co.text_address + offset, generation(co.arch))
            seen.setdefault(found.raw, found)
            offset += found.size
        assert offset == end
    return list(seen.values())


def used_bits(instruction: Instruction) -> int:
    """The encoding without the source fields that the instruction has no operand for."""
    raw = int.from_bytes(instruction.raw, "little")
    if instruction.format in ("VOP3", "VOP3SD", "VOP3P"):
        for field, low in (("src1", 41), ("src2", 50)):
            if not any(field in name for name in instruction.operands):
                raw &= ~(0x1FF << low)
    return raw


def assembled_again(arch: str, found: list[Instruction]) -> list[Instruction]:
    """The instructions' text through LLVM's assembler and our decoder."""
    text = "".join(f"\t{i}\n" for i in found)
    code = ELFFile(io.BytesIO(assemble_text(arch, text))).get_section_by_name(".text").data()
    result, offset = [], 0
    while offset < len(code):
        result.append(decode(code, offset, 0, generation(arch)))
        offset += result[-1].size
    return result


# A dual instruction may name one register as a source of both halves on gfx12. The hardware allows it and
# Triton's LLVM uses it; clang's assembler refused it until llvm-project PR 198034 (May 2026).
def shares_a_source(instruction: Instruction) -> bool:
    if instruction.format != "VOPD" or instruction.generation != "rdna4":
        return False
    f = instruction.fields
    pairs = [(f["srcx0"], f["srcy0"]), (f["vsrcx1"], f["vsrcy1"])]
    return any(x == y and x >= 256 for x, y in pairs)


def check_round_trip(arch: str, *code_objects: bytes) -> int:
    distinct = {i.raw: i for code_object in code_objects for i in instructions(code_object)}
    found = [i for i in distinct.values() if not shares_a_source(i)]
    try:
        again = assembled_again(arch, found)
    except AssemblyError as error:
        lines = {int(n): message for n, message in re.findall(r"a\.s:(\d+):\d+: error: (.*)", str(error))}
        pytest.fail("\n".join(f"{found[n - 1]}: {message}" for n, message in list(lines.items())[:20]))
    assert len(again) == len(found)
    for before, after in zip(found, again, strict=True):
        assert used_bits(before) == used_bits(after), (
            f"{before} ({before.raw.hex()}) became {after} ({after.raw.hex()})"
        )
    return len(found)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_triton_object_assembles_to_the_same_bytes(arch, dtype):
    for built in triton_kernels(arch, dtype):
        assert check_round_trip(arch, built.code) > 300


@pytest.mark.parametrize("arch", ARCHS)
def test_hip_object_assembles_to_the_same_bytes(arch):
    assert check_round_trip(arch, hip_kernel(arch)) > 50


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instruction_that_is_shipped_assembles_to_the_same_bytes(arch):
    pack = find_pack(arch)  # of this tree's build: GRISTMILL_PACK_PATH, see build_scripts/run_tests.py
    code = [pack.read_object(entry) for entry in pack.manifest.entries.values()]
    assert check_round_trip(arch, *code) > 10_000


def listing(arch: str, path: Path) -> str:
    """The output of an llvm-objdump that knows the arch."""
    for name in ("llvm-objdump-21", "llvm-objdump-20", "llvm-objdump-19", "llvm-objdump"):
        tool = shutil.which(name)
        if tool is None:
            continue
        result = subprocess.run([tool, "-d", f"--mcpu={arch}", str(path)], capture_output=True, text=True)
        if result.returncode == 0 and "not a recognized processor" not in result.stderr:
            return result.stdout
    pytest.skip(f"no llvm-objdump that knows {arch} is installed")


@pytest.mark.parametrize("arch", ARCHS)
def test_hip_object_disassembles_to_the_same_mnemonics(arch, tmp_path: Path):
    """A second opinion, from another LLVM's disassembler: addresses and mnemonics of the whole text."""
    path = tmp_path / "kernel.hsaco"
    path.write_bytes(hip_kernel(arch))
    theirs = {
        int(address, 16): line.split()[0]
        for line, address in re.findall(r"^\t(.*?)\s*// 0*([0-9A-F]+):", listing(arch, path), re.M)
    }
    co = CodeObject.parse(path.read_bytes())
    (kernel,) = co.kernels.values()
    address, compared = kernel.entry_address, 0
    while address < kernel.entry_address + kernel.code_bytes:
        ours = decode(co.text, address - co.text_address, address, generation(arch))
        name = theirs[address]
        if not name.startswith(".long"):
            assert re.sub(r"_(e32|e64|dpp|e64_dpp)$", "", name) == str(ours).split()[0].removesuffix(
                "_dpp"
            ).removesuffix("_e64").removesuffix("_e32"), f"{address:#x}: {name} or {ours}"
            compared += 1
        address = ours.end
    assert compared > 50
