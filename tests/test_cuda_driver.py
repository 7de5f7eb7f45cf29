"""The CUDA path against a stub libcuda.so.1: contexts, opt-in shared memory, and every failure."""

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
        stub_driver.TESTS / "stub_cuda/stub_cuda.c", tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    )


@pytest.fixture
def run(stub_library, tmp_path):
    """Runs a program beside the stub with a pack for sm90 and sm80; returns the calls that the stub saw."""
    for arch in ("sm90", "sm80"):
        stub_driver.write_pack(tmp_path / "packs", arch)
    return lambda program, **settings: stub_driver.run(
        stub_library, tmp_path, CUDA + textwrap.dedent(program), **settings
    )


CUDA = """
import ctypes
cuda = get_driver("cuda")

def current_context():
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value or 0
"""

PLACE = """
host = fake_driver.random_weight(72, 136, 64, zero_points=True, bias=True)
weight = gristmill.to_device(host, "cuda:0")
x = DeviceArray.from_numpy(fake_driver.random_x(3, 136), "cuda:0")
"""


def test_facts(run):
    run(
        """
        assert cuda.unavailable_reason() is None
        assert cuda.device_count() == 2
        assert cuda.version() == "13.1"
        facts = cuda.device_facts(1)
        assert (facts.backend, facts.arch, facts.name) == ("cuda", "sm89", "stub device 1")
        assert (facts.warp_size, facts.multiprocessor_count) == (32, 132)
        assert (facts.lds_bytes_per_block, facts.max_threads_per_block) == (232448, 1024)
        assert Device.parse("cuda:sm89") == ("cuda", 1)
        assert "no device cuda:2; the NVIDIA driver sees 2" in fails(NoDeviceError, cuda.device_facts, 2)
        """,
        STUB_DEVICES="9.0,8.9",
    )


def test_call_from_pack_to_launch(run, tmp_path):
    calls = run(
        PLACE
        + """
out = gristmill.linear(x, weight, stream=77)
arrays = [x, weight.qweight, weight.scales, weight.zero_points, weight.bias, out]
open(os.environ["ADDRESSES"], "w").write(",".join(str(array.address) for array in arrays))
""",
        ADDRESSES=str(tmp_path / "addresses"),
    )
    (launch,) = named(calls, "cuLaunchKernel")
    assert launch.pop("arguments") == (tmp_path / "addresses").read_text() + ",3,72,136,64,3,136,20,3,72,0"
    assert launch == {
        "symbol": "symbol_small", "device": "0", "grid": "1,2,1", "block": "128,1,1", "shared": str(3 * 136 * 2),
        "stream": "77", "extra": "0",
    }  # fmt: skip
    assert len(named(calls, "cuModuleLoadData")) == 1
    limits = {details["symbol"]: details["value"] for details in named(calls, "cuFuncSetAttribute")}
    assert limits == {"symbol_small": "232448", "symbol_floor": "4096"}


def test_shared_memory_beyond_48_kilobytes(run):
    calls = run(
        """
        host = fake_driver.random_weight(8, 16384, 64, zero_points=True)
        weight = gristmill.to_device(host, "cuda:0")
        gristmill.linear(DeviceArray.from_numpy(fake_driver.random_x(4, 16384), "cuda:0"), weight)
        """
    )
    assert named(calls, "cuLaunchKernel")[0]["shared"] == str(4 * 16384 * 2)


def test_context_is_made_current_and_put_back(run):
    """Threads without a context and threads with another device's; one primary context a device is retained."""
    calls = run(
        """
        import threading
        host = fake_driver.random_weight(8, 32, 32, zero_points=True)
        weights = [gristmill.to_device(host, f"cuda:{i}") for i in (0, 1)]
        inputs = [DeviceArray.from_numpy(fake_driver.random_x(2, 32), f"cuda:{i}") for i in (0, 1)]
        contexts = [cuda._contexts[i] for i in (0, 1)]

        def work():
            for current in (0, *contexts):
                cuda._call("cuCtxSetCurrent", current)
                for i in (0, 1):
                    gristmill.linear(inputs[i], weights[i])
                    assert current_context() == current
            done.append(True)

        done = []
        assert current_context() == 0
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert done
        assert [loader_for(Device("cuda", i)).pack.manifest.arch for i in (0, 1)] == ["sm90", "sm80"]
        """,
        STUB_DEVICES="9.0,8.9",
    )
    assert [details["device"] for details in named(calls, "cuLaunchKernel")] == ["0", "1"] * 3
    assert [details["device"] for details in named(calls, "cuDevicePrimaryCtxRetain")] == ["0", "1"]


