"""Drivers behind one protocol: NVIDIA through libcuda, AMD through hip-python.

A driver is a module whose `driver()` returns a `gristmill.drivers.protocol.Driver`. Two are part of the dispatcher;
others, `emulated` among them, are named in the entry-point group "gristmill.drivers".
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

from gristmill.drivers import fork_guard
from gristmill.errors import NoDriverError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from gristmill.drivers.protocol import Driver

GROUP = "gristmill.drivers"

# Known without asking for entry points: importing importlib.metadata and reading all distributions takes 30 ms.
BUILT_IN = {"cuda": "gristmill.drivers.cuda", "hip": "gristmill.drivers.hip"}

# Which extra brings what a driver needs, where it is not called like the driver.
EXTRAS = {"hip": "rocm", "emulated": "emulator"}

_drivers: dict[str, Driver] = {}
_lock = threading.Lock()


def driver_names() -> list[str]:
    """Names of the drivers that are installed, whether or not they can be used here."""
    return sorted({point.name for point in _entry_points()} | BUILT_IN.keys() | _drivers.keys())


def get_driver(name: str) -> Driver:
    """The driver called `name`; the same object each time.

    Raises
    ------
    NoDriverError : no driver has that name; one that has it but lacks its library raises on use
    """
    driver = _drivers.get(name)
    if driver is not None:
        return driver
    with _lock:
        if name not in _drivers:
            try:
                module = importlib.import_module(BUILT_IN.get(name) or _module_of(name))
            except ImportError as error:
                extra = EXTRAS.get(name, name)
                raise NoDriverError(
                    f"a package that driver {name!r} needs is missing ({error}); run: pip install 'gristmill[{extra}]'"
                ) from None
            _drivers[name] = module.driver()
        return _drivers[name]


def _module_of(name: str) -> str:
    for point in _entry_points():
        if point.name == name:
            return point.value
    raise NoDriverError(f"no driver is called {name!r}; installed: {', '.join(driver_names())}")


def _entry_points() -> EntryPoints:
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def register(driver: Driver) -> None:
    """Make `driver` the one that `get_driver(driver.name)` returns."""
    with _lock:
        _drivers[driver.name] = driver


def _renew_lock() -> None:
    """In the child of a fork."""
    global _lock
    _lock = threading.Lock()


fork_guard.in_child.append(_renew_lock)
