"""`gristmill list`: the entries of the packs found."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from gristmill.cli import print_json
from gristmill.commands.options import arch_list, found_archs
from gristmill.packs import find_pack

HELP = "list the kernels of the installed packs"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", type=arch_list, help="archs, separated by commas; default: every pack found")
    parser.add_argument("--resources", action="store_true", help="show registers, spills and shared memory")


def run(arguments: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for arch in arguments.arch or found_archs():
        pack = find_pack(arch)
        verified = pack.verified()
        for entry in pack.manifest.entries.values():
            rows.append(
                {
                    "arch": arch,
                    "op": entry.op,
                    "name": entry.name,
                    "needs": {
                        "dtype": entry.needs.dtype,
                        "zero_points": entry.needs.zero_points,
                        "conditions": [condition.text for condition in entry.needs.conditions],
                    },
                    "resources": {
                        **entry.resources,
                        "threads": entry.block[0] * entry.block[1] * entry.block[2],
                        "static_shared_bytes": entry.static_shared_bytes,
                        "dynamic_shared_bytes": entry.dynamic_shared_bytes.text,
                    },
                    "verified": asdict(verified[entry.name]) if entry.name in verified else None,
                }
            )
    if arguments.json:
        print_json({"entries": rows})
        return 0
    for row in rows:
        needs = row["needs"]
        conditions = " and ".join(f"({text})" for text in needs["conditions"])
        zero_points = "with zero points" if needs["zero_points"] else "without zero points"
        print(f"{row['arch']} {row['name']}: {needs['dtype']} {zero_points}{' if ' + conditions if conditions else ''}")
        record = row["verified"]
        proof = f"{record['how']} on {record['on']}, {record['cases']} cases" if record else "no record of a run"
        print(f"    verified: {proof}")
        if arguments.resources:
            print("    " + ", ".join(f"{name} {value}" for name, value in row["resources"].items()))
    if not rows:
        print("no packs found; run: gristmill build, or pip install a gristmill-<arch> wheel")
    return 0
