"""Loading ahead of the first call, so that nothing loads on live traffic or while a graph is captured."""

from __future__ import annotations

from gristmill.device import DeviceFacts
from gristmill.errors import FormulaError
from gristmill.formula import Formula
from gristmill.manifest import Entry, Manifest
from gristmill.packed_weight import PackedWeight
from gristmill.prepared import MAX_ALIGNMENT, PreparedWeight, prepare
from gristmill.problem import Problem
from gristmill.select import select

# What is not known before a call.
_OPEN = frozenset({"M", "alignment"})


def preload(weight: PackedWeight, M: range | None = None) -> list[str]:
    """Load every kernel that a call with `weight` can hit.

    Parameters
    ----------
    weight : on a device
    M : numbers of rows that will come; None for any. A range is walked through, so keep it for short ones

    Returns
    -------
    names of the entries, now loaded on the weight's device

    Raises
    ------
    NoKernelError : a value of `M` that no kernel covers
    DamagedPackError, DriverError : a kernel cannot be loaded
    """
    prepared = prepare(weight)
    loader = prepared.loader
    if M is None:
        entries = reachable_entries(prepared.problem(1, MAX_ALIGNMENT), loader.facts, loader.pack.manifest)
    else:
        entries = _entries_for(prepared, M)
    for entry in entries:
        loader.kernel(entry)
    return [entry.name for entry in entries]


def reachable_entries(problem: Problem, device: DeviceFacts, manifest: Manifest) -> list[Entry]:
    """Entries that some M and some alignment can lead to, all else being as in `problem`.

    A superset: a formula that names M or the alignment is taken to hold.
    """
    values = {**problem.names(), **device.names()}

    def can_hold(formula: Formula) -> bool:
        try:
            return bool(formula.names & _OPEN) or bool(formula(values))
        except FormulaError:
            return False

    def fits(entry: Entry) -> bool:
        needs = entry.needs
        return (
            entry.op == problem.op
            and needs.dtype == problem.dtype
            and needs.zero_points == problem.has_zero_points
            and all(can_hold(condition) for condition in needs.conditions)
        )

    names = [name for rule in manifest.policy if can_hold(rule.when) for name in rule.entries]
    return [manifest.entries[name] for name in dict.fromkeys(names) if fits(manifest.entries[name])]


def _entries_for(prepared: PreparedWeight, M: range) -> list[Entry]:
    loader = prepared.loader
    entries: dict[str, Entry] = {}
    for rows in M:
        for alignment in (2, 4, 8, 16) if rows else ():
            entry = select(prepared.problem(rows, alignment), loader.facts, loader.pack.manifest).entry
            entries[entry.name] = entry
    return list(entries.values())
