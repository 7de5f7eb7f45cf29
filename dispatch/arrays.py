"""Arrays as a launch sees them: address, shape, strides, dtype, device.

`view` reads that from torch tensors, numpy arrays, `DeviceArray`s and whatever speaks DLPack or
`__cuda_array_interface__`, without importing what the caller has not imported. `DeviceArray` is memory of our own, for
use without torch.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from gristmill.drivers import get_driver
from gristmill.errors import ArgumentError, DTypeError, NoDeviceError, ShapeError, StrideError
from gristmill.named_tuple import NamedTuple

HOST = "cpu"

ITEM_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


class Device(NamedTuple):
    """One device of one driver; prints as "cuda:0"."""

    driver: str  # "cpu" for the host
    ordinal: int

    def __str__(self) -> str:
        return f"{self.driver}:{self.ordinal}" if self.driver != HOST else HOST

    @staticmethod
    def parse(text: str) -> Device:
        """Read "cuda", "hip:1" or, by arch, "emulated:gfx1151" (the first device of that arch)."""
        driver, _, which = text.partition(":")
        if driver == HOST or not which:
            return Device(driver, 0)
        if which.isdecimal():
            return Device(driver, int(which))
        archs = [get_driver(driver).device_facts(i).arch for i in range(get_driver(driver).device_count())]
        if which not in archs:
            raise NoDeviceError(f"{driver} has no device {which!r}; its devices: {', '.join(archs) or 'none'}")
        return Device(driver, archs.index(which))


class ArrayView(NamedTuple):
    """Where an array lies. It keeps nothing alive: the array it was taken from must outlive its use."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    device: Device

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last; strides are not negative."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.item_bytes


