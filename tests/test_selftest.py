"""The self-test itself: right kernels pass, and each planted fault is found."""

import json

import fake_driver
import numpy as np
import pytest
from gristmill import drivers, strict
from gristmill.arrays import Device
from gristmill.cli import main
from gristmill.device import nominal_device
from gristmill.formula import Formula
from gristmill.loader import forget_loaders, loader_for
from gristmill.manifest import Entry, Needs, Rule
from gristmill.packed_weight import NIBBLE_SHIFTS
from gristmill.select import unmet_needs
from gristmill.selftest import cases_for, problem_of, run_case
from gristmill.verified import read_records

DEVICE = Device("fake", 0)

# Each takes what the kernel was given, by name, and changes it or the weight that it means.
FAULTS = {
    "nibbles in plain order": lambda given: given | {"nibbles": True},
    "group index off by one": lambda given: given | {"group": 1},
    "zero points ignored": lambda given: given | {"zero_points": 0},
    "bias ignored": lambda given: given | {"bias": 0},
    "bias shifted by one": lambda given: given | {"bias": given["bias"] + 2 if given["bias"] else 0},
    "x without its row stride": lambda given: given | {"x_row_stride": given["K"]},
    "x from the next element": lambda given: given | {"x": given["x"] + 2},
    "scales without their row stride": lambda given: given | {"scales_row_stride": given["num_groups"]},
    "last row missing": lambda given: given | {"M": given["M"] - 1},
    "last column missing": lambda given: given | {"N": given["N"] - 1},
    "output one element on": lambda given: given | {"out": given["out"] + 2},
    "output without its row stride": lambda given: given | {"out_row_stride": given["N"]},
}


@pytest.fixture(params=["float16", "bfloat16"])
def kernel(request, fake_device):
    loader = loader_for(DEVICE)
    return loader.kernel(loader.pack.manifest.entries[f"floor_{request.param}_zp"])


def run_all(kernel):
    facts = loader_for(DEVICE).facts
    rng = np.random.default_rng()
    return [run_case(kernel, DEVICE, facts, case, rng) for case in cases_for(kernel.entry, facts)]


def test_right_kernel_passes_every_case(kernel):
    results = run_all(kernel)
    assert all(result.passed for result in results)
    assert 0 < max(result.error_over_bound for result in results) <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(kernel, fault, monkeypatch):
    compute = fake_driver.compute

    def faulty(values, dtype):
        names = [argument.name for argument in fake_driver.ARGUMENTS]
        given = FAULTS[fault](dict(zip(names, values, strict=False)))
        if given["M"] == 0 or given["N"] == 0:
            return
        with monkeypatch.context() as patch:
            if given.get("nibbles"):
                patch.setattr("gristmill.packed_weight.NIBBLE_SHIFTS", np.sort(NIBBLE_SHIFTS))
            if given.get("group"):
                real = fake_driver.dequantize
                patch.setattr(fake_driver, "dequantize", lambda weight: real(_groups_rolled(weight)))
            compute([given.get(name, 0) for name in names], dtype)

    monkeypatch.setattr(fake_driver, "compute", faulty)
    assert not all(result.passed for result in run_all(kernel))


def _groups_rolled(weight):
    return weight.replace(scales=np.roll(weight.scales, 1, axis=1))


def test_cases_meet_the_needs_and_reach_the_edges(fake_device):
    facts = loader_for(DEVICE).facts
    entry = loader_for(DEVICE).pack.manifest.entries["floor_float16_zp"]
    cases = cases_for(entry, facts)
    assert cases == cases_for(entry, facts)
    assert {case.group_size for case in cases} >= {8, 24, 32, 48, 64, 96, 128, 256}
    assert any(case.group_size == case.K for case in cases)
    assert {case.has_bias for case in cases} == {False, True}
    assert {case.alignment for case in cases} == {2, 16}
    assert {1, 7} <= {case.N for case in cases} | {case.N % 8 for case in cases}
    assert any(case.K % 8 for case in cases)
    assert any(case.K % case.group_size for case in cases)
    assert any(case.M > 16 and case.N > 64 and case.K > 128 for case in cases)


