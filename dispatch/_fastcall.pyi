from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

NULL_VALUE: int

def bind(
    *,
    x: Tensor,
    choices: dict[int, Any],
    raise_launch_error: Callable[[Any, int], None],
    empty: Callable[[Any, Any, Any], Tensor],
    is_grad_enabled: Callable[[], bool],
    dispatch_depth: Callable[[], int],
    is_profiling: Callable[[], bool],
    forward_ad: dict[str, Any],
    launch: int,
    get_current: int,
    is_capturing: int,
    current: int,
    K: int,
    N: int,
    low_bits: int,
    single_row_stride: int,
    single_out_row_stride: int,
    values: Sequence[int],
    ranges: Sequence[int],
) -> Callable[[Tensor, Tensor | None, int | None], Tensor | None]: ...
def record(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    early_start: bool,
    row_stride_limit: int,
    sources: bytes,
) -> bytes: ...