def test_memory(run):
    calls = run(
        """
        import gc
        array = np.arange(35, dtype=np.int32).reshape(5, 7)
        placed = DeviceArray.from_numpy(array, "cuda:1", row_stride=12)
        np.testing.assert_array_equal(placed.to_numpy(), array)
        assert cuda.device_of(placed.address + 8) == 1
        foreign = type("Foreign", (), {"__cuda_array_interface__": placed.__cuda_array_interface__})()
        from gristmill.arrays import view
        assert view(foreign) == placed.view()
        placed.fill_bytes(0xFF)
        assert (placed.to_numpy() == -1).all()
        start = cuda.record_event(1, 0)
        assert 0 <= cuda.elapsed_us(1, start, cuda.record_event(1, 0)) < 1e6
        cuda.synchronize(1)
        cuda.synchronize(1, 5)
        del placed, foreign
        gc.collect()
        """,
        STUB_DEVICES="9.0,8.0",
    )
    assert [details["device"] for details in named(calls, "cuMemAlloc")] == ["1"]
    assert len(named(calls, "cuMemFree")) == 1
    assert len(named(calls, "cuEventDestroy")) == 2


def test_capture(run):
    calls = run(
        """
        host = fake_driver.random_weight(8, 32, 32, zero_points=True)
        weight = host.map(lambda array: DeviceArray.from_numpy(array, "cuda:0"))
        x = DeviceArray.from_numpy(fake_driver.random_x(2, 32), "cuda:0")
        out = DeviceArray.empty("cuda:0", (2, 8), "float16")
        os.environ["STUB_CAPTURING"] = "9"
        message = fails(NotLoadedError, gristmill.linear, x, weight, out=out, stream=9)
        assert "kernel small is not loaded on cuda:0" in message and "gristmill.preload" in message, message
        os.environ["STUB_FAIL"] = "cuStreamIsCapturing=906"  # the legacy stream beside a capture
        fails(NotLoadedError, gristmill.linear, x, weight, out=out)
        os.environ["STUB_FAIL"] = ""
        gristmill.linear(x, weight, out=out, stream=8)
        gristmill.linear(x, weight, out=out, stream=9)
        """
    )
    assert [details["stream"] for details in named(calls, "cuLaunchKernel")] == ["8", "9"]
    names = [name for name, _ in calls]
    load = names.index("cuModuleLoadData")
    assert names.count("cuStreamIsCapturing") == names[:load].count("cuStreamIsCapturing") == 3
    # A load lets a capture of another thread be, and the thread's mode is put back.
    assert [details["mode"] for details in named(calls, "cuThreadExchangeStreamCaptureMode")] == ["2", "0"] * 2


