"""Each call of each driver fails in turn, with every code: the error names it, nothing leaks, the next call works."""

import pytest
import stub_driver

DRIVERS = {
    "cuda": ("stub_cuda/stub_cuda.c", "libcuda.so.1", "9.0,8.0", ("sm90", "sm80"), "driver_faults.CUDA_CODES"),
    "hip": (
        "stub_hip/stub_hip.c",
        "libamdhip64.so",
        "gfx1151,gfx1201",
        ("gfx1151", "gfx1201"),
        "driver_faults.hip_codes()",
    ),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_call_fails_with_every_code(driver, tmp_path):
    source, library, devices, archs, codes = DRIVERS[driver]
    if driver == "hip":
        pytest.importorskip("hip")
    stub = stub_driver.build(stub_driver.TESTS / source, tmp_path / "stub" / library)
    for arch in archs:
        stub_driver.write_pack(tmp_path / "packs", arch)
    program = f"import driver_faults\ndriver_faults.run(driver_faults.{driver}(), (2, 719, 12345), {codes})"
    stub_driver.run(stub, tmp_path, program, STUB_DEVICES=devices)
