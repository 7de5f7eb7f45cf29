"""The HIP path against a stub libamdhip64.so."""

import shutil
import textwrap

import fake_driver
import pytest
import stub_driver
from gristmill.formula import Formula
from gristmill.manifest import Rule
from stub_driver import named


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory):
    return stub_driver.build(
        stub_driver.TESTS / "stub_hip/stub_hip.c", tmp_path_factory.mktemp("stub") / "libamdhip64.so"
    )


@pytest.fixture
def run(stub_library, tmp_path):
    """Runs a program beside the stub with a pack for gfx1151 and gfx1201; returns the calls that the stub saw."""
    pytest.importorskip("hip")
    for arch in ("gfx1151", "gfx1201"):
        stub_driver.write_pack(tmp_path / "packs", arch)
    hip = 'hip = get_driver("hip")\n'
    return lambda program, **settings: stub_driver.run(
        stub_library, tmp_path, hip + textwrap.dedent(program), **settings
    )


PLACE = """
host = fake_driver.random_weight(72, 136, 64, zero_points=True, bias=True)
weight = gristmill.to_device(host, "hip:0")
x = DeviceArray.from_numpy(fake_driver.random_x(3, 136), "hip:0")
"""


def test_facts(run):
    run(
        """
        assert hip.unavailable_reason() is None
        assert hip.device_count() == 2
        assert hip.version() == "7.2.53211"
        facts = hip.device_facts(1)
        assert (facts.backend, facts.arch, facts.name) == ("hip", "gfx90a", "stub device 1")
        assert (facts.warp_size, facts.multiprocessor_count) == (32, 20)
        assert (facts.lds_bytes_per_block, facts.max_threads_per_block) == (65536, 1024)
        assert Device.parse("hip:gfx90a") == ("hip", 1)
        assert "no device hip:2; the HIP runtime sees 2" in fails(NoDeviceError, hip.device_facts, 2)
        """,
        STUB_DEVICES="gfx1151,gfx90a:sramecc+:xnack-",
    )


def test_fork_after_the_driver_was_used(run):
    calls = run(
        PLACE
        + """
child = os.fork()
if not child:
    ok = all("start workers with" in fails(ForkedProcessError, gristmill.linear, x, weight) for _ in range(2))
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
gristmill.linear(x, weight)
""",
        PYTHONWARNINGS="ignore::DeprecationWarning",
    )
    assert len(named(calls, "hipModuleLaunchKernel")) == 1


def test_call_from_pack_to_launch(run):
    calls = run(
        PLACE
        + """
out = gristmill.linear(x, weight, stream=77)
"""
    )
    order = [
        name for name, _ in calls if name in ("hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel")
    ]
    assert order == ["hipModuleLoadData", "hipModuleGetFunction", "hipModuleGetFunction", "hipModuleLaunchKernel"]
    assert [details["symbol"] for details in named(calls, "hipModuleGetFunction")] == ["symbol_small", "symbol_floor"]
    (launch,) = named(calls, "hipModuleLaunchKernel")
    values = [int(value) for value in launch.pop("arguments").split(",")]
    assert launch == {
        "symbol": "symbol_small", "device": "0", "grid": "1,2,1", "block": "128,1,1", "shared": str(3 * 136 * 2),
        "stream": "77", "extra": "0",
    }  # fmt: skip
    assert values[6:] == [3, 72, 136, 64, 3, 136, 20, 3, 72, 0]
    assert len(set(values[:6])) == 6
    assert all(value % 256 == 0 for value in values[:6])


def test_addresses_in_the_arguments(run, tmp_path):
    calls = run(
        PLACE
        + """
out = gristmill.linear(x, weight)
arrays = [x, weight.qweight, weight.scales, weight.zero_points, weight.bias, out]
open(os.environ["ADDRESSES"], "w").write(",".join(str(array.address) for array in arrays))
""",
        ADDRESSES=str(tmp_path / "addresses"),
    )
    (launch,) = named(calls, "hipModuleLaunchKernel")
    assert launch["arguments"].startswith((tmp_path / "addresses").read_text() + ",3,72,")
    assert launch["stream"] == "0"