def test_a_kernel_may_start_early_only_where_it_is_recorded(run, tmp_path):
    code = stub_driver.code_of(["symbol_early", "symbol_late"])
    rows = [(fake_driver.entry(name, code, early_start=name == "early"), code) for name in ("early", "late")]
    early, late = (entry._replace(needs=entry.needs._replace(zero_points=True)) for entry, _ in rows)
    early = early._replace(needs=early.needs._replace(conditions=(Formula("M <= 4"),)))
    shutil.rmtree(tmp_path / "packs/sm90")
    rules = tuple(Rule(Formula("1"), names, "test") for names in (("early",), ("late",), ("early", "late")))
    fake_driver.write_pack(tmp_path / "packs", "sm90", [(early, code), (late, code)], rules)
    calls = run(
        """
        weight = gristmill.to_device(fake_driver.random_weight(8, 32, 32, zero_points=True), "cuda:0")
        for M in (2, 8):
            x = DeviceArray.from_numpy(fake_driver.random_x(M, 32), "cuda:0")
            out = DeviceArray.empty("cuda:0", (M, 8), "float16")
            for captured in ("0", "9"):
                os.environ["STUB_CAPTURING"] = captured
                gristmill.linear(x, weight, out=out, stream=9)
        os.environ["STUB_FAIL"] = "cuLaunchKernelEx=1"
        x = DeviceArray.from_numpy(fake_driver.random_x(2, 32), "cuda:0")
        message = fails(DriverError, gristmill.linear, x, weight, stream=9)
        assert message.startswith("cuLaunchKernelEx failed: NAME_OF_1 "), message
        assert "symbol symbol_early, cuda:0" in message, message
        """
    )
    launched = [(name, details["symbol"]) for name, details in calls if name.startswith("cuLaunch")]
    assert launched[:4] == [
        ("cuLaunchKernel", "symbol_early"), ("cuLaunchKernelEx", "symbol_early"),
        ("cuLaunchKernel", "symbol_late"), ("cuLaunchKernel", "symbol_late"),
    ]  # fmt: skip
    plain, recorded = (named(calls, name)[0] for name in ("cuLaunchKernel", "cuLaunchKernelEx"))
    assert (recorded["attributes"], recorded["first"]) == ("1", "6:1")  # programmatic stream serialization
    assert all(recorded[key] == plain[key] for key in ("grid", "block", "shared", "stream", "arguments", "device"))


def test_library_is_loaded_once_whichever_thread_is_first(run):
    run('driver = get_driver("cuda")' + stub_driver.LATE_AT_THE_LOCK)


def test_every_call_of_the_path_can_fail(run):
    """Each failure names the call, the code's name and the driver's words; the next try works and nothing is lost."""
    calls = run(
        PLACE
        + """
for call in (
    "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuStreamIsCapturing", "cuLaunchKernel",
    "cuThreadExchangeStreamCaptureMode",
):
    for code in (1, 2, 209, 500, 700, 719):
        forget_loaders()
        fresh = weight.map(lambda array: array)
        os.environ["STUB_FAIL"] = f"{call}={code}"
        message = fails(DriverError, gristmill.linear, x, fresh)
        assert message.startswith(f"{call} failed: NAME_OF_{code} (stub text of code {code})"), message
        has_symbol = call in ("cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel")
        assert ("symbol symbol_small" in message) == has_symbol, message
        assert "cuda:0 (sm90)" in message or call.startswith("cuThread"), message
        os.environ["STUB_FAIL"] = ""
        assert current_context() == 0
        gristmill.linear(x, weight.map(lambda array: array))
for call, function, arguments in (
    ("cuMemAlloc", DeviceArray.empty, ("cuda:0", (3, 4), "float16")),
    ("cuMemcpyDtoH", x.to_numpy, ()),
    ("cuMemsetD8", x.fill_bytes, (0,)),
    ("cuStreamSynchronize", cuda.synchronize, (0, 5)),
    ("cuCtxSynchronize", cuda.synchronize, (0,)),
    ("cuEventCreate", cuda.record_event, (0, 0)),
    ("cuEventRecord", cuda.record_event, (0, 0)),
    ("cuCtxGetCurrent", cuda.synchronize, (0,)),
    ("cuCtxSetCurrent", cuda.synchronize, (0,)),
):
    os.environ["STUB_FAIL"] = f"{call}=2"
    assert fails(DriverError, function, *arguments).startswith(f"{call} failed: NAME_OF_2"), call
    os.environ["STUB_FAIL"] = ""
    function(*arguments)
    assert current_context() == 0
os.environ["STUB_FAIL"] = "cuLaunchKernel=12345"
assert "cuLaunchKernel failed: " in fails(DriverError, gristmill.linear, x, weight)
os.environ["STUB_FAIL"] = "cuCtxGetCurrent=201"
assert "cuCtxGetCurrent failed: NAME_OF_201" in fails(DriverError, gristmill.linear, x, weight)
os.environ["STUB_FAIL"] = ""
gristmill.linear(x, weight)
forget_loaders()
"""
    )
    assert len(named(calls, "cuModuleUnload")) == len(named(calls, "cuModuleLoadData")) - 6  # six loads failed


