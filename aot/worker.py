"""Compile one batch of variants: `python -m gristmill.aot.worker BATCH.json`, an edge of the ninja graph.

A batch shares one import of triton. Each object goes to the cache as soon as it is there, so that a build
that was interrupted goes on where it stopped. The first variant that fails ends the batch: BATCH.status names
it, BATCH.log has what the compilers said, also when one of them took the process down, and BATCH.out what
Triton printed, such as the PTX that ptxas refused.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from gristmill.aot.cache import ObjectCache
from gristmill.aot.compilers import Variant, compile_variant
from gristmill.aot.errors import BuildError
from gristmill.aot.module_sources import bytecode_unwritten, source_digests
from gristmill.aot.sources import object_key, read_rows
from gristmill.aot.targets import Target, find_target


def run_batch(path: Path) -> int:
    """Compile the batch described by `path`; 0, or 1 when a variant failed."""
    batch = json.loads(path.read_bytes())
    status = path.with_suffix(".status")
    _send(1, path.with_suffix(".out"))
    _send(2, path.with_suffix(".log"))
    target = find_target(batch["arch"])
    rows = {variant.name: variant for variant in read_rows(batch["arch"], batch["row_modules"]).variants}
    cache = ObjectCache(Path(batch["cache"]), report=lambda line: print(line, file=sys.stderr))
    seconds = {}
    for name, key in batch["variants"].items():
        os.ftruncate(2, 0)
        status.write_text(name)
        start = _processor_seconds()
        try:
            _check_sources(rows, name, target, key)
            with bytecode_unwritten():
                compiled = compile_variant(rows[name], target)
            _check_sources(rows, name, target, key)  # the compiler may have read what was edited since
            cache.store(key, compiled)
        except Exception as error:
            sys.stderr.write(_words(error) + "\n")
            sys.stderr.flush()
            return 1
        seconds[name] = round(_processor_seconds() - start, 3)
    done = path.with_suffix(".done")
    temporary = path.with_suffix(".done.new")
    temporary.write_text(json.dumps(seconds))
    temporary.rename(done)
    return 0


def _check_sources(rows: Mapping[str, Variant], name: str, target: Target, key: str) -> None:
    """Raise BuildError unless `key` is that of the sources as they are now."""
    source_digests.cache_clear()
    if name not in rows or object_key(rows[name], target) != key:
        raise BuildError(f"the sources of {name} changed while the build ran; build again")


def _processor_seconds() -> float:
    """Processor time of this process and of the compilers it has run."""
    return sum(os.times()[:4])


def _send(descriptor: int, path: Path) -> None:
    """Let all that goes to `descriptor`, from compilers in this process and below it, go to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(file, descriptor)
    os.close(file)


def _words(error: Exception) -> str:
    """What the user needs of an error: its message where it is ours or the compiler's, else all of it."""
    if isinstance(error, BuildError) or type(error).__module__.startswith("triton."):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()


if __name__ == "__main__":
    sys.exit(run_batch(Path(sys.argv[1])))
