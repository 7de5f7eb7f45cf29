"""The ninja graph: the variants that the cache lacks, in batches, one edge each."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gristmill.aot.environment import child_environment
from gristmill.aot.errors import BuildError, CompileError
from gristmill.aot.toolchain import ninja_program

# Upper bound of a batch: above it the import of triton no longer counts, and progress shows too rarely.
MAX_BATCH = 12
# Batches per job: enough that the jobs end at about the same time.
BATCHES_PER_JOB = 4

# Exit code of ninja when it, or a command of it, was told to stop.
_INTERRUPTED = 130

# Of a compiler's log, what a message shows.
_LOG_TAIL = 6000


@dataclass(frozen=True, slots=True)
class Batch:
    """Variants of one arch that one process compiles."""

    name: str
    arch: str
    variants: Mapping[str, str]  # name -> key in the cache


def make_batches(missing: Mapping[str, Mapping[str, str]], jobs: int) -> list[Batch]:
    """Split what is missing (arch -> variant -> key) so that `jobs` processes are evenly busy.

    Variants are dealt out in turn, as neighbours in the rows tend to take equally long.
    """
    total = sum(len(variants) for variants in missing.values())
    size = max(1, min(MAX_BATCH, -(-total // (jobs * BATCHES_PER_JOB))))
    batches = []
    for arch, variants in missing.items():
        count = -(-len(variants) // size)
        names = list(variants)
        for index in range(count):
            dealt = {name: variants[name] for name in names[index::count]}
            batches.append(Batch(f"{arch}-{index + 1:03d}", arch, dealt))
    return batches


def compile_batches(
    batches: Sequence[Batch],
    folder: Path,
    cache: Path,
    row_modules: Sequence[str],
    jobs: int,
    progress: IO[str],
) -> dict[str, float]:
    """Write the graph into the empty `folder` and run it; returns the processor seconds of each `arch/variant`.

    Raises
    ------
    CompileError : a variant failed; the message has its name and the compiler's words
    BuildError : somebody stopped it
    ToolchainError : there is no ninja
    """
    ninja = ninja_program()
    for batch in batches:
        document = {
            "arch": batch.arch,
            "variants": batch.variants,
            "cache": str(cache.resolve()),
            "row_modules": list(row_modules),
        }
        (folder / f"{batch.name}.json").write_text(json.dumps(document, indent=1))
    (folder / "build.ninja").write_text(_graph(batches))
    process = subprocess.Popen(
        [str(ninja), "-C", str(folder), "-j", str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=child_environment(NINJA_STATUS="[%f/%t] "),
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if not line.startswith("ninja: Entering directory"):
                progress.write(line)
                progress.flush()
    if process.returncode == _INTERRUPTED:
        raise BuildError("the build was interrupted; what was compiled is in the cache, so build again to go on")
    if process.returncode:
        raise CompileError(_failure(batches, folder) or f"ninja ended with exit code {process.returncode}")
    seconds: dict[str, float] = {}
    for batch in batches:
        times = json.loads((folder / f"{batch.name}.done").read_bytes())
        seconds.update({f"{batch.arch}/{name}": time for name, time in times.items()})
    return seconds


def _graph(batches: Sequence[Batch]) -> str:
    import ninja.ninja_syntax as syntax

    lines = [
        "# Written by `gristmill build`; each edge compiles a batch of variants into the build cache.",
        "ninja_required_version = 1.5",
        f"python = {syntax.escape(shlex.quote(sys.executable))}",
        "rule batch",
        "  command = $python -m gristmill.aot.worker $in",
        "  description = $description",
    ]
    for batch in batches:
        names = list(batch.variants)
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines += [
            f"build {batch.name}.done: batch {batch.name}.json",
            f"  description = {batch.arch}: {syntax.escape(label)}",
        ]
    return "\n".join(lines) + "\n"


def _failure(batches: Sequence[Batch], folder: Path) -> str:
    """The message for the batches that did not end: the variant each was at and the end of its log."""
    parts = []
    for batch in batches:
        status = folder / f"{batch.name}.status"
        if (folder / f"{batch.name}.done").exists() or not status.exists():
            continue
        log = (folder / f"{batch.name}.log").read_text(errors="replace").strip()
        log = re.sub(r"\x1b\[[0-9;]*m", "", log)
        words = log[-_LOG_TAIL:] or "the compiler ended without a word; it may have run out of memory"
        parts.append(f"{batch.arch}: variant {status.read_text()} does not compile\n{words}")
    return "\n\n".join(parts)
