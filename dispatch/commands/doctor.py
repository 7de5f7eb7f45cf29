"""`gristmill doctor`: devices, packs, and what keeps them apart."""

from __future__ import annotations

import argparse
from typing import Any

from gristmill import __version__
from gristmill.cli import print_json
from gristmill.drivers import driver_names, get_driver
from gristmill.drivers.default import HARDWARE
from gristmill.environment import chip_override
from gristmill.errors import GristmillError, PackError
from gristmill.packs import Pack, find_pack, pack_folders

HELP = "say what can run here, and what is missing with its fix"


def configure(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    packs = [_examine_pack(folder) for folder in pack_folders()]
    drivers = [_examine_driver(name) for name in driver_names()]
    warnings = []
    if chip_override():
        warnings.append(
            f"HSA_OVERRIDE_GFX_VERSION={chip_override()} hides the true chip: a pack for the wrong arch may load and "
            "give wrong results; unset it"
        )
    can_run = any(device["pack"] for row in drivers if row["driver"] in HARDWARE for device in row["devices"])
    document = {
        "version": __version__,
        "can_run": can_run,
        "drivers": drivers,
        "packs": packs,
        "warnings": warnings,
    }
    if arguments.json:
        print_json(document)
    else:
        _print(document)
    return 0 if can_run else 1


def _examine_pack(folder) -> dict[str, Any]:
    row: dict[str, Any] = {"arch": folder.name, "folder": str(folder), "entries": 0, "problem": None}
    try:
        pack = Pack.open(folder)
        for entry in pack.manifest.entries.values():
            pack.read_object(entry)
        row["entries"] = len(pack.manifest.entries)
        row["version"] = pack.manifest.version
    except PackError as error:
        row["problem"] = str(error)
    return row


def _examine_driver(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"driver": name, "problem": None, "devices": []}
    try:
        driver = get_driver(name)
        row["problem"] = driver.unavailable_reason()
        if row["problem"] is None:
            for ordinal in range(driver.device_count()):
                row["devices"].append(_examine_device(driver, ordinal))
    except GristmillError as error:
        row["problem"] = str(error)
    return row


def _examine_device(driver, ordinal: int) -> dict[str, Any]:
    facts = driver.device_facts(ordinal)
    row = {"device": f"{driver.name}:{ordinal}", **facts._asdict(), "pack": None, "problem": None}
    try:
        row["pack"] = str(find_pack(facts.arch).folder)
    except PackError as error:
        row["problem"] = str(error)
    return row


def _print(document: dict[str, Any]) -> None:
    print(f"gristmill {document['version']}")
    for driver in document["drivers"]:
        print(f"driver {driver['driver']}: {driver['problem'] or 'usable'}")
        for device in driver["devices"]:
            shared = f"{device['lds_bytes_per_block']} bytes of shared memory a block"
            print(f"  {device['device']}: {device['name']}, {device['arch']}, {shared}")
            print(f"    pack: {device['pack'] or device['problem']}")
    for pack in document["packs"]:
        print(f"pack {pack['arch']}: {pack['problem'] or str(pack['entries']) + ' entries'} in {pack['folder']}")
    if not document["packs"]:
        print("no packs found; run: pip install gristmill-<arch>, or gristmill build")
    for warning in document["warnings"]:
        print(f"warning: {warning}")
    print("something can run here" if document["can_run"] else "nothing can run here: see the lines above")
