"""AMD devices through hip-python."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gristmill.device import DeviceFacts
from gristmill.drivers import fork_guard
from gristmill.drivers.holding import released_on_error
from gristmill.drivers.protocol import Dim3
from gristmill.errors import DriverError, GristmillError, NoDeviceError, NoDriverError
from gristmill.launch import ArgumentBuffer

INSTALL_PACKAGE = "run: pip install 'gristmill[rocm]', with the hip-python version of your ROCm"
INSTALL_DRIVER = "install the ROCm runtime and put the folder of libamdhip64.so on LD_LIBRARY_PATH"

HIP_ERROR_NO_DEVICE = 100
HIP_ERROR_STREAM_CAPTURE_IMPLICIT = 906


@dataclass(frozen=True, slots=True)
class HipFunction:
    """A kernel of a loaded module."""

    handle: Any
    symbol: str


class HipDriver:
    """See `gristmill.drivers.protocol.Driver`."""

    name = "hip"

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bindings: Any = None
        self._facts: dict[int, DeviceFacts] = {}
        self._count: int | None = None

    def unavailable_reason(self) -> str | None:
        try:
            return None if self.device_count() else "the HIP runtime works but sees no device"
        except GristmillError as error:
            return str(error)

    def version(self) -> str:
        version = self._call("hipRuntimeGetVersion")
        return f"{version // 10_000_000}.{version // 100_000 % 100}.{version % 100_000}"

    def device_count(self) -> int:
        if self._count is None:
            self._count = self._call("hipGetDeviceCount", accept={HIP_ERROR_NO_DEVICE: 0})
        return self._count

    def device_facts(self, ordinal: int) -> DeviceFacts:
        facts = self._facts.get(ordinal)
        if facts is None:
            facts = self._facts[ordinal] = self._read_facts(ordinal)
        return facts

    def device_of(self, address: int) -> int:
        return int(self._call("hipPointerGetAttributes", address, where=f"address {address:#x}").device)

    def load_module(self, ordinal: int, code: bytes) -> Any:
        held: list[Any] = []
        with released_on_error(held, partial(self.unload_module, ordinal)), self._current(ordinal):
            held.append(self._call("hipModuleLoadData", code, where=self._where(ordinal)))
        return held[0]

    def unload_module(self, ordinal: int, module: Any) -> None:
        with self._current(ordinal):
            self._call("hipModuleUnload", module, where=self._where(ordinal))

    def function(
        self, ordinal: int, module: Any, symbol: str, max_dynamic_shared_bytes: int, early_start: bool
    ) -> HipFunction:
        # AMD has no opt-in limit: a kernel may always be launched with all the LDS that the device has.
        where = f"symbol {symbol}, {self._where(ordinal)}"
        with self._current(ordinal):
            return HipFunction(self._call("hipModuleGetFunction", module, symbol.encode(), where=where), symbol)

    def launch(
        self,
        ordinal: int,
        function: HipFunction,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: int,
    ) -> None:
        # The hot path: with the device current already, as after torch's own calls, no guard is built.
        hip = self._bindings
        try:
            unknown, current = hip.hipGetDevice()
        except ValueError:  # a code that is newer than hip-python
            unknown, current = True, None
        if not unknown and current == ordinal:
            status = self._launch(hip, function, grid, block, shared_bytes, arguments, stream)
        else:
            with self._current(ordinal):
                status = self._launch(hip, function, grid, block, shared_bytes, arguments, stream)
        if status:
            hip.hipGetLastError()
            where = f"symbol {function.symbol}, {self._where(ordinal)}, grid {grid}, block {block}, "
            where += f"{shared_bytes} bytes of dynamic LDS"
            raise DriverError(f"hipModuleLaunchKernel failed: {_text(hip, status)} [{where}]")

    def launch_pointers(self, ordinal: int) -> None:
        return None  # hip-python does not tell addresses

    @staticmethod
    def _launch(
        hip: Any,
        function: HipFunction,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int,
        arguments: ArgumentBuffer,
        stream: int,
    ) -> Any:
        try:
            return hip.hipModuleLaunchKernel(
                function.handle, *grid, *block, shared_bytes, stream, arguments.address, None
            )[0]
        except ValueError as error:  # a code that is newer than hip-python
            _last_error(hip)
            raise DriverError(f"hipModuleLaunchKernel failed: {error} [symbol {function.symbol}]") from error

    def is_capturing(self, ordinal: int, stream: int) -> bool:
        with self._current(ordinal):
            # Implicit: the null stream, while a stream that synchronises with it is captured.
            accept = {HIP_ERROR_STREAM_CAPTURE_IMPLICIT: 1}
            status = self._call("hipStreamIsCapturing", stream, where=self._where(ordinal), accept=accept)
        return int(status) != 0

    def allocate(self, ordinal: int, size: int) -> int:
        held: list[int] = []
        with released_on_error(held, partial(self.free, ordinal)), self._current(ordinal):
            held.append(int(self._call("hipMalloc", size, where=f"{size} bytes, {self._where(ordinal)}")))
        return held[0]

    def free(self, ordinal: int, address: int) -> None:
        with self._current(ordinal):
            self._call("hipFree", address, where=f"address {address:#x}")

    def copy_to_device(self, ordinal: int, destination: int, source: int, size: int) -> None:
        self._copy(ordinal, destination, source, size, "hipMemcpyHostToDevice")

    def copy_to_host(self, ordinal: int, destination: int, source: int, size: int) -> None:
        self.synchronize(ordinal)
        self._copy(ordinal, destination, source, size, "hipMemcpyDeviceToHost")

    def _copy(self, ordinal: int, destination: int, source: int, size: int, kind: str) -> None:
        direction = getattr(self._load().hipMemcpyKind, kind)
        with self._current(ordinal):
            where = f"{size} bytes, {self._where(ordinal)}"
            self._call("hipMemcpy", destination, source, size, direction, where=where)
            # From pageable memory the copy may still be on its way when the call returns.
            self._call("hipStreamSynchronize", 0, where=self._where(ordinal))

    def fill(self, ordinal: int, address: int, value: int, size: int) -> None:
        with self._current(ordinal):
            self._call("hipMemset", address, value, size, where=f"{size} bytes, {self._where(ordinal)}")
            self._call("hipStreamSynchronize", 0, where=self._where(ordinal))

    def synchronize(self, ordinal: int, stream: int | None = None) -> None:
        with self._current(ordinal):
            if stream is None:
                self._call("hipDeviceSynchronize", where=self._where(ordinal))
            else:
                self._call("hipStreamSynchronize", stream, where=self._where(ordinal))

    def record_event(self, ordinal: int, stream: int) -> Any:
        held: list[Any] = []
        with released_on_error(held, partial(self._destroy_event, ordinal)), self._current(ordinal):
            held.append(self._call("hipEventCreate"))
            self._call("hipEventRecord", held[0], stream, where=self._where(ordinal))
        return held[0]

    def elapsed_us(self, ordinal: int, start: Any, stop: Any) -> float:
        held = [stop, start]
        with released_on_error(held, partial(self._destroy_event, ordinal)), self._current(ordinal):
            self._call("hipEventSynchronize", stop, where=self._where(ordinal))
            milliseconds = self._call("hipEventElapsedTime", start, stop)
            while held:
                self._call("hipEventDestroy", held[-1])
                held.pop()
        return 1000.0 * milliseconds

    def _destroy_event(self, ordinal: int, event: Any) -> None:
        with self._current(ordinal):
            self._call("hipEventDestroy", event)

    def _load(self) -> Any:
        """hip-python's module, after hipInit."""
        if self._bindings is not None:
            return self._bindings
        with self._lock:
            if self._bindings is not None:  # another thread was first
                return self._bindings
            try:
                hip = importlib.import_module("hip").hip
            except ImportError as error:
                raise NoDriverError(f"hip-python cannot be imported ({error}); {INSTALL_PACKAGE}") from error
            try:
                status = hip.hipInit(0)[0]
            except RuntimeError as error:  # what hip-python raises for a library that is not there
                raise NoDriverError(f"libamdhip64.so cannot be loaded ({error}); {INSTALL_DRIVER}") from error
            except ValueError as error:  # a code that is newer than hip-python
                raise NoDriverError(f"hipInit failed: {error}; {INSTALL_DRIVER}") from error
            if status and int(status) != HIP_ERROR_NO_DEVICE:
                raise NoDriverError(f"hipInit failed: {_text(hip, status)}; {INSTALL_DRIVER}")
            self._bindings = hip
            fork_guard.guard(self)
        return self._bindings

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make the device current and put the former one back."""
        count = self.device_count()
        if not 0 <= ordinal < count:
            raise NoDeviceError(f"no device hip:{ordinal}; the HIP runtime sees {count}")
        former = self._call("hipGetDevice")
        if former == ordinal:
            yield
            return
        self._call("hipSetDevice", ordinal)
        try:
            yield
        finally:
            self._call("hipSetDevice", former)

    def _read_facts(self, ordinal: int) -> DeviceFacts:
        hip = self._load()

        def attribute(name: str) -> int:
            key = getattr(hip.hipDeviceAttribute_t, f"hipDeviceAttribute{name}")
            return self._call("hipDeviceGetAttribute", key, ordinal, where=name)

        with self._current(ordinal):
            properties = self._call("hipGetDeviceProperties", ordinal)
            return DeviceFacts(
                backend="hip",
                arch=_decoded(properties.gcnArchName).partition(":")[0],  # "gfx90a:sramecc+:xnack-"
                name=_decoded(properties.name),
                warp_size=attribute("WarpSize"),
                multiprocessor_count=attribute("MultiprocessorCount"),
                lds_bytes_per_block=attribute("MaxSharedMemoryPerBlock"),
                max_threads_per_block=attribute("MaxThreadsPerBlock"),
            )

    def _where(self, ordinal: int) -> str:
        facts = self._facts.get(ordinal)
        return f"hip:{ordinal}" if facts is None else f"hip:{ordinal} ({facts.arch})"

    def _call(self, name: str, *arguments: Any, where: str = "", accept: Mapping[int, Any] | None = None) -> Any:
        """Call the runtime; its value, that of `accept` for a code in there, DriverError for any other code."""
        hip = self._load()
        try:
            result = getattr(hip, name)(*arguments)
        except ValueError as error:
            result = (self._code_after(name, error, where),)
        except RuntimeError as error:  # a function that this libamdhip64.so does not have
            raise NoDriverError(f"{name} cannot be called ({error}); {INSTALL_PACKAGE}") from error
        status = result[0]
        if not status:
            return result[1] if len(result) > 1 else None
        hip.hipGetLastError()  # or torch's next launch check would report what is raised here
        if accept is not None and int(status) in accept:
            return accept[int(status)]
        raise DriverError(f"{name} failed: {_text(hip, status)}{f' [{where}]' if where else ''}")

    def _code_after(self, name: str, error: ValueError, where: str) -> Any:
        """The code of a call whose results hip-python could not turn into enums.

        It converts the results of a failed call too, which the runtime has left as they were, and it knows no code
        that is newer than itself.
        """
        status = _last_error(self._bindings)
        if not status:
            raise DriverError(f"{name} failed: {error}{f' [{where}]' if where else ''}") from error
        return status


def driver() -> HipDriver:
    """The driver, for `gristmill.drivers.get_driver`; nothing is loaded yet."""
    return HipDriver()


def _decoded(text: Any) -> str:
    """A C string: bytes in older hip-python; str, or an object with decode(), in newer."""
    if isinstance(text, bytes):
        return text.split(b"\0")[0].decode(errors="replace")
    return text if isinstance(text, str) else text.decode()


def _last_error(hip: Any) -> Any:
    """The runtime's last error, which is cleared by it; None for a code that is newer than hip-python."""
    try:
        return hip.hipGetLastError()[0]
    except ValueError:
        return None


def _text(hip: Any, status: Any) -> str:
    """Name and words of the runtime for a code."""
    words = hip.hipGetErrorString(status)
    words = words[1] if isinstance(words, tuple) else words
    return f"{status.name} ({_decoded(words) if words else 'no text'})"
