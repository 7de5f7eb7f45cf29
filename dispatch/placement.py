"""Placing a weight on a device, without torch. `gristmill.to_torch` is the way with torch."""

from __future__ import annotations

from typing import Any

from gristmill.arrays import HOST, Device, DeviceArray, view
from gristmill.errors import DeviceMismatchError
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
    PackedWeight of `DeviceArray`s; padding between rows is kept, and qweight's rows are padded to 16 bytes, which they
    may have lost on the way from another process

    Raises
    ------
    NoPackError, NoDriverError, NoDeviceError : the device cannot be used
    """
    device = Device.parse(device) if isinstance(device, str) else device
    if view(weight.qweight).device.driver != HOST:
        raise DeviceMismatchError(f"weight must be on cpu, got {view(weight.qweight).device}")

    def upload(array: Any) -> DeviceArray:
        row_stride = view(array).strides[0] if array.ndim == 2 and array.shape[0] > 1 else None
        if row_stride is not None and row_stride < array.shape[1]:
            row_stride = None  # rows that repeat, or run backwards, on the host
        if array is weight.qweight:
            row_stride = max(row_stride or 0, -(-array.shape[1] // ROW_WORDS) * ROW_WORDS)
        return DeviceArray.from_numpy(array, device, row_stride=row_stride)

    placed = weight.map(upload)
    preload(placed)
    return placed
