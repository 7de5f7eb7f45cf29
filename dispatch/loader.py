"""Loading: from an entry of a pack to a kernel that can be launched on one device."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gristmill.arrays import Device
from gristmill.device import DeviceFacts
from gristmill.drivers import fork_guard, get_driver
from gristmill.errors import DriverError, ManifestError, NotLoadedError
from gristmill.launch import INT32_MAX
from gristmill.manifest import Entry
from gristmill.packs import Pack, find_pack

if TYPE_CHECKING:
    from gristmill.drivers.protocol import Driver

INT64_MAX = 2**63 - 1

# The arguments that differ from call to call; the others belong to the weight.
VARYING = ("x", "out", "M", "x_row_stride", "out_row_stride")


class LoadedKernel:
    """An entry that is loaded on one device, with what a launch needs of it."""

    __slots__ = ("block", "entry", "function", "row_stride_limit", "varying")

    def __init__(self, entry: Entry, function: Any) -> None:
        names = [argument.name for argument in entry.arguments if argument.type != "null"]
        if len(set(names)) != len(names):
            raise ManifestError(f"entry {entry.name}: an argument is named twice: {', '.join(names)}")
        position = {argument.name: i for i, argument in enumerate(entry.arguments) if argument.type != "null"}
        types = {argument.name: argument.type for argument in entry.arguments}
        strides = {types.get("x_row_stride"), types.get("out_row_stride")}
        self.entry = entry
        self.function = function
        self.block = entry.block
        # Positions in the argument buffer; what the kernel does not take is written to a spare slot after the last.
        self.varying = tuple(position.get(name, len(entry.arguments)) for name in VARYING)
        self.row_stride_limit = INT32_MAX if "int32" in strides else INT64_MAX


class Loader:
    """The kernels of one pack on one device; each module is loaded once, whichever thread asks first."""

    def __init__(self, device: Device, driver: Driver, facts: DeviceFacts, pack: Pack) -> None:
        self.device = device
        self.driver = driver
        self.facts = facts
        self.pack = pack
        self.choices: dict[Any, dict[int, Any]] = {}  # per weight class; see gristmill.prepared
        self._kernels: dict[str, LoadedKernel] = {}
        self._modules: dict[str, Any] = {}  # by sha256 of the object: entries of one object share a module
        self._lock = threading.Lock()

    def kernel(self, entry: Entry, stream: int | None = None) -> LoadedKernel:
        """The kernel of `entry`, loaded now if it is not yet.

        Parameters
        ----------
        stream : where the kernel is about to be launched; None when nothing is launched

        Raises
        ------
        NotLoadedError : not loaded, and `stream` is being captured; the stream is untouched
        DamagedPackError, DriverError : the object cannot be read or loaded
        """
        kernel = self._kernels.get(entry.name)
        if kernel is not None:
            return kernel
        if stream is not None and self.driver.is_capturing(self.device.ordinal, stream):
            raise NotLoadedError(
                f"kernel {entry.name} is not loaded on {self.device} and the stream is being captured; "
                "call gristmill.preload(weight) before the capture"
            )
        with self._lock:
            kernel = self._kernels.get(entry.name)
            if kernel is None:
                kernel = self._kernels[entry.name] = self._load(entry)
        return kernel

    def loaded(self) -> list[str]:
        """Names of the entries that are loaded."""
        return list(self._kernels)

    def is_loaded(self, entry: Entry) -> bool:
        """Whether `entry` can be launched without loading."""
        return entry.name in self._kernels

    def has_object(self, entry: Entry) -> bool:
        """Whether the module of `entry` is on the device, perhaps for another entry."""
        return entry.object in self._modules

    def unload(self) -> None:
        """Unload all modules; no launch may be under way.

        Raises
        ------
        DriverError : the first that the driver refused to unload; the others are unloaded all the same
        """
        failure = None
        with self._lock:
            self._kernels.clear()
            self.choices.clear()
            while self._modules:
                try:
                    self.driver.unload_module(self.device.ordinal, self._modules.popitem()[1])
                except DriverError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _load(self, entry: Entry) -> LoadedKernel:
        ordinal = self.device.ordinal
        module = self._modules.get(entry.object)
        if module is None:
            module = self.driver.load_module(ordinal, self.pack.read_object(entry))
            self._modules[entry.object] = module
        shared_bytes = max_dynamic_shared_bytes(entry, self.facts)
        return LoadedKernel(entry, self.driver.function(ordinal, module, entry.symbol, shared_bytes, entry.early_start))


def max_dynamic_shared_bytes(entry: Entry, facts: DeviceFacts) -> int:
    """The most dynamic shared memory that selection can ask for: the constant, or all that the device has left."""
    if entry.dynamic_shared_bytes.names:
        return facts.lds_bytes_per_block - entry.static_shared_bytes
    return entry.dynamic_shared_bytes({})


_loaders: dict[Device, Loader] = {}
_lock = threading.Lock()

# Caches of what refers to a loader; emptied with them.
dependent_caches: list[dict[Any, Any]] = []


def loader_for(device: Device) -> Loader:
    """The loader of `device`, with the pack that serves it; the same object each time.

    Raises
    ------
    NoPackError : no installed pack serves the device; the message has the pip line
    NoDriverError, NoDeviceError : the device cannot be used
    """
    loader = _loaders.get(device)
    if loader is None:
        with _lock:
            loader = _loaders.get(device)
            if loader is None:
                driver = get_driver(device.driver)
                facts = driver.device_facts(device.ordinal)
                loader = Loader(device, driver, facts, find_pack(facts.arch))
                _loaders[device] = loader
    return loader


def forget_loaders(device: Device | None = None) -> None:
    """Unload all modules, of one device or of all; packs are looked for anew. No launch may be under way.

    Raises
    ------
    DriverError : the first module that a driver refused to unload; all is forgotten all the same
    """
    failure = None
    with _lock:
        for cache in dependent_caches:
            cache.clear()
        for found in list(_loaders) if device is None else [device]:
            loader = _loaders.pop(found, None)
            try:
                if loader is not None:
                    loader.unload()
            except DriverError as error:
                failure = failure or error
    if failure is not None:
        raise failure


def _forget_in_fork() -> None:
    """In the child of a fork: drop what is the parent's, without a call to its driver."""
    global _lock
    _lock = threading.Lock()
    for cache in dependent_caches:
        cache.clear()
    _loaders.clear()


fork_guard.in_child.append(_forget_in_fork)
