"""`linear`: the one way from a call to a launch. All checks come first; then select, load, launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gristmill.arrays import HOST, ArrayView, DeviceArray, view
from gristmill.errors import ArgumentError, DeviceMismatchError, DTypeError, ShapeError, StrideError
from gristmill.packed_weight import PackedWeight, dequantize, round_to
from gristmill.prepared import Choice, PreparedWeight, device_of_weight, prepare


def _torch_linear(x: Any, weight: PackedWeight, out: Any, stream: Any) -> Any:
    """`linear` of tensors, until `serve_torch` puts the real one here."""
    from gristmill.torch_adapter import linear as torch_linear

    return torch_linear(x, weight, out, stream)


_tensor_type: type | None = None


def serve_torch(linear: Callable[..., Any], tensor_type: type) -> None:
    """Called once by `gristmill.torch_adapter`: `linear` of tensors is `linear` from now on."""
    global _torch_linear, _tensor_type
    _torch_linear = linear
    _tensor_type = tensor_type


def linear(x: Any, weight: PackedWeight, *, out: Any = None, stream: Any = None) -> Any:
    """Multiply 16-bit activations by a packed 4-bit weight W (N, K): x @ W.T + bias.

    Parameters
    ----------
    x : (..., K), dtype of `weight`, on the device of `weight`, unit inner stride; a torch tensor of any rank, or a 2-D
        `DeviceArray` or object with `__dlpack__` or `__cuda_array_interface__`. numpy arrays are computed on the
        host, in float64 with one rounding
    weight : see `PackedWeight`
    out : (..., N), dtype and device of `x`, unit inner stride, must not overlap `x` or `weight`; allocated when None,
        as a torch tensor for a torch tensor, a numpy array for an array on the host, else as a `DeviceArray`
    stream : handle of the driver's stream, or an object that has one; None for torch's current stream, without torch
        for the default stream. The call returns before the kernel ends

    Returns
    -------
    `out`

    Raises
    ------
    ShapeError, DTypeError, StrideError, DeviceMismatchError, ArgumentError : nothing has been launched
    NoKernelError : no kernel covers the problem; one reason per candidate
    NotLoadedError : the kernel would have to be loaded while `stream` is captured; see `preload`
    NoPackError, NoDriverError, NoDeviceError : the device cannot be used
    DamagedPackError, DriverError : the pack cannot be read, the kernel not loaded or launched
    ForkedProcessError : the process is a fork of one that had used the driver

    Notes
    -----
    Accumulates in float32; the output is rounded once. Some kernels also round q - z or the dequantised weight to the
    activation dtype first: the manifest's `roundings` and `weights_in_dtype`. So, as that of a dense layer, the
    result may be infinite or NaN where q - z or (q - z) * s is too large for the dtype (any q of 0..15, if K does not
    fill the last step of a kernel), where sums of x * (q - z), or, beside bfloat16 zero points below 2^-120, of x pass
    float32 before the scale is applied, and where x is infinite. The dot products of RDNA take denormal bfloat16
    numbers as zero. The kernels of sm80 and sm90 for few tokens lose what is below 2^-143 of bfloat16 sums; the wgmma
    kernel of sm90, where it scales weights, rounds bfloat16 weights without zero points, below 2^-124, to multiples of
    2^-131.
    M == 0 launches nothing. A weight with `perm` (act-order) is taken for torch tensors and on the host; without
    torch, gather x[:, perm] first and pass a weight without `perm`.
    """
    if type(x) is _tensor_type or hasattr(x, "new_empty"):  # a torch tensor, perhaps of a class of its own
        return _torch_linear(x, weight, out, stream)
    x_view = view(x)
    if x_view.device.driver == HOST:
        return _linear_on_host(x, x_view, weight, out)
    check_devices(x_view, weight)
    prepared = prepare(weight)
    if prepared.has_perm:
        raise ArgumentError(
            "weight has perm (act-order): without torch, gather x[:, perm] before the call and pass a weight "
            "whose perm is None"
        )
    check_x(x_view, weight)
    if out is None:
        out = DeviceArray.empty(x_view.device, (x_view.shape[0], weight.N), x_view.dtype)
    run(x_view, view(out), weight, prepared, stream_handle(stream))
    return out


def run(x: ArrayView, out: ArrayView, weight: PackedWeight, prepared: PreparedWeight, stream: int) -> Choice | None:
    """Check `x` and `out` (2-D) against the weight and launch; returns what was launched, None for M == 0."""
    check_x(x, weight)
    check_out(out, x, weight, prepared)
    M = x.shape[0]
    if M == 0:
        return None
    x_row_stride = x.strides[0] if M > 1 else prepared.single_row_stride
    out_row_stride = out.strides[0] if M > 1 else prepared.single_out_row_stride
    low_bits = x.address | out.address | (x_row_stride | out_row_stride) * x.item_bytes | prepared.low_bits
    choice = prepared.choices.get(M << 4 | low_bits & 15)  # the key of `choices`
    if choice is None:
        choice = prepared.choose(M, low_bits, stream)
    prepared.launch(choice, M, x.address, x_row_stride, out.address, out_row_stride, stream)
    return choice


def check_devices(x: ArrayView, weight: PackedWeight) -> None:
    """DeviceMismatchError unless `x` lies where the weight does."""
    device = device_of_weight(weight)
    if x.device != device:
        raise DeviceMismatchError(f"x must be on {device}, the device of weight, got {x.device}")


def check_x(x: ArrayView, weight: PackedWeight) -> None:
    """Raise what is wrong with x (M, K)."""
    if len(x.shape) != 2 or x.shape[1] != weight.K:
        raise ShapeError(f"x must have shape (M, K) with K={weight.K}, got {x.shape}")
    if x.dtype != weight.dtype:
        raise DTypeError(f"x must be {weight.dtype}, the dtype of weight, got {x.dtype}")
    _check_strides("x", x)


def check_out(out: ArrayView, x: ArrayView, weight: PackedWeight, prepared: PreparedWeight) -> None:
    """Raise what is wrong with out (M, N)."""
    expected = (x.shape[0], weight.N)
    if out.shape != expected:
        raise ShapeError(f"out must have shape (M, N) = {expected}, got {out.shape}")
    if out.dtype != x.dtype:
        raise DTypeError(f"out must be {x.dtype}, the dtype of x, got {out.dtype}")
    if out.device != x.device:
        raise DeviceMismatchError(f"out must be on {x.device}, the device of x, got {out.device}")
    _check_strides("out", out)
    if out.shape[0] > 1 and out.strides[0] < out.shape[1]:
        raise StrideError(f"out's rows must not overlap: row stride {out.strides[0]} is less than N={out.shape[1]}")
    for name, other in {"x": x, **prepared.views}.items():
        if overlap(out, other):
            raise ArgumentError(f"out must not overlap {name}: {_extent(out)} and {_extent(other)}")


def _check_strides(name: str, array: ArrayView) -> None:
    rows, columns = array.shape
    if rows and columns > 1 and array.strides[1] != 1:
        raise StrideError(f"{name} must have an inner stride of one element, got {array.strides[1]}")
    if rows > 1 and array.strides[0] < 0:
        raise StrideError(f"{name} must not have a negative row stride, got {array.strides[0]}")


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays share an element; rows of one buffer that lie side by side do not."""
    a_bytes, b_bytes = a.span_bytes(), b.span_bytes()
    if not a_bytes or not b_bytes or a.address + a_bytes <= b.address or b.address + b_bytes <= a.address:
        return False
    if len(a.shape) == len(b.shape) == 2 and a.shape[0] > 1 and b.shape[0] > 1:
        stride = a.strides[0] * a.item_bytes
        if stride == b.strides[0] * b.item_bytes and stride:
            shift = (b.address - a.address) % stride
            return shift < a.shape[1] * a.item_bytes or shift + b.shape[1] * b.item_bytes > stride
    return True


