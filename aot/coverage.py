"""The coverage table: what each arch is served by, as text that is checked in.

It is derived from the packs through the dispatcher's own selection, so that a kernel, a dtype, a group size or a range
of M that is lost shows as a diff of `docs/coverage.md`; wheels are made only of packs that agree with it.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.aot.errors import WheelError
from gristmill.device import PACKS_FOR_ARCH, DeviceFacts, nominal_device
from gristmill.errors import NoKernelError
from gristmill.formula import Formula
from gristmill.manifest import Manifest
from gristmill.problem import DTYPES, OP_W4A16_GEMM, Problem, resolve_group_size
from gristmill.select import select

TABLE = "docs/coverage.md"

GROUP_SIZES = (8, 32, 64, 128, 256, -1)

# N x K between which the policies tell: square, wide, deep, and small layers; and a K whose activations fill no LDS.
SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048), (512, 131072))

# Addresses and row strides in bytes: as tensors are allocated, and as slices may lie.
ALIGNMENTS = (16, 2)

SMALL_M = 16
LARGEST_M = 65536

_HEAD = f"""\
# Coverage

Which kernel serves a call, by arch of the device, as the dispatcher chooses it from the packs; `gristmill coverage`
writes this page and `gristmill wheel` refuses packs that disagree with it. Looked at are N x K of
{", ".join(f"{N} x {K}" for N, K in SHAPES)}, with bias; every M up to {SMALL_M}, and
both sides of each bound that a pack names up to {LARGEST_M}. Where N and K decide, kernels are joined by "or". "Floor"
is the kernel that takes everything; NONE would be a call that is refused.

All these N and K are multiples of 128. On sm80 and sm90 the C++ kernels (`.cu`) need K % 32 == 0 and an alignment of 16
bytes, which from M = 2 on contiguous outputs have where N % 8 == 0. For other sizes ask `gristmill why`.
"""

_COLUMNS = ("op", "dtype", "zero points", "group size", "M: kernel, 16-byte alignment", "M: kernel, 2-byte alignment")

# A bound of M in a formula: "M <= 8", "1 <= M".
_BOUND = re.compile(r"\bM *[<>=]=? *(\d+)|(\d+) *[<>]=? *M\b")


@dataclass(frozen=True, slots=True)
class _Class:
    """Problems that differ in M, N and K alone."""

    dtype: str
    zero_points: bool
    group_size: int
    alignment: int

    def problems(self, M: int) -> Iterator[Problem]:
        for N, K in SHAPES:
            size = resolve_group_size(self.group_size, K)
            yield Problem(OP_W4A16_GEMM, M, N, K, size, self.dtype, self.zero_points, True, self.alignment)


def coverage_table(manifests: Iterable[Manifest]) -> str:
    """The page for the packs of `manifests`: a section for each arch that one of them serves."""
    return "\n".join([_HEAD, *sections(manifests).values()])


def sections(manifests: Iterable[Manifest]) -> dict[str, str]:
    """Arch of a device -> its section of the page, in the order of `PACKS_FOR_ARCH`."""
    by_arch = {manifest.arch: manifest for manifest in manifests}
    found = {}
    for arch, packs in PACKS_FOR_ARCH.items():
        serving = next((by_arch[pack] for pack in packs if pack in by_arch), None)
        if serving is not None:
            found[arch] = _section(arch, serving)
    return found


def check_coverage(manifests: Iterable[Manifest], path: Path, whole: bool = False) -> None:
    """Compare packs with the page at `path`.

    Parameters
    ----------
    whole : compare the sections of archs that no pack of `manifests` serves too: they are lost

    Raises
    ------
    WheelError : they disagree; the message is the diff, and the command that writes the page anew
    """
    try:
        written = _split(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WheelError(f"{path}: {error.strerror}; run: gristmill coverage --write {path}") from None
    found = sections(manifests)
    archs = [arch for arch in PACKS_FOR_ARCH if arch in found or (whole and arch in written)]
    before, now = ("\n".join(page.get(arch, "") for arch in archs).splitlines() for page in (written, found))
    lines = list(difflib.unified_diff(before, now, str(path), "the packs", lineterm="", n=1))
    if lines:
        raise WheelError(
            f"the packs do not cover what {path} says; if that is wanted, run: gristmill coverage --write {path}\n"
            + "\n".join(lines)
        )


def _split(page: str) -> dict[str, str]:
    """The sections of a page by arch."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.rstrip("\n") + "\n" for part in parts}


def _section(arch: str, manifest: Manifest) -> str:
    sources = Counter(_kernel(entry.source) for entry in manifest.entries.values())
    counts = ", ".join(f"{count} of {source}" for source, count in sorted(sources.items()))
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *_rows(nominal_device(arch), manifest)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## {arch}\n\nPack {manifest.arch}, {len(manifest.entries)} entries: {counts}.\n\n{table}\n"


def _rows(device: DeviceFacts, manifest: Manifest) -> Iterator[tuple[str, ...]]:
    """A row for each kind of weight; group sizes that are served alike share it."""
    ms = _interesting_m(manifest)
    for dtype, zero_points in itertools.product(DTYPES, (False, True)):
        served: dict[tuple[str, ...], list[str]] = {}
        for group_size in GROUP_SIZES:
            classes = [_Class(dtype, zero_points, group_size, alignment) for alignment in ALIGNMENTS]
            cells = tuple(_cell(device, manifest, ms, class_) for class_ in classes)
            served.setdefault(cells, []).append("K" if group_size == -1 else str(group_size))
        for cells, sizes in served.items():
            yield OP_W4A16_GEMM, dtype, "yes" if zero_points else "no", ", ".join(sizes), *cells


def _cell(device: DeviceFacts, manifest: Manifest, ms: Sequence[int], class_: _Class) -> str:
    """The kernels by range of M: "1..8 a.hip; 9.. b.py"."""

    def kernels(M: int) -> str:
        return " or ".join(sorted({_served_by(problem, device, manifest) for problem in class_.problems(M)}))

    runs = [(list(run), names) for names, run in itertools.groupby(ms, kernels)]
    return "; ".join(f"{_range(run, ms)} {names}" for run, names in runs)


def _served_by(problem: Problem, device: DeviceFacts, manifest: Manifest) -> str:
    try:
        selection = select(problem, device, manifest)
    except NoKernelError:
        return "NONE"
    return "floor" if selection.is_floor else _kernel(selection.entry.source)


def _interesting_m(manifest: Manifest) -> list[int]:
    """Every small M, and the neighbours of each number that a formula compares M with."""
    formulas: list[Formula] = [rule.when for rule in manifest.policy]
    for entry in manifest.entries.values():
        formulas += [*entry.needs.conditions, entry.dynamic_shared_bytes]
    bounds = {int(M or reverse) for formula in formulas for M, reverse in _BOUND.findall(formula.text)}
    near = {bound + step for bound in bounds for step in (-1, 0, 1)}
    return sorted({*range(1, SMALL_M + 1), *(M for M in near if 0 < M <= LARGEST_M), LARGEST_M})


def _range(run: Sequence[int], ms: Sequence[int]) -> str:
    """ "1..8", "5", or "33.." for the run that ends with the largest M looked at."""
    if run[-1] == ms[-1]:
        return f"{run[0]}.."
    return str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}"


def _kernel(source: str) -> str:
    """ "csrc/hip/w4a16_skinny.hip" -> "w4a16_skinny.hip"."""
    return source.rpartition("/")[2]
