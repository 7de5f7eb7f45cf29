"""Fuzz one parser:

    cd tests && python -m fuzz manifest --count 1000000 [--seed 1]

An input is named by its number and the seed, so that a fault can be looked into: it is printed, and the exit code is 1.
Memory is limited, an input has seconds, and no file outside the folder that is given to the parser may be opened.
"""

from __future__ import annotations

import argparse
import sys
import time

from fuzz.run import PARSERS, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parser", choices=PARSERS)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    arguments = parser.parse_args()
    start = time.monotonic()
    result = fuzz(arguments.parser, arguments.count, arguments.seed, arguments.first)
    seconds = time.monotonic() - start
    print(
        f"{arguments.parser}: {result.inputs} inputs in {seconds:.0f} s, {result.taken} taken, "
        f"{result.inputs - result.taken} refused, largest resident set {result.peak_mb:.0f} MB"
    )
    if result.fault is not None:
        print(result.fault)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