def test_memory(run):
    calls = run(
        """
        import gc
        array = np.arange(35, dtype=np.int32).reshape(5, 7)
        placed = DeviceArray.from_numpy(array, "hip:1", row_stride=12)
        np.testing.assert_array_equal(placed.to_numpy(), array)
        assert hip.device_of(placed.address + 8) == 1
        placed.fill_bytes(0xFF)
        assert (placed.to_numpy() == -1).all()
        start, stop = hip.record_event(1, 0), None
        stop = hip.record_event(1, 0)
        assert 0 <= hip.elapsed_us(1, start, stop) < 1e6
        hip.synchronize(1)
        hip.synchronize(1, 5)
        del placed
        gc.collect()
        """,
        STUB_DEVICES="gfx1151,gfx1201",
    )
    assert [details["device"] for details in named(calls, "hipMalloc")] == ["1"]
    assert len(named(calls, "hipFree")) == 1
    assert len(named(calls, "hipEventDestroy")) == 2
    assert named(calls, "hipStreamSynchronize")[-1] == {"stream": "5"}


def test_current_device_is_put_back(run):
    calls = run(
        """
        from hip import hip as api
        host = fake_driver.random_weight(8, 32, 32, zero_points=True)
        weights = [gristmill.to_device(host, f"hip:{i}") for i in (0, 1)]
        for current in (0, 1):
            api.hipSetDevice(current)
            for i in (0, 1):
                gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(2, 32), f"hip:{i}"), weights[i])
                assert api.hipGetDevice()[1] == current
        assert [loader_for(Device("hip", i)).pack.manifest.arch for i in (0, 1)] == ["gfx1151", "gfx1201"]
        """,
        STUB_DEVICES="gfx1151,gfx1201",
    )
    assert [details["device"] for details in named(calls, "hipModuleLaunchKernel")] == ["0", "1", "0", "1"]
    assert [details["device"] for details in named(calls, "hipModuleLoadData")] == ["0", "1"]


def test_capture(run):
    calls = run(
        """
        host = fake_driver.random_weight(8, 32, 32, zero_points=True)
        weight = host.map(lambda array: DeviceArray.from_numpy(array, "hip:0"))
        x = DeviceArray.from_numpy(fake_driver.random_x(2, 32), "hip:0")
        out = DeviceArray.empty("hip:0", (2, 8), "float16")
        os.environ["STUB_CAPTURING"] = "9"
        message = fails(NotLoadedError, gristmill.linear, x, weight, out=out, stream=9)
        assert "kernel small is not loaded on hip:0" in message and "gristmill.preload" in message, message
        gristmill.linear(x, weight, out=out, stream=8)
        gristmill.linear(x, weight, out=out, stream=9)
        """
    )
    assert [details["stream"] for details in named(calls, "hipModuleLaunchKernel")] == ["8", "9"]
    names = [name for name, _ in calls]
    first_query = names.index("hipStreamIsCapturing")
    assert "hipModuleLoadData" not in names[:first_query]


def test_library_is_loaded_once_whichever_thread_is_first(run):
    run('driver = get_driver("hip")' + stub_driver.LATE_AT_THE_LOCK)


