"""Keeping a fault of gfx11 hardware out of our objects: dual instructions that it gets wrong are taken apart.

A dual instruction whose halves read different vector registers of one parity at the same source position may
not wait for a result that is still on its way to one of them. Compilers form no such pair since llvm-project
PR 220348; the ones we build with are older, and in Triton's dual issue cannot be switched off. So their
assembly is rewritten before it becomes an object: such a pair becomes its two single instructions, every
other line stays as it is. `s_delay_alu`, which counts instructions, is a hint that no result depends on;
branches are the assembler's business.

`emulator.hazards` finds these pairs in a finished object, by its bytes: verification refuses what slips
through here.

Pairs that read the result of a cross-lane (DPP, permlane) instruction soon after it are taken apart too. On
gfx1150 they were seen to read it too early; gfx1151 was seen to be clean, but the kernels have one or two of
them, so caution costs nothing (ROCm/aotriton issue 183). "Soon" goes by the text, not around loops.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from gristmill.aot.errors import CompileError

# Half of a pair -> the same operation on its own, for all operations that gfx11 can pair. dot2acc_f32_bf16 is
# left out: gfx11 has it in pairs only, and no compiler forms them.
SINGLE = {
    "v_dual_fmac_f32": "v_fmac_f32_e32",
    "v_dual_fmaak_f32": "v_fmaak_f32",
    "v_dual_fmamk_f32": "v_fmamk_f32",
    "v_dual_mul_f32": "v_mul_f32_e32",
    "v_dual_add_f32": "v_add_f32_e32",
    "v_dual_sub_f32": "v_sub_f32_e32",
    "v_dual_subrev_f32": "v_subrev_f32_e32",
    "v_dual_mul_dx9_zero_f32": "v_mul_dx9_zero_f32_e32",
    "v_dual_mov_b32": "v_mov_b32_e32",
    "v_dual_cndmask_b32": "v_cndmask_b32_e32",
    "v_dual_max_f32": "v_max_f32_e32",
    "v_dual_min_f32": "v_min_f32_e32",
    "v_dual_dot2acc_f32_f16": "v_dot2acc_f32_f16_e32",
    "v_dual_add_nc_u32": "v_add_nc_u32_e32",
    "v_dual_lshlrev_b32": "v_lshlrev_b32_e32",
    "v_dual_and_b32": "v_and_b32_e32",
}
# Instructions after which a cross-lane result was always there; after 16 it was not yet (the same issue).
SETTLED_AFTER = 26

ACCUMULATING = ("v_dual_fmac_f32", "v_dual_dot2acc_f32_f16", "v_dual_dot2acc_f32_bf16")

_PAIR = re.compile(
    r"(?P<indent>\s*)(?P<x>v_dual_\w+\s+[^:;/]+?)\s*::\s*(?P<y>v_dual_\w+\s+[^:;/]+?)(?P<rest>\s*(?:(?:;|//).*)?)"
)
_INSTRUCTION = re.compile(r"\s+[a-z]+_\w+\s")
_CROSS_LANE = re.compile(r"\s+(?:v_\w+_dpp|v_permlane\w+)\s+v(\d+)")
_VGPR = re.compile(r"v(\d+)")
# What else may be a source: a scalar register or a number.
_OTHER = re.compile(r"(?:s|ttmp)\d+|m0|null|(?:exec|vcc)_(?:lo|hi)|src_\w+|-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?)")


def avoid_faults(assembly: str, arch: str, what: str) -> str:
    """The assembly of a kernel without pairs that `arch` gets wrong; unchanged for archs without the fault.

    Parameters
    ----------
    what : whose assembly it is, for messages

    Raises
    ------
    CompileError : a pair cannot be read or taken apart; the message has its line
    """
    return split_hazardous_pairs(assembly, what) if arch.startswith("gfx11") else assembly


def split_hazardous_pairs(assembly: str, what: str) -> str:
    """The assembly with each hazardous dual instruction as two single ones; see `avoid_faults`."""
    lines: list[str] = []
    unsettled: deque[int | None] = deque(maxlen=SETTLED_AFTER)  # what cross-lane instructions wrote
    for number, line in enumerate(assembly.split("\n"), 1):
        try:
            lines += _rewritten(line, unsettled)
        except ValueError as error:
            raise CompileError(f"{what}: assembly line {number}: {line.strip()}: {error}") from None
        if _INSTRUCTION.match(line):
            found = _CROSS_LANE.match(line)
            unsettled.append(int(found[1]) if found else None)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Half:
    name: str
    destination: int
    sources: tuple[str, ...]  # as written

    @classmethod
    def parse(cls, text: str) -> _Half:
        name, operands = text.split(None, 1)
        destination, *sources = [operand.strip() for operand in operands.split(",")]
        expected = {"v_dual_mov_b32": 1, "v_dual_fmaak_f32": 3, "v_dual_fmamk_f32": 3}.get(name, 2)
        if len(sources) != expected:
            raise ValueError(f"{name} has {len(sources)} sources, not {expected}")
        written = _VGPR.fullmatch(destination)
        if written is None:
            raise ValueError(f"{destination!r} is no vector register")
        for source in sources:
            if not _VGPR.fullmatch(source) and not _OTHER.fullmatch(source):
                raise ValueError(f"cannot read the operand {source!r}")
        return cls(name, int(written[1]), tuple(sources))

    @property
    def by_position(self) -> tuple[int | None, int | None]:
        """Vector registers read at the two positions of the encoding; None where there is another source."""
        first = self.sources[0]
        second = "" if self.name == "v_dual_mov_b32" else self.sources[2 if "fmamk" in self.name else 1]
        return _register(first), _register(second)

    @property
    def reads(self) -> set[int]:
        """All vector registers read; no half writes a scalar one, so the mask of cndmask does not matter."""
        reads = {read for read in self.by_position if read is not None}
        return reads | {self.destination} if self.name in ACCUMULATING else reads

    def single(self) -> str:
        if self.name not in SINGLE:
            raise ValueError(f"gfx11 has no single instruction for {self.name}")
        mask = ("vcc_lo",) if self.name == "v_dual_cndmask_b32" else ()
        return f"{SINGLE[self.name]} {', '.join((f'v{self.destination}', *self.sources, *mask))}"


def _rewritten(line: str, unsettled: Collection[int | None]) -> Iterator[str]:
    code = re.split(r";|//", line, maxsplit=1)[0]
    if "v_dual_" not in code or "::" not in code:
        yield line
        return
    found = _PAIR.fullmatch(line)
    if found is None:
        raise ValueError("cannot read this dual instruction")
    x, y = _Half.parse(found["x"]), _Half.parse(found["y"])
    if not _is_hazardous(x, y) and not any(read in unsettled for read in x.reads | y.reads):
        yield line
        return
    first, second = _ordered(x, y)
    yield f"{found['indent']}{first.single()}{found['rest']}"
    yield f"{found['indent']}{second.single()}"


def _is_hazardous(x: _Half, y: _Half) -> bool:
    return any(
        a is not None and b is not None and a != b and (a ^ b) & 1 == 0
        for a, b in zip(x.by_position, y.by_position, strict=True)
    )


def _ordered(x: _Half, y: _Half) -> tuple[_Half, _Half]:
    """The halves in an order in which neither reads what the other has written: in a pair both read first."""
    if x.destination not in y.reads:
        return x, y
    if y.destination not in x.reads:
        return y, x
    raise ValueError("each half reads what the other writes")


def _register(operand: str) -> int | None:
    found = _VGPR.fullmatch(operand)
    return int(found[1]) if found else None
