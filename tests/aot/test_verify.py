"""Verification: what is refused, what a record is of, and that the emulated driver is left as it was."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_driver
import pytest
import real_kernels
from gristmill.aot import verify
from gristmill.aot.amdgpu_code_object import CodeObject
from gristmill.aot.emulator.driver import ARCHS
from gristmill.aot.emulator.hazards import instructions_of
from gristmill.aot.errors import BuildError
from gristmill.aot.module_sources import source_digests
from gristmill.aot.pack import check_pack
from gristmill.aot.verify import VerificationError, _cached, run_code, verify_packs
from gristmill.drivers import get_driver
from gristmill.packs import Pack
from gristmill.verified import Record, dump_records

ENTRY = fake_driver.entry("entry", b"code")
RECORD = Record(ENTRY.object, "emulated gfx1151", "emulation", 9, 0.5)


def test_cached_record_is_found(tmp_path):
    path = tmp_path / "key.json"
    assert _cached(path, ENTRY) is None
    path.write_bytes(dump_records({"entry": RECORD}))
    assert _cached(path, ENTRY) == RECORD
    assert _cached(path, fake_driver.entry("another", b"code")) is None


def test_cached_record_of_another_object_means_that_the_entry_is_run_again(tmp_path):
    path = tmp_path / "key.json"
    path.write_bytes(dump_records({"entry": dataclasses.replace(RECORD, object="0" * 64)}))
    assert _cached(path, ENTRY) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"entries": {"entry": {"cases": 1}}}'])
def test_damaged_record_means_that_the_entry_is_run_again(tmp_path, data):
    path = tmp_path / "key.json"
    path.write_bytes(data)
    assert _cached(path, ENTRY) is None


def test_key_has_every_module_that_a_verification_runs(tmp_path):
    real_kernels.build_pack(tmp_path, "gfx1151", [real_kernels.smallest_row("gfx1151")])
    program = (
        "import json, pathlib, sys\n"
        "from gristmill.aot import verify\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "verify.run_entry(folder, next(iter(verify.Pack.open(folder).manifest.entries)))\n"
        "print(json.dumps([name for name in sys.modules if name.partition('.')[0] == 'gristmill']))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "gfx1151")]
    run = set(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    assert {"gristmill.arrays", "gristmill.loader", "gristmill.drivers"} <= run
    # The two hold no code of a run.
    assert run - source_digests("gristmill.aot.verify").keys() <= {"gristmill", "gristmill.aot"}


@pytest.mark.parametrize("package", verify.PACKAGES)
def test_key_follows_the_versions_of_packages(package, monkeypatch):
    before = verify._machinery_digest.__wrapped__()
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == package else version(name))
    assert verify._machinery_digest.__wrapped__() != before


def refuse(folder: Path, name: str):
    raise VerificationError(f"{name} is wrong")


def die(folder: Path, name: str):
    os._exit(9)


@pytest.fixture
def packs(tmp_path) -> list[Path]:
    """Packs of both archs with the record of an earlier verification; their objects do not run."""
    folders = []
    for arch in ARCHS:
        folder = fake_driver.usual_pack(tmp_path / "packs", arch)
        entries = Pack.open(folder).manifest.entries
        records = {name: dataclasses.replace(RECORD, object=entry.object) for name, entry in entries.items()}
        (folder / "verified.json").write_bytes(dump_records(records))
        folders.append(folder)
    return folders


def test_failed_verification_leaves_no_record_of_an_earlier_one(packs, tmp_path, monkeypatch):
    """The objects may be the same while what is asked of them is more."""
    monkeypatch.setattr(verify, "run_entry", refuse)
    with pytest.raises(VerificationError, match="is wrong"):
        verify_packs(packs, tmp_path / "cache", 1, print)
    assert [Pack.open(folder).verified() for folder in packs] == [{}, {}]


def test_process_that_dies_is_a_build_error(packs, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "run_entry", die)
    with pytest.raises(BuildError, match=f"{ARCHS[0]}: a process that verifies died; if memory has run out"):
        verify_packs(packs, tmp_path / "cache", 1, print)


def test_record_that_is_not_written_leaves_no_file_in_the_pack(tmp_path, monkeypatch):
    real_kernels.build_pack(tmp_path, "gfx1151", [real_kernels.smallest_row("gfx1151")])
    folder = tmp_path / "gfx1151"

    def stop(source, target):
        check_pack(folder)  # as after a kill, when nothing cleans up
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        verify._write(folder / "verified.json", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["gfx1151"]


UNKNOWN = {"call": "004880be", "no instruction": "ffffffff"}


@pytest.mark.parametrize("what", UNKNOWN)
def test_code_that_cannot_be_followed_is_refused_with_the_entrys_name(what):
    built = real_kernels.smallest("gfx1201")
    code = CodeObject.parse(built.code)
    first = next(iter(instructions_of(code, built.entry.symbol)))
    place = built.code.index(code.text) + first.address - code.text_address
    word = bytes.fromhex(UNKNOWN[what])
    with pytest.raises(VerificationError, match=rf"^{built.entry.name}: (Unimplemented|Undecodable)Instruction: "):
        run_code("gfx1201", built.entry, built.code[:place] + word + built.code[place + 4 :])


@pytest.mark.parametrize("code", [b"", b"x" * 200])
def test_bytes_that_do_not_load_are_refused_with_the_entrys_name(code):
    with pytest.raises(VerificationError, match=r"^entry: CodeObjectError: not an ELF file"):
        run_code("gfx1201", ENTRY, code)


@pytest.mark.parametrize("arch", ARCHS)
def test_later_launches_have_the_order_and_the_budget_of_before(arch, monkeypatch):
    """The driver is one for the process: a budget that stays behind makes a later, larger launch a runaway."""
    driver = get_driver("emulated")
    before = driver.schedule, driver.budget
    built = real_kernels.smallest(arch)
    run_code(arch, built.entry, built.code)
    assert (driver.schedule, driver.budget) == before
    monkeypatch.setattr(verify, "INSTRUCTION_BUDGET", 100)
    with pytest.raises(VerificationError, match="RunawayError"):
        run_code(arch, built.entry, built.code)
    assert (driver.schedule, driver.budget) == before
