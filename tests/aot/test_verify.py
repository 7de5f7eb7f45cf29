"""Records of verification in the build cache, which is never trusted blindly."""

import pytest
from gristmill.aot.verify import _cached
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
