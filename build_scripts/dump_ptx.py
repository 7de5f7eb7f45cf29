"""Write the PTX of a pack's entries, for tests/gpu/test_sm80_ptx.py. PTX is never shipped: that would be a JIT.

    python build_scripts/dump_ptx.py --arch sm80 --out build/ptx

The H200 cannot run sm80's machine code, but its driver compiles the same kernels from their PTX: that proves
their logic.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gristmill.aot.compilers import compile_variant
from gristmill.aot.sources import read_rows
from gristmill.aot.targets import find_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm80")
    parser.add_argument("--out", type=Path, default=Path("build/ptx"))
    arguments = parser.parse_args()
    folder = arguments.out / arguments.arch
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_rows(arguments.arch).variants
    for done, row in enumerate(rows, 1):
        (folder / f"{row.name}.ptx").write_text(compile_variant(row, find_target(arguments.arch)).assembly)
        print(f"[{done}/{len(rows)}] {row.name}", flush=True)


if __name__ == "__main__":
    main()
