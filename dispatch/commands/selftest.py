"""`gristmill selftest`: every entry of the device's pack on the device itself, on the cases of its verification."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gristmill.arrays import Device
from gristmill.cli import print_json, progress
from gristmill.commands.output import check_writable, write
from gristmill.drivers.default import first_device
from gristmill.errors import ArgumentError
from gristmill.loader import Loader, loader_for
from gristmill.manifest import Entry
from gristmill.selftest import CaseResult, cases_for, record_of, run_case, why_no_cases
from gristmill.verified import dump_records

HELP = "run every kernel of the device's pack on the device and compare with the float64 reference"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda:0, hip:0, emulated:gfx1151; default: the first GPU")
    parser.add_argument("--entry", action="append", help="only this entry; may be repeated")
    parser.add_argument("--record", type=Path, help="write the records of the entries that passed to this file")


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.record, "--record")
    device = Device.parse(arguments.device) if arguments.device else first_device()
    loader = loader_for(device)
    entries = _chosen(loader.pack.manifest.entries, arguments.entry)
    start = time.monotonic()
    results = {}
    not_usable = {}
    for done, entry in enumerate(entries, 1):
        rows = results[entry.name] = _run_cases(entry, loader, device)
        if rows:
            worst = max(row.error_over_bound for row in rows)
            progress(f"[{done}/{len(entries)}] {entry.name}: {len(rows)} cases, worst error over bound {worst:.3f}")
        else:
            not_usable[entry.name] = why_no_cases(entry, loader.facts)
    failed = {name: [asdict(row) for row in rows if not row.passed] for name, rows in results.items()}
    failed = {name: rows for name, rows in failed.items() if rows}
    how = "emulation" if device.driver == "emulated" else "silicon"
    records = {
        entry.name: record_of(entry, results[entry.name], loader.facts.name, how)
        for entry in entries
        if entry.name not in failed and entry.name not in not_usable
    }
    if arguments.record is not None:
        write(arguments.record, dump_records(records), "--record")
    passed = bool(records) and not failed
    document = {
        "device": str(device),
        "device_name": loader.facts.name,
        "passed": passed,
        "seconds": time.monotonic() - start,
        "entries": {name: asdict(record) for name, record in records.items()},
        "failed": failed,
        "not_usable": not_usable,
    }
    if arguments.json:
        print_json(document)
    else:
        _print(document)
    return 0 if passed else 1


def _chosen(entries: Mapping[str, Entry], names: Sequence[str] | None) -> list[Entry]:
    """The entries of these names, in the pack's order; all where none is named."""
    unknown = [name for name in names or () if name not in entries]
    if unknown:
        raise ArgumentError(f"the device's pack has no entry {', '.join(unknown)}; gristmill list names those it has")
    return [entry for name, entry in entries.items() if not names or name in names]


def _run_cases(entry: Entry, loader: Loader, device: Device) -> list[CaseResult]:
    """The results of an entry; it is loaded only if the device can take a case at all."""
    rng = np.random.default_rng()
    cases = cases_for(entry, loader.facts)
    return [run_case(loader.kernel(entry), device, loader.facts, case, rng) for case in cases]


def _print(document: Mapping[str, Any]) -> None:
    for name, rows in document["failed"].items():
        for row in rows:
            case = " ".join(f"{field}={value}" for field, value in row["case"].items())
            what = f"error over bound {row['error_over_bound']:.3f}, guard {row['guard_intact']}"
            print(f"FAILED {name} {case}: {what}")
    for name, reason in document["not_usable"].items():
        print(f"not usable on this device: {name}: {reason}")
    passed, failed, not_usable = (len(document[key]) for key in ("entries", "failed", "not_usable"))
    rest = f"; {not_usable} are not usable on it" if not_usable else ""
    where = f"{document['device']} ({document['device_name']})"
    print(f"{passed} of {passed + failed + not_usable} entries passed on {where}{rest}")
