"""The device that a command takes when none is named."""

from __future__ import annotations

from gristmill.arrays import Device
from gristmill.drivers import get_driver
from gristmill.errors import GristmillError, NoDeviceError

# Hardware only: nothing is emulated unless it is asked for.
HARDWARE = ("cuda", "hip")


def first_device() -> Device:
    """The first device of the first hardware driver that has one.

    Raises
    ------
    NoDeviceError : none has; the message says why for each driver
    """
    reasons = []
    for name in HARDWARE:
        try:
            driver = get_driver(name)
            reason = driver.unavailable_reason()
            if reason is None and driver.device_count():
                return Device(name, 0)
            reasons.append(f"{name}: {reason or 'no device'}")
        except GristmillError as error:
            reasons.append(f"{name}: {error}")
    raise NoDeviceError("no GPU found: " + "; ".join(reasons))
