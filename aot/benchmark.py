"""Timing of kernels on an NVIDIA GPU, ours and the peers', in one process.

A CUDA graph holds one launch per copy of the weight, with copies enough that no weight is still in the L2
when its turn comes again; a time is the median over replays, divided by the launches. So it has the kernel
and the gap between two kernels of a stream, and nothing of the host. In a graph a kernel of ours may start
while the one ahead of it ends; what it takes without that is a time of its own.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.aot.peers import GROUP_SIZE, Peer, PeerError, PeerMissingError, peers, versions
from gristmill.loader import LoadedKernel
from gristmill.manifest import Manifest
from gristmill.packed_weight import ROW_WORDS, PackedWeight
from gristmill.prepared import Choice, PreparedWeight, prepare
from gristmill.select import select, unmet_needs
from gristmill.torch_weights import pad_rows

SHAPES = (  # K, N of real layers; the last has neither a multiple of 128
    (4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096),
    (2560, 6144), (2560, 19456), (9728, 2560), (2112, 2816),
)  # fmt: skip
MS = (1, 2, 4, 8, 16, 32, 64)
REPLAYS = 9
L2_MULTIPLE = 3  # copies of a weight are this many times the L2 together
MOST_COPIES = 40
COPY_BYTES = 2**31

# Our Triton kernel where another of ours is chosen: a column among the peers', but no peer.
OUR_TILES = "our tiles"

DRIVER_VERSION = Path("/sys/module/nvidia/version")


@dataclass(slots=True)
class Cell:
    """One problem, timed."""

    K: int
    N: int
    M: int
    dtype: str
    us: float
    apart_us: float  # where each launch waits for the one ahead to end
    entry: str
    floor_us: float
    gbps: float
    percent_of_copy: float
    peers_us: dict[str, float] = field(default_factory=dict)
    entries_us: dict[str, float] = field(default_factory=dict)  # every entry that can, when asked for

    @property
    def best_peer_us(self) -> float | None:
        return min((us for name, us in self.peers_us.items() if name != OUR_TILES), default=None)


def conditions(torch: Any) -> dict[str, Any]:
    """What the numbers depend on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **versions(),
        "gristmill": importlib.metadata.version("gristmill"),
        "replays": REPLAYS,
        "copy_gbps": round(copy_gbps(torch), 1),
    }


def driver_version() -> str:
    """Of NVIDIA's kernel driver, which the CUDA version that it serves does not tell."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return "unknown"


def copy_gbps(torch: Any) -> float:
    """Rate of a large copy in device memory, bytes read and written.

    Timed outside a graph: as a graph's node the same copy was seen to run at two thirds of its rate (2.8 of 4.3 TB/s,
    NVIDIA H200, driver 580.159, torch 2.11).
    """
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(REPLAYS + 2):  # the first two warm up
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return 2 * COPY_BYTES / statistics.median(times[2:]) / 1000


def time_us(torch: Any, calls: list[Callable[[], Any]]) -> float:
    """Time of one call in us: the median of graph replays, divided by the calls in the graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Kind:
    """What the weights are like."""

    dtype: str = "float16"  # of the activations, scales and zero points
    group_size: int = GROUP_SIZE
    zero_points: str = ""  # "" without, else "whole", as GPTQ and AWQ have them, or "real", as HQQ

    @property
    def is_common(self) -> bool:
        """Whether the peers have it."""
        return self.group_size == GROUP_SIZE and not self.zero_points

    def __str__(self) -> str:
        zero_points = f", {self.zero_points} zero points" if self.zero_points else ""
        return f"{self.dtype}, group size {self.group_size}{zero_points}"


def run(
    torch: Any, shapes, ms, kind: Kind, copy_rate: float, every_entry: bool, report: Callable[[str], None]
) -> Iterator[Cell]:
    """Time every (K, N) in `shapes` for every M in `ms`.

    Parameters
    ----------
    kind : of the weights; other than the common one is timed without peers
    copy_rate : GB/s, what the floor of a time is made from
    every_entry : time each entry of the pack that can run the problem, not the chosen one alone
    report : gets a line for a peer that is left out
    """
    missing: set[str] = set()
    for K, N in shapes:
        weights = make_weights(torch, N, K, kind)
        cells = [_own(torch, weights, M, copy_rate, every_entry) for M in ms]
        count = len(weights)
        del weights
        for peer in peers() if kind.is_common else ():
            if peer.name not in missing:
                _add_peer(torch, peer, cells, count, kind.dtype, report, missing)
        yield from cells


