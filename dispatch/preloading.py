"""Loading ahead of the first call, so that nothing loads on live traffic or while a graph is captured."""

from __future__ import annotations

import time
from collections.abc import Iterable

from gristmill.arrays import Device
from gristmill.device import DeviceFacts
from gristmill.errors import ArgumentError, FormulaError, PreloadLimitError
from gristmill.formula import Formula, tokens
from gristmill.launch import INT32_MAX
from gristmill.loader import Loader, forget_loaders
from gristmill.manifest import Entry, Manifest, Rule
from gristmill.named_tuple import NamedTuple
from gristmill.packed_weight import PackedWeight
from gristmill.prepared import PreparedWeight, prepare
from gristmill.problem import ALIGNMENTS, MAX_ALIGNMENT, Problem
from gristmill.ranges import Range, UndecidedError
from gristmill.select import formula_values, select, signature_of, unmet_needs

# Where the truth of a comparison of M with a number changes, counted from the number.
_BORDERS = {"<=": (1,), ">": (1,), "<": (0,), ">=": (0,), "==": (0, 1), "!=": (0, 1)}

MAX_ROW_RANGES = 64  # a pack that splits M finer gets ranges joined, and a few kernels more

Kernel = tuple[Loader, Entry]


class Preloaded(NamedTuple):
    """What a preload did."""

    entries: tuple[str, ...]  # all that a call can hit, now loaded
    loaded: tuple[str, ...]  # those of them that were not loaded before
    code_bytes: int  # of the code objects that were handed to the driver; entries of one object share it
    time_us: float


def preload(
    weights: PackedWeight | Iterable[PackedWeight], M: range | None = None, *, limit_bytes: int | None = None
) -> Preloaded:
    """Load every kernel that a call with `weights` can hit, so that the first call, and a captured one, loads nothing.

    Parameters
    ----------
    weights : one weight or several, on one device or on several
    M : numbers of rows that will come; None for any. A range is walked through, so keep it for short ones
    limit_bytes : the most device code that may be loaded by this call; None for no limit

    Returns
    -------
    Preloaded : which entries, how many bytes of device code, how long

    Raises
    ------
    ArgumentError : `weights` or `M` is nothing of the kind
    DeviceMismatchError : a weight lies on the host, or not all of it on one device
    NoPackError, NoDriverError, NoDeviceError : a device cannot be used
    PreloadLimitError : more than `limit_bytes` would have to be loaded; nothing has been
    NoKernelError : a value of `M` that no kernel covers
    DamagedPackError, DriverError : a kernel cannot be loaded

    Notes
    -----
    The bytes are those of the code objects; what the driver sets aside beside them is its own. Load before you measure
    how much memory is left for a KV cache. `unload` gives it all back.
    """
    if not isinstance(weights, (PackedWeight, Iterable)):
        raise ArgumentError(f"weights must be one PackedWeight or several, got {type(weights).__name__}")
    if M is not None and not isinstance(M, Iterable):
        raise ArgumentError(f"M must be a range of numbers of rows or None, got {type(M).__name__}")
    start = time.perf_counter()
    prepared_weights = map(prepare, [weights] if isinstance(weights, PackedWeight) else weights)
    # Layers of one class can hit the same entries, so each class is asked once.
    classes = {(weight.device, weight.problem(1, MAX_ALIGNMENT)): weight for weight in prepared_weights}
    wanted = {
        (weight.device, entry.name): (weight.loader, entry)
        for weight in classes.values()
        for entry in _entries_for(weight, M)
    }
    missing = [(loader, entry) for loader, entry in wanted.values() if not loader.is_loaded(entry)]
    code_bytes = _code_bytes(missing)
    if limit_bytes is not None and code_bytes > limit_bytes:
        raise PreloadLimitError(
            f"{len(missing)} kernels with {code_bytes} bytes of device code are to be loaded, the limit is "
            f"{limit_bytes} bytes: {', '.join(entry.name for _, entry in missing)}"
        )
    for loader, entry in missing:
        loader.kernel(entry)
    return Preloaded(
        entries=_names(wanted.values()),
        loaded=_names(missing),
        code_bytes=code_bytes,
        time_us=1e6 * (time.perf_counter() - start),
    )


def unload(device: Device | str | None = None) -> None:
    """Unload all kernels, of one device or of all; a later call loads what it needs again.

    No launch may be under way, and no captured graph be replayed afterwards.

    Parameters
    ----------
    device : a `Device`, or text such as "cuda:0"; None for all

    Raises
    ------
    DriverError : the first module that a driver refused to unload; all is forgotten all the same
    """
    forget_loaders(Device.parse(device) if isinstance(device, str) else device)


def _names(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.name for _, entry in kernels))


