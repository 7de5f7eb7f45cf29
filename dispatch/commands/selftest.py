"""`gristmill selftest`: every entry of the device's pack on the device itself, on the cases of its verification."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from gristmill.arrays import Device
from gristmill.cli import print_json, progress
from gristmill.drivers.default import first_device
from gristmill.loader import loader_for
from gristmill.selftest import CaseResult, cases_for, record_of, run_case
from gristmill.verified import dump_records

HELP = "run every kernel of the device's pack on the device and compare with the float64 reference"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=Device.parse, help="cuda:0, hip:0, emulated:gfx1151; default: the first GPU")
    parser.add_argument("--entry", action="append", help="only this entry; may be repeated")
    parser.add_argument("--record", type=Path, help="write the records of the entries that passed to this file")


def run(arguments: argparse.Namespace) -> int:
    device = arguments.device or first_device()
    loader = loader_for(device)
    entries = [e for e in loader.pack.manifest.entries.values() if not arguments.entry or e.name in arguments.entry]
    rng = np.random.default_rng()
    results: dict[str, list[CaseResult]] = {}
    start = time.monotonic()
    for done, entry in enumerate(entries, 1):
        kernel = loader.kernel(entry)
        cases = cases_for(entry, loader.facts)
        results[entry.name] = [run_case(kernel, device, loader.facts, case, rng) for case in cases]
        worst = max(result.error_over_bound for result in results[entry.name])
        progress(f"[{done}/{len(entries)}] {entry.name}: {len(cases)} cases, worst error over bound {worst:.3f}")
    failed = {name: [r for r in rows if not r.passed] for name, rows in results.items()}
    failed = {name: rows for name, rows in failed.items() if rows}
    how = "emulation" if device.driver == "emulated" else "silicon"
    records = {
        name: record_of(loader.pack.manifest.entries[name], rows, loader.facts.name, how)
        for name, rows in results.items()
        if name not in failed
    }
    if arguments.record:
        arguments.record.write_bytes(dump_records(records))
    if arguments.json:
        print_json(
            {
                "device": str(device),
                "device_name": loader.facts.name,
                "passed": not failed,
                "seconds": time.monotonic() - start,
                "entries": {name: asdict(record) for name, record in records.items()},
                "failed": {name: [asdict(row) for row in rows] for name, rows in failed.items()},
            }
        )
    else:
        for name, rows in failed.items():
            for row in rows:
                print(
                    f"FAILED {name}: {row.case}: error over bound {row.error_over_bound:.3f}, guard {row.guard_intact}"
                )
        print(f"{len(records)} of {len(entries)} entries passed on {device} ({loader.facts.name})")
    return 1 if failed or not entries else 0
