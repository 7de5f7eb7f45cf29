"""The self-test itself: right kernels pass, and each planted fault is found."""

import fake_driver
import numpy as np
import pytest
from gristmill.arrays import Device
from gristmill.formula import Formula
from gristmill.loader import loader_for
from gristmill.manifest import Entry, Needs
from gristmill.packed_weight import NIBBLE_SHIFTS
from gristmill.select import unmet_needs
from gristmill.selftest import cases_for, problem_of, run_case

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
