"""The sm80 entries' PTX, compiled by the driver of a newer GPU: proof of their logic where no sm80 device is at hand.

Needs the folder of `build_scripts/dump_ptx.py` in GRISTMILL_TEST_PTX and the sm80 pack. With GRISTMILL_TEST_RECORD set
to a file, the records of verification are written there; they belong into `aot/records/sm80.json`.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from gristmill.arrays import Device
from gristmill.device import nominal_device
from gristmill.drivers import get_driver
from gristmill.loader import LoadedKernel, max_dynamic_shared_bytes
from gristmill.packs import find_pack
from gristmill.selftest import cases_for, record_of, run_case
from gristmill.verified import dump_records

pytestmark = pytest.mark.gpu

FOLDER = os.environ.get("GRISTMILL_TEST_PTX")


def test_every_sm80_entry_is_right_from_its_ptx(device):
    if FOLDER is None:
        pytest.skip("GRISTMILL_TEST_PTX names no folder of PTX; see build_scripts/dump_ptx.py")
    driver = get_driver("cuda")
    where = Device("cuda", 0)
    on = driver.device_facts(0).name
    facts = nominal_device("sm80")
    rng = np.random.default_rng()
    records, failed = {}, []
    for name, entry in find_pack("sm80").manifest.entries.items():
        ptx = (Path(FOLDER) / "sm80" / f"{name}.ptx").read_bytes() + b"\0"
        module = driver.load_module(0, ptx)
        function = driver.function(0, module, entry.symbol, max_dynamic_shared_bytes(entry, facts), False)
        results = [run_case(LoadedKernel(entry, function), where, facts, case, rng) for case in cases_for(entry, facts)]
        driver.unload_module(0, module)
        failed += [f"{name}: {result}" for result in results if not result.passed]
        if all(result.passed for result in results):
            records[name] = record_of(entry, results, on, "ptx on another arch")
    if os.environ.get("GRISTMILL_TEST_RECORD"):
        Path(os.environ["GRISTMILL_TEST_RECORD"]).write_bytes(dump_records(records))
    assert not failed, "\n".join(failed)
