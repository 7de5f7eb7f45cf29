"""`gristmill bench`: time the kernels of this GPU's pack beside their peers."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.aot.errors import ToolchainError
from gristmill.cli import print_json, progress
from gristmill.drivers.default import first_device
from gristmill.errors import NoDeviceError
from gristmill.problem import DTYPES

if TYPE_CHECKING:
    from gristmill.aot.benchmark import Cell
    from gristmill.aot.cold_start import Row

HELP = "time the kernels of this GPU's pack beside their peers; needs an NVIDIA GPU, and torch but for cold starts"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=_shape, action="append", help="KxN, may be repeated (default: real layers)")
    parser.add_argument("--m", type=_numbers, help="comma separated (default 1,2,4,8,16,32,64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--group-size", type=int, default=128, help="default 128, which the peers have too")
    parser.add_argument(
        "--zero-points",
        choices=("whole", "real"),
        default="",
        help="weights with such zero points; the peers have none",
    )
    parser.add_argument("--every-entry", action="store_true", help="time each entry that can, for choosing rules")
    parser.add_argument("--out", type=Path, help="folder for bench.json, bench.md, bench.svg and bench.png")
    parser.add_argument("--cold", action="store_true", help="time the first result in fresh processes instead")
    parser.add_argument("--runs", type=int, default=7, help="with --cold: processes per figure (default 7)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.cold:
        return _run_cold(arguments)
    try:
        import torch
    except ImportError as error:
        raise ToolchainError(f"the benchmark needs torch ({error}); run: pip install torch") from None
    if not torch.cuda.is_available():
        raise NoDeviceError("the benchmark needs an NVIDIA GPU that torch sees")
    from gristmill.aot import benchmark

    shapes = arguments.shape or benchmark.SHAPES
    ms = arguments.m or benchmark.MS
    kind = benchmark.Kind(arguments.dtype, arguments.group_size, arguments.zero_points)
    facts = {**benchmark.conditions(torch), "weights": str(kind)}
    if not arguments.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        print("us per launch: median of graph replays, weights rotated past the L2; x: a peer's time over ours")
        print("apart: each launch waits for the one ahead to end; else a kernel that can starts early")
    cells = []
    rate = facts["copy_gbps"]
    for cell in benchmark.run(torch, shapes, ms, kind, rate, arguments.every_entry, progress):
        cells.append(cell)
        if not arguments.json:
            print(line(cell), flush=True)
    ratios = summary(cells)
    document = {"conditions": facts, "cells": [asdict(cell) for cell in cells], "summary": ratios}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
        (arguments.out / "bench.md").write_text(markdown(cells, facts))
        _plot(cells, facts, arguments.out)
    if arguments.json:
        print_json(document)
    else:
        for text in (f"{name}: {value}" for name, value in ratios.items()):
            print(text)
    return 0


def _run_cold(arguments: argparse.Namespace) -> int:
    from gristmill.aot import cold_start

    if first_device().driver != "cuda":
        raise NoDeviceError("the benchmark needs an NVIDIA GPU")
    rows = []
    for row in cold_start.run(arguments.runs, progress):
        rows.append(row)
        if not arguments.json:
            print(cold_line(row), flush=True)
    ratios = cold_ratios(rows)
    if arguments.json:
        print_json({"rows": [{**asdict(row), "ms": row.ms} for row in rows], "summary": ratios})
    else:
        for name, ratio in ratios.items():
            print(f"{name}: {ratio}")
    return 0


def cold_line(row: Row) -> str:
    """One row of the table of cold starts."""
    phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in row.phases.items())
    facts = "".join(f" | {name} {value:.3g}" for name, value in row.facts.items())
    return f"{row.name:24} {row.ms:9.1f} ms | {phases}{facts}"


def cold_ratios(rows: list[Row]) -> dict[str, float]:
    """Each other way to the same first result over ours."""
    times = {row.name: row.ms for row in rows}
    ours = times.get("ours")
    return {f"{name} over ours": round(ms / ours, 1) for name, ms in times.items() if ours and "JIT" in name}


def line(cell: Cell) -> str:
    """One row of the table."""
    peers = "  ".join(f"{name} {us / cell.us:.2f}x" for name, us in cell.peers_us.items())
    return (
        f"{cell.K}x{cell.N} M={cell.M:<3} {cell.us:8.2f} us {cell.gbps:7.0f} GB/s"
        f" {cell.percent_of_copy:4.0f} % of copy  {cell.us / cell.floor_us:.2f} of floor"
        f"  apart {cell.apart_us:.2f} us | {peers} | {cell.entry}"
    )


def markdown(cells: list[Cell], facts: dict[str, Any]) -> str:
    """The table with its conditions, for a page; times in us."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.peers_us))
    columns = ["K x N", "M", "floor", "Gristmill", "apart", "GB/s", "% of copy", *names, "over best"]
    lines = [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for cell in cells:
        peers = [f"{cell.peers_us[name]:.1f}" if name in cell.peers_us else "" for name in names]
        ratio = f"{cell.us / cell.best_peer_us:.2f}" if cell.best_peer_us else ""
        times = [f"{us:.1f}" for us in (cell.floor_us, cell.us, cell.apart_us)]
        rates = [f"{cell.gbps:.0f}", f"{cell.percent_of_copy:.0f}"]
        lines.append("| " + " | ".join([f"{cell.K}x{cell.N}", str(cell.M), *times, *rates, *peers, ratio]) + " |")
    return "\n".join(lines) + "\n"


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Geometric mean of our time over the best peer's, by M; and where we are slower."""
    found: dict[str, Any] = {}
    for M in sorted({cell.M for cell in cells}):
        ratios = [cell.us / cell.best_peer_us for cell in cells if cell.M == M and cell.best_peer_us]
        if ratios:
            found[f"M={M} over best peer"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)
    found["slower than a peer"] = [
        f"{cell.K}x{cell.N} M={cell.M}" for cell in cells if cell.best_peer_us and cell.us > cell.best_peer_us
    ]
    return found


def _plot(cells: list[Cell], facts: dict[str, Any], folder: Path) -> None:
    """Time against M, one panel a shape, the floor drawn in."""
    try:
        import matplotlib
    except ImportError:
        progress("no plot: matplotlib is not installed; run: pip install matplotlib")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gristmill"
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((cell.K, cell.N) for cell in cells))
    columns = min(4, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False)
    names = list(dict.fromkeys(name for cell in cells for name in cell.peers_us))
    for panel, (K, N) in zip(axes.flat, shapes, strict=False):
        own = [cell for cell in cells if (cell.K, cell.N) == (K, N)]
        panel.plot([c.M for c in own], [c.us for c in own], "o-", color="black", label="Gristmill", zorder=3)
        if any(c.apart_us != c.us for c in own):
            panel.plot([c.M for c in own], [c.apart_us for c in own], "--", color="black", label="without early start")
        panel.plot([c.M for c in own], [c.floor_us for c in own], ":", color="gray", label="floor (copy rate)")
        for index, name in enumerate(names):
            points = [(c.M, c.peers_us[name]) for c in own if name in c.peers_us]
            if points:
                panel.plot(*zip(*points, strict=True), ".-", color=f"C{index}", label=name)
        panel.set(xscale="log", yscale="log", title=f"K={K} N={N}", xlabel="M", ylabel="us")
        panel.set_xticks([c.M for c in own], [str(c.M) for c in own])
    for panel in list(axes.flat)[len(shapes) :]:
        panel.set_visible(False)
    axes.flat[0].legend(fontsize="small")
    figure.suptitle(f"W4A16, {facts['weights']}, {facts['device']}")
    figure.tight_layout()
    for suffix in ("svg", "png"):
        figure.savefig(folder / f"bench.{suffix}", metadata={"Date": None} if suffix == "svg" else None)


def _shape(text: str) -> tuple[int, int]:
    """ "4096x28672" -> (4096, 28672), K first."""
    K, cross, N = text.partition("x")
    if not (cross and K.isdecimal() and N.isdecimal() and int(K) and int(N)):
        raise argparse.ArgumentTypeError(f"{text!r} is not KxN")
    return int(K), int(N)


def _numbers(text: str) -> tuple[int, ...]:
    """ "1,8" -> (1, 8)."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers")
    return tuple(int(part) for part in parts)
