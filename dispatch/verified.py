"""Records of verification: on what each entry was run, and how far off it was.

A record belongs to one code object by its sha256: a kernel that was compiled anew has no record until it has been run
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from gristmill.errors import ManifestError
from gristmill.manifest import Entry

# How an entry was run: its machine code on a device of its arch; its machine code in the emulator; its PTX, compiled by
# the driver, on a device of another arch (which proves the logic, not the machine code).
HOW = ("silicon", "emulation", "ptx on another arch")


@dataclass(frozen=True, slots=True)
class Record:
    """The verification of one entry."""

    object: str  # sha256 of the code object that was run
    on: str  # the device's name, or the emulator's
    how: str  # one of HOW
    cases: int
    worst_error_over_bound: float


def read_records(data: bytes, origin: str) -> dict[str, Record]:
    """Read the records of one pack; ManifestError when they are not what `dump_records` writes."""
    try:
        rows = json.loads(data)["entries"]
        records = {name: Record(**row) for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{origin}: not records of verification ({type(error).__name__}: {error})") from None
    types = {"str": str, "int": int, "float": float}
    for name, record in records.items():
        for field in fields(Record):
            if type(getattr(record, field.name)) is not types[str(field.type)]:
                raise ManifestError(f"{origin}: {name[:200]!a}: {field.name} must be a {field.type}")
        if record.how not in HOW or not 0 <= record.worst_error_over_bound <= 1 or record.cases < 1:
            raise ManifestError(f"{origin}: {name[:200]!a}: not a record of a verification that passed")
        if not record.on.isprintable():
            raise ManifestError(f"{origin}: {name[:200]!a}: on must be printable, got {record.on[:80]!a}")
    return records


def records_of(entries: Mapping[str, Entry], records: Mapping[str, Record]) -> dict[str, Record]:
    """The records that are of the very objects of `entries`."""
    return {
        name: record for name, record in records.items() if name in entries and entries[name].object == record.object
    }


def dump_records(records: Mapping[str, Record]) -> bytes:
    """The records as canonical JSON."""
    document = {"entries": {name: asdict(record) for name, record in sorted(records.items())}}
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
