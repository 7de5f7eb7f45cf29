"""torch: `linear` for tensors and the op `gristmill::w4a16_linear`.

Eager calls go straight to the driver, those that `gristmill.fastcall` has learned without more Python. What has to see
an op gets one: torch.compile, export, dispatch modes, the profiler and autograd. The op's CUDA key serves ROCm too; its
CPU key is the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from gristmill.arrays import torch_driver, view
from gristmill.errors import (
    ArgumentError,
    DeviceMismatchError,
    DTypeError,
    GristmillError,
    ShapeError,
    StrideError,
)
from gristmill.fastcall import learn
from gristmill.gemm import check_out, check_x, run, serve_torch, stream_handle
from gristmill.loader import dependent_caches
from gristmill.packed_weight import PackedWeight
from gristmill.prepared import PreparedWeight, check_weight, prepare, prepared_weights
from gristmill.torch_weights import array_of, dtype_name, tensor_of, to_numpy, to_torch, weight_of_tensors
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

__all__ = ["linear", "to_torch"]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DRIVER = torch_driver(torch)

MAX_OP_WEIGHTS = 16384

_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_is_grad_enabled = torch.is_grad_enabled
_current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0)


def linear(x: Tensor, weight: PackedWeight, out: Tensor | None = None, stream: Any = None) -> Tensor:
    """Multiply activations of any rank by a packed 4-bit weight; see `gristmill.linear`.

    Leading dimensions are flattened without a copy where their strides allow. `stream` defaults to torch's current
    stream on the device of `x`; with another one, give `out`: torch's allocator knows the current stream only. On
    another one x must have its rows at one stride and `weight` no perm: what torch would copy or gather for the call
    runs on the current stream.

    Under torch.autocast x is cast to autocast's dtype, which must be the weight's, as `nn.Linear` casts it; an x that
    has the weight's dtype already, and a call with `out`, are left alone.
    """
    if not is_dynamo_compiling():  # what else compiles calls with tensors of its own kind, or under a dispatch mode
        found = prepared_weights.get(id(weight))
        if found is not None:
            fast = found[1].fast
            if fast:
                result = fast(x, out, stream if stream is None else stream_handle(stream))
                if result is not None:
                    return result
    if is_compiling():
        if out is not None or stream is not None:
            raise ArgumentError("out and stream must be None under torch.compile")
        return _call_op(x, weight)
    if out is not None or stream is not None:
        return _linear_into(x, weight, out, stream)
    if (
        type(x) is not Tensor
        or not x.is_cuda
        or (x.requires_grad and _is_grad_enabled())
        or _len_torch_dispatch_stack()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
        or is_functorch_wrapped_tensor(x)
    ):
        _check_devices(x, weight)
        return _call_op(x, weight)
    return _launch(x, prepare(weight), weight.perm)


serve_torch(linear, Tensor)


def _launch(x: Tensor, prepared: PreparedWeight, perm: Tensor | None) -> Tensor:
    """The eager hot path: x on a GPU, of any rank."""
    K = prepared.K
    N = prepared.N
    if x.dim() == 2:
        M, columns = x.shape
        x_row_stride, inner_stride = x.stride()
        out_shape: tuple[int, ...] = (M, N)
    else:
        out_shape = (*x.shape[:-1], N)
        M, x_row_stride = _row_layout(x, K)
        if x_row_stride is None:
            x, x_row_stride = x.contiguous(), K
        columns, inner_stride = K, 1
    ordinal = x.get_device()
    if (
        columns != K
        or (inner_stride != 1 and K != 1)
        or x.dtype is not DTYPES[prepared.dtype]
        or ordinal != prepared.ordinal
        or prepared.device.driver != DRIVER
    ):
        cast = _autocast(x, DTYPES[prepared.dtype])
        if cast is x:
            raise _fault(x, prepared)
        return _launch(cast, prepared, perm)
    if perm is not None:
        x = x.reshape(M, K).index_select(1, perm)
        x_row_stride = K
    out = x.new_empty(out_shape)
    if M:
        out_row_stride = N
        if M == 1:
            x_row_stride = prepared.single_row_stride
            out_row_stride = prepared.single_out_row_stride
        x_address = x.data_ptr()
        out_address = out.data_ptr()
        low_bits = x_address | out_address | (x_row_stride | out_row_stride) << 1 | prepared.low_bits
        stream = _current_raw_stream(ordinal)
        choice = prepared.choices.get(M << 4 | low_bits & 15)  # the key of `choices`
        if choice is None:
            choice = prepared.choose(M, low_bits, stream)
        prepared.launch(choice, M, x_address, x_row_stride, out_address, out_row_stride, stream)
        if prepared.fast is None or choice.record is None:
            learn(x, prepared, choice)
    return out


def _row_layout(x: Tensor, K: int) -> tuple[int, Any]:
    """How many rows x (..., K) has, and their stride; None where they lie at no single stride."""
    if x.dim() == 0 or x.shape[-1] != K:
        raise ShapeError(f"x must have shape (..., K) with K={K}, got {tuple(x.shape)}")
    *extents, _ = x.shape
    *strides, inner_stride = x.stride()
    if inner_stride != 1 and K > 1 and x.numel():
        raise StrideError(f"x must have an inner stride of one element, got {inner_stride}")
    M, row_stride = 1, K
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        if extent == 1:
            continue
        if M == 1:
            row_stride = stride
        elif stride != row_stride * M:
            return x.numel() // K, None
        M *= extent
    return M, row_stride


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as torch.autocast has it; x itself where autocast is off, or leaves it alone.

    `nn.Linear` under autocast rounds its input and its weight to autocast's dtype. The input is treated so here; a
    packed weight stays as it is, so autocast must ask for the weight's own dtype. What has that dtype already is
    computed in it, whatever autocast asks for.
    """
    kind = x.device.type
    if x.dtype is dtype or x.dtype is torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x
    wanted = torch.get_autocast_dtype(kind)
    if wanted is not dtype:
        names = [dtype_name(name) for name in (x.dtype, wanted, dtype)]
        raise DTypeError(
            f"x is {names[0]} and torch.autocast asks for {names[1]}, but weight is {names[2]}: convert the layer with "
            f".to(torch.{names[1]}), or pack the weight anew, or autocast to {names[2]}"
        )
    return x.to(dtype)