class DeviceArray:
    """An array in device memory that Gristmill allocated, or a part of one.

    Attributes: `shape`, `strides` (in elements), `dtype` (a name), `device`, `address`. The memory is freed when the
    array and all its parts are gone. Arrays of driver "cuda" also offer `__cuda_array_interface__`.
    """

    __slots__ = ("__weakref__", "_memory", "address", "device", "dtype", "shape", "strides")

    def __init__(
        self, memory: _Memory, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
    ) -> None:
        self._memory = memory
        self.address = address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = memory.device

    @staticmethod
    def empty(
        device: Device | str, shape: tuple[int, ...], dtype: str, *, row_stride: int | None = None
    ) -> DeviceArray:
        """Allocate without filling.

        Parameters
        ----------
        device : a `Device`, or text such as "cuda:0"
        shape : any rank
        dtype : a name, "float16" for example
        row_stride : elements from row to row of a 2-D array; default: rows without padding
        """
        device = Device.parse(device) if isinstance(device, str) else device
        if dtype not in ITEM_BYTES:
            raise DTypeError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
        shape = tuple(int(extent) for extent in shape)
        if min(shape, default=0) < 0:
            raise ShapeError(f"shape must have no negative extent, got {shape}")
        strides = compact_strides(shape)
        if row_stride is not None:
            if len(shape) != 2 or row_stride < shape[1]:
                raise StrideError(f"row_stride must be at least the row of a 2-D shape, got {row_stride} for {shape}")
            strides = (row_stride, 1)
        extent = math.prod(shape) if row_stride is None else shape[0] * row_stride
        memory = _Memory(device, max(1, extent * ITEM_BYTES[dtype]))
        return DeviceArray(memory, memory.address, shape, strides, dtype)

    @staticmethod
    def from_numpy(array: Any, device: Device | str, *, row_stride: int | None = None) -> DeviceArray:
        """Upload a numpy array, bfloat16 as `ml_dtypes.bfloat16`; rows are padded to `row_stride` elements."""
        import numpy as np

        result = DeviceArray.empty(device, array.shape, str(array.dtype), row_stride=row_stride)
        if array.flags.c_contiguous and array.nbytes == result._memory.size:
            result._memory.upload(array.ctypes.data, 0, array.nbytes)
            return result
        staged = np.zeros(result._memory.size // result.item_bytes, dtype=array.dtype)
        _strided(np, staged, result)[...] = array
        if array.size:
            result._memory.upload(staged.ctypes.data, 0, staged.nbytes)
        return result

    def to_numpy(self) -> Any:
        """Download, after all work on the device; a compact numpy array, bfloat16 as `ml_dtypes.bfloat16`."""
        import numpy as np

        staged = np.zeros(self.view().span_bytes() // self.item_bytes, dtype=numpy_dtype(self.dtype))
        if staged.size:
            self._memory.download(staged.ctypes.data, self.address - self._memory.address, staged.nbytes)
        return _strided(np, staged, self).copy()

    def part(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> DeviceArray:
        """A part of the same memory that starts `offset` elements after this array's first."""
        strides = compact_strides(shape) if strides is None else strides
        if len(strides) != len(shape) or min(shape, default=0) < 0 or min(strides, default=0) < 0:
            raise ShapeError(f"a part must have extents and strides of at least 0, got {shape} and {strides}")
        result = DeviceArray(self._memory, self.address + offset * self.item_bytes, shape, strides, self.dtype)
        end = result.address + result.view().span_bytes()
        if offset < 0 or end > self._memory.address + self._memory.size:
            raise ShapeError(f"part at {offset} of shape {shape} and strides {strides} passes the end of the memory")
        return result

    def fill_bytes(self, value: int) -> None:
        """Set each byte of the whole allocation, padding included, to `value`."""
        memory = self._memory
        memory.driver.fill(self.device.ordinal, memory.address, value, memory.size)

    def view(self) -> ArrayView:
        return ArrayView(self.address, self.shape, self.strides, self.dtype, self.device)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.driver != "cuda":
            raise AttributeError(f"an array on {self.device} has no __cuda_array_interface__")
        kind = {"f": "f", "b": "V", "i": "i", "u": "u"}[self.dtype[0]]
        return {
            "shape": self.shape,
            "strides": tuple(stride * self.item_bytes for stride in self.strides),
            "typestr": f"<{kind}{self.item_bytes}" if self.dtype != "bool" else "|b1",
            "data": (self.address, False),
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"


class _Memory:
    """One allocation, freed with its last user."""

    __slots__ = ("address", "device", "driver", "size")

    def __init__(self, device: Device, size: int) -> None:
        self.address = 0
        self.device = device
        self.driver = get_driver(device.driver)
        self.size = size
        # Whole words: a kernel's copy of the last 2 bytes is one of 4 with 2 masked out, and memory checkers see 4.
        self.address = self.driver.allocate(device.ordinal, -(-size // 4) * 4)

    def upload(self, source: int, offset: int, size: int) -> None:
        self.driver.copy_to_device(self.device.ordinal, self.address + offset, source, size)

    def download(self, destination: int, offset: int, size: int) -> None:
        self.driver.copy_to_host(self.device.ordinal, destination, self.address + offset, size)

    def __del__(self) -> None:
        # At the end of the process the driver gives all memory back, and may be gone already.
        if self.address and not sys.is_finalizing():
            self.driver.free(self.device.ordinal, self.address)


def view(array: Any) -> ArrayView:
    """Read where `array` lies.

    Raises
    ------
    ArgumentError : not an array of a kind known here
    DTypeError : an element type that has no name here
    """
    if isinstance(array, ArrayView):
        return array
    if isinstance(array, DeviceArray):
        return array.view()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_torch(array, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.ndarray):
        dtype = _known(str(array.dtype))
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return ArrayView(array.ctypes.data, array.shape, strides, dtype, Device(HOST, 0))
    if hasattr(array, "__dlpack__"):
        from gristmill.dlpack import view_dlpack

        return view_dlpack(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _view_cuda_array_interface(array.__cuda_array_interface__)
    raise ArgumentError(
        "an array must be a torch tensor, a numpy array, a DeviceArray or an object with __dlpack__ or "
        f"__cuda_array_interface__, got {type(array).__name__}"
    )


def torch_driver(torch: Any) -> str:
    """The driver behind torch's device type "cuda": ROCm builds of torch call theirs so too."""
    return "hip" if torch.version.hip else "cuda"


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array without padding."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def numpy_dtype(name: str) -> Any:
    """The numpy dtype called `name`; bfloat16 comes from ml_dtypes."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _strided(np: Any, flat: Any, array: DeviceArray) -> Any:
    strides = [stride * flat.itemsize for stride in array.strides]
    return np.lib.stride_tricks.as_strided(flat, array.shape, strides)


def _known(dtype: str) -> str:
    if dtype not in ITEM_BYTES:
        raise DTypeError(f"an array's dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype}")
    return dtype


def _view_torch(tensor: Any, torch: Any) -> ArrayView:
    kind = tensor.device.type
    if kind == "cuda":
        device = Device(torch_driver(torch), tensor.get_device())
    elif kind == HOST:
        device = Device(HOST, 0)
    else:
        raise ArgumentError(f"a tensor must be on cpu or cuda (ROCm included), got {tensor.device}")
    dtype = _known(str(tensor.dtype).removeprefix("torch."))
    return ArrayView(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), dtype, device)


def _view_cuda_array_interface(interface: dict[str, Any]) -> ArrayView:
    typestr = interface["typestr"]
    kinds = {"f": "float", "i": "int", "u": "uint"}
    if typestr[1:] == "V2":
        dtype = "bfloat16"  # numpy has no letter for it; ml_dtypes' arrays say so
    elif typestr[1] in kinds and typestr[0] != ">":
        dtype = _known(f"{kinds[typestr[1]]}{8 * int(typestr[2:])}")
    else:
        raise DTypeError(f"an array's typestr must be a float or an integer, got {typestr!r}")
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    elements = compact_strides(shape) if strides is None else tuple(stride // ITEM_BYTES[dtype] for stride in strides)
    address = interface["data"][0]
    ordinal = get_driver("cuda").device_of(address) if address else 0
    return ArrayView(address, shape, elements, dtype, Device("cuda", ordinal))