def stream_handle(stream: Any) -> int:
    """The integer handle of a stream: an int, a torch or CuPy stream, or an object with `__cuda_stream__`."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise ArgumentError(f"stream must be an integer handle or have __cuda_stream__, got {type(stream).__name__}")


def _extent(array: ArrayView) -> str:
    return f"{array.address:#x}..{array.address + array.span_bytes():#x}"


def _linear_on_host(x: Any, x_view: ArrayView, weight: PackedWeight, out: Any) -> Any:
    import numpy as np
    from gristmill.reference import linear_float64

    check_devices(x_view, weight)
    check_x(x_view, weight)
    if not isinstance(weight.qweight, np.ndarray):
        raise ArgumentError(f"x is an array on the host, weight has {type(weight.qweight).__name__}s, not numpy arrays")
    if out is not None and not isinstance(out, np.ndarray):
        raise ArgumentError(f"out must be a numpy array where x is on the host, got {type(out).__name__}")
    if out is not None and not out.flags.writeable:
        raise ArgumentError("out must be writeable, got an array that is read-only")
    if not isinstance(x, np.ndarray):
        if x_view.dtype == "bfloat16":
            raise DTypeError(
                "x must be a numpy array of ml_dtypes.bfloat16, or a torch tensor: numpy's DLPack has none"
            )
        x = np.from_dlpack(x)
    result = round_to(linear_float64(x, dequantize(weight), weight.bias), weight.dtype)
    if out is None:
        return result
    if tuple(out.shape) != result.shape or out.dtype != result.dtype:
        raise ShapeError(f"out must be {result.dtype} of shape {result.shape}, got {out.dtype} of shape {out.shape}")
    out[...] = result
    return out
