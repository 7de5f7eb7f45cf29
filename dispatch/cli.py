"""The `gristmill` command.

A command is a module with `HELP`, `configure(parser)` and `run(arguments) -> exit code`, found by name among the entry
points of the group "gristmill.commands": so the dispatcher offers `build` where the build half is installed, and
imports nothing of it. With --json standard output holds one JSON document; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gristmill import __version__
from gristmill.errors import GristmillError, StrictModeError

GROUP = "gristmill.commands"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code, 1 for a typed error and 2 for a wrong call."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {point.name: point for point in entry_points(group=GROUP)}
    if not argv or argv[0] not in commands:
        return _overview(argv, commands)
    try:
        command = commands[argv[0]].load()
    except StrictModeError as error:
        print(f"gristmill {argv[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog=f"gristmill {argv[0]}", description=command.HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    command.configure(parser)
    arguments = parser.parse_args(argv[1:])
    try:
        return command.run(arguments)
    except GristmillError as error:
        if arguments.json:
            print_json({"error": {"class": type(error).__name__, "message": str(error)}})
        print(f"gristmill {argv[0]}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def print_json(document: object) -> None:
    """Print `document` as the one JSON document of a command; what is not finite, which JSON has not, as null."""
    print(json.dumps(_finite(document), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def progress(text: str) -> None:
    """Say on standard error what is being done."""
    print(text, file=sys.stderr, flush=True)


def _overview(argv: list[str], commands: dict[str, EntryPoint]) -> int:
    if argv and argv[0] == "--version":
        print(f"gristmill {__version__}")
        return 0
    wanted = not argv or argv[0] in ("-h", "--help")
    stream = sys.stdout if wanted else sys.stderr
    if not wanted:
        print(f"gristmill: no command {argv[0]!r}", file=stream)
    print("usage: gristmill COMMAND [--json] ...\n       gristmill --version\n", file=stream)
    for name, point in sorted(commands.items()):
        print(f"  {name:10} {_help_of(point)}", file=stream)
    return 0 if wanted else 2


def _help_of(point: EntryPoint) -> str:
    try:
        return point.load().HELP
    except StrictModeError as error:
        return f"({error})"
