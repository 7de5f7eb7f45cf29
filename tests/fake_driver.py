"""A driver without hardware, and a pack for it.

Its device memory is host memory. A launch reads its arguments as `ARGUMENTS` lays them out, computes the product in
float64 with numpy and stores it rounded: so tests see whether addresses, strides and sizes arrived. Every call is
recorded in `calls`.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gristmill.arrays import numpy_dtype
from gristmill.device import DeviceFacts
from gristmill.errors import DriverError, NoDeviceError
from gristmill.formula import Formula
from gristmill.manifest import Argument, Entry, Manifest, Needs, Rule
from gristmill.packed_weight import PackedWeight, dequantize, pack

ARGUMENTS = tuple(
    Argument(name, type_)
    for name, type_ in (
        ("x", "pointer"), ("qweight", "pointer"), ("scales", "pointer"), ("zero_points", "pointer"),
        ("bias", "pointer"), ("out", "pointer"), ("M", "int32"), ("N", "int32"), ("K", "int32"),
        ("group_size", "int32"), ("num_groups", "int32"), ("x_row_stride", "int64"), ("qweight_row_stride", "int64"),
        ("scales_row_stride", "int32"), ("out_row_stride", "int64"), ("scratch", "null"),
    )
)  # fmt: skip


class FakeDriver:
    """See `gristmill.drivers.protocol.Driver`."""

    def __init__(self, name: str = "fake", archs: tuple[str, ...] = ("sm90",), load_seconds: float = 0.0) -> None:
        self.name = name
        self.facts = [DeviceFacts("cuda", arch, f"fake {arch}", 32, 132, 232448, 1024) for arch in archs]
        self.calls: list[tuple] = []
        self.capturing: set[int] = set()  # streams
        self.failing: dict[str, str] = {}  # method -> text of the DriverError
        self.load_seconds = load_seconds
        self.computes = True
        self._memory: dict[int, tuple[int, ctypes.Array]] = {}
        self._lock = threading.Lock()

    def record(self, method: str, *details) -> None:
        with self._lock:
            self.calls.append((method, *details))
        if method in self.failing:
            raise DriverError(self.failing[method])

    def called(self, method: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == method]

    def live_bytes(self) -> int:
        return sum(len(buffer) for _, buffer in self._memory.values())

    def unavailable_reason(self):
        return None

    def version(self):
        return "0.0"

    def device_count(self):
        return len(self.facts)

    def device_facts(self, ordinal):
        if ordinal >= len(self.facts):
            raise NoDeviceError(f"no device {self.name}:{ordinal}; there are {len(self.facts)}")
        return self.facts[ordinal]

    def device_of(self, address):
        for start, (ordinal, buffer) in self._memory.items():
            if start <= address < start + len(buffer):
                return ordinal
        raise DriverError(f"no memory at {address:#x}")

    def load_module(self, ordinal, code):
        time.sleep(self.load_seconds)
        self.record("load_module", ordinal, code)
        return f"module {hashlib.sha256(code).hexdigest()[:8]} on {ordinal}"

    def unload_module(self, ordinal, module):
        self.record("unload_module", ordinal, module)

    def function(self, ordinal, module, symbol, max_dynamic_shared_bytes, early_start):
        self.record("function", ordinal, module, symbol, max_dynamic_shared_bytes)
        return f"{symbol} of {module}"

    def launch(self, ordinal, function, grid, block, shared_bytes, arguments, stream):
        self.record("launch", ordinal, function, grid, block, shared_bytes, stream, list(arguments.values[:16]))
        if self.computes:
            compute(list(arguments.values), "bfloat16" if "bfloat16" in function else "float16")

    def launch_pointers(self, ordinal):
        return None

    def is_capturing(self, ordinal, stream):
        return stream in self.capturing

    def allocate(self, ordinal, size):
        self.record("allocate", ordinal, size)
        buffer = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self._memory[address] = (ordinal, buffer)
        return address

    def free(self, ordinal, address):
        self.record("free", ordinal, address)
        del self._memory[address]

    def copy_to_device(self, ordinal, destination, source, size):
        self.record("copy_to_device", ordinal, size)
        ctypes.memmove(destination, source, size)

    def copy_to_host(self, ordinal, destination, source, size):
        self.record("copy_to_host", ordinal, size)
        ctypes.memmove(destination, source, size)

    def fill(self, ordinal, address, value, size):
        ctypes.memset(address, value, size)

    def synchronize(self, ordinal, stream=None):
        self.record("synchronize", ordinal, stream)

    def record_event(self, ordinal, stream):
        return time.perf_counter()

    def elapsed_us(self, ordinal, start, stop):
        return 1e6 * (stop - start)


def at(address: int, rows: int, columns: int, row_stride: int, dtype: str) -> np.ndarray:
    """The array at a host address."""
    dtype = numpy_dtype(dtype)
    extent = max(1, ((rows - 1) * row_stride + columns) * dtype.itemsize)
    flat = np.frombuffer((ctypes.c_char * extent).from_address(address), dtype=dtype)
    return np.lib.stride_tricks.as_strided(
        flat, (rows, columns), (row_stride * dtype.itemsize, dtype.itemsize), writeable=True
    )


def compute(values: list[int], dtype: str) -> None:
    """What a kernel with `ARGUMENTS` does."""
    given = {argument.name: value for argument, value in zip(ARGUMENTS, values, strict=False)}
    M, N, K, num_groups = (given[name] for name in ("M", "N", "K", "num_groups"))

    def groups(name: str) -> np.ndarray | None:
        address = given[name]
        return at(address, N, num_groups, given["scales_row_stride"], dtype).copy() if address else None

    weight = PackedWeight(
        K=K,
        N=N,
        group_size=given["group_size"],
        dtype=dtype,
        qweight=at(given["qweight"], N, -(-K // 8), given["qweight_row_stride"], "int32"),
        scales=groups("scales"),
        zero_points=groups("zero_points"),
    )
    out = at(given["x"], M, K, given["x_row_stride"], dtype).astype(np.float64) @ dequantize(weight).T
    if given["bias"]:
        out = out + at(given["bias"], 1, N, N, dtype).astype(np.float64)
    at(given["out"], M, N, given["out_row_stride"], dtype)[...] = out


def entry(name: str, code: bytes, dtype: str = "float16", **changes) -> Entry:
    """An entry whose object is `code`."""
    fields = {
        "name": name,
        "op": "w4a16_gemm",
        "symbol": f"symbol_{name}",
        "object": hashlib.sha256(code).hexdigest(),
        "source": "tests/fake_driver.py",
        "arguments": ARGUMENTS,
        "grid": (Formula("ceil_div(M, 16)"), Formula("ceil_div(N, 64)"), Formula("1")),
        "block": (128, 1, 1),
        "static_shared_bytes": 0,
        "dynamic_shared_bytes": Formula("4096"),
        "needs": Needs(dtype, False, ()),
        "roundings": 1,
        "weights_in_dtype": False,
        "early_start": False,
        "resources": {},
    }
    return Entry(**{**fields, **changes})


def write_pack(root: Path, arch: str, rows: list[tuple[Entry, bytes]], policy: tuple[Rule, ...]) -> Path:
    """Write a pack of `rows` (entry, object) into `root`/`arch`; returns the folder."""
    folder = root / arch
    (folder / "objects").mkdir(parents=True)
    kind = "cubin" if arch.startswith("sm") else "hsaco"
    for row, code in rows:
        (folder / "objects" / f"{row.object}.{kind}").write_bytes(code)
    manifest = Manifest.of(
        [row for row, _ in rows],
        policy,
        arch=arch,
        kind=kind,
        version="0.1.0",
        compilers={},
        source_digest="0" * 64,
    )
    (folder / "manifest.json").write_bytes(manifest.dump())
    return folder


def usual_pack(root: Path, arch: str = "sm90", code_of: Callable[[list[str]], bytes] | None = None) -> Path:
    """A pack that covers every problem: per dtype and zero points a small-M, an aligned and a floor entry.

    `code_of` makes the object of the symbols; by default it is no code.
    """
    rows, policy = [], {"small": [], "tiled": [], "floor": []}
    for dtype in ("float16", "bfloat16"):
        for zero_points in (False, True):
            suffix = f"{dtype}{'_zp' if zero_points else ''}"
            code = f"object {dtype} {zero_points}".encode()
            if code_of is not None:
                code = code_of([f"symbol_{kind}_{suffix}" for kind in policy])
            conditions = {
                "small": (Formula("M <= 4"), Formula("alignment == 16")),
                "tiled": (Formula("alignment == 16"), Formula("K >= 64")),
                "floor": (),
            }
            for kind, formulas in conditions.items():
                name = f"{kind}_{suffix}"
                needs = Needs(dtype, zero_points, formulas)
                shared = Formula("M * 16 * 2") if kind == "small" else Formula("49664")
                rows.append((entry(name, code, needs=needs, dynamic_shared_bytes=shared), code))
                policy[kind].append(name)
    rules = (
        Rule(Formula("M <= 4"), tuple(policy["small"]), "test, small M"),
        Rule(Formula("1"), tuple(policy["tiled"]), "test, tiles"),
        Rule(Formula("1"), tuple(policy["floor"]), "test, floor"),
    )
    return write_pack(root, arch, rows, rules)


def random_weight(
    N: int, K: int, group_size: int, dtype: str = "float16", *, zero_points=False, bias=False, perm=False, seed=0
) -> PackedWeight:
    """A host weight with reproducible values."""
    rng = np.random.default_rng(seed)
    num_groups = 1 if group_size == -1 else -(-K // group_size)
    return pack(
        rng.integers(0, 16, (N, K)),
        rng.uniform(0.5, 1.5, (N, num_groups)) / 16,
        rng.uniform(0, 15, (N, num_groups)) if zero_points else None,
        rng.normal(size=N) if bias else None,
        group_size=group_size,
        dtype=dtype,
        perm=rng.permutation(K) if perm else None,
    )


def random_x(M: int, K: int, dtype: str = "float16", seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(M, K)).astype(numpy_dtype(dtype))
