"""The eager path in C: what `gristmill._fastcall` needs to know of a weight and of the launches chosen for it.

Python decides everything once, on the first call of its kind; from then on the extension repeats the launch, with
fresh addresses, without coming back here. Where it is not there, or torch has no exchange table, Python serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gristmill.loader import VARYING, LoadedKernel
from gristmill.manifest import ARGUMENT_NAMES
from gristmill.prepared import Choice, PreparedWeight
from torch import Tensor

try:
    from gristmill import _fastcall
except ImportError:  # a platform without it, or a source tree without a C compiler
    _fastcall = None  # type: ignore[assignment]

# In the extension's order: what differs from call to call, then what belongs to the weight.
FIXED = tuple(name for name in ARGUMENT_NAMES if name not in VARYING)
_PLACES = {name: place for place, name in enumerate((*VARYING, *FIXED))}


def learn(x: Tensor, prepared: PreparedWeight, choice: Choice) -> None:
    """Let the next call with `prepared` and tensors like `x` that leads to `choice` be made in C, where that can be."""
    if prepared.fast is None:
        prepared.fast = _bind(x, prepared) or False
    if prepared.fast and choice.record is None:
        kernel = choice.kernel
        choice.record = _fastcall.record(
            kernel.function.handle,
            choice.grid,
            kernel.block,
            choice.shared_bytes,
            kernel.entry.early_start,
            kernel.row_stride_limit,
            _sources(kernel),
        )


def _sources(kernel: LoadedKernel) -> bytes:
    """Of each argument of the kernel, its place among the values."""
    arguments = kernel.entry.arguments
    return bytes(_fastcall.NULL_VALUE if a.type == "null" else _PLACES[a.name] for a in arguments)


def _bind(x: Tensor, prepared: PreparedWeight) -> Callable[..., Tensor | None] | None:
    pointers = prepared.loader.driver.launch_pointers(prepared.ordinal)
    if pointers is None or _fastcall is None or not _has_exchange_table():
        return None
    if prepared.has_perm or type(x) is not Tensor:
        return None

    views = prepared.views.values()
    error = pointers.error

    def raise_launch_error(choice: Choice, status: int) -> None:
        kernel = choice.kernel
        raise error(kernel.function, choice.grid, kernel.block, choice.shared_bytes, status)

    try:
        return _fastcall.bind(
            x=x,
            choices=prepared.choices,
            raise_launch_error=raise_launch_error,
            empty=_empty_strided(x.device.type),
            is_grad_enabled=torch.is_grad_enabled,
            dispatch_depth=torch._C._len_torch_dispatch_stack,
            is_profiling=torch.autograd._profiler_enabled,  # type: ignore[attr-defined]
            forward_ad=vars(torch.autograd.forward_ad),
            launch=pointers.launch,
            get_current=pointers.get_current,
            is_capturing=pointers.is_capturing,
            current=pointers.current,
            K=prepared.K,
            N=prepared.N,
            low_bits=prepared.low_bits,
            single_row_stride=prepared.single_row_stride,
            single_out_row_stride=prepared.single_out_row_stride,
            values=[prepared.values[name] for name in FIXED],
            ranges=[border for view in views for border in (view.address, view.address + view.span_bytes())],
        )
    except ValueError:  # an exchange table of another DLPack
        return None


def _has_exchange_table() -> bool:
    return hasattr(Tensor, "__dlpack_c_exchange_api__")  # from torch 2.10 on


def _empty_strided(device_type: str) -> Callable[[Any, Any, torch.dtype], Tensor]:
    """Allocates on the current device; what torch's own compiled code calls is there, at a third of the cost."""
    found = getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}", None)
    return found or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device_type))
