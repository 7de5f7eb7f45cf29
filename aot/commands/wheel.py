"""`gristmill wheel`: make the core wheels and one wheel of data for each pack."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.aot.coverage import TABLE, check_coverage
from gristmill.aot.errors import WheelError
from gristmill.aot.toolchain import BUILD_PACKAGES, WHEEL_PACKAGES, require
from gristmill.cli import print_json, progress
from gristmill.commands.options import arch_list
from gristmill.packs import Pack

if TYPE_CHECKING:
    from gristmill.aot.wheel import Wheel

HELP = "make the core wheels and a wheel of data for each pack"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--packs",
        type=Path,
        default=Path("build/packs"),
        help="folder of packs (default build/packs; GRISTMILL_PACK_PATH has no say here)",
    )
    parser.add_argument("--arch", type=arch_list, help="comma separated (default: all packs there)")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of wheels (default dist)")
    parser.add_argument(
        "--source",
        type=Path,
        help=f"source tree for the core wheel, with {TABLE}, which the packs must agree with (default: where gristmill "
        "runs from)",
    )
    parser.add_argument("--no-core", action="store_true", help="wheels of packs only")
    parser.add_argument("--sizes", action="store_true", help="show what each kernel takes of its wheel")


def run(arguments: argparse.Namespace) -> int:
    require(BUILD_PACKAGES | WHEEL_PACKAGES, "making wheels")
    from gristmill.aot.wheel import BUDGET_BYTES, PLATFORM, core_wheel, find_license, pack_wheel

    folders = sorted(path.parent for path in arguments.packs.glob("*/manifest.json"))
    if arguments.arch is not None:
        folders = [arguments.packs / arch for arch in arguments.arch]
    if not folders:
        raise WheelError(f"no packs in {arguments.packs}; run: gristmill build --out {arguments.packs}")
    source = arguments.source or _source_tree(arguments.no_core)
    if source is not None and (source / TABLE).is_file():
        progress(f"comparing the packs with {source / TABLE}")
        check_coverage([Pack.open(folder).manifest for folder in folders], source / TABLE)
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
        print_json({"budget_bytes": BUDGET_BYTES, "wheels": [_document(wheel) for wheel in wheels]})
        return 0
    for wheel in wheels:
        print(f"{wheel.path}  {wheel.bytes} bytes")
        for kernel in wheel.kernels if arguments.sizes else ():
            share = 100 * kernel.compressed_bytes / wheel.bytes
            print(f"  {kernel.compressed_bytes:8} bytes {share:5.2f} %  {kernel.op}  {', '.join(kernel.entries)}")
    return 0


def _source_tree(no_core: bool) -> Path | None:
    """The tree that gristmill runs from; wheels of packs alone can be made without one."""
    from gristmill.aot.wheel import source_tree

    try:
        return source_tree()
    except WheelError:
        if no_core:
            return None
        raise


def _document(wheel: Wheel) -> dict[str, Any]:
    kernels = [{**asdict(kernel), "share": kernel.compressed_bytes / wheel.bytes} for kernel in wheel.kernels]
    return {**asdict(wheel), "path": str(wheel.path), "kernels": kernels}