def make_weights(torch: Any, N: int, K: int, kind: Kind) -> list[PackedWeight]:
    """Random weights, enough of them to leave the L2 between two turns."""
    words = -(-K // 8)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    copies = max(4, min(MOST_COPIES, -(-L2_MULTIPLE * l2_bytes // (4 * N * words))))
    type_ = getattr(torch, kind.dtype)
    groups = (N, -(-K // kind.group_size))
    weights = []
    for _ in range(copies):
        qweight = torch.randint(-(2**31), 2**31, (N, words), device="cuda", dtype=torch.int64).int()
        qweight = pad_rows(qweight)[:, :words] if words % ROW_WORDS else qweight
        scales = (torch.rand(groups, device="cuda") / 50).to(type_)
        zero_points = None
        if kind.zero_points:
            values = 15 * torch.rand(groups, device="cuda")
            zero_points = (values.round() if kind.zero_points == "whole" else values).to(type_)
        weights.append(PackedWeight(K, N, kind.group_size, kind.dtype, qweight, scales, zero_points))
    return weights


def _own(torch: Any, weights, M: int, copy_rate: float, every_entry: bool) -> Cell:
    prepared = [prepare(weight) for weight in weights]
    one = prepared[0]
    x = torch.randn(M, one.K, device="cuda").to(getattr(torch, one.dtype))
    out = torch.empty(M, one.N, device="cuda", dtype=x.dtype)
    chosen = _choice(one, M, one.loader.pack.manifest)
    us = _time_choice(torch, prepared, chosen, x, out)
    apart_us = _time_choice(torch, prepared, _apart(chosen), x, out) if chosen.kernel.entry.early_start else us
    moved = weights[0].nbytes + 2 * M * (one.K + one.N)
    gbps = moved / us / 1000
    cell = Cell(
        K=one.K, N=one.N, M=M, dtype=one.dtype, us=us, apart_us=apart_us, entry=chosen.kernel.entry.name,
        floor_us=moved / copy_rate / 1000, gbps=gbps, percent_of_copy=100 * gbps / copy_rate,
    )  # fmt: skip
    tiles = _choice(one, M, _tiles_only(one.loader.pack.manifest))
    cell.peers_us[OUR_TILES] = us if tiles.kernel is chosen.kernel else _time_choice(torch, prepared, tiles, x, out)
    if every_entry:
        manifest = one.loader.pack.manifest
        for entry in manifest.entries.values():
            if not unmet_needs(entry, one.problem(M, 16), one.loader.facts):
                choice = _choice(one, M, manifest._replace(policy=_only(manifest, entry.name)))
                cell.entries_us[entry.name] = _time_choice(torch, prepared, choice, x, out)
    return cell


def _choice(one: PreparedWeight, M: int, manifest: Manifest) -> Choice:
    selection = select(one.problem(M, 16), one.loader.facts, manifest)
    kernel = one.loader.kernel(selection.entry)
    return Choice(kernel, selection.grid, selection.dynamic_shared_bytes, selection.origin)


def _apart(choice: Choice) -> Choice:
    """The same launch, which waits for the one ahead to end."""
    kernel = choice.kernel
    function = kernel.function._replace(early_start=False)
    return Choice(LoadedKernel(kernel.entry, function), choice.grid, choice.shared_bytes, choice.origin)


def _tiles_only(manifest: Manifest) -> Manifest:
    """The pack as it would be with our Triton kernel alone."""
    rules = []
    for rule in manifest.policy:
        names = tuple(name for name in rule.entries if manifest.entries[name].source.endswith(".py"))
        rules += [rule._replace(entries=names)] if names else []
    return manifest._replace(policy=tuple(rules))


def _only(manifest: Manifest, name: str):
    rule = next((rule for rule in manifest.policy if name in rule.entries), manifest.policy[-1])
    return (rule._replace(when=type(rule.when)("M >= 1"), entries=(name,)),)


def _time_choice(torch: Any, prepared: list[PreparedWeight], choice: Choice, x: Any, out: Any) -> float:
    M, K = x.shape
    N = out.shape[1]

    def call(weight: PreparedWeight) -> Callable[[], None]:
        return lambda: weight.launch(
            choice, M, x.data_ptr(), K, out.data_ptr(), N, torch.cuda.current_stream().cuda_stream
        )

    return time_us(torch, [call(weight) for weight in prepared])


def _add_peer(torch: Any, peer: Peer, cells: list[Cell], copies: int, dtype: str, report, missing: set[str]) -> None:
    N, K = cells[0].N, cells[0].K
    try:
        calls = peer.make(torch, N, K, copies, dtype)
        for cell in cells:
            if peer.largest_m >= cell.M:
                cell.peers_us[peer.name] = time_us(torch, calls(cell.M))
    except PeerMissingError as error:
        report(f"{peer.name}: {error}")
        missing.add(peer.name)
    except PeerError as error:
        report(f"{peer.name}, K={K} N={N}: {error}")
    except Exception as error:  # a peer's fault is its own: the table goes on without it
        report(f"{peer.name}, K={K} N={N}: {type(error).__name__}: {str(error)[:200]}")
