"""The mutation proof: a kernel that is corrupted on purpose does not pass verification.

Each mutant runs as `gristmill build` runs an entry, and so does the unmutated control. Faults of meaning are
planted in the kernel's source; faults of the compiler or of storage are planted in the machine code, one bit
at a time, so that nothing here encodes an instruction.
"""

from __future__ import annotations

import functools
import importlib
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import real_kernels
from gristmill.aot import verify
from gristmill.aot.emulator import EmulatorError, Kernel, Module
from gristmill.aot.emulator.decode import Instruction, decode, generation
from gristmill.aot.emulator.driver import ARCHS
from gristmill.aot.emulator.errors import UndecodableInstruction
from gristmill.aot.emulator.float_formats import FloatMode
from gristmill.aot.emulator.operands import RegisterLimits
from gristmill.aot.emulator.program import compile_step
from gristmill.aot.emulator.vector import Step
from gristmill.aot.emulator.waves import EXEC, SCC, VECTOR, Waves
from gristmill.aot.verify import VerificationError, run_code
from gristmill.kernels.variant import TritonVariant
from real_kernels import Built

# Text of the kernel -> what stands there instead. Each text must occur exactly once: an edit of the kernel
# that moves it fails the test, which would otherwise go on testing nothing.
SOURCE_MUTATIONS = {
    "pairs of nibbles reversed": ("shift = 4 * tl.arange(0, 4)", "shift = 12 - 4 * tl.arange(0, 4)"),
    "halves of a pair swapped": ("tl.join(low, high)", "tl.join(high, low)"),
    "first group off by one": ("    tile_group = 0\n", "    tile_group = 1\n"),
    "groups begin one tile late": ("tiles_left = tiles_per_group\n", "tiles_left = tiles_per_group + 1\n"),
    "zero points ignored": ("tl.constexpr = zero_points is not None", "tl.constexpr = False"),
    "bias shifted by one": ("tl.load(bias + n_read)", "tl.load(bias + (n_read + 1) % N)"),
    "bias ignored": ("if bias.to(tl.int64) != 0:", "if bias.to(tl.int64) == 1:"),
    "x not masked in the K tail": (", mask=(k < k_left)[None, :], other=0.0)", ")"),
    "K tail left out": ("if k_left > 0:", "if k_left > BLOCK_K:"),
    "rows of x not wrapped": ("m_read = (m % M)", "m_read = m"),
    "rows of qweight not wrapped": ("n_read = (n % N)", "n_read = n"),
    "rows past M stored": ("mask=(m < M)[:, None] & ", "mask=(m < M + 1)[:, None] & "),
    "group of row tiles forgotten": ("return first_m + within % width", "return within % width"),
}


@dataclass(frozen=True)
class Flip:
    """One bit of the machine code."""

    address: int  # of the instruction
    bit: int  # counted from the instruction's first byte
    before: Instruction
    after: Instruction | None  # None: no instruction any more

    def __str__(self) -> str:
        return f"{self.address:#x} bit {self.bit}: {self.before} -> {self.after or 'no instruction'}"