def test_every_call_of_the_path_can_fail(run):
    """Each failure names the call, the code's name and the runtime's words; the next try works and nothing is lost."""
    calls = run(
        PLACE
        + """
from hip import hip as api
for call in ("hipModuleLoadData", "hipModuleGetFunction", "hipStreamIsCapturing", "hipModuleLaunchKernel"):
    for code in (1, 2, 209, 500, 700, 719, 999):
        forget_loaders()
        fresh = weight.map(lambda array: array)
        os.environ["STUB_FAIL"] = f"{call}={code}"
        message = fails(DriverError, gristmill.linear, x, fresh)
        assert message.startswith(f"{call} failed: {api.hipError_t(code).name} (stub text of code {code})"), message
        assert "hip:0 (gfx1151)" in message, message
        has_symbol = call in ("hipModuleGetFunction", "hipModuleLaunchKernel")
        assert ("symbol symbol_small" in message) == has_symbol, message
        assert int(api.hipGetLastError()[0]) == 0
        os.environ["STUB_FAIL"] = ""
        gristmill.linear(x, weight.map(lambda array: array))
for call, function, arguments in (
    ("hipMalloc", DeviceArray.empty, ("hip:0", (3, 4), "float16")),
    ("hipMemcpy", x.to_numpy, ()),
    ("hipMemset", x.fill_bytes, (0,)),
    ("hipStreamSynchronize", hip.synchronize, (0, 5)),
    ("hipDeviceSynchronize", hip.synchronize, (0,)),
    ("hipEventCreate", hip.record_event, (0, 0)),
    ("hipEventRecord", hip.record_event, (0, 0)),
    ("hipGetDevice", hip.synchronize, (0,)),
):
    os.environ["STUB_FAIL"] = f"{call}=2"
    assert fails(DriverError, function, *arguments).startswith(f"{call} failed: "), call
    os.environ["STUB_FAIL"] = ""
    function(*arguments)
os.environ["STUB_FAIL"] = "hipModuleLaunchKernel=12345"
assert "hipModuleLaunchKernel failed: 12345 is not a valid" in fails(DriverError, gristmill.linear, x, weight)
os.environ["STUB_FAIL"] = ""
forget_loaders()
"""
    )
    assert len(named(calls, "hipModuleUnload")) == len(named(calls, "hipModuleLoadData")) - 7  # seven loads failed


def test_launch_error_has_the_launch(run):
    run(
        PLACE
        + """
os.environ["STUB_FAIL"] = "hipModuleLaunchKernel=1"
message = fails(DriverError, gristmill.linear, x, weight)
where = "symbol symbol_small, hip:0 (gfx1151), grid (1, 2, 1), block (128, 1, 1), 816 bytes of dynamic LDS"
assert message.endswith(f"[{where}]"), message
"""
    )


def test_object_that_the_runtime_refuses(run, tmp_path):
    code = b"\x7fELF of another kind"
    entry = fake_driver.entry("only", code)
    shutil.rmtree(tmp_path / "packs" / "gfx1151")
    fake_driver.write_pack(tmp_path / "packs", "gfx1151", [(entry, code)], (Rule(Formula("1"), ("only",), "test"),))
    run(
        """
        host = fake_driver.random_weight(8, 32, 32)
        message = fails(DriverError, gristmill.to_device, host, "hip:0")
        words = "hipErrorInvalidImage (stub text of code 200)"
        assert message == f"hipModuleLoadData failed: {words} [hip:0 (gfx1151)]", message
        """
    )


def test_no_device(run):
    run(
        """
        assert hip.device_count() == 0
        assert hip.unavailable_reason() == "the HIP runtime works but sees no device"
        assert "no device hip:0; the HIP runtime sees 0" in fails(NoDeviceError, hip.device_facts, 0)
        """,
        STUB_DEVICES="",
    )


def test_initialisation_fails(run):
    run(
        """
        message = fails(NoDriverError, hip.device_count)
        words = "hipErrorNotInitialized (stub text of code 3)"
        assert message.startswith(f"hipInit failed: {words}; install the ROCm runtime"), message
        """,
        STUB_FAIL="hipInit=3",
    )


def test_no_library(run, tmp_path):
    run(
        """
        reason = hip.unavailable_reason()
        assert "libamdhip64.so cannot be loaded" in reason and "on LD_LIBRARY_PATH" in reason, reason
        assert fails(NoDriverError, DeviceArray.empty, "hip:0", (2, 2), "float16") == reason
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )


def test_no_package(run):
    run(
        """
        sys.modules["hip"] = None
        reason = hip.unavailable_reason()
        assert "hip-python cannot be imported" in reason and "pip install 'gristmill[rocm]'" in reason, reason
        """
    )