def _fault(x: Tensor, prepared: PreparedWeight) -> GristmillError:
    """What is wrong with x."""
    device = view(x).device
    if device != prepared.device:
        return DeviceMismatchError(f"x must be on {prepared.device}, the device of weight, got {device}")
    if x.shape[-1] != prepared.K:
        return ShapeError(f"x must have shape (..., K) with K={prepared.K}, got {tuple(x.shape)}")
    if x.dtype != DTYPES[prepared.dtype]:
        return DTypeError(f"x must be {prepared.dtype}, the dtype of weight, got {dtype_name(x.dtype)}")
    return StrideError(f"x must have an inner stride of one element, got {x.stride(-1)}")


def _check_devices(x: Tensor, weight: PackedWeight) -> None:
    check_weight(weight)
    if not isinstance(weight.qweight, Tensor):
        raise ArgumentError(f"x is a torch tensor, weight has {type(weight.qweight).__name__}s; see gristmill.to_torch")
    if x.device != weight.qweight.device:
        raise DeviceMismatchError(f"x must be on {weight.qweight.device}, the device of weight, got {x.device}")


def _linear_into(x: Tensor, weight: PackedWeight, out: Tensor | None, stream: Any) -> Tensor:
    """`linear` where `out` or `stream` is given."""
    _check_devices(x, weight)
    if _is_derived(x) or is_functorch_wrapped_tensor(x):
        raise ArgumentError(
            "out and stream must be None where x has a derivative or is under torch.func: the result would lose it; "
            "or call under torch.no_grad()"
        )
    M, _ = _row_layout(x, weight.K)
    shape = (*x.shape[:-1], weight.N)
    if out is None:
        out = x.new_empty(shape)
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        raise ShapeError(f"out must be a tensor of shape {shape}, got {tuple(getattr(out, 'shape', ()))}")
    try:
        out_rows = out.view(M, weight.N)
    except RuntimeError:
        raise StrideError(f"out must have rows at one stride, got strides {out.stride()}") from None
    if x.is_cuda:
        _launch_into(x, weight, out_rows, stream)
        return out
    check_x(view(x.reshape(M, weight.K)), weight)
    if out.dtype != x.dtype or out.device != x.device:
        raise ArgumentError(f"out must be {x.dtype} on {x.device}, got {out.dtype} on {out.device}")
    out.copy_(_call_op(x, weight))
    return out


def _launch_into(x: Tensor, weight: PackedWeight, out_rows: Tensor, stream: Any) -> None:
    """Launch on `stream`, the current one for None, with x on a GPU and the output as (M, N)."""
    M, row_stride = _row_layout(x, weight.K)
    current = _current_raw_stream(x.get_device())
    handle = current if stream is None else stream_handle(stream)
    if M and handle != current and (row_stride is None or weight.perm is not None):
        fix = "give x with its rows at one stride"
        if weight.perm is not None:
            fix = "gather x[..., perm] before the call and pass a weight whose perm is None"
        raise ArgumentError(
            "stream must be torch's current stream where x has to be copied or gathered first, which torch does there, "
            f"unordered with a launch elsewhere: {fix}"
        )
    prepared = prepare(weight)
    rows = x.reshape(M, weight.K)
    if weight.perm is not None:
        check_x(view(rows), weight)
        check_out(view(out_rows), view(rows), weight, prepared)
        rows = rows.index_select(1, weight.perm)
    choice = run(view(rows), view(out_rows), weight, prepared, handle)
    if choice is not None:
        learn(rows, prepared, choice)


