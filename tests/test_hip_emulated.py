"""The HIP path end to end with numbers: hip-python, a stub libamdhip64.so, and the emulator behind it."""

import functools
import textwrap

import pytest
import real_kernels
import stub_driver
from gristmill.aot.emulator.driver import ARCHS
from stub_driver import named

DTYPES = ("float16", "bfloat16")

# M, N, K, group_size, with zero points, with bias: decode and prefill, tails in each, and one for the floor.
CASES = (
    (1, 64, 256, 128, True, True),
    (3, 40, 136, 64, False, False),
    (9, 40, 136, -1, True, False),
    (70, 136, 72, 32, False, True),
    (130, 72, 264, 96, True, True),
    (5, 37, 50, 8, True, True),
)

PRELUDE = """
import logging
import hip_emulation
from gristmill.packed_weight import dequantize
from gristmill.prepared import prepare
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound

logging.getLogger("gristmill").setLevel(logging.ERROR)  # it warns that the floor runs, which is meant here
hip = get_driver("hip")
emulation = hip_emulation.attach()

def check(device, dtype, M, N, K, group_size, zero_points, bias, stream=0):
    host = fake_driver.random_weight(N, K, group_size, dtype, zero_points=zero_points, bias=bias)
    weight = gristmill.to_device(host, device)
    x = fake_driver.random_x(M, K, dtype)
    x_device = DeviceArray.from_numpy(x, device)
    out = gristmill.linear(x_device, weight, stream=stream)
    chosen = prepare(weight).choose(M, 0 if N % 8 == 0 and K % 8 == 0 else 2, stream).kernel.entry
    w = dequantize(host)
    bound = error_bound(x, w, host.bias, dtype=dtype, roundings=chosen.roundings,
                        weights_in_dtype=chosen.weights_in_dtype)
    worst = worst_error_over_bound(out.to_numpy(), linear_float64(x, w, host.bias), bound)
    assert 0 < worst <= 1, (device, dtype, M, N, K, worst, emulation.faults)
    return chosen
"""


@functools.cache
def rows(arch):
    """Both dtypes with and without zero points, and a floor for what is not aligned."""
    aligned = [real_kernels.smallest_row(arch, dtype, zero) for dtype in DTYPES for zero in (False, True)]
    return aligned + [real_kernels.smallest_row(arch, dtype, True, aligned=False) for dtype in DTYPES]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A folder whose `packs` has real kernels for both archs."""
    folder = tmp_path_factory.mktemp("emulated")
    for arch in ARCHS:
        real_kernels.build_pack(folder / "packs", arch, rows(arch))
    return folder


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory):
    return stub_driver.build(
        stub_driver.TESTS / "stub_hip/stub_hip.c", tmp_path_factory.mktemp("stub") / "libamdhip64.so"
    )


@pytest.fixture
def run(stub_library, packs):
    """Runs a program beside the stub that runs its launches; returns the calls that the stub saw."""
    pytest.importorskip("hip")
    return lambda program, devices, **settings: stub_driver.run(
        stub_library, packs, PRELUDE + textwrap.dedent(program), STUB_DEVICES=devices, **settings
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_numbers(run, arch):
    calls = run(
        f"""
        for dtype in {DTYPES}:
            for case in {CASES}:
                check("hip:0", dtype, *case, stream=77)
        assert hip.device_facts(0).arch == "{arch}"
        assert [(r.device, r.stream) for r in emulation.runs] == [(0, 77)] * {len(DTYPES) * len(CASES)}
        assert all(r.shared_bytes > 0 and r.report.lds_bytes_read > 0 for r in emulation.runs)
        assert all(r.report.instructions["wmma"] > 0 for r in emulation.runs)
        assert {{r.report.arch for r in emulation.runs}} == {{"{arch}"}}
        assert not emulation.faults
        """,
        arch,
    )
    launches = named(calls, "hipModuleLaunchKernel")
    assert len(launches) == len(DTYPES) * len(CASES)
    assert {launch["extra"] for launch in launches} == {"0"}


def test_two_archs_in_one_process(run):
    calls = run(
        """
        for device in ("hip:0", "hip:1", "hip:gfx1151", "hip:gfx1201"):
            check(device, "float16", 9, 40, 136, 64, True, True)
        assert [(r.device, r.report.arch) for r in emulation.runs] == [(0, "gfx1201"), (1, "gfx1151")] + [
            (1, "gfx1151"), (0, "gfx1201")]
        """,
        "gfx1201,gfx1151",
    )
    assert {details["device"] for details in named(calls, "hipModuleLoadData")} == {"0", "1"}


def test_self_test_through_the_driver(run):
    """The cases of `gristmill selftest`: strides, guards and misaligned addresses reach the kernel."""
    run(
        """
        from gristmill.selftest import cases_for, run_case
        device = Device("hip", 0)
        loader = loader_for(device)
        for name in (list(loader.pack.manifest.entries)[1], list(loader.pack.manifest.entries)[-1]):
            entry = loader.pack.manifest.entries[name]
            for case in cases_for(entry, loader.facts)[:5]:
                result = run_case(loader.kernel(entry), device, loader.facts, case, np.random.default_rng(7))
                assert result.passed, (name, result, emulation.faults)
        """,
        "gfx1151",
    )


REFUSED = """
weight = gristmill.to_device(fake_driver.random_weight(40, 136, 64, zero_points=True), "hip:0")
x = DeviceArray.from_numpy(fake_driver.random_x(3, 136), "hip:0")
out = DeviceArray.empty("hip:0", (3, 40), "float16")
out.fill_bytes(0xFF)
"""


@pytest.mark.parametrize("code", [1, 98, 701, 719])
def test_launch_that_is_refused_runs_nothing(run, code):
    run(
        REFUSED
        + f"""
