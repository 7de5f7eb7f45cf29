"""Loading ahead of the first call, so that nothing loads on live traffic or while a graph is captured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from gristmill.arrays import Device
from gristmill.device import DeviceFacts
from gristmill.errors import FormulaError, PreloadLimitError
from gristmill.formula import Formula
from gristmill.loader import Loader, forget_loaders
from gristmill.manifest import Entry, Manifest
from gristmill.packed_weight import PackedWeight
from gristmill.prepared import MAX_ALIGNMENT, PreparedWeight, prepare
from gristmill.problem import Problem
from gristmill.select import select

# What is not known before a call.
_OPEN = frozenset({"M", "alignment"})

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
    PreloadLimitError : more than `limit_bytes` would have to be loaded; nothing has been
    NoKernelError : a value of `M` that no kernel covers
    DamagedPackError, DriverError : a kernel cannot be loaded

    Notes
    -----
    The bytes are those of the code objects; what the driver sets aside beside them is its own. Load before you measure
    how much memory is left for a KV cache. `unload` gives it all back.
    """
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
    """
    forget_loaders(Device.parse(device) if isinstance(device, str) else device)


def _names(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry.name for _, entry in kernels))


def _code_bytes(kernels: Iterable[Kernel]) -> int:
    """Bytes of the objects of `kernels` that are not loaded, each once per device."""
    objects = {(loader.device, entry.object): (loader, entry) for loader, entry in kernels}
    return sum(loader.pack.object_bytes(entry) for loader, entry in objects.values() if not loader.has_object(entry))


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


def _entries_for(prepared: PreparedWeight, M: range | None) -> list[Entry]:
    loader = prepared.loader
    if M is None:
        return reachable_entries(prepared.problem(1, MAX_ALIGNMENT), loader.facts, loader.pack.manifest)
    entries: dict[str, Entry] = {}
    for rows in M:
        for alignment in (2, 4, 8, 16) if rows else ():
            entry = select(prepared.problem(rows, alignment), loader.facts, loader.pack.manifest).entry
            entries[entry.name] = entry
    return list(entries.values())
