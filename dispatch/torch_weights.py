"""Packed weights as torch tensors, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gristmill.arrays import HOST
from gristmill.errors import ArgumentError, NoDeviceError
from gristmill.packed_weight import ROW_WORDS, VALUES_PER_WORD, PackedWeight
from gristmill.preloading import preload
from gristmill.prepared import device_of_weight
from torch import Tensor


def to_torch(weight: PackedWeight, device: torch.device | str) -> PackedWeight:
    """The weight as torch tensors on `device`, rows padded to 16 bytes; on a GPU all kernels it can hit are loaded.

    Parameters
    ----------
    weight : of numpy arrays or torch tensors
    device : as torch takes it

    Returns
    -------
    PackedWeight of tensors; on the CPU, and where they were on `device` already, some share memory with what was given

    Raises
    ------
    ArgumentError : the weight is of other arrays
    NoPackError, NoDriverError, NoDeviceError : the device cannot be used
    DamagedPackError, DriverError : a kernel cannot be loaded
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NoDeviceError(f"{device}: torch sees no GPU")

    if not isinstance(weight.qweight, (Tensor, np.ndarray)):
        raise ArgumentError(
            f"weight must be of numpy arrays or torch tensors, got {type(weight.qweight).__name__}s; "
            "place the host's weight with gristmill.to_torch instead of gristmill.to_device"
        )

    def convert(array: Any) -> Tensor:
        tensor = array if isinstance(array, Tensor) else tensor_of(array)
        if tensor.dtype == torch.int32 and tensor.dim() == 2:
            return pad_rows(tensor.to(device))[:, : tensor.shape[1]]
        return tensor.to(device).contiguous()

    placed = weight.map(convert)
    if device_of_weight(placed).driver != HOST:
        preload(placed)
    return placed


def to_numpy(weight: PackedWeight) -> PackedWeight:
    """The weight as numpy arrays, which share memory with tensors on the CPU."""
    return weight.map(lambda array: array_of(array) if isinstance(array, Tensor) else array)


def weight_of_tensors(
    qweight: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    perm: Tensor | None,
    K: int,
    group_size: int,
) -> PackedWeight:
    """The weight that a module's buffers, or the op's arguments, stand for; qweight may have its rows' padding."""
    words = -(-K // VALUES_PER_WORD)
    if qweight.dim() == 2 and qweight.shape[1] > words:
        qweight = qweight[:, :words]
    return PackedWeight(
        K=K,
        N=qweight.shape[0],
        group_size=group_size,
        dtype=dtype_name(scales.dtype),
        qweight=qweight,
        scales=scales,
        zero_points=zero_points,
        bias=bias,
        perm=perm,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without torch's own before it."""
    return str(dtype).removeprefix("torch.")


def pad_rows(qweight: Tensor) -> Tensor:
    """qweight (N, words) with its rows padded with zeros to a multiple of 16 bytes."""
    N, words = qweight.shape
    padded = qweight.new_zeros((N, -(-words // ROW_WORDS) * ROW_WORDS))
    padded[:, :words] = qweight
    return padded


def tensor_of(array: Any) -> Tensor:
    """A tensor that shares memory with a numpy array, strides kept; a copy where they run backwards."""
    if min(array.strides, default=0) < 0:
        array = array.copy()
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: Tensor) -> Any:
    """A numpy array that shares memory with a tensor on the CPU, or a copy of one on a GPU; strides are kept."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