from hip import hip as api
os.environ["STUB_FAIL"] = "hipModuleLaunchKernel={code}"
message = fails(DriverError, gristmill.linear, x, weight, out=out)
name = api.hipError_t({code}).name
assert message.startswith(f"hipModuleLaunchKernel failed: {{name}} (stub text"), message
os.environ["STUB_FAIL"] = ""
assert not emulation.runs and not emulation.faults
assert (out.to_numpy().view(np.uint16) == 0xFFFF).all()
gristmill.linear(x, weight, out=out)
assert len(emulation.runs) == 1 and np.isfinite(out.to_numpy()).all()
""",
        "gfx1151",
    )


def test_kernel_that_reads_freed_memory_fails(run):
    """What the emulator forbids comes out of the driver as the code of a launch that failed."""
    run(
        REFUSED
        + """
from hip import hip as api
api.hipFree(weight.scales.address)
message = fails(DriverError, gristmill.linear, x, weight, out=out)
assert message.startswith("hipModuleLaunchKernel failed: hipErrorLaunchFailure"), message
(fault,) = emulation.faults
assert type(fault).__name__ == "MemoryAccessError" and "global_load" in str(fault), fault
os._exit(0)  # freeing it again would fail
""",
        "gfx1201",
    )


def test_object_of_another_arch_is_not_run(run):
    run(
        REFUSED
        + """
os.environ["STUB_DEVICES"] = "gfx1201"
message = fails(DriverError, gristmill.linear, x, weight, out=out)
assert "hipErrorNoBinaryForGpu" in message and not emulation.runs, message
""",
        "gfx1151",
    )


def test_symbol_that_the_object_lacks(run):
    run(
        """
        loader = loader_for(Device("hip", 0))
        entry = next(iter(loader.pack.manifest.entries.values()))
        module = hip.load_module(0, loader.pack.read_object(entry))
        message = fails(DriverError, hip.function, 0, module, "w4a16_gem", 0, False)
        assert message.startswith("hipModuleGetFunction failed: hipErrorNotFound"), message
        assert hip.function(0, module, entry.symbol, 0, False).symbol == entry.symbol
        hip.unload_module(0, module)
        """,
        "gfx1201",
    )
