"""Cold start: what the first result takes in a fresh process, ours beside Triton's JIT.

Every run is a process of its own, and every figure a median over runs. Not counted are CUDA's start and the imports of
numpy and torch, which take as long for everyone. Counted is all else up to the result on the host, which is checked
afterwards: imports, manifest, upload of the weight, loading or compiling, launch, copies. Two rows are of a part alone:
`import gristmill`, and one `preload` of all linear layers of a model, in a process that has imported it and has the
weights on the device. A first run of each program, untimed, leaves Python's bytecode and the files in the page cache.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gristmill.aot.environment import child_environment
from gristmill.aot.errors import BenchmarkError
from gristmill.packed_weight import dequantize, pack
from gristmill.reference import error_bound, linear_float64

K, N, M, GROUP_SIZE = 4096, 4096, 1, 128

# Llama 3 8B: query, key, value, output, gate, up, down (K, N).
SHAPES = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
LAYERS = 32

PROGRAMS = Path(__file__).with_name("cold_programs.py")
OURS = "ours"
CUDA = "CUDA"  # the phase that is everyone's


@dataclass(slots=True)
class Row:
    """One program's medians in ms."""

    name: str
    program: str
    phases: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """All phases but the start of CUDA itself."""
        return sum(ms for phase, ms in self.phases.items() if phase != CUDA)


def run(runs: int, report: Callable[[str], None]) -> Iterator[Row]:
    """Time each program `runs` times.

    Parameters
    ----------
    report : gets a line for a program that is left out
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-cold-") as temporary:
        folder = Path(temporary)
        write_problem(folder)
        yield _row("import gristmill", "imports", folder, runs)
        yield _row(f"{OURS}, without torch", "without_torch", folder, runs)
        yield _row(f"preload, {LAYERS} layers", "preload_model", folder, runs)
        if importlib.util.find_spec("torch") is None:
            report("no rows with torch, for it is not installed")
            return
        yield _row(OURS, "with_torch", folder, runs)
        try:
            yield _row("Triton JIT, empty cache", "with_jit", folder, runs, keep_cache=False)
            yield _row("Triton JIT, warm cache", "with_jit", folder, runs)
        except BenchmarkError as error:  # no triton, or one that does not know the kernel's language
            report(f"no rows for Triton's JIT: {error}")


def write_problem(folder: Path) -> None:
    """What the programs read: one problem with its reference, and the shapes of a model."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.5, 1.5, (N, K // GROUP_SIZE)) / 64
    weight = pack(rng.integers(0, 16, (N, K)), scales, group_size=GROUP_SIZE, dtype="float16")
    x = rng.standard_normal((M, K)).astype(np.float16)
    dense = dequantize(weight)
    given: dict[str, Any] = {
        "x": x,
        "qweight": np.ascontiguousarray(weight.qweight),
        "scales": weight.scales,
        "K": K,
        "N": N,
        "group_size": GROUP_SIZE,
        "expected": linear_float64(x, dense, None),
        # Two roundings: the most of any kernel that may be chosen.
        "bound": error_bound(x, dense, None, dtype="float16", roundings=2, weights_in_dtype=True),
    }
    np.savez(folder / "problem.npz", **given)
    (folder / "model.json").write_text(json.dumps({"shapes": SHAPES, "layers": LAYERS}))


def _row(name: str, program: str, folder: Path, runs: int, keep_cache: bool = True) -> Row:
    cache = folder / "triton"
    documents = []
    for _ in range(1 + runs):
        if not keep_cache:
            shutil.rmtree(cache, ignore_errors=True)
        documents.append(_run(program, folder, cache))
    phases = {
        phase: round(statistics.median(document["phases"][phase] for document in documents[1:]), 2)
        for phase in documents[0]["phases"]
    }
    facts = {key: value for key, value in documents[-1].items() if key != "phases"}
    if facts.get("worst", 0) > 1:
        raise BenchmarkError(f"{name}: the result is off by {facts['worst']:.3g} of its bound")
    return Row(name, program, phases, facts)


def _run(program: str, folder: Path, cache: Path) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAMS.read_text(encoding="utf-8"), program, str(folder)],
        env=child_environment(TRITON_CACHE_DIR=str(cache)),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        raise BenchmarkError(f"{program}: {lines[-1]}")
    return json.loads(process.stdout.splitlines()[-1])