def _code_bytes(kernels: Iterable[Kernel]) -> int:
    """Bytes of the objects of `kernels` that are not loaded, each once per device."""
    objects = {(loader.device, entry.object): (loader, entry) for loader, entry in kernels}
    return sum(loader.pack.object_bytes(entry) for loader, entry in objects.values() if not loader.has_object(entry))


def reachable_entries(problem: Problem, device: DeviceFacts, manifest: Manifest) -> list[Entry]:
    """Entries that some M and some alignment can lead to, all else being as in `problem`; in the manifest's order.

    A superset: M is looked at in ranges, as the policy's rules divide it, and where something holds for a part of a
    range only, both what follows from it and what follows from the contrary count as reachable.
    """
    own = signature_of(problem)
    kin = [manifest.entries[name] for name, signature in manifest.signatures.items() if signature == own]
    ranges = _row_ranges(manifest.policy)
    reached = set()
    for alignment in _alignments(problem, device, manifest.policy, kin):
        aligned = problem._replace(alignment=alignment)
        candidates = _candidates(aligned, device, kin)
        for rows in ranges:
            # Arithmetic and comparisons work with a range as they do with a number.
            here = aligned._replace(M=rows)  # type: ignore[arg-type]
            reached |= _reached(here, device, manifest.policy, candidates)
    return [entry for entry in kin if entry.name in reached]


def _candidates(problem: Problem, device: DeviceFacts, entries: list[Entry]) -> dict[str, Entry]:
    """Those of `entries` whose conditions can hold for some M, as far as that can be told without it."""
    values = formula_values(problem, device)
    known: dict[str, bool] = {}

    def can_hold(formula: Formula) -> bool:
        holds = known.get(formula.text)
        if holds is None:
            holds = known[formula.text] = "M" in formula.names or bool(_value(formula, values))
        return holds

    return {entry.name: entry for entry in entries if all(map(can_hold, entry.needs.conditions))}


def _reached(problem: Problem, device: DeviceFacts, policy: tuple[Rule, ...], candidates: dict[str, Entry]) -> set[str]:
    """Names of the candidates that selection may come to, `problem.M` being a range."""
    values = formula_values(problem, device)
    reached = set()
    for rule in policy:
        try:
            if not _value(rule.when, values):
                continue
            surely = True
        except UndecidedError:
            surely = False
        for name in rule.entries:
            entry = candidates.get(name)
            if entry is None:
                continue
            try:
                if unmet_needs(entry, problem, device):
                    continue
            except UndecidedError:
                reached.add(name)
                continue
            reached.add(name)
            if surely:
                return reached
            break
    return reached


def _row_ranges(policy: tuple[Rule, ...]) -> list[Range]:
    """All M that a call can have, in ranges over which no comparison of M with a number in the policy changes."""
    starts = {1}
    for rule in policy:
        words = tokens(rule.when.text) if "M" in rule.when.names else []
        for left, comparison, right in zip(words, words[1:], words[2:], strict=False):
            if left == "M" and right.isdecimal():
                starts.update(int(right) + step for step in _BORDERS.get(comparison, ()))
            elif right == "M" and left.isdecimal() and comparison in _BORDERS:
                starts.update((int(left), int(left) + 1))
    ordered = sorted(start for start in starts if 1 <= start <= INT32_MAX)
    ordered = ordered[:: -(-len(ordered) // MAX_ROW_RANGES)]
    ends = [start - 1 for start in ordered[1:]] + [INT32_MAX]
    return [Range(start, end) for start, end in zip(ordered, ends, strict=True)]


def _alignments(problem: Problem, device: DeviceFacts, policy: tuple[Rule, ...], entries: list[Entry]) -> list[int]:
    """Alignments, one for each way in which formulas can tell them apart."""
    formulas = [rule.when for rule in policy]
    for entry in entries:
        formulas += (*entry.needs.conditions, *entry.grid, entry.dynamic_shared_bytes)
    naming = {formula.text: formula for formula in formulas if "alignment" in formula.names}.values()
    if any("M" in formula.names for formula in naming):
        return list(ALIGNMENTS)
    values = formula_values(problem, device)
    classes: dict[tuple[int | None, ...], int] = {}
    for alignment in ALIGNMENTS:
        values["alignment"] = alignment
        classes.setdefault(tuple([_value(formula, values) for formula in naming]), alignment)
    return list(classes.values())


def _value(formula: Formula, values: dict[str, int]) -> int | None:
    try:
        return formula(values)
    except FormulaError:
        return None


def _entries_for(prepared: PreparedWeight, M: range | None) -> list[Entry]:
    loader = prepared.loader
    if M is None:
        return reachable_entries(prepared.problem(1, MAX_ALIGNMENT), loader.facts, loader.pack.manifest)
    entries: dict[str, Entry] = {}
    for rows in M:
        for alignment in ALIGNMENTS if rows else ():
            entry = select(prepared.problem(rows, alignment), loader.facts, loader.pack.manifest).entry
            entries[entry.name] = entry
    return list(entries.values())