_library = torch.library.Library("gristmill", "DEF")
_library.define(
    "w4a16_linear(Tensor x, Tensor qweight, Tensor scales, Tensor? zero_points, Tensor? bias, Tensor? perm, "
    "int K, int group_size) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_op_weights: dict[tuple, PreparedWeight] = {}
dependent_caches.append(_op_weights)


def _call_op(x: Tensor, weight: PackedWeight) -> Tensor:
    return _op(
        x, weight.qweight, weight.scales, weight.zero_points, weight.bias, weight.perm, weight.K, weight.group_size
    )


def _op_cuda(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    K: int,
    group_size: int,
) -> Tensor:
    # All that a prepared weight is made of, so that tensors of the same memory share one and none is kept alive.
    key = (
        K, group_size,
        qweight.data_ptr(), qweight.shape, qweight.stride(), qweight.dtype,
        scales.data_ptr(), scales.shape, scales.stride(), scales.dtype,
        zero_points is not None
        and (zero_points.data_ptr(), zero_points.shape, zero_points.stride(), zero_points.dtype),
        bias is not None and (bias.data_ptr(), bias.shape, bias.stride(), bias.dtype),
        perm is not None and (perm.data_ptr(), perm.shape, perm.stride(), perm.dtype),
    )  # fmt: skip
    prepared = _op_weights.get(key)
    if prepared is None:
        weight = weight_of_tensors(qweight, scales, zero_points, bias, perm, K, group_size)
        _check_devices(x, weight)
        prepared = PreparedWeight(weight)
        if len(_op_weights) >= MAX_OP_WEIGHTS:
            _op_weights.clear()
        _op_weights[key] = prepared
    elif prepared.fast:
        out = prepared.fast(x, None, None)
        if out is not None:
            return out
    return _launch(x, prepared, perm)


def _op_cpu(x: Tensor, *given: Any) -> Tensor:
    from gristmill.gemm import linear as host_linear

    weight = to_numpy(weight_of_tensors(*given))
    M, _ = _row_layout(x, weight.K)
    out = host_linear(array_of(x.reshape(M, weight.K)), weight)
    return tensor_of(out).view(*x.shape[:-1], weight.N)


def _op_autocast(x: Tensor, qweight: Tensor, scales: Tensor, *others: Any) -> Tensor:
    x = _autocast(x, scales.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return _op(x, qweight, scales, *others)


def _op_fake(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    K: int,
    group_size: int,
) -> Tensor:
    torch._check(x.dim() > 0 and x.shape[-1] == K, lambda: f"x must have shape (..., K) with K={K}, got {x.shape}")
    torch._check(x.dtype == scales.dtype, lambda: f"x must be {scales.dtype}, the dtype of weight, got {x.dtype}")
    return x.new_empty((*x.shape[:-1], qweight.shape[0]))


def _op_autograd(keys: Any, *arguments: Any) -> Tensor:
    below = keys & torch._C._after_autograd_keyset  # type: ignore[attr-defined]
    if any(isinstance(given, Tensor) and _is_derived(given) for given in arguments):
        if torch._C._are_functorch_transforms_active():
            _refuse_derivative()  # a transform asks for it right away
        return _without_derivative().apply(below, *arguments)
    return _below_autograd(below, *arguments)


def _below_autograd(below: Any, *arguments: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return _op.redispatch(below, *arguments)


def _is_derived(tensor: Tensor) -> bool:
    """Whether autograd follows what is done with a tensor, backward or forward."""
    if tensor.requires_grad and _is_grad_enabled():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _refuse_derivative() -> NoReturn:
    raise NotImplementedError(
        "gristmill::w4a16_linear is for inference and has no derivative; call it under torch.no_grad(), with no tangent"
    )


@cache
def _without_derivative() -> Any:
    """The op as autograd knows it: what needs its derivative gets an error, and when it is asked for."""

    class WithoutDerivative(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, below: Any, *arguments: Any) -> Tensor:
            return _below_autograd(below, *arguments)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> NoReturn:
            _refuse_derivative()

        @staticmethod
        def jvp(context: Any, *tangents: Any) -> NoReturn:
            _refuse_derivative()

    return WithoutDerivative


_library.impl("w4a16_linear", _op_cuda, "CUDA")
_library.impl("w4a16_linear", _op_cpu, "CPU")
for _key in ("AutocastCUDA", "AutocastCPU"):
    _library.impl("w4a16_linear", _op_autocast, _key)
# What register_fake and register_autograd come to. They also look up from where they were called in the sources of all
# modules, and make classes: 4 ms that the first result of a process would wait for.
_library.impl("w4a16_linear", _op_fake, "Meta")
_library.impl("w4a16_linear", _op_autograd, "Autograd", with_keyset=True)
_op = torch.ops.gristmill.w4a16_linear.default
