"""`gristmill wheel`: make the core wheels and one wheel of data for each pack."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from gristmill.aot.errors import WheelError
from gristmill.aot.toolchain import BUILD_PACKAGES, WHEEL_PACKAGES, require
from gristmill.cli import print_json, progress
from gristmill.commands.options import arch_list

HELP = "make the core wheels and a wheel of data for each pack"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--packs", type=Path, default=Path("build/packs"), help="folder of packs (default build/packs)")
    parser.add_argument("--arch", type=arch_list, help="comma separated (default: all packs there)")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of wheels (default dist)")
    parser.add_argument(
        "--source", type=Path, help="source tree for the core wheel (default: where gristmill runs from)"
    )
    parser.add_argument("--no-core", action="store_true", help="wheels of packs only")


def run(arguments: argparse.Namespace) -> int:
    require(BUILD_PACKAGES | WHEEL_PACKAGES, "making wheels")
    from gristmill.aot.wheel import PLATFORM, Wheel, core_wheel, find_license, pack_wheel, source_tree

    folders = sorted(path.parent for path in arguments.packs.glob("*/manifest.json"))
    if arguments.arch is not None:
        folders = [arguments.packs / arch for arch in arguments.arch]
    if not folders:
        raise WheelError(f"no packs in {arguments.packs}; run: gristmill build --out {arguments.packs}")
    source = arguments.source or (None if arguments.no_core else source_tree())
    wheels: list[Wheel] = []
    if not arguments.no_core and source is not None:
        for platform in (PLATFORM, None):
            progress(f"making the core wheel for {platform or 'any platform'}")
            wheels.append(core_wheel(source, arguments.out, platform))
    license_text = find_license(source)
    for folder in folders:
        progress(f"making the wheel of {folder.name}")
        wheels.append(pack_wheel(folder, arguments.out, license_text))
    if arguments.json:
        print_json({"wheels": [{**asdict(wheel), "path": str(wheel.path)} for wheel in wheels]})
        return 0
    for wheel in wheels:
        print(f"{wheel.path}  {wheel.bytes} bytes")
    return 0
