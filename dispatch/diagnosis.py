"""What can run here, and what keeps the rest from it: the findings of `gristmill doctor`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.device import PACKS_FOR_ARCH
from gristmill.drivers import driver_names, get_driver
from gristmill.drivers.default import HARDWARE
from gristmill.drivers.protocol import Driver
from gristmill.environment import chip_override, pack_path
from gristmill.errors import (
    DamagedPackError,
    GristmillError,
    NoPackError,
    PackError,
    PackTooNewError,
    PackTooOldError,
)
from gristmill.kfd import NODES, arch_of_override, chips
from gristmill.packs import Pack, distribution_name, find_pack, folders_in, pack_roots

UNSET_OVERRIDE = "unset HSA_OVERRIDE_GFX_VERSION"


@dataclass
class PackFinding:
    """One pack on disk, with all its code objects read."""

    arch: str
    folder: str
    version: str | None = None
    entries: int = 0
    verified: int = 0  # of the entries: those with a record of a run that passed
    problem: str | None = None
    fix: str | None = None


@dataclass
class DeviceFinding:
    """One device; it can run when `problem` is None."""

    device: str
    arch: str
    name: str
    multiprocessor_count: int
    lds_bytes_per_block: int
    chip: str | None = None  # the true arch, where the kernel tells it
    pack: str | None = None
    problem: str | None = None
    fix: str | None = None


@dataclass
class DriverFinding:
    driver: str
    version: str | None = None
    problem: str | None = None
    devices: list[DeviceFinding] = field(default_factory=list)


@dataclass
class Diagnosis:
    """`can_run`: some device of a hardware driver has a pack that is whole."""

    can_run: bool
    drivers: list[DriverFinding]
    packs: list[PackFinding]
    amd_chips: list[str]  # as the kernel sees them
    mismatches: list[str]
    fixes: list[str]  # commands and steps, most to the point first


def diagnose(kfd_nodes: Path = NODES) -> Diagnosis:
    """Look at drivers, devices, packs and the environment; raises nothing that it can report."""
    amd_chips = chips(kfd_nodes)
    folders, unreadable = _pack_folders()
    packs = [_pack_finding(folder) for folder in folders]
    drivers = [_driver_finding(name, packs, amd_chips) for name in driver_names()]
    hardware = [row for row in drivers if row.driver in HARDWARE]
    devices = [device for row in hardware for device in row.devices]
    can_run = any(device.problem is None for device in devices)
    fixes = [f"let this process read {root}, or take it off GRISTMILL_PACK_PATH" for root in unreadable]
    fixes += [fix for fix in (*(row.fix for row in devices), *(row.fix for row in packs)) if fix]
    if not devices:
        fixes += _fixes_without_device(hardware, amd_chips)
    mismatches = [f"packs cannot be read: {reason}" for reason in unreadable.values()]
    mismatches += _mismatches(devices, packs, amd_chips)
    return Diagnosis(can_run, drivers, packs, amd_chips, mismatches, _distinct(fixes))


def _pack_folders() -> tuple[list[str], Mapping[str, str]]:
    """The folders of all packs, and for each root that cannot be read the reason: it does not hide the others."""
    folders: list[str] = []
    unreadable = {}
    for root in pack_roots():
        try:
            folders += folders_in(root)
        except PackError as error:
            unreadable[root] = str(error)
    return folders, unreadable


def _pack_finding(folder: str) -> PackFinding:
    row = PackFinding(os.path.basename(folder), folder)
    try:
        pack = Pack.open(folder)
        row.version = pack.manifest.version
        row.entries = len(pack.manifest.entries)
        for entry in pack.manifest.entries.values():
            pack.read_object(entry)
        row.verified = len(pack.verified())
    except PackError as error:
        row.problem, row.fix = str(error), fix_of(error, row.arch, folder)
    return row


def _driver_finding(name: str, packs: Sequence[PackFinding], amd_chips: Sequence[str]) -> DriverFinding:
    row = DriverFinding(name)
    try:
        driver = get_driver(name)
        row.problem = driver.unavailable_reason()
        if row.problem is None:
            row.version = driver.version()
            row.devices = [_device_finding(driver, ordinal, packs) for ordinal in range(driver.device_count())]
    except GristmillError as error:
        row.problem = str(error)
    if name == "hip":
        _compare_with_kernel(row.devices, amd_chips)
    return row


def _device_finding(driver: Driver, ordinal: int, packs: Sequence[PackFinding]) -> DeviceFinding:
    facts = driver.device_facts(ordinal)
    row = DeviceFinding(
        f"{driver.name}:{ordinal}", facts.arch, facts.name, facts.multiprocessor_count, facts.lds_bytes_per_block
    )
    try:
        row.pack = find_pack(facts.arch).folder
    except PackError as error:
        serving = PACKS_FOR_ARCH.get(facts.arch, ())
        folder = next((pack.folder for arch in serving for pack in packs if pack.arch == arch), None)
        row.problem, row.fix = str(error), fix_of(error, facts.arch, folder)
        return row
    for pack in packs:
        if pack.folder == row.pack:
            row.problem, row.fix = pack.problem, pack.fix
    return row


def _compare_with_kernel(devices: Sequence[DeviceFinding], amd_chips: Sequence[str]) -> None:
    """Find devices behind which another chip is: by position where the numbers agree, else where all chips are one."""
    if len(devices) == len(amd_chips):
        true_archs = list(amd_chips)
    elif len(set(amd_chips)) == 1:
        true_archs = list(amd_chips[:1]) * len(devices)
    else:
        return
    if sorted(true_archs) == sorted(device.arch for device in devices):
        return  # the runtime may count them in another order
    for device, chip in zip(devices, true_archs, strict=True):
        device.chip = chip
        if chip != device.arch:
            device.problem = (
                f"ROCm reports {device.arch}, the chip is {chip}: code for {device.arch} may compute wrongly"
            )
            device.fix = _without_override(chip)


def _without_override(chip: str) -> str:
    serving = PACKS_FOR_ARCH.get(chip)
    return f"{UNSET_OVERRIDE}; pip install {distribution_name(serving[0])}" if serving else UNSET_OVERRIDE


def _mismatches(devices: Sequence[DeviceFinding], packs: Sequence[PackFinding], amd_chips: Sequence[str]) -> list[str]:
    """What does not fit together, though it may not keep anything from running."""
    lines = [f"{row.device}: {row.problem}" for row in devices if row.problem]
    override = chip_override()
    if override:
        reported = arch_of_override(override)
        if reported is None or set(amd_chips) != {reported}:
            seen = f"the chips are {', '.join(sorted(set(amd_chips)))}" if amd_chips else "the true chip is not known"
            lines.append(
                f"HSA_OVERRIDE_GFX_VERSION={override} makes ROCm report {reported or 'another chip'}; {seen}: "
                f"a pack for the wrong chip may load and give wrong results; {UNSET_OVERRIDE}"
            )
    used = {device.pack: device.device for device in reversed(devices)}
    lines += [
        f"pack {row.arch}: {row.entries - row.verified} of {row.entries} entries have no record of a run that passed; "
        f"run: gristmill selftest --device {used[row.folder]} --record {shlex.quote(f'{row.folder}/verified.json')}"
        for row in packs
        if row.folder in used and row.problem is None and row.verified < row.entries
    ]
    if devices:
        lines += [f"pack {row.arch} in {row.folder} serves no device here" for row in packs if row.folder not in used]
    return lines


def _fixes_without_device(hardware: Sequence[DriverFinding], amd_chips: Sequence[str]) -> list[str]:
    served = [PACKS_FOR_ARCH[chip][0] for chip in amd_chips if chip in PACKS_FOR_ARCH]
    lines = [f"pip install 'gristmill[rocm]' {' '.join(_distinct(map(distribution_name, served)))}"] if served else []
    return lines + [f"for {row.driver}: {row.problem}" for row in hardware if row.problem]


def fix_of(error: PackError, arch: str, folder: str | None) -> str | None:
    """What repairs what `error` says of the pack for `arch`, in `folder` if there is one; None where nothing does."""
    serving = PACKS_FOR_ARCH.get(arch)
    if isinstance(error, PackTooNewError):
        return "pip install --upgrade gristmill"
    if serving is None:
        return None
    root, name = os.path.split(folder or "")
    if root in pack_path() and isinstance(error, PackTooOldError | DamagedPackError):
        # It comes before whatever pip installs.
        return f"gristmill build --arch {name} --out {shlex.quote(root)}; or remove {folder}"
    wheel = distribution_name(serving[0])
    if isinstance(error, PackTooOldError):
        return f"pip install --upgrade {wheel}"
    if isinstance(error, DamagedPackError):
        return f"pip install --force-reinstall --no-deps {wheel}"
    return f"pip install {wheel}" if isinstance(error, NoPackError) else None


def _distinct(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
