"""What the rows of both CUDA kernels share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gristmill.kernels.variant import PolicyRow
from gristmill.kernels.w4a16_rows import KINDS, entry_name

# K % 32: weights are read 16 bytes, 32 values, at a time, and nothing needs to lie behind the last row. Alignment: of
# those pieces, and of the ones that x is read in.
CONDITIONS = ("K % 32 == 0", "alignment % 16 == 0")


@dataclass(frozen=True, slots=True)
class Groups:
    """Group sizes that one specialisation serves: multiples of `span`; G128 also one group for all of K."""

    span: int
    condition: str

    @property
    def tag(self) -> str:  # in the names of entries
        return f"g{self.span}"


# No problem is for two of them: a rule for one takes nothing from the others. Below K = 2^20 the multiplication that
# finds a group is right, and no count of k overflows.
_LIMIT = "K < 1048576"
G128 = Groups(128, f"(group_size >= K or group_size % 128 == 0) and {_LIMIT}")
G64 = Groups(64, f"group_size % 128 == 64 and group_size < K and {_LIMIT}")
G32 = Groups(32, f"group_size % 64 == 32 and group_size < K and {_LIMIT}")

ALL_GROUPS = (G128, G64, G32)

WITHOUT_ZERO_POINTS = tuple(kind for kind in KINDS if not kind[1])
WITH_ZERO_POINTS = tuple(kind for kind in KINDS if kind[1])

MEASURED = "measured on NVIDIA H200"


class Shape(Protocol):
    """How a kernel divides the work."""

    @property
    def suffix(self) -> str: ...  # of the names of its entries


S = TypeVar("S", bound=Shape)


@dataclass(frozen=True, slots=True)
class Choice(Generic[S]):
    """Where `when` holds, the first of `shapes` whose shared memory the device has."""

    when: str
    shapes: tuple[S, ...]
    origin: str = MEASURED
    groups: tuple[Groups, ...] = ALL_GROUPS
    kinds: tuple[tuple[str, bool], ...] = KINDS  # dtype, whether with zero points


def specialisations(choices: Iterable[Choice[S]]) -> list[tuple[S, Groups, str, bool]]:
    """All that `choices` may take: shape, groups, dtype, whether with zero points."""
    wanted = dict.fromkeys(
        (shape, groups, *kind)
        for choice in choices
        for shape in choice.shapes
        for groups in choice.groups
        for kind in choice.kinds
    )
    return list(wanted)


def policy_rows(symbol: str, choices: Iterable[Choice[S]]) -> list[PolicyRow]:
    """One rule per choice."""
    return [
        PolicyRow(
            choice.when,
            tuple(
                name_of(symbol, shape, groups, dtype, zero_points)
                for dtype, zero_points in choice.kinds
                for groups in choice.groups
                for shape in choice.shapes
            ),
            choice.origin,
        )
        for choice in choices
    ]


def name_of(symbol: str, shape: Shape, groups: Groups, dtype: str, zero_points: bool) -> str:
    return entry_name(symbol, dtype, zero_points, f"{groups.tag}_{shape.suffix}")


def clusters_at_once(size: int, blocks: str = "multiprocessor_count") -> str:
    """Formula: how many clusters of `size` run at once on a device that can run `blocks`, a formula too.

    A cluster lies within one GPC, and GPCs do not all hold a multiple of four multiprocessors: an H200 holds 30
    clusters of four on its 132. 15/16 is the simplest factor that gives that: 132 * 15 // 64 == 30.
    """
    if size <= 2:
        return blocks if size == 1 else f"{blocks} // {size}"
    return f"{blocks} * 15 // {16 * size}"


def one_turn(rows: int, cluster: int) -> str:
    """Condition: tiles of `rows` output features run all at once, one per cluster."""
    return f"N <= {rows} * ({clusters_at_once(cluster)})"


def full_turns(rows: int, cluster: int) -> str:
    """Condition: of the turns that tiles of `rows` output features take, 85 % are filled."""
    turn = f"max({rows} * ({clusters_at_once(cluster)}), 1)"  # a few multiprocessors may hold no cluster
    return f"N * 20 >= {turn} * ceil_div(N, {turn}) * 17"
