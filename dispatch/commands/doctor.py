"""`gristmill doctor`: devices, drivers, packs, and what keeps them apart."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from gristmill import __version__
from gristmill.cli import print_json
from gristmill.diagnosis import DeviceFinding, Diagnosis, diagnose
from gristmill.kfd import NODES

HELP = "say what can run here, and what is missing with its fix"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kfd", type=Path, default=NODES, help=f"where AMD's kernel driver lists its nodes ({NODES})")


def run(arguments: argparse.Namespace) -> int:
    diagnosis = diagnose(arguments.kfd)
    if arguments.json:
        print_json({"version": __version__, **asdict(diagnosis)})
    else:
        _print(diagnosis)
    return 0 if diagnosis.can_run else 1


def _print(diagnosis: Diagnosis) -> None:
    print(f"gristmill {__version__}")
    for driver in diagnosis.drivers:
        print(f"driver {driver.driver}: {driver.problem or f'usable, version {driver.version}'}")
        for device in driver.devices:
            _print_device(device)
    if diagnosis.amd_chips:
        print(f"AMD chips that the kernel sees: {', '.join(diagnosis.amd_chips)}")
    for pack in diagnosis.packs:
        found = pack.problem or f"{pack.entries} entries, {pack.verified} with a record of a run that passed,"
        print(f"pack {pack.arch} {pack.version or ''}: {found} in {pack.folder}")
    if not diagnosis.packs:
        print("no packs found")
    for line in diagnosis.mismatches:
        print(f"mismatch: {line}")
    print("something can run here" if diagnosis.can_run else "nothing can run here")
    for line in diagnosis.fixes:
        print(f"fix: {line}")


def _print_device(device: DeviceFinding) -> None:
    shared = f"{device.lds_bytes_per_block} bytes of shared memory a block"
    print(f"  {device.device}: {device.name}, {device.arch}, {shared}")
    print(f"    {'cannot run: ' + device.problem if device.problem else f'runs with {device.pack}'}")