class Code:
    """The machine code of a built kernel."""

    def __init__(self, built: Built):
        self.built = built
        self.kernel: Kernel = Module(built.code).kernel(built.entry.symbol)
        text = self.kernel.module.code_object.text
        assert built.code.count(text) == 1
        self._offset = built.code.index(text) - self.kernel.module.code_object.text_address

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        info, found = self.kernel.info, []
        address = info.entry_address
        while address < info.entry_address + info.code_bytes:
            found.append(self.kernel.program.instruction_at(address))
            address = found[-1].end
        return found

    @functools.cached_property
    def loop(self) -> list[Instruction]:
        """The body of the loop over tiles: the longest stretch that a branch goes back over."""
        back = [i for i in self.instructions if i.name.startswith("s_cbranch") and i.target < i.address]
        end = max(back, key=lambda branch: branch.address - branch.target)
        return [i for i in self.instructions if end.target <= i.address <= end.address]

    def flip(self, instruction: Instruction, bit: int) -> Flip:
        raw = bytearray(instruction.raw + self._bytes(instruction.end, 12))
        raw[bit // 8] ^= 1 << bit % 8
        try:
            after = decode(bytes(raw), 0, instruction.address, generation(self.built.arch))
        except UndecodableInstruction:
            after = None
        return Flip(instruction.address, bit, instruction, after)

    def flips(self, instructions: Iterable[Instruction]) -> Iterable[Flip]:
        return (self.flip(i, bit) for i in instructions for bit in range(8 * i.size))

    def with_flip(self, flip: Flip) -> bytes:
        code = bytearray(self.built.code)
        code[self._offset + flip.address + flip.bit // 8] ^= 1 << flip.bit % 8
        return bytes(code)

    def with_nops(self, instructions: Iterable[Instruction]) -> bytes:
        code = bytearray(self.built.code)
        for i in instructions:
            at = self._offset + i.address
            assert code[at : at + i.size] == i.raw
            code[at : at + i.size] = S_NOP * (i.size // 4)
        return bytes(code)

    def _bytes(self, address: int, size: int) -> bytes:
        return self.built.code[self._offset + address : self._offset + address + size]


S_NOP = (0xBF800000).to_bytes(4, "little")
MAGIC, NIBBLES = 0x64006400, 0x000F000F
SOURCES = ("src0", "src1", "src2", "ssrc0", "ssrc1")
_ZERO, _LAST_INLINE = 128, 192  # operand codes of the integers 0 and 64


def _literal_changed(literal: int, bit: int) -> Callable[[Flip, TritonVariant], bool]:
    def wanted(flip: Flip, row: TritonVariant) -> bool:
        a, b = flip.before, flip.after
        return a.literal == literal and b is not None and b.name == a.name and b.literal == literal ^ 1 << bit

    return wanted


def _step_changed(flip: Flip, row: TritonVariant) -> bool:
    """An addition of what one tile along K takes up, of x or of qweight, in bytes."""
    a, b = flip.before, flip.after
    steps = (row.constexprs["BLOCK_K"] * 2, row.constexprs["BLOCK_K"] // 2)
    if b is None or b.name != a.name or "_add" not in a.name or a.literal is not None or b.literal is not None:
        return False
    changed = [name for name in a.fields if a[name] != b.get(name)]
    return (
        len(changed) == 1
        and changed[0] in SOURCES
        and a[changed[0]] - _ZERO in steps
        and _ZERO < b[changed[0]] <= _LAST_INLINE + 16
    )


def _offset_changed(flip: Flip, row: TritonVariant) -> bool:
    a, b = flip.before, flip.after
    if b is None or b.name != a.name or not a.name.startswith("global_load_b"):
        return False
    changed = [name for name in a.fields if a[name] != b.get(name)]
    return changed in (["offset"], ["ioffset"]) and abs(a[changed[0]] - b[changed[0]]) == 16


def _comparison_turned(flip: Flip, row: TritonVariant) -> bool:
    pairs = {"s_cmp_lg_u32": "s_cmp_eq_u32", "s_cmp_eq_u32": "s_cmp_lg_u32"}
    return flip.after is not None and pairs.get(flip.before.name) == flip.after.name


def _store_widened(flip: Flip, row: TritonVariant) -> bool:
    """A comparison that masks the store of the output lets one more row or column through."""
    pairs = {"v_cmp_gt_i32": "v_cmp_ne_i32", "v_cmp_gt_i64": "v_cmp_ne_i64"}
    return flip.after is not None and pairs.get(flip.before.name) == flip.after.name


# What is flipped, in which part of the code: the first bit that fits is taken.
BINARY_MUTATIONS = {
    "magic constant": ("all", _literal_changed(MAGIC, 3)),
    "mask of the nibbles": ("all", _literal_changed(NIBBLES, 2)),
    "step along K": ("loop", _step_changed),
    "offset of a load": ("loop", _offset_changed),
    "condition of the loop": ("loop", _comparison_turned),
    "bound of the stores": ("end", _store_widened),
}


@pytest.fixture(scope="module", params=ARCHS)
def code(request) -> Code:
    return _code(request.param)


@functools.cache
def _code(arch: str) -> Code:
    return Code(real_kernels.smallest(arch))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The cases of an entry chosen once; loops that do not end given up soon."""
    monkeypatch.setattr(verify, "cases_for", _cases_for)
    monkeypatch.setattr(verify, "INSTRUCTION_BUDGET", 500_000)


_chosen: dict = {}


def _cases_for(entry, facts):
    key = entry.name, facts
    if key not in _chosen:
        _chosen[key] = _really_chosen(entry, facts)
    return _chosen[key]


_really_chosen = verify.cases_for


def caught(built: Built, code: bytes) -> Exception | None:
    """What verification finds wrong with `code` as the object of the entry; None when it passes."""
    try:
        run_code(built.arch, built.entry, code)
    except (VerificationError, EmulatorError) as error:
        return error
    return None


def test_control_passes(code):
    record = run_code(code.built.arch, code.built.entry, code.built.code)
    assert record.cases > 8
    assert 0 < record.worst_error_over_bound <= 1


# -- faults in the source --------------------------------------------------------------------------------


def mutant(text: str, folder, monkeypatch, name: str, row: TritonVariant, arch: str) -> Built:
    """The kernel compiled from `text`."""
    module = f"mutant_{arch}_{re.sub(r'[^a-z]', '_', name.lower())}"
    (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return real_kernels.build(arch, replace(row, module=module))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SOURCE_MUTATIONS)
def test_source_mutation_is_caught(name, arch, tmp_path, monkeypatch):
    old, new = SOURCE_MUTATIONS[name]
    source = real_kernels.kernel_source()
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in the kernel: choose another"
    row = real_kernels.smallest_row(arch)
    built = mutant(source.replace(old, new), tmp_path, monkeypatch, name, row, arch)
    assert isinstance(caught(built, built.code), VerificationError)


def test_source_without_mutation_passes(tmp_path, monkeypatch):
    arch = ARCHS[0]
    row = real_kernels.smallest_row(arch)
    built = mutant(real_kernels.kernel_source(), tmp_path, monkeypatch, "control", row, arch)
    assert caught(built, built.code) is None


# -- faults in the machine code --------------------------------------------------------------------------


@pytest.mark.parametrize("name", BINARY_MUTATIONS)
def test_binary_mutation_is_caught(name, code):
    where, wanted = BINARY_MUTATIONS[name]
    row = real_kernels.smallest_row(code.built.arch)
    part = {"all": code.instructions, "loop": code.loop, "end": code.instructions[::-1]}[where]
    flip = next((flip for flip in code.flips(part) if wanted(flip, row)), None)
    assert flip is not None, f"no instruction of {code.built.entry.name} fits"
    assert caught(code.built, code.with_flip(flip)) is not None, flip


def test_every_missing_barrier_is_caught(code):
    """One barrier after the other becomes s_nop; on gfx12 both halves of it, and each half alone."""
    barriers = [i for i in code.instructions if i.name.startswith("s_barrier")]
    assert len(barriers) >= 4
    whole = [[i] for i in barriers]
    if code.built.arch.startswith("gfx12"):
        signals, waits = barriers[::2], barriers[1::2]
        assert {i.name for i in signals} == {"s_barrier_signal"}
        assert {i.name for i in waits} == {"s_barrier_wait"}
        whole += [[signal, wait] for signal, wait in zip(signals, waits, strict=True)]
    missed = [hex(group[0].address) for group in whole if caught(code.built, code.with_nops(group)) is None]
    assert missed == []


# -- single bits at random -------------------------------------------------------------------------------

FLIPS = 60
# Of the flips that change what the emulator models. Of 204 on both archs 33 passed, 15 of them unexplained:
# steps of integer divisions that small quotients do not need, sides of selections that were not taken, and a
# zero that became a denormal, far below the bound.
MOST_ESCAPES, MOST_UNEXPLAINED = 0.25, 0.12
_TIMING = re.compile(
    r"s_(wait|nop|delay_alu|clause|sleep|setprio|icache_inv|set_inst_prefetch_distance)"
    r"|buffer_gl|global_(inv|wb)"
)
_CACHE_POLICY = re.compile(r" (glc|slc|dlc|nv|th:\w+|scope:\w+)\b")
_UNUSED = re.compile(r" neg_(lo|hi):\[0(,0)*\]")  # how the bits of an operand that is not there are written


def neutral(flip: Flip) -> str | None:
    """Why a flip cannot show in the emulator, whatever the inputs are; None when it can."""
    if flip.after is None:
        return None
    before, after = (_UNUSED.sub("", str(i)) for i in (flip.before, flip.after))
    if _TIMING.match(before) and _TIMING.match(after):
        return "waits, delays and cache invalidation: each instruction is complete before the next"
    if before == after or flip.before.name == flip.after.name in ("s_barrier", "s_endpgm"):
        return "a bit that the instruction does not use"
    if _CACHE_POLICY.sub("", before) == _CACHE_POLICY.sub("", after):
        return "cache policy"
    return None


def executed(code: Code) -> list[Instruction]:
    """The instructions that the control reaches, in order."""
    from gristmill.drivers import get_driver

    driver, loaded = get_driver("emulated"), []
    with pytest.MonkeyPatch.context() as patch:
        load = driver.load_module
        patch.setattr(driver, "load_module", lambda *given: (loaded.append(load(*given)), loaded[-1])[1])
        run_code(code.built.arch, code.built.entry, code.built.code)
    program = loaded[0].kernel(code.built.entry.symbol).program
    found = {i.address: i for block in program.blocks for i in block.instructions}
    return [found[address] for address in sorted(found)]


def random_flips(code: Code, count: int, seed: int) -> list[Flip]:
    generator = random.Random(seed)
    reached = executed(code)
    picked = (generator.choice(reached) for _ in range(count))
    return [code.flip(i, generator.randrange(8 * i.size)) for i in picked]


class Twice:
    """Runs an instruction as it is and as a flip made it; what differs is undefined from there on."""

    def __init__(self, flip: Flip):
        self.flip, self.different = flip, False

    def compile(self, instruction: Instruction, limits: RegisterLimits, mode: FloatMode) -> Step | None:
        step = compile_step(instruction, limits, mode)
        if instruction.address != self.flip.address:
            return step
        changed = compile_step(self.flip.after, limits, mode)

        def both(st: Waves) -> None:
            copy = st.take(np.arange(st.count))
            for one, where in ((changed, copy), (step, st)):
                if one is not None:
                    one(where)
            self._mark(st, copy)

        return both

    def _mark(self, st: Waves, other: Waves) -> None:
        assert (st.s[EXEC] == other.s[EXEC]).all(), "what differs is which lanes are on"
        for first, mine, theirs in ((0, st.s, other.s), (VECTOR, st.v, other.v)):
            for n, (a, b) in enumerate(zip(mine, theirs, strict=True), first):
                self._mark_bits(st, n, (a ^ b) | _undefined(other, n))
        self._mark_bits(st, SCC, (st.scc ^ other.scc).astype(np.uint32) | _undefined(other, SCC))

    def _mark_bits(self, st: Waves, n: int, bits: np.ndarray | np.uint32) -> None:
        bits = bits & ~_undefined(st, n)
        if bits.any():
            self.different = True
            st.shadow[n] = _undefined(st, n) | bits


def _undefined(st: Waves, n: int) -> np.ndarray | np.uint32:
    shadow = st.shadow[n]
    return np.uint32(0) if shadow is None else shadow


def explained(code: Code, flip: Flip) -> str | None:
    """Why a flip that passes is right to pass; None when the cases should have shown it.

    Either its instruction gives the same results whenever a case runs it, or the bits that differ reach no
    address, no branch and no stored result: the emulator follows undefined bits, so it need only be told that
    they are.
    """
    before, after = flip.before, flip.after
    moves = (
        "s_branch",
        "s_cbranch",
        "s_endpgm",
        "s_barrier",
        "s_set",
        "s_swappc",
        "s_call",
        "s_getpc",
        "s_round",
    )
    if after is None or after.size != before.size or any(i.name.startswith(moves) for i in (before, after)):
        return None
    if any("store" in i.name or "atomic" in i.name for i in (before, after)):
        return None
    twice = Twice(flip)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gristmill.aot.emulator.program.compile_step", twice.compile)
        if caught(code.built, code.built.code) is not None:
            return None
    return "what differs is not used" if twice.different else "the same results"


def test_random_flips_are_caught_or_explained():
    code = _code(ARCHS[0])
    flips = [flip for flip in random_flips(code, FLIPS, seed=2) if neutral(flip) is None]
    escaped = [flip for flip in flips if caught(code.built, code.with_flip(flip)) is None]
    unexplained = [flip for flip in escaped if explained(code, flip) is None]
    words = "\n".join(map(str, unexplained))
    assert len(flips) > FLIPS / 2
    assert len(escaped) <= MOST_ESCAPES * len(flips), "\n".join(map(str, escaped))
    assert len(unexplained) <= MOST_UNEXPLAINED * len(flips), f"{len(unexplained)} of {len(flips)}:\n{words}"
