"""`gristmill check`: a model's layers on a device, against the float64 reference of the checkpoint's own format."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gristmill.arrays import HOST, Device
from gristmill.check import CheckRow, check_layer
from gristmill.checkpoints.gguf import GgufCheckpoint
from gristmill.cli import print_json, progress
from gristmill.commands.options import dtype_list, positive
from gristmill.drivers import get_driver
from gristmill.drivers.default import HARDWARE, first_device
from gristmill.errors import ArgumentError
from gristmill.problem import DTYPES

HELP = "run a model's layers on a device and compare with the float64 reference"

PROGRESS_SECONDS = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--device", help="cuda:0, hip:0, emulated:gfx1151, or cpu for the reference path")
    parser.add_argument(
        "--layers", type=positive, help="number of layers, taken in turn from each shape and format; default: all"
    )
    parser.add_argument("--m", type=_m_list, default=[1, 5, 6, 64, 300], help="values of M (default 1,5,6,64,300)")
    parser.add_argument("--dtype", type=dtype_list, default=list(DTYPES), help="activation dtypes (default: both)")
    parser.add_argument("--seed", type=_seed, help="of the random activations; default: fresh")


def run(arguments: argparse.Namespace) -> int:
    device = Device.parse(arguments.device) if arguments.device else first_device()
    device_name = "the reference path" if device.driver == HOST else _device_name(device)
    checkpoint = GgufCheckpoint(arguments.model)
    names = _choose(checkpoint, arguments.layers)
    seed = (
        int(np.random.SeedSequence(arguments.seed).generate_state(1)[0]) if arguments.seed is None else arguments.seed
    )
    rng = np.random.default_rng(seed)
    progress(f"{len(names)} layers of {arguments.model.name} on {device} ({device_name}), seed {seed}")
    rows: list[CheckRow] = []
    spoken = time.monotonic()
    for done, name in enumerate(names):
        if time.monotonic() - spoken > PROGRESS_SECONDS:
            progress(f"  {done} of {len(names)} layers")
            spoken = time.monotonic()
        weight = checkpoint.load(name)
        for dtype in arguments.dtype:
            rows += check_layer(weight, device, dtype, arguments.m, rng)
    failed = [row for row in rows if not row.passed]
    document = {
        "model": arguments.model.name,
        "device": str(device),
        "device_name": device_name,
        "seed": seed,
        "layers": len(names),
        "not_read": checkpoint.not_read,
        "passed": not failed,
        "worst_error_over_bound": max(row.error_over_bound for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    if arguments.json:
        print_json(document)
    else:
        _print(document, rows, failed)
    return 1 if failed else 0


def _choose(checkpoint: GgufCheckpoint, count: int | None) -> list[str]:
    """All layers, or `count` of them: in turn from each kind (shape and format), so that none is left out."""
    if not checkpoint.layers:
        others = {**checkpoint.not_read, **checkpoint.left_out}
        raise ArgumentError(f"{checkpoint.path}: no layers in a supported 4-bit type; others: {others}")
    kinds: dict[Any, list[str]] = defaultdict(list)
    for name, layer in checkpoint.layers.items():
        kinds[layer.K, layer.N, layer.format].append(name)
    rounds: Iterable[str] = (
        names[turn] for turn in range(max(map(len, kinds.values()))) for names in kinds.values() if turn < len(names)
    )
    return list(rounds)[:count]


def _print(document: dict[str, Any], rows: list[CheckRow], failed: list[CheckRow]) -> None:
    groups: dict[Any, list[CheckRow]] = defaultdict(list)
    for row in rows:
        groups[row.dtype, row.K, row.N, row.M, row.entry].append(row)
    column = "median us" if Device.parse(document["device"]).driver in HARDWARE else "on host us"
    print(f"{'dtype':9} {'K':>6} {'N':>6} {'M':>4} {'layers':>6} {'error/bound':>11} {column:>10}  entry")
    for (dtype, K, N, M, entry), members in groups.items():
        worst = max(row.error_over_bound for row in members)
        time_us = median(row.time_us for row in members)
        print(f"{dtype:9} {K:6} {N:6} {M:4} {len(members):6} {worst:11.3f} {time_us:10.1f}  {entry}")
    for row in failed[:20]:
        what = f"error/bound {row.error_over_bound:.3f}" if row.guard_intact else "wrote outside its output"
        print(f"FAILED {row.layer} M={row.M} {row.dtype} {row.entry}: {what}")
    for name, reason in document["not_read"].items():
        print(f"4-bit, NOT READ: {name}: {reason}")
    verdict = "passed" if document["passed"] else f"FAILED in {len(failed)} of {len(rows)} cases"
    print(
        f"{document['layers']} layers on {document['device']} ({document['device_name']}): {verdict}; "
        f"worst error over bound {document['worst_error_over_bound']:.3f}"
    )


def _seed(text: str) -> int:
    seed = int(text)
    if seed < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return seed


def _m_list(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _device_name(device: Device) -> str:
    return get_driver(device.driver).device_facts(device.ordinal).name
