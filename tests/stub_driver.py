"""Programs run beside a stub of a vendor's driver library, each in a process of its own: the loader finds the stub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import fake_driver
import pytest
from gristmill.formula import Formula
from gristmill.manifest import Needs, Rule

TESTS = Path(__file__).parent
SIZES = {"pointer": 8, "null": 8, "int32": 4, "int64": 8}
FLAGS = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]

PRELUDE = """
import os, sys
sys.path.append(os.environ["STUB_TESTS"])
import fake_driver, numpy as np
import gristmill
from gristmill.arrays import Device, DeviceArray
from gristmill.drivers import get_driver
from gristmill.errors import *
from gristmill.loader import forget_loaders, loader_for

def fails(error, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except error as found:
        assert type(found) is error, repr(found)
        return str(found)
    raise AssertionError("did not fail")
"""

Calls = list[tuple[str, dict[str, str]]]


def build(source: Path, library: Path) -> Path:
    """Compile a stub; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler for the stub")
    library.parent.mkdir(parents=True, exist_ok=True)
    paths = ["-I", str(TESTS / "stub_common"), "-o", str(library), str(source)]
    subprocess.run([compiler, *FLAGS, *paths, "-lpthread"], check=True)
    return library


def run(library: Path, folder: Path, program: str, **settings: str) -> Calls:
    """Run `program` with the stub `library` first in line and the packs of `folder`; returns the stub's calls."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROCM_", "HIP_", "CUDA_"))}
    environment |= {
        "LD_LIBRARY_PATH": str(library.parent),
        "GRISTMILL_PACK_PATH": str(folder / "packs"),
        "STUB_LOG": str(log),
        "STUB_TESTS": str(TESTS),
        **settings,
    }
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    calls = []
    for line in log.read_text().splitlines() if log.exists() else ():
        name, _, details = line.partition(" ")
        calls.append((name, dict(pair.split("=", 1) for pair in details.split())))
    return calls


def skip_where_installed(library: str) -> None:
    """Skip a test of what happens without a driver's library, on a machine that has it.

    A process of its own looks, as pytest's would keep the library loaded.
    """
    program = f"import ctypes; ctypes.CDLL({library!r})"
    environment = {**os.environ, "LD_LIBRARY_PATH": ""}
    if subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True).returncode == 0:
        pytest.skip(f"this machine has {library}")


# A program: another thread is first at the lock of `driver`, which is yet unused.
LATE_AT_THE_LOCK = """
class First:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        driver._lock = self.lock
        assert driver.device_count()

    def __exit__(self, *_):
        pass

from gristmill.drivers import fork_guard
driver._lock = First(driver._lock)
assert driver.device_count()
assert fork_guard._drivers == [driver]  # once
"""


def named(calls: Calls, name: str) -> list[dict[str, str]]:
    """The details of the calls of `name`."""
    return [details for found, details in calls if found == name]


def code_of(symbols: list[str]) -> bytes:
    """A code object for the stub: kernels with `fake_driver.ARGUMENTS`."""
    sizes = " ".join(str(SIZES[argument.type]) for argument in fake_driver.ARGUMENTS)
    return b"STUB\n" + b"".join(f"{symbol} {sizes}\n".encode() for symbol in symbols)


def write_pack(root: Path, arch: str) -> None:
    """A pack of one object: "small" for M <= 4, whose shared memory grows with M and K, and "floor"."""
    code = code_of(["symbol_small", "symbol_floor"])
    small = fake_driver.entry(
        "small", code, needs=Needs("float16", True, (Formula("M <= 4"),)), dynamic_shared_bytes=Formula("M * K * 2")
    )
    floor = fake_driver.entry("floor", code, needs=Needs("float16", True, ()))
    rules = tuple(Rule(Formula("1"), (name,), "test") for name in ("small", "floor"))
    fake_driver.write_pack(root, arch, [(small, code), (floor, code)], rules)
