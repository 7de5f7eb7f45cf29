"""Drivers behind one protocol: NVIDIA through cuda-python, AMD through hip-python.

A driver is a module named in the entry-point group "gristmill.drivers" whose `driver()` returns a
`gristmill.drivers.protocol.Driver`; other distributions may add theirs.
"""

from __future__ import annotations

import importlib
import threading
from importlib.metadata import entry_points

from gristmill.drivers.protocol import Driver
from gristmill.errors import NoDriverError

GROUP = "gristmill.drivers"

# Which extra brings what a driver needs, where it is not called like the driver.
EXTRAS = {"hip": "rocm", "emulated": "emulator"}

_drivers: dict[str, Driver] = {}
_lock = threading.Lock()


def driver_names() -> list[str]:
    """Names of the drivers that are installed, whether or not they can be used here."""
    return sorted({point.name for point in entry_points(group=GROUP)} | set(_drivers))


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
            points = entry_points(group=GROUP, name=name)
            if not points:
                raise NoDriverError(f"no driver is called {name!r}; installed: {', '.join(driver_names()) or 'none'}")
            try:
                module = importlib.import_module(next(iter(points)).value)
            except ImportError as error:
                extra = EXTRAS.get(name, name)
                raise NoDriverError(f"driver {name!r}: {error}; run: pip install 'gristmill[{extra}]'") from None
            _drivers[name] = module.driver()
        return _drivers[name]


def register(driver: Driver) -> None:
    """Make `driver` the one that `get_driver(driver.name)` returns."""
    with _lock:
        _drivers[driver.name] = driver
