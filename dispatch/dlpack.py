"""DLPack, the reading side: enough to learn where a producer's array lies."""

from __future__ import annotations

import ctypes
from typing import Any

from gristmill.arrays import HOST, ArrayView, Device, compact_strides
from gristmill.errors import ArgumentError, DTypeError

# DLDeviceType of dlpack.h. Managed CUDA memory is addressed like device memory.
DRIVERS = {1: HOST, 2: "cuda", 10: "hip", 13: "cuda"}

# (DLDataTypeCode, bits) of dlpack.h.
DTYPES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (6, 8): "bool",
}  # fmt: skip

NO_SYNCHRONISATION = -1


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def view_dlpack(array: Any) -> ArrayView:
    """Read where `array` lies.

    The producer is asked not to synchronise: the caller's stream orders the work, as with torch tensors. The capsule
    is left unconsumed, so dropping it releases what the producer made for it.
    """
    device_type = int(array.__dlpack_device__()[0])
    if device_type not in DRIVERS:
        raise ArgumentError(f"an array's DLPack device type must be one of {sorted(DRIVERS)}, got {device_type}")
    on_host = DRIVERS[device_type] == HOST
    capsule = array.__dlpack__() if on_host else array.__dlpack__(stream=NO_SYNCHRONISATION)
    tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))  # first member of DLManagedTensor
    dtype = DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise DTypeError(
            f"an array's DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) is unknown"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else compact_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    return ArrayView(address, shape, strides, dtype, Device(DRIVERS[device_type], tensor.device_id))
