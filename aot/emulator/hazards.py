"""Instruction sequences that hardware is known to get wrong, although each instruction means what it should.

The emulator executes what the ISA documents say, so it cannot see a fault of the silicon. What can be done is
to look for the sequences that compilers have learned to avoid, in objects of compilers that are older than
the fix.

Source: llvm-project PR 220348 (September 2026), "Fix for GFX11 VOPD interlock hazard".
"""

from __future__ import annotations

from collections.abc import Iterator

from ..amdgpu_code_object import CodeObject
from .decode import Instruction, decode, generation
from .waves import VECTOR


def vopd_interlock_hazards(code_object: CodeObject) -> dict[str, list[Instruction]]:
    """Dual instructions of gfx11 whose halves read different registers of one parity at the same source
    position.

    The hardware may then not wait for a result that is still on its way to one of them. Compilers since LLVM
    PR 220348 form no such pair. The build rewrites those of older ones in their assembly (`aot.dual_issue`),
    and verification refuses an object in which one is left.

    Returns
    -------
    kernel name -> the instructions, kernels without any left out; empty for gfx12, which does not have the
    fault
    """
    if generation(code_object.arch) != "rdna3":
        return {}
    found = {name: [i for i in instructions_of(code_object, name) if _same_parity(i)] for name in code_object.kernels}
    return {name: instructions for name, instructions in found.items() if instructions}


def _same_parity(instruction: Instruction) -> bool:
    if instruction.format != "VOPD":
        return False
    pairs = [(instruction["srcx0"], instruction["srcy0"])]
    if "v_dual_mov_b32" not in (instruction.name, instruction.second):  # a move has one source
        pairs.append((instruction["vsrcx1"], instruction["vsrcy1"]))
    return any(x >= VECTOR and y >= VECTOR and x != y and (x ^ y) & 1 == 0 for x, y in pairs)


def instructions_of(code_object: CodeObject, name: str) -> Iterator[Instruction]:
    """The instructions of a kernel in the order of their addresses."""
    kernel = code_object.kernels[name]
    address, end = kernel.entry_address, kernel.entry_address + kernel.code_bytes
    while address < end:
        instruction = decode(
            code_object.text, address - code_object.text_address, address, generation(code_object.arch)
        )
        yield instruction
        address = instruction.end