def test_object_that_the_driver_refuses(run, tmp_path):
    code = b"\x7fELF of another kind"
    entry = fake_driver.entry("only", code)
    shutil.rmtree(tmp_path / "packs" / "sm90")
    fake_driver.write_pack(tmp_path / "packs", "sm90", [(entry, code)], (Rule(Formula("1"), ("only",), "test"),))
    run(
        """
        message = fails(DriverError, gristmill.to_device, fake_driver.random_weight(8, 32, 32), "cuda:0")
        assert message == "cuModuleLoadData failed: NAME_OF_200 (stub text of code 200) [cuda:0 (sm90)]", message
        """
    )


def test_no_device(run):
    run(
        """
        assert cuda.unavailable_reason() == "the NVIDIA driver works but sees no device"
        assert "no device cuda:0; the NVIDIA driver sees 0" in fails(NoDeviceError, cuda.device_facts, 0)
        """,
        STUB_DEVICES="",
    )


def test_initialisation_fails(run):
    run(
        """
        message = fails(NoDriverError, cuda.device_count)
        words = "NAME_OF_803 (stub text of code 803)"
        assert message.startswith(f"cuInit failed: {words}; install the NVIDIA driver"), message
        """,
        STUB_FAIL="cuInit=803",
    )


def test_no_library(run, tmp_path):
    stub_driver.skip_where_installed("libcuda.so.1")
    run(
        """
        reason = cuda.unavailable_reason()
        assert "libcuda.so.1 cannot be loaded" in reason and "install the NVIDIA driver" in reason, reason
        assert fails(NoDriverError, DeviceArray.empty, "cuda:0", (2, 2), "float16") == reason
        """,
        LD_LIBRARY_PATH=str(tmp_path),
    )


def test_library_of_a_driver_that_is_too_old(run, tmp_path):
    library = stub_driver.build(stub_driver.TESTS / "stub_cuda/too_old.c", tmp_path / "libcuda.so.1")
    run(
        """
        reason = cuda.unavailable_reason()
        assert "libcuda.so.1 cannot be loaded" in reason and "cuGetErrorName" in reason, reason
        assert "install the NVIDIA driver" in reason, reason
        """,
        LD_LIBRARY_PATH=str(library.parent),
    )


def test_launch_without_a_package_for_cuda(run):
    """The driver's library is all that a launch needs."""
    run('sys.modules["cuda"] = None\n' + PLACE + "gristmill.linear(x, weight)")


def test_pointers_for_a_launch_from_c(run):
    calls = run(
        PLACE
        + """
from gristmill.launch import ArgumentBuffer
from gristmill.prepared import prepare
pointers = cuda.launch_pointers(0)
context = ctypes.c_uint64()
cuda._call("cuCtxSetCurrent", pointers.current)
assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(pointers.get_current)(ctypes.byref(context)) == 0
assert context.value == pointers.current != 0
kernel = loader_for(Device("cuda", 0)).kernel(next(iter(prepare(weight).loader.pack.manifest.entries.values())))
launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)(pointers.launch)
arguments = ArgumentBuffer(kernel.entry.arguments).address
assert launch(kernel.function.handle, 1, 2, 3, 4, 5, 6, 7, 8, arguments, None) == 0
os.environ["STUB_FAIL"] = "cuLaunchKernel=719"
status = launch(kernel.function.handle, 1, 2, 3, 4, 5, 6, 7, 8, arguments, None)
message = str(pointers.error(kernel.function, (1, 2, 3), (4, 5, 6), 7, status))
assert message.startswith("cuLaunchKernel failed: NAME_OF_719 (stub text of code 719) [symbol symbol_"), message
assert "grid (1, 2, 3), block (4, 5, 6), 7 bytes of dynamic shared memory" in message, message
os.environ["STUB_FAIL"] = ""
"""
    )
    assert named(calls, "cuLaunchKernel")[0]["grid"] == "1,2,3"
