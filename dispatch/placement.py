"""Placing a weight on a device, without torch. `gristmill.to_torch` is the way with torch."""

from __future__ import annotations

import numpy as np
from gristmill.arrays import HOST, Device, DeviceArray, view
from gristmill.errors import ArgumentError, DeviceMismatchError
from gristmill.packed_weight import ROW_WORDS, PackedWeight
from gristmill.preloading import preload


def to_device(weight: PackedWeight, device: Device | str) -> PackedWeight:
    """Upload a weight of numpy arrays and load every kernel that it can hit.

    Parameters
    ----------
    weight : on the host
    device : a `Device`, or text such as "cuda:0", "hip:1", "emulated:gfx1151"

    Returns
    -------
    PackedWeight of `DeviceArray`s; qweight's rows keep their padding and have it to 16 bytes at least, which they may
    have lost on the way from another process. The others are compact

    Raises
    ------
    DeviceMismatchError, ArgumentError : the weight is on a device, or not of numpy arrays
    NoPackError, NoDriverError, NoDeviceError : the device cannot be used
    DamagedPackError, DriverError : a kernel cannot be loaded
    """
    device = Device.parse(device) if isinstance(device, str) else device
    if view(weight.qweight).device.driver != HOST:
        raise DeviceMismatchError(f"weight must be on cpu, got {view(weight.qweight).device}")

    if not isinstance(weight.qweight, np.ndarray):
        raise ArgumentError(
            f"weight must be of numpy arrays, got {type(weight.qweight).__name__}s; gristmill.to_torch places tensors"
        )

    def upload(array: np.ndarray) -> DeviceArray:
        row_stride = None
        if array is weight.qweight:
            N, words = array.shape
            own = view(array).strides[0] if N > 1 else 0  # less than a row where rows repeat or run backwards
            row_stride = max(own, -(-words // ROW_WORDS) * ROW_WORDS)
        return DeviceArray.from_numpy(array, device, row_stride=row_stride)

    placed = weight.map(upload)
    preload(placed)
    return placed
