"""Verification: no entry goes into a wheel that has not been run.

Entries for AMD run here, instruction by instruction, in the emulator; the record is kept in the cache under the digests
of the code object, of its manifest entry and of the emulator, so that an unchanged object is not run again. The
emulator knows no fault of the hardware and no load that comes late: instructions that fall under a known fault, and
those that may run before a load has brought what they need, are refused before the run. Entries for NVIDIA ran on a
GPU, with `gristmill selftest --record`; those records are part of the source, in `aot/records`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from gristmill.aot.amdgpu_code_object import CodeObject
from gristmill.aot.emulator import driver as emulated
from gristmill.aot.emulator.hazards import vopd_interlock_hazards
from gristmill.aot.emulator.waits import missing_waits
from gristmill.aot.errors import BuildError
from gristmill.aot.module_sources import source_digests
from gristmill.arrays import Device
from gristmill.drivers import get_driver
from gristmill.errors import ManifestError
from gristmill.loader import LoadedKernel
from gristmill.manifest import Entry
from gristmill.packs import RECORDS_FILE, Pack
from gristmill.selftest import CaseResult, cases_for, record_of, run_case
from gristmill.verified import Record, dump_records, read_records, records_of

RECORDS = Path(__file__).parent / "records"

# Orders in which the waves of a block run between barriers: a missing barrier gives another result in one of them.
SERIAL_SCHEDULES = ("forward", "reverse")

# Packages whose code a verification runs, beside ours.
PACKAGES = ("numpy", "ml_dtypes", "tinygrad", "pyelftools", "msgpack")

# Wave-instructions that one case may take: dozens of times what the dearest needs, and no endless loop.
INSTRUCTION_BUDGET = 5_000_000


class VerificationError(BuildError):
    """An entry gave a wrong result, did what the emulator forbids, or holds what the emulator does not know."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What verifying one pack came to."""

    arch: str
    records: dict[str, Record]
    unverified: tuple[str, ...]  # entries without a record: their objects were never run


def verify_packs(
    folders: Sequence[Path], cache: Path, jobs: int, progress: Callable[[str], None]
) -> list[VerificationReport]:
    """Write `verified.json` into the packs in `folders`.

    Parameters
    ----------
    cache : folder of the build cache
    jobs : processes that emulate side by side
    progress : gets a line for each entry run

    Raises
    ------
    VerificationError : an entry that was run is wrong; the message names entry and case
    BuildError : a process that emulates died
    """
    for folder in folders:  # what an earlier verification found may not hold for this one; the first failure ends it
        (folder / RECORDS_FILE).unlink(missing_ok=True)
    return [_verify(Pack.open(folder), cache / "verified", jobs, progress) for folder in folders]


def _verify(pack: Pack, cache: Path, jobs: int, progress: Callable[[str], None]) -> VerificationReport:
    arch = pack.manifest.arch
    records = _emulate(pack, cache, jobs, progress) if arch in emulated.ARCHS else _recorded(pack)
    _write(Path(pack.folder, RECORDS_FILE), dump_records(records))
    unverified = tuple(name for name in pack.manifest.entries if name not in records)
    return VerificationReport(arch, records, unverified)


def run_entry(folder: str | Path, name: str) -> Record:
    """Run one entry of a pack in the emulator, on all its cases; VerificationError when one is wrong."""
    pack = Pack.open(folder)
    entry = pack.manifest.entries[name]
    return run_code(pack.manifest.arch, entry, pack.read_object(entry))