def test_narrow_entry_gets_cases_of_its_own_domain(fake_device):
    facts = loader_for(DEVICE).facts
    conditions = tuple(map(Formula, ("M == 5", "group_size % 128 == 0", "alignment % 16 == 0", "K % 8 == 0")))
    entry: Entry = fake_driver.entry("narrow", b"", needs=Needs("float16", False, conditions))
    cases = cases_for(entry, facts)
    assert cases
    assert not any(unmet_needs(entry, problem_of(entry, case), facts) for case in cases)
    assert {case.group_size for case in cases} >= {128, 256}


# The command.


@pytest.fixture
def small_device(monkeypatch, tmp_path):
    """An sm89 whose pack has one entry, of two, that needs more shared memory than it has."""
    driver = fake_driver.FakeDriver(archs=("sm89",))
    driver.facts = [nominal_device("sm89")]
    monkeypatch.setitem(drivers._drivers, "fake", driver)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path / "packs"))
    rows = [
        (fake_driver.entry("fits", b"float16"), b"float16"),
        (fake_driver.entry("too_large", b"large", dynamic_shared_bytes=Formula("122880")), b"large"),
    ]
    rule = Rule(Formula("1"), ("too_large", "fits"), "test")
    fake_driver.write_pack(tmp_path / "packs", "sm80", rows, (rule,))
    yield driver
    forget_loaders()


def test_entry_that_the_device_is_too_small_for_is_named_and_gets_no_record(small_device, tmp_path, capsys):
    reason = "needs 122880 bytes of shared memory, the device has 101376"
    record = tmp_path / "verified.json"
    assert main(["selftest", "--device", "fake:0", "--json", "--record", str(record)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["passed"], list(answer["entries"]), answer["not_usable"]) == (True, ["fits"], {"too_large": reason})
    assert read_records(record.read_bytes(), "record").keys() == {"fits"}
    assert {symbol for _, _, symbol, _ in small_device.called("function")} == {"symbol_fits"}
    assert main(["selftest", "--device", "fake:0"]) == 0
    text = capsys.readouterr().out
    assert f"not usable on this device: too_large: {reason}" in text
    assert "1 of 2 entries passed on fake:0 (RTX 4090 (nominal)); 1 are not usable on it" in text


def test_nothing_passes_where_nothing_can_run(small_device):
    assert main(["selftest", "--device", "fake:0", "--entry", "too_large"]) == 1


def test_names_of_no_entries_are_refused(small_device, capsys):
    assert main(["selftest", "--device", "fake:0", "--entry", "fits", "--entry", "fit", "--entry", "fats"]) == 1
    assert "ArgumentError: the device's pack has no entry fit, fats; gristmill list names" in capsys.readouterr().err
    assert small_device.called("launch") == []


@pytest.mark.parametrize(
    ("device", "error"),
    [("fake:sm99", "NoDeviceError"), ("abacus:sm90", "NoDriverError"), ("fake:7", "NoDeviceError")],
)
def test_no_such_device_is_a_typed_error(small_device, capsys, device, error):
    assert main(["selftest", "--device", device, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["class"] == error


def test_record_that_cannot_be_written_is_refused_before_anything_runs(small_device, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nowhere" / "records.json"):
        assert main(["selftest", "--device", "fake:0", "--record", str(path)]) == 1
        assert f"ArgumentError: --record {path} cannot be written" in capsys.readouterr().err
    assert small_device.called("launch") == []


def test_full_disk_is_a_typed_error(small_device, capsys):
    assert main(["selftest", "--device", "fake:0", "--record", "/dev/full"]) == 1
    assert "--record /dev/full cannot be written: No space left on device" in capsys.readouterr().err


def test_strict_mode_takes_the_records_from_standard_output(small_device, tmp_path, capsys):
    argv = ["selftest", "--device", "fake:0", "--json"]
    with strict.enforced():
        assert main([*argv, "--record", str(tmp_path / "records.json")]) == 1
        assert "redirect the output of --json instead" in json.loads(capsys.readouterr().out)["error"]["message"]
        assert main(argv) == 0
    assert read_records(capsys.readouterr().out.encode(), "output").keys() == {"fits"}


def test_infinite_errors_are_null_in_json(small_device, capsys):
    small_device.computes = False  # the output stays poison
    assert main(["selftest", "--device", "fake:0", "--json"]) == 1
    out = capsys.readouterr().out
    answer = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert {row["error_over_bound"] for row in answer["failed"]["fits"]} == {None}
