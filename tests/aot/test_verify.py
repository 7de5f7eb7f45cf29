"""Verification leaves the emulated driver as it was; records in the build cache are never trusted blindly."""

import pytest
import real_kernels
from gristmill.aot import verify
from gristmill.aot.emulator.driver import ARCHS
from gristmill.aot.verify import VerificationError, _cached, run_code
from gristmill.drivers import get_driver
from gristmill.verified import Record, dump_records

RECORD = Record("0" * 64, "emulated gfx1151", "emulation", 9, 0.5)


def test_cached_record_is_found(tmp_path):
    (tmp_path / "key.json").write_bytes(dump_records({"entry": RECORD}))
    assert _cached(tmp_path, "key", "entry") == RECORD
    assert _cached(tmp_path, "key", "another") is None
    assert _cached(tmp_path, "nokey", "entry") is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"entries": {"entry": {"cases": 1}}}'])
def test_damaged_record_means_that_the_entry_is_run_again(tmp_path, data):
    (tmp_path / "key.json").write_bytes(data)
    assert _cached(tmp_path, "key", "entry") is None


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