def run_code(arch: str, entry: Entry, code: bytes) -> Record:
    """Run `code` in the emulator as the object of `entry`, on all the entry's cases.

    Raises
    ------
    VerificationError : a case is wrong, or did what the emulator forbids; or the code has a pair of instructions that
        the hardware may get wrong, does not wait for a load, holds an instruction that the emulator does not know, or
        does not load
    """
    driver = get_driver("emulated")
    assert isinstance(driver, emulated.EmulatedDriver)
    device = Device("emulated", emulated.ARCHS.index(arch))
    facts = driver.device_facts(device.ordinal)
    with _blamed_on(entry.name):
        module = driver.load_module(device.ordinal, code)
        _refuse_hazards(entry, code)
        function = driver.function(device.ordinal, module, entry.symbol, 0, entry.early_start)
    kernel = LoadedKernel(entry, function)
    cases = cases_for(entry, facts)
    # The waves of a block run one after the other on the smallest case that has a second step along K.
    smallest = min(cases, key=lambda case: (case.K < 128, case.M * case.N * case.K))
    runs = [(case, emulated.DEFAULT_SCHEDULE) for case in cases] + [(smallest, order) for order in SERIAL_SCHEDULES]
    results = []
    for case, schedule in runs:
        # The inputs are fresh for each object and case, and the same when a failure is looked into.
        seed = int.from_bytes(hashlib.sha256(f"{entry.object} {case}".encode()).digest()[:8], "little")
        with driver.launching(schedule, INSTRUCTION_BUDGET):
            results.append(_run(kernel, device, facts, case, np.random.default_rng(seed)))
    return record_of(entry, results, facts.name, "emulation")


@contextmanager
def _blamed_on(what: str) -> Iterator[None]:
    """Turn whatever is raised into a VerificationError that begins with `what`: a build must not end without it."""
    try:
        yield
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(f"{what}: {type(error).__name__}: {error}") from error


def _refuse_hazards(entry: Entry, code: bytes) -> None:
    code_object = CodeObject.parse(code)
    for symbol, instructions in vopd_interlock_hazards(code_object).items():
        first = instructions[0]
        raise VerificationError(
            f"{entry.name}: the hardware may get {len(instructions)} dual instructions of {symbol} wrong, the first at "
            f"{first.address:#x}: {first}"
        )
    for symbol, missing in missing_waits(code_object).items():
        raise VerificationError(f"{entry.name}: {symbol} lacks {len(missing)} waits, the first at {missing[0]}")


def _run(kernel: LoadedKernel, device: Device, facts, case, rng: np.random.Generator) -> CaseResult:
    what = f"{kernel.entry.name} on {facts.name}, {case}"
    with _blamed_on(what):
        result = run_case(kernel, device, facts, case, rng)
    if not result.passed:
        guard = "" if result.guard_intact else "; it wrote outside its output"
        raise VerificationError(f"{what}: error {result.error_over_bound:.3g} times the bound{guard}")
    return result


def _emulate(pack: Pack, cache: Path, jobs: int, progress: Callable[[str], None]) -> dict[str, Record]:
    entries = pack.manifest.entries
    paths = {name: cache / f"{_key(entry)}.json" for name, entry in entries.items()}
    records = {name: record for name, path in paths.items() if (record := _cached(path, entries[name])) is not None}
    missing = [name for name in paths if name not in records]
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        try:
            running = {pool.submit(run_entry, pack.folder, name): name for name in missing}
            for done, future in enumerate(as_completed(running), 1):
                name = running[future]
                record = records[name] = future.result()
                _write(paths[name], dump_records({name: record}))
                progress(
                    f"[{done}/{len(missing)}] {record.on}: {name}: {record.cases} cases, "
                    f"worst error over bound {record.worst_error_over_bound:.3f}"
                )
        except BrokenProcessPool:
            raise BuildError(
                f"{pack.manifest.arch}: a process that verifies died; if memory has run out, give fewer --jobs"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: records[name] for name in paths}


def _recorded(pack: Pack) -> dict[str, Record]:
    path = RECORDS / f"{pack.manifest.arch}.json"
    if not path.exists():
        return {}
    return records_of(pack.manifest.entries, read_records(path.read_bytes(), str(path)))


def _cached(path: Path, entry: Entry) -> Record | None:
    try:
        return records_of({entry.name: entry}, read_records(path.read_bytes(), str(path))).get(entry.name)
    except (OSError, ManifestError):  # not there, or damaged: the entry is run again
        return None


def _key(entry: Entry) -> str:
    """Digest of all that a verification depends on."""
    digest = hashlib.sha256(f"{entry!r}".encode())
    digest.update(_machinery_digest().encode())
    return digest.hexdigest()


@lru_cache
def _machinery_digest() -> str:
    """Digest of this module and of all that it imports: the emulator, the cases, the launch, the reference."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    return hashlib.sha256(f"{source_digests(__name__)} {versions}".encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not beside the file: what a killed process leaves must not lie in a pack.
    handle, temporary = tempfile.mkstemp(dir=path.parent.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
