"""NVIDIA devices through cuda-python, in the device's primary context, which torch and the CUDA runtime use too."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gristmill.device import DeviceFacts
from gristmill.drivers.protocol import Dim3
from gristmill.errors import DriverError, GristmillError, NoDeviceError, NoDriverError
from gristmill.launch import ArgumentBuffer

INSTALL_PACKAGE = "run: pip install 'gristmill[cuda]'"
INSTALL_DRIVER = "install the NVIDIA driver; in a container, start it with the GPUs (docker run --gpus all)"

CUDA_ERROR_NO_DEVICE = 100
CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906


@dataclass(frozen=True, slots=True)
class CudaFunction:
    """A kernel of a loaded module."""

    handle: Any
    symbol: str
    arch: str


class CudaDriver:
    """See `gristmill.drivers.protocol.Driver`."""

    name = "cuda"

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bindings: Any = None
        self._contexts: dict[int, int] = {}  # ordinal -> retained primary context
        self._facts: dict[int, DeviceFacts] = {}

    def unavailable_reason(self) -> str | None:
        try:
            return None if self.device_count() else "the NVIDIA driver works but sees no device"
        except GristmillError as error:
            return str(error)

    def device_count(self) -> int:
        return self._call("cuDeviceGetCount", accept={CUDA_ERROR_NO_DEVICE: 0})

    def device_facts(self, ordinal: int) -> DeviceFacts:
        facts = self._facts.get(ordinal)
        if facts is None:
            facts = self._facts[ordinal] = self._read_facts(ordinal)
        return facts

    def device_of(self, address: int) -> int:
        attribute = self._load().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(self._call("cuPointerGetAttribute", attribute, address, where=f"address {address:#x}"))

    def load_module(self, ordinal: int, code: bytes) -> Any:
        with self._current(ordinal), self._load_beside_capture():
            return self._call("cuModuleLoadData", code, where=self._where(ordinal))

    def unload_module(self, ordinal: int, module: Any) -> None:
        with self._current(ordinal):
            self._call("cuModuleUnload", module, where=self._where(ordinal))

    def function(self, ordinal: int, module: Any, symbol: str, max_dynamic_shared_bytes: int) -> CudaFunction:
        arch = self.device_facts(ordinal).arch
        where = f"symbol {symbol}, {self._where(ordinal)}"
        with self._current(ordinal), self._load_beside_capture():
            handle = self._call("cuModuleGetFunction", module, symbol.encode(), where=where)
            if max_dynamic_shared_bytes:
                limit = self._bindings.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                where = f"{max_dynamic_shared_bytes} bytes of dynamic shared memory, {where}"
                self._call("cuFuncSetAttribute", handle, limit, max_dynamic_shared_bytes, where=where)
        return CudaFunction(handle, symbol, arch)

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
        cuda = self._bindings
        try:
            status, current = cuda.cuCtxGetCurrent()
            if not status and int(current) == self._contexts[ordinal]:
                (status,) = cuda.cuLaunchKernel(
                    function.handle, *grid, *block, shared_bytes, stream, arguments.address, 0
                )
            else:
                with self._current(ordinal):
                    (status,) = cuda.cuLaunchKernel(
                        function.handle, *grid, *block, shared_bytes, stream, arguments.address, 0
                    )
            words = _text(cuda, status) if status else ""
        except (ValueError, KeyError) as error:  # a code that is newer than cuda-python
            words = str(error)
        if words:
            where = f"symbol {function.symbol}, {self._where(ordinal)}, grid {grid}, block {block}, "
            where += f"{shared_bytes} bytes of dynamic shared memory"
            raise DriverError(f"cuLaunchKernel failed: {words} [{where}]")

    def is_capturing(self, ordinal: int, stream: int) -> bool:
        with self._current(ordinal):
            # Implicit: the legacy stream, while a stream that synchronises with it is captured.
            accept = {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: True}
            status = self._call("cuStreamIsCapturing", stream, where=self._where(ordinal), accept=accept)
        return int(status) != 0

    def allocate(self, ordinal: int, size: int) -> int:
        with self._current(ordinal):
            return int(self._call("cuMemAlloc", size, where=f"{size} bytes, {self._where(ordinal)}"))

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

    def record_event(self, ordinal: int, stream: int) -> Any:
        with self._current(ordinal):
            event = self._call("cuEventCreate", 0)
            self._call("cuEventRecord", event, stream, where=self._where(ordinal))
        return event

    def elapsed_us(self, ordinal: int, start: Any, stop: Any) -> float:
        with self._current(ordinal):
            self._call("cuEventSynchronize", stop, where=self._where(ordinal))
            milliseconds = self._call("cuEventElapsedTime", start, stop)
            self._call("cuEventDestroy", start)
            self._call("cuEventDestroy", stop)
        return 1000.0 * milliseconds

    def _load(self) -> Any:
        """cuda.bindings.driver, after cuInit."""
        if self._bindings is not None:
            return self._bindings
        with self._lock:
            try:
                cuda = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise NoDriverError(f"cuda-python cannot be imported ({error}); {INSTALL_PACKAGE}") from error
            try:
                status = cuda.cuInit(0)[0]
            except Exception as error:  # cuda-python has no common class for a library that is not there
                raise NoDriverError(f"libcuda.so.1 cannot be loaded ({error}); {INSTALL_DRIVER}") from error
            if status and int(status) != CUDA_ERROR_NO_DEVICE:
                raise NoDriverError(f"cuInit failed: {_text(cuda, status)}; {INSTALL_DRIVER}")
            self._bindings = cuda
        return self._bindings

    def _context(self, ordinal: int) -> int:
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal)
                if context is None:
                    device = self._device(ordinal)
                    context = int(self._call("cuDevicePrimaryCtxRetain", device, where=self._where(ordinal)))
                    self._contexts[ordinal] = context
        return context

    def _device(self, ordinal: int) -> Any:
        count = self.device_count()
        if not 0 <= ordinal < count:
            raise NoDeviceError(f"no device cuda:{ordinal}; the NVIDIA driver sees {count}")
        return self._call("cuDeviceGet", ordinal)

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make the device's context current and put the former one back."""
        context = self._context(ordinal)
        former = self._call("cuCtxGetCurrent")
        if int(former) == context:
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
        relaxed = self._bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        former = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", former)

    def _read_facts(self, ordinal: int) -> DeviceFacts:
        cuda = self._load()
        device = self._device(ordinal)

        def attribute(name: str) -> int:
            key = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return self._call("cuDeviceGetAttribute", key, device, where=name)

        return DeviceFacts(
            backend="cuda",
            arch=f"sm{attribute('COMPUTE_CAPABILITY_MAJOR')}{attribute('COMPUTE_CAPABILITY_MINOR')}",
            name=self._call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace"),
            warp_size=attribute("WARP_SIZE"),
            multiprocessor_count=attribute("MULTIPROCESSOR_COUNT"),
            lds_bytes_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            max_threads_per_block=attribute("MAX_THREADS_PER_BLOCK"),
        )

    def _where(self, ordinal: int) -> str:
        facts = self._facts.get(ordinal)
        return f"cuda:{ordinal}" if facts is None else f"cuda:{ordinal} ({facts.arch})"

    def _call(self, name: str, *arguments: Any, where: str = "", accept: Mapping[int, Any] | None = None) -> Any:
        """Call the driver; its value, that of `accept` for a code in there, DriverError for any other code."""
        cuda = self._load()
        try:
            result = getattr(cuda, name)(*arguments)
        except (ValueError, KeyError) as error:  # a code that these bindings have no name for
            raise DriverError(f"{name} failed: {error}{f' [{where}]' if where else ''}") from error
        status = result[0]
        if not status:
            return result[1] if len(result) > 1 else None
        if accept is not None and int(status) in accept:
            return accept[int(status)]
        raise DriverError(f"{name} failed: {_text(cuda, status)}{f' [{where}]' if where else ''}")


def driver() -> CudaDriver:
    """The driver, for `gristmill.drivers.get_driver`; nothing is loaded yet."""
    return CudaDriver()


def _text(cuda: Any, status: Any) -> str:
    """Name and words of the driver for a code."""
    name = cuda.cuGetErrorName(status)[1]
    words = cuda.cuGetErrorString(status)[1]
    return f"{name.decode()} ({(words or b'no text').decode()})" if name else f"code {int(status)}"
