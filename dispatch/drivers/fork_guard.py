"""Forks of a process that has used a driver.

A driver's contexts, modules and memory belong to the process that made them; a fork inherits the handles and nothing
behind them. So when Python forks, the child's copies of the drivers that were in use are turned into ones that raise,
and what was cached of them is forgotten. Locks are made anew in any child: another thread of the parent may have held
them. The parent, and a call in either, pay nothing for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gristmill.errors import ForkedProcessError

if TYPE_CHECKING:
    from gristmill.drivers.protocol import Driver

FIX = "start workers with multiprocessing's 'spawn' method, or use the GPU only after the fork"

# What a child has to forget, by whoever keeps it.
in_child: list[Callable[[], None]] = []

_drivers: list[Driver] = []
_lock = threading.Lock()


def guard(driver: Driver) -> None:
    """Say that `driver` has been initialised in this process."""
    with _lock:
        _drivers.append(driver)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for driver in _drivers:
        _disable(driver)
    _drivers.clear()
    for forget in in_child:
        forget()


def _disable(driver: Driver) -> None:
    """Let every method of `driver` raise, whoever holds it."""
    message = f"driver {driver.name!r} was initialised in process {os.getppid()}, of which this one is a fork; {FIX}"

    def refuse(*_: Any, **__: Any) -> Any:
        raise ForkedProcessError(message)

    for name in dir(driver):
        if callable(getattr(driver, name)) and not name.startswith("_"):
            setattr(driver, name, refuse)
    setattr(driver, "unavailable_reason", lambda: message)  # noqa: B010
    # Arrays and modules of the parent that are collected here are still the parent's.
    for name in ("free", "unload_module"):
        setattr(driver, name, lambda *_: None)


os.register_at_fork(after_in_child=_after_fork_in_child)
