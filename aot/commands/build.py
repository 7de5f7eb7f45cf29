"""`gristmill build`: compile the kernels of each arch into a pack, without a GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.aot.environment import default_cache_folder
from gristmill.aot.targets import TARGETS
from gristmill.aot.toolchain import BUILD_PACKAGES, processor_count, require
from gristmill.cli import print_json, progress
from gristmill.commands.options import arch_list, positive

if TYPE_CHECKING:
    from gristmill.aot.build import PackReport
    from gristmill.aot.verify import VerificationReport

HELP = "compile the kernels of each arch into a pack; needs no GPU"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", type=arch_list, default=list(TARGETS), help=f"comma separated (default {','.join(TARGETS)})"
    )
    parser.add_argument("--out", type=Path, default=Path("build/packs"), help="folder of packs (default build/packs)")
    parser.add_argument("--cache", type=Path, help="folder of the build cache (default ~/.cache/gristmill)")
    parser.add_argument("--jobs", type=positive, default=processor_count(), help="processes (default: processors)")


def run(arguments: argparse.Namespace) -> int:
    require(BUILD_PACKAGES, "building packs")
    from gristmill.aot.build import build_packs  # imports what was just asked for
    from gristmill.aot.verify import verify_packs

    cache = arguments.cache or default_cache_folder()
    start = time.monotonic()
    reports = build_packs(
        arguments.arch,
        out=arguments.out,
        cache_folder=cache,
        jobs=arguments.jobs,
        progress=sys.stderr,
    )
    built = time.monotonic()
    verifications = verify_packs([report.folder for report in reports], cache, arguments.jobs, progress)
    seconds = round(built - start, 1)
    verify_seconds = round(time.monotonic() - built, 1)
    for report in reports:
        if report.spilled:
            worst = max(report.spilled, key=lambda name: report.spilled[name])
            progress(
                f"{report.arch}: {len(report.spilled)} entries keep registers in memory, the most {worst}: "
                f"{report.spilled[worst]} bytes a thread"
            )
    if arguments.json:
        packs = [
            {**asdict(report), "folder": str(report.folder), "unverified": found.unverified}
            for report, found in zip(reports, verifications, strict=True)
        ]
        print_json({"packs": packs, "seconds": seconds, "verify_seconds": verify_seconds})
    else:
        _print_table(reports, seconds)
        _print_verification(verifications, verify_seconds)
        print(f"to use these packs: export GRISTMILL_PACK_PATH={arguments.out.resolve()}")
    return 0


def _print_table(reports: list[PackReport], seconds: float) -> None:
    head = ("arch", "entries", "objects", "bytes", "compiled", "cached", "CPU s", "spilled", "pack")
    rows = [
        (
            report.arch,
            str(report.entries),
            str(report.objects),
            str(report.object_bytes),
            str(report.compiled),
            str(report.entries - report.compiled),
            f"{report.compile_seconds:.1f}",
            str(len(report.spilled)),
            f"{report.folder}{'' if report.changed else ' (unchanged)'}",
        )
        for report in reports
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [text.ljust(width) if index in (0, 8) else text.rjust(width)
                 for index, (text, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        print("  ".join(cells).rstrip())
    print(f"built in {seconds:.1f} s")


def _print_verification(reports: list[VerificationReport], seconds: float) -> None:
    for report in reports:
        ways = Counter((record.how, record.on) for record in report.records.values())
        for (how, on), count in ways.items():
            worst = max(record.worst_error_over_bound for record in report.records.values())
            print(f"{report.arch}: {count} entries verified by {how} on {on}, worst error over bound {worst:.3f}")
        if report.unverified:
            print(
                f"{report.arch}: {len(report.unverified)} entries were never run, and no wheel can be made of them: "
                f"run gristmill selftest --record on a GPU. The first: {report.unverified[0]}"
            )
    print(f"verified in {seconds:.1f} s")
