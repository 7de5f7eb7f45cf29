"""`gristmill coverage`: the table of what the packs serve, to be checked in."""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.aot.coverage import check_coverage, coverage_table, sections
from gristmill.aot.errors import WheelError
from gristmill.cli import print_json, progress
from gristmill.packs import Pack

HELP = "write the table of what the packs serve, or compare packs with it; needs no GPU"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--packs",
        type=Path,
        default=Path("build/packs"),
        help="folder of packs (default build/packs; GRISTMILL_PACK_PATH has no say here)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE", help="write the table to FILE; default: print it")
    action.add_argument("--check", type=Path, metavar="FILE", help="fail with the diff if FILE says something else")


def run(arguments: argparse.Namespace) -> int:
    folders = sorted(path.parent for path in arguments.packs.glob("*/manifest.json"))
    if not folders:
        raise WheelError(f"no packs in {arguments.packs}; run: gristmill build --out {arguments.packs}")
    manifests = [Pack.open(folder).manifest for folder in folders]
    if arguments.check:
        check_coverage(manifests, arguments.check, whole=True)
        progress(f"the packs cover what {arguments.check} says")
    elif arguments.write:
        arguments.write.write_text(coverage_table(manifests), encoding="utf-8")
    elif not arguments.json:
        print(coverage_table(manifests), end="")
    if arguments.json:
        print_json({"sections": sections(manifests)})
    return 0
