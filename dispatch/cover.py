"""Coverage: prove, without a GPU, that every call of a model resolves to a shipped entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from gristmill.checkpoints.affine import LayerInfo
from gristmill.device import DeviceFacts
from gristmill.errors import NoKernelError
from gristmill.manifest import Manifest
from gristmill.problem import MAX_ALIGNMENT, OP_W4A16_GEMM, Problem
from gristmill.select import select


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive M that take the same entry; `entry` is None where nothing covers them."""

    first_m: int
    last_m: int
    entry: str | None
    origin: str
    is_floor: bool


@dataclass(frozen=True, slots=True)
class LayerClass:
    """What tells layers apart for selection."""

    K: int
    N: int
    group_size: int
    has_zero_points: bool

    @staticmethod
    def of(layer: LayerInfo) -> LayerClass:
        return LayerClass(layer.K, layer.N, layer.group_size, layer.has_zero_points)


def contiguous_alignment(M: int, K: int, N: int) -> int:
    """Alignment of a call whose activations (M, K) and output (M, N) are contiguous and freshly allocated."""
    if M == 1:  # a single row has no stride
        return MAX_ALIGNMENT
    row_bytes = 2 * K | 2 * N | MAX_ALIGNMENT
    return row_bytes & -row_bytes


def cover_layer(
    layer: LayerClass, ms: Sequence[int], dtype: str, alignment: int, device: DeviceFacts, manifest: Manifest
) -> list[Run]:
    """Resolve each M of `ms` (ascending), with and without bias; M that take the same entry are joined."""

    @cache
    def resolve(M: int, has_bias: bool) -> tuple[str | None, str, bool]:
        problem = Problem(
            OP_W4A16_GEMM, M, layer.N, layer.K, layer.group_size, dtype, layer.has_zero_points, has_bias, alignment
        )
        try:
            selection = select(problem, device, manifest)
        except NoKernelError:
            return None, "", False
        return selection.entry.name, selection.origin, selection.is_floor

    def both(M: int) -> tuple[str | None, str, bool]:
        without, with_bias = resolve(M, False), resolve(M, True)
        return without if with_bias[0] is not None else with_bias

    return list(_runs((M, both(M)) for M in ms))


def _runs(resolved: Iterable[tuple[int, tuple[str | None, str, bool]]]) -> Iterable[Run]:
    first = last = 0
    current: tuple[str | None, str, bool] | None = None
    for M, found in resolved:
        if current is not None and found != current:
            yield Run(first, last, *current)
            current = None
        if current is None:
            first, current = M, found
        last = M
    if current is not None:
        yield Run(first, last, *current)
