"""The choice of a kernel, pure: `select` gives the entry and its launch, `verdicts` says why each entry fits or not."""

from __future__ import annotations

from gristmill.device import DeviceFacts
from gristmill.errors import FormulaError, ManifestError, NoKernelError
from gristmill.formula import Formula
from gristmill.launch import INT32_MAX
from gristmill.manifest import Entry, Manifest, Signature
from gristmill.named_tuple import NamedTuple
from gristmill.problem import Problem

MAX_GRID = (2**31 - 1, 65535, 65535)  # in blocks
MAX_HIP_THREADS = 2**32 - 1  # HIP counts a grid's extent in threads, in 32 bits


class Verdict(NamedTuple):
    """Why one entry was taken or not; `reasons` is empty where all its needs hold."""

    entry: str
    reasons: tuple[str, ...]


class Selection(NamedTuple):
    """The chosen entry with its launch, and the origin of the rule that named it."""

    entry: Entry
    grid: tuple[int, int, int]
    dynamic_shared_bytes: int
    origin: str
    is_floor: bool  # the policy's last rule: right, but not chosen for speed


def select(problem: Problem, device: DeviceFacts, manifest: Manifest) -> Selection:
    """Choose an entry: the first rule of the policy that holds and names an entry whose needs hold.

    Raises
    ------
    NoKernelError : no rule does; the message has one reason per entry
    DamagedPackError : the row of an entry that could be chosen is not valid
    """
    values = formula_values(problem, device)
    signature = signature_of(problem)
    for index, rule in enumerate(manifest.policy):
        if not _holds(rule.when, values):
            continue
        for name in rule.entries:
            if manifest.signatures[name] != signature:
                continue
            entry = manifest.entries[name]
            if not unmet_needs(entry, problem, device):
                grid, dynamic_shared_bytes = _launch_shape(entry, values)
                return Selection(
                    entry=entry,
                    grid=grid,
                    dynamic_shared_bytes=dynamic_shared_bytes,
                    origin=rule.origin,
                    is_floor=index == len(manifest.policy) - 1,
                )
    lines = [f"no {problem.op} kernel for {problem} on {device.arch}"]
    lines += [
        f"  {verdict.entry}: {'; '.join(verdict.reasons) or rule_verdict(verdict.entry, problem, device, manifest)}"
        for verdict in verdicts(problem, device, manifest)
    ]
    raise NoKernelError("\n".join(lines))


def signature_of(problem: Problem) -> Signature:
    """The signature of the entries that can serve `problem`."""
    return Signature(problem.op, problem.dtype, problem.has_zero_points)


def verdicts(problem: Problem, device: DeviceFacts, manifest: Manifest) -> list[Verdict]:
    """The verdict on every entry of the pack, in the manifest's order."""
    return [_verdict(name, problem, device, manifest) for name in manifest.entries]


def _verdict(name: str, problem: Problem, device: DeviceFacts, manifest: Manifest) -> Verdict:
    try:
        entry = manifest.entries[name]  # read, and found right or not, only now
    except ManifestError as error:
        return Verdict(name, (str(error),))
    return Verdict(name, tuple(unmet_needs(entry, problem, device)))


def rule_verdict(name: str, problem: Problem, device: DeviceFacts, manifest: Manifest) -> str:
    """What the policy says of an entry whose needs all hold and that was not chosen."""
    values = formula_values(problem, device)
    naming = [rule for rule in manifest.policy if name in rule.entries]
    holding = [rule for rule in naming if _holds(rule.when, values)]
    if holding:
        return f"would do; an earlier choice comes before it ({holding[0].origin})"
    if naming:
        return f"would do; its rules do not hold: {' nor '.join(rule.when.text for rule in naming)}"
    return "would do; no rule names it"


def unmet_needs(entry: Entry, problem: Problem, device: DeviceFacts) -> list[str]:
    """The needs of `entry` that `problem` on `device` does not meet, each as a sentence with the values found."""
    reasons = []
    if entry.op != problem.op:
        reasons.append(f"is for {entry.op}")
    if entry.needs.dtype != problem.dtype:
        reasons.append(f"needs {entry.needs.dtype}, got {problem.dtype}")
    if entry.needs.zero_points != problem.has_zero_points:
        reasons.append("needs zero points" if entry.needs.zero_points else "takes no zero points")
    values = formula_values(problem, device)
    for condition in entry.needs.conditions:
        if not _holds(condition, values):
            found = ", ".join(f"{name}={values[name]}" for name in sorted(condition.names))
            reasons.append(f"needs {condition.text}, got {found}")
    if problem.M > INT32_MAX or problem.N > INT32_MAX or problem.K > INT32_MAX:
        for name, type_ in entry.arguments:
            if type_ == "int32" and values.get(name, 0) > INT32_MAX:
                reasons.append(f"takes {name} in 32 bits, got {values[name]}")
    threads = entry.block[0] * entry.block[1] * entry.block[2]
    if threads > device.max_threads_per_block:
        reasons.append(f"needs {threads} threads a block, the device has {device.max_threads_per_block}")
    try:
        grid, dynamic_shared_bytes = _launch_shape(entry, values)
    except FormulaError as error:
        return [*reasons, str(error)]
    shared_bytes = entry.static_shared_bytes + dynamic_shared_bytes
    if dynamic_shared_bytes < 0:
        reasons.append(f"its shared memory, {entry.dynamic_shared_bytes.text}, is {dynamic_shared_bytes} bytes")
    if shared_bytes > device.lds_bytes_per_block:
        reasons.append(f"needs {shared_bytes} bytes of shared memory, the device has {device.lds_bytes_per_block}")
    if any(not 0 <= blocks <= most for blocks, most in zip(grid, MAX_GRID, strict=True)):
        reasons.append(f"needs a grid of {grid} blocks, the most is {MAX_GRID}")
    if 0 in grid and problem.M > 0 and problem.N > 0:
        reasons.append(f"has a grid of {grid} blocks on this device: nothing would run")
    if device.backend == "hip" and any(g * b > MAX_HIP_THREADS for g, b in zip(grid, entry.block, strict=True)):
        reasons.append(
            f"needs a grid of {grid} blocks of {entry.block} threads, HIP's most is {MAX_HIP_THREADS} threads"
        )
    return reasons


def formula_values(problem: Problem, device: DeviceFacts) -> dict[str, int]:
    """The values that a manifest's formulas may name."""
    return {**problem.formula_values(), **device.formula_values()}


def launch_shape(entry: Entry, problem: Problem, device: DeviceFacts) -> tuple[tuple[int, int, int], int]:
    """Grid in blocks and dynamic shared memory in bytes with which `entry` is launched for `problem`."""
    return _launch_shape(entry, formula_values(problem, device))


def _launch_shape(entry: Entry, values: dict[str, int]) -> tuple[tuple[int, int, int], int]:
    x, y, z = entry.grid
    return (x(values), y(values), z(values)), entry.dynamic_shared_bytes(values)


def _holds(condition: Formula, values: dict[str, int]) -> bool:
    try:
        return bool(condition(values))
    except FormulaError:
        return False
