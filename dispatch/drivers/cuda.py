"""NVIDIA devices through libcuda.so.1, in the device's primary context, which torch and the CUDA runtime use too.

The library comes with the NVIDIA driver; of its functions the few that are used are declared here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

from gristmill.device import DeviceFacts
from gristmill.drivers import fork_guard
from gristmill.drivers.holding import released_on_error
from gristmill.errors import DriverError, ForkedProcessError, GristmillError, NoDeviceError, NoDriverError
from gristmill.named_tuple import NamedTuple

if TYPE_CHECKING:
    from gristmill.drivers.protocol import Dim3, LaunchPointers
    from gristmill.launch import ArgumentBuffer

LIBRARY = "libcuda.so.1"
INSTALL_DRIVER = "install the NVIDIA driver; in a container, start it with the GPUs (docker run --gpus all)"

CUDA_ERROR_NOT_INITIALIZED = 3
CUDA_ERROR_NO_DEVICE = 100
CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906

CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
CU_STREAM_CAPTURE_MODE_RELAXED = 2
CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

# CUdevice_attribute.
MAX_THREADS_PER_BLOCK = 1
WARP_SIZE = 10
MULTIPROCESSOR_COUNT = 16
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97

# Handles are c_void_p, device addresses c_uint64. Every function returns a CUresult.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDriverGetVersion": (c_void_p,),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamSynchronize": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuEventDestroy": (c_void_p,),
    "cuMemAlloc": (c_void_p, c_size_t),
    "cuMemFree": (c_uint64,),
    "cuMemcpyHtoD": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH": (c_void_p, c_uint64, c_size_t),
    "cuMemsetD8": (c_uint64, c_ubyte, c_size_t),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
}

# Functions whose first form, with 32-bit addresses, still has the plain name in the library.
_SECOND_FORM = {"cuEventDestroy", "cuMemAlloc", "cuMemFree", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemsetD8"}


class CudaFunction(NamedTuple):
    """A kernel of a loaded module."""

    handle: int
    symbol: str
    early_start: bool


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", c_uint),
    )


_EARLY_START = _LaunchAttribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))


class CudaDriver:
    """See `gristmill.drivers.protocol.Driver`."""

    name = "cuda"

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._functions: dict[str, Any] = {}  # of the library, once cuInit has been called
        self._contexts: dict[int, int] = {}  # ordinal -> retained primary context
        self._facts: dict[int, DeviceFacts] = {}

    def unavailable_reason(self) -> str | None:
        try:
            return None if self.device_count() else "the NVIDIA driver works but sees no device"
        except GristmillError as error:
            return str(error)

    def version(self) -> str:
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"  # of CUDA, the newest that the driver serves

    def device_count(self) -> int:
        count = c_int(0)
        self._call("cuDeviceGetCount", byref(count), accept=(CUDA_ERROR_NO_DEVICE,))
        return count.value

    def device_facts(self, ordinal: int) -> DeviceFacts:
        facts = self._facts.get(ordinal)
        if facts is None:
            facts = self._facts[ordinal] = self._read_facts(ordinal)
        return facts

    def device_of(self, address: int) -> int:
        ordinal = c_int()
        where = f"address {address:#x}"
        self._call("cuPointerGetAttribute", byref(ordinal), CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address, where=where)
        return ordinal.value

    def load_module(self, ordinal: int, code: bytes) -> int:
        module = c_void_p()
        held: list[int] = []
        with (
            released_on_error(held, partial(self.unload_module, ordinal)),
            self._current(ordinal),
            self._load_beside_capture(),
        ):
            self._call("cuModuleLoadData", byref(module), code, where=self._where(ordinal))
            held.append(_handle(module))
        return held[0]

    def unload_module(self, ordinal: int, module: int) -> None:
        with self._current(ordinal):
            self._call("cuModuleUnload", module, where=self._where(ordinal))

    def function(
        self, ordinal: int, module: int, symbol: str, max_dynamic_shared_bytes: int, early_start: bool
    ) -> CudaFunction:
        handle = c_void_p()
        where = f"symbol {symbol}, {self._where(ordinal)}"
        with self._current(ordinal), self._load_beside_capture():
            self._call("cuModuleGetFunction", byref(handle), module, symbol.encode(), where=where)
            if max_dynamic_shared_bytes:
                limit = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                where = f"{max_dynamic_shared_bytes} bytes of dynamic shared memory, {where}"
                self._call("cuFuncSetAttribute", handle, limit, max_dynamic_shared_bytes, where=where)
        return CudaFunction(_handle(handle), symbol, early_start)

    def launch(
        self,
        ordinal: int,
        function: CudaFunction,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: int,
    ) -> None:
        # The hot path: a thread that torch has used has the device's context current already, so no guard is built.
        current = c_void_p()
        status = self._functions["cuCtxGetCurrent"](byref(current))
        if status == 0 and current.value == self._contexts[ordinal]:
            self._launch(ordinal, function, grid, block, shared_bytes, arguments, stream)
        else:
            with self._current(ordinal):
                self._launch(ordinal, function, grid, block, shared_bytes, arguments, stream)

    def _launch(
        self,
        ordinal: int,
        function: CudaFunction,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: int,
    ) -> None:
        # A kernel that starts early reads its weight before the stores of the kernel ahead are sure to be seen. In a
        # graph that one is another layer's; outside, it may have written the weight. Nor is anything gained there: the
        # host is slower.
        functions = self._functions
        early = False
        if function.early_start:
            capturing = c_int()
            early = functions["cuStreamIsCapturing"](stream, byref(capturing)) == 0 and capturing.value != 0
        if early:
            name = "cuLaunchKernelEx"
            config = _LaunchConfig(grid, block, shared_bytes, stream, ctypes.pointer(_EARLY_START), 1)
            status = functions[name](byref(config), function.handle, arguments.address, None)
        else:
            name = "cuLaunchKernel"
            status = functions[name](function.handle, *grid, *block, shared_bytes, stream, arguments.address, None)
        if status:
            raise self._launch_error(ordinal, function, grid, block, shared_bytes, status, name)

    def launch_pointers(self, ordinal: int) -> LaunchPointers:
        from gristmill.drivers.protocol import LaunchPointers

        functions = self._load()
        launch, get_current, is_capturing = (
            ctypes.cast(functions[name], c_void_p).value or 0
            for name in ("cuLaunchKernel", "cuCtxGetCurrent", "cuStreamIsCapturing")
        )
        context = self._context(ordinal)
        return LaunchPointers(launch, get_current, is_capturing, context, partial(self._launch_error, ordinal))

    def _launch_error(
        self,
        ordinal: int,
        function: CudaFunction,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        status: int,
        name: str = "cuLaunchKernel",  # the only one that is launched with from C
    ) -> DriverError:
        where = f"symbol {function.symbol}, {self._where(ordinal)}, grid {grid}, block {block}, "
        where += f"{shared_bytes} bytes of dynamic shared memory"
        return DriverError(f"{name} failed: {self._text(status)} [{where}]")

    def is_capturing(self, ordinal: int, stream: int) -> bool:
        capturing = c_int()
        # Implicit: the legacy stream, while a stream that synchronises with it is captured.
        accept = (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,)
        with self._current(ordinal):
            where = self._where(ordinal)
            status = self._call("cuStreamIsCapturing", stream, byref(capturing), where=where, accept=accept)
        return status != 0 or capturing.value != 0

    def allocate(self, ordinal: int, size: int) -> int:
        address = c_uint64()
        held: list[int] = []
        with released_on_error(held, partial(self.free, ordinal)), self._current(ordinal):
            self._call("cuMemAlloc", byref(address), size, where=f"{size} bytes, {self._where(ordinal)}")
            held.append(address.value)
        return held[0]

    def free(self, ordinal: int, address: int) -> None:
        with self._current(ordinal):
            self._call("cuMemFree", address, where=f"address {address:#x}")

    def copy_to_device(self, ordinal: int, destination: int, source: int, size: int) -> None:
        with self._current(ordinal):
            self._call("cuMemcpyHtoD", destination, source, size, where=f"{size} bytes, {self._where(ordinal)}")
            # From pageable memory the copy may still be on its way when the call returns.
            self._call("cuStreamSynchronize", 0, where=self._where(ordinal))

    def copy_to_host(self, ordinal: int, destination: int, source: int, size: int) -> None:
        with self._current(ordinal):
            self._call("cuCtxSynchronize", where=self._where(ordinal))
            self._call("cuMemcpyDtoH", destination, source, size, where=f"{size} bytes, {self._where(ordinal)}")

    def fill(self, ordinal: int, address: int, value: int, size: int) -> None:
        with self._current(ordinal):
            self._call("cuMemsetD8", address, value, size, where=f"{size} bytes, {self._where(ordinal)}")
            self._call("cuStreamSynchronize", 0, where=self._where(ordinal))

    def synchronize(self, ordinal: int, stream: int | None = None) -> None:
        with self._current(ordinal):
            if stream is None:
                self._call("cuCtxSynchronize", where=self._where(ordinal))
            else:
                self._call("cuStreamSynchronize", stream, where=self._where(ordinal))

    def record_event(self, ordinal: int, stream: int) -> int:
        event = c_void_p()
        held: list[int] = []
        with released_on_error(held, partial(self._destroy_event, ordinal)), self._current(ordinal):
            self._call("cuEventCreate", byref(event), 0)
            held.append(_handle(event))
            self._call("cuEventRecord", event, stream, where=self._where(ordinal))
        return held[0]

    def elapsed_us(self, ordinal: int, start: int, stop: int) -> float:
        milliseconds, held = c_float(), [stop, start]
        with released_on_error(held, partial(self._destroy_event, ordinal)), self._current(ordinal):
            self._call("cuEventSynchronize", stop, where=self._where(ordinal))
            self._call("cuEventElapsedTime", byref(milliseconds), start, stop)
            while held:
                self._call("cuEventDestroy", held[-1])
                held.pop()
        return 1000.0 * milliseconds.value

    def _destroy_event(self, ordinal: int, event: int) -> None:
        with self._current(ordinal):
            self._call("cuEventDestroy", event)

    def _load(self) -> Mapping[str, Any]:
        """The functions of the library, after cuInit."""
        if self._functions:
            return self._functions
        with self._lock:
            if self._functions:  # another thread was first
                return self._functions
            try:
                library = ctypes.CDLL(LIBRARY)
                functions = {name: _declare(library, name) for name in _ARGUMENTS}
            except (OSError, AttributeError) as error:  # not there, or of a driver that is too old
                raise NoDriverError(f"{LIBRARY} cannot be loaded ({error}); {INSTALL_DRIVER}") from error
            status = functions["cuInit"](0)
            if status == CUDA_ERROR_NOT_INITIALIZED:  # what cuInit itself returns after a fork
                text = _text(functions, status)
                raise ForkedProcessError(
                    f"cuInit failed: {text}; this is a fork of a process that had used CUDA; {fork_guard.FIX}"
                )
            if status and status != CUDA_ERROR_NO_DEVICE:
                raise NoDriverError(f"cuInit failed: {_text(functions, status)}; {INSTALL_DRIVER}")
            self._functions = functions
            fork_guard.guard(self)
        return self._functions

    def _context(self, ordinal: int) -> int:
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal)
                if context is None:
                    retained = c_void_p()
                    device = self._device(ordinal)
                    self._call("cuDevicePrimaryCtxRetain", byref(retained), device, where=self._where(ordinal))
                    context = self._contexts[ordinal] = _handle(retained)
        return context

    def _device(self, ordinal: int) -> int:
        count = self.device_count()
        if not 0 <= ordinal < count:
            raise NoDeviceError(f"no device cuda:{ordinal}; the NVIDIA driver sees {count}")
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make the device's context current and put the former one back."""
        context = self._context(ordinal)
        former = c_void_p()
        self._call("cuCtxGetCurrent", byref(former))
        if former.value == context:
            yield
            return
        self._call("cuCtxSetCurrent", context, where=self._where(ordinal))
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", former)

    @contextmanager
    def _load_beside_capture(self) -> Iterator[None]:
        """Let this thread load while another thread captures a graph, without breaking that capture."""
        mode = c_int(CU_STREAM_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))  # the former mode comes out
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def _read_facts(self, ordinal: int) -> DeviceFacts:
        device = self._device(ordinal)

        def attribute(key: int) -> int:
            value = c_int()
            self._call("cuDeviceGetAttribute", byref(value), key, device, where=f"attribute {key}")
            return value.value

        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), device)
        return DeviceFacts(
            backend="cuda",
            arch=f"sm{attribute(COMPUTE_CAPABILITY_MAJOR)}{attribute(COMPUTE_CAPABILITY_MINOR)}",
            name=name.value.decode(errors="replace"),
            warp_size=attribute(WARP_SIZE),
            multiprocessor_count=attribute(MULTIPROCESSOR_COUNT),
            lds_bytes_per_block=attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            max_threads_per_block=attribute(MAX_THREADS_PER_BLOCK),
        )

    def _where(self, ordinal: int) -> str:
        facts = self._facts.get(ordinal)
        return f"cuda:{ordinal}" if facts is None else f"cuda:{ordinal} ({facts.arch})"

    def _call(self, name: str, *arguments: Any, where: str = "", accept: tuple[int, ...] = ()) -> int:
        """Call the driver; its code, which is success or of `accept`, DriverError for any other."""
        status = self._load()[name](*arguments)
        if status and status not in accept:
            raise DriverError(f"{name} failed: {self._text(status)}{f' [{where}]' if where else ''}")
        return status

    def _text(self, status: int) -> str:
        return _text(self._functions, status)


def driver() -> CudaDriver:
    """The driver, for `gristmill.drivers.get_driver`; nothing is loaded yet."""
    return CudaDriver()


def _declare(library: ctypes.CDLL, name: str) -> Any:
    function = library[f"{name}_v2" if name in _SECOND_FORM else name]
    function.argtypes = _ARGUMENTS[name]
    function.restype = c_int
    return function


def _handle(pointer: c_void_p) -> int:
    return pointer.value or 0


def _text(functions: Mapping[str, Any], status: int) -> str:
    """Name and words of the driver for a code."""
    name, words = c_char_p(), c_char_p()
    functions["cuGetErrorName"](status, byref(name))
    functions["cuGetErrorString"](status, byref(words))
    return f"{name.value.decode()} ({(words.value or b'no text').decode()})" if name.value else f"code {status}"
