"""Every call that the path from a pack to a result makes fails in turn, beside a stub of the driver's library.

Runs in a process of its own (`stub_driver.run`), through `gristmill.drivers.protocol.Driver` and the stub's own
functions alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import fake_driver
import gristmill
import gristmill.drivers
import numpy as np
from gristmill.arrays import DeviceArray
from gristmill.drivers import fork_guard
from gristmill.drivers.protocol import Driver
from gristmill.errors import (
    DriverError,
    ForkedProcessError,
    GristmillError,
    NoDeviceError,
    NoDriverError,
    NotLoadedError,
)
from gristmill.loader import forget_loaders

# Of two devices the second: so that another one is current, where the driver has such a thing without being asked.
ORDINAL = 1

HOST_WEIGHT = fake_driver.random_weight(72, 136, 64, zero_points=True, bias=True)
HOST_X = fake_driver.random_x(3, 136)


refused: list[str] = []  # errors of unloading


@dataclass(frozen=True)
class Library:
    """What a test knows of a driver's library."""

    driver: str  # the name of ours
    api: ctypes.CDLL
    fresh: Callable[[], Driver]
    says: Callable[[int], str]  # what an error must say of a code
    current: str  # the call that asks for what is current; asked again where it fails
    init: str
    reset: Callable[[], None]  # the thread as it was before any call
    # Codes that mean something else than a failure: (call, code) -> what comes of it, None for nothing.
    accepted: dict[tuple[str, int], type[GristmillError] | None]


def run(library: Library, few: Iterable[int], codes: Iterable[int]) -> None:
    """Fail each call of each place with `few` codes, and each call once with all of `codes`."""
    scenario(library)
    gc.collect()
    gc.freeze()  # what is there by now stays, and need not be looked through each time
    places = Counter(line.split()[0] for line in Path(os.environ["STUB_LOG"]).read_text().splitlines())
    os.environ["STUB_LOG"] = ""
    assert len(places) > 15, places
    for call, count in places.items():
        for place in range(1, count + 1):
            for code in few:
                fail(library, call, place, code)
                works(library)
        for code in codes:
            fail(library, call, 1, code)
        works(library)


def works(library: Library) -> None:
    """The scenario runs and leaves nothing."""
    before = live(library)
    scenario(library)
    assert live(library) == before


def scenario(library: Library) -> None:
    """All that a user's process makes of the driver, from its initialisation to unloading."""
    fork_guard._drivers.clear()  # which keeps those of earlier runs
    driver = gristmill.drivers._drivers[library.driver] = library.fresh()
    device = f"{library.driver}:{ORDINAL}"
    weight = gristmill.to_device(HOST_WEIGHT, device)
    x = DeviceArray.from_numpy(HOST_X, device)
    gristmill.linear(x, weight, stream=77)
    unload()
    out = gristmill.linear(x, weight.map(lambda array: array), stream=77)  # loads what it needs
    out.to_numpy()
    np.testing.assert_array_equal(x.to_numpy(), HOST_X)
    x.fill_bytes(0)
    assert driver.device_of(x.address) == ORDINAL
    measure(driver)
    driver.synchronize(ORDINAL, 5)
    driver.synchronize(ORDINAL)
    unload()


def unload() -> None:
    try:
        forget_loaders()
    except DriverError as error:
        refused.append(str(error))
        raise


def measure(driver: Driver) -> None:
    start = driver.record_event(ORDINAL, 0)
    try:
        stop = driver.record_event(ORDINAL, 0)
    except DriverError:
        driver.elapsed_us(ORDINAL, start, driver.record_event(ORDINAL, 0))  # the next call works
        raise
    driver.elapsed_us(ORDINAL, start, stop)


def fail(library: Library, call: str, place: int, code: int) -> None:
    """Run the scenario with one call failing: the error names it, and nothing is left."""
    where = f"{call}, call {place}, code {code}"
    before = live(library)
    refused.clear()
    unseen: list[str] = []  # what is raised where nobody can catch it
    sys.unraisablehook = lambda args: unseen.append(str(args.exc_value))
    os.environ["STUB_FAIL"] = f"{call}#{place}={code}"
    kind, message = outcome(library)
    gc.collect()
    os.environ["STUB_FAIL"] = ""
    forget_loaders()
    library.reset()
    if (call, code) in library.accepted:
        assert kind is library.accepted[call, code], (where, kind, message)
    elif kind is None and not unseen:
        assert call == library.current, f"{where}: no error"
    else:
        expected = NoDriverError if call == library.init else DriverError
        assert kind is expected or (kind is None and unseen), (where, kind, message)
        text = message or unseen[0]
        assert text.startswith(f"{call.removesuffix('R0600')} failed: "), (where, text)  # the form of ROCm 6
        assert library.says(code) in text, (where, text)
    # What the driver refused to take back is the one thing that nobody can give back.
    modules, events, memory = (now - then for now, then in zip(live(library), before, strict=True))
    assert events == 0, f"{where}: {events} events are left"
    assert modules <= len(refused) <= 1, f"{where}: {modules} modules are left, {refused}"
    assert memory <= len(unseen) <= 1, f"{where}: {memory} allocations are left, {unseen}"


def outcome(library: Library) -> tuple[type[GristmillError] | None, str]:
    try:
        scenario(library)
    except GristmillError as error:
        return type(error), str(error)
    return None, ""


def live(library: Library) -> tuple[int, int, int]:
    """Modules, events and allocations that the stub still has."""
    gc.collect()
    counts = [ctypes.c_int() for _ in range(3)]
    library.api.stub_live(*map(ctypes.byref, counts))
    modules, events, memory = (count.value for count in counts)
    return modules, events, memory


def cuda() -> Library:
    from gristmill.drivers.cuda import CudaDriver

    api = ctypes.CDLL("libcuda.so.1")

    def reset() -> None:
        api.cuCtxSetCurrent(None)
        mode = ctypes.c_int(0)
        api.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    return Library(
        driver="cuda",
        api=api,
        fresh=CudaDriver,
        says=lambda code: f"NAME_OF_{code} (stub text of code {code})" if code <= 999 else str(code),
        current="cuCtxGetCurrent",
        init="cuInit",
        reset=reset,
        accepted={
            ("cuInit", 3): ForkedProcessError,
            ("cuInit", 100): None,
            ("cuDeviceGetCount", 100): NoDeviceError,
            ("cuStreamIsCapturing", 906): NotLoadedError,
        },
    )


def hip() -> Library:
    from gristmill.drivers.hip import HipDriver
    from hip import hip as api

    known = {int(code): code.name for code in api.hipError_t}
    return Library(
        driver="hip",
        api=ctypes.CDLL("libamdhip64.so"),
        fresh=HipDriver,
        says=lambda code: f"{known[code]} (stub text of code {code})" if code in known else str(code),
        current="hipGetDevice",
        init="hipInit",
        reset=lambda: api.hipSetDevice(0),
        accepted={
            ("hipInit", 100): None,
            ("hipGetDeviceCount", 100): NoDeviceError,
            ("hipStreamIsCapturing", 906): NotLoadedError,
        },
    )


# CUresult of CUDA 13; a driver may be newer.
CUDA_CODES = (
    *range(1, 9), 34, 36, 46, *range(100, 103), *range(200, 228), *range(300, 305), *range(400, 403), 500, 600,
    *range(700, 724), *range(800, 813), *range(900, 919), 999, 1000, 12345,
)  # fmt: skip


def hip_codes() -> list[int]:
    from hip import hip as api

    return [*(int(code) for code in api.hipError_t if int(code)), 1234, 12345]
