"""`python sampled_command.py ...` is `gristmill ...`, but `build` builds few entries, and `wheel` makes no core wheel.

The few serve float16 weights without zero points: the floor, and on AMD a C++ kernel for M = 1. The tests of the pages
run builds through it, in seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.aot import build, wheel
from gristmill.aot.sources import ROW_MODULES, Rows, read_rows
from gristmill.cli import main

DECODE = "w4a16_skinny_fp16_m1"


def few_rows(arch: str, modules: Sequence[str] = ROW_MODULES) -> Rows:
    rows = read_rows(arch, modules)
    floor = [row for row in rows.variants if row.name in rows.policy[-1].variants]
    wanted = [row for row in floor if row.dtype == "float16" and not row.zero_points]
    wanted += [row for row in rows.variants if row.name == DECODE]
    names = {row.name for row in wanted}
    rules = [replace(rule, variants=tuple(name for name in rule.variants if name in names)) for rule in rows.policy]
    return Rows(tuple(wanted), tuple(rule for rule in rules if rule.variants))


def no_core_wheel(source: Path, out: Path, platform: str | None = None) -> wheel.Wheel:
    out.mkdir(exist_ok=True)
    (out / "core.txt").write_text(str(platform))
    return wheel.Wheel(out / "core.txt", 0, "", None, 0, ())


if __name__ == "__main__":
    build.read_rows = few_rows
    wheel.core_wheel = no_core_wheel
    wheel.source_tree = Path  # here, where no table of coverage is
    wheel.find_license = lambda source: "licence"
    sys.exit(main())
