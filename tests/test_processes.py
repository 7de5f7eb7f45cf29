"""Threads, forks and new processes, against the stub libcuda.so.1, which counts calls and computes what is launched."""

import textwrap

import fake_driver
import pytest
import stub_driver
from stub_driver import named

PLACE = """
import logging
import stub_compute
stub_compute.attach()
logging.getLogger("gristmill").setLevel(logging.ERROR)  # it warns where the floor runs

def place(device, seed=0, dtype="float16"):
    host = fake_driver.random_weight(72, 136, 64, dtype, zero_points=True, bias=True, seed=seed)
    return host, gristmill.to_device(host, device)

def check(out, x, host):
    from gristmill.packed_weight import dequantize
    from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
    dense = dequantize(host)
    bound = error_bound(x, dense, host.bias, dtype=host.dtype, roundings=1, weights_in_dtype=False)
    assert worst_error_over_bound(out.to_numpy(), linear_float64(x, dense, host.bias), bound) <= 1

def multiply(device, M=3):
    host, weight = place(device)
    x = fake_driver.random_x(M, 136)
    check(gristmill.linear(DeviceArray.from_numpy(x, device), weight), x, host)

def in_fork(work):
    "Runs `work` in a fork; it must come to its end."
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.fixture(scope="module")
def stub_library(tmp_path_factory):
    return stub_driver.build(
        stub_driver.TESTS / "stub_cuda/stub_cuda.c", tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    )


@pytest.fixture
def run(stub_library, tmp_path):
    """Runs a program beside the stub with packs that cover all; returns the calls that the stub saw."""
    for arch in ("sm90", "sm80"):
        fake_driver.usual_pack(tmp_path / "packs", arch, stub_driver.code_of)
    # Python warns of forks beside threads; numpy's are idle.
    quiet = {"PYTHONWARNINGS": "ignore::DeprecationWarning", "OPENBLAS_NUM_THREADS": "1"}
    return lambda program, **settings: stub_driver.run(
        stub_library, tmp_path, PLACE + textwrap.dedent(program), **{**quiet, **settings}
    )


FORKED = "driver 'cuda' was initialised in process {pid}, of which this one is a fork; start workers with"


def test_fork_after_the_driver_was_used(run):
    """Every way to the driver raises one typed error, and no call of the child reaches the library."""
    calls = run(
        f"""
        host, weight = place("cuda:0")
        x = DeviceArray.from_numpy(fake_driver.random_x(3, 136), "cuda:0")
        out = gristmill.linear(x, weight)
        cuda, loader = get_driver("cuda"), loader_for(Device("cuda", 0))
        from gristmill.prepared import PreparedWeight, prepare
        prepared = prepare(weight)
        choice = prepared.choose(3, 0, 0)
        expected = {FORKED!r}.format(pid=os.getpid())
        log = os.environ["STUB_LOG"]
        size = os.path.getsize(log)

        def work():
            for call in (
                lambda: gristmill.linear(x, weight), lambda: gristmill.linear(x, weight, out=out),
                lambda: gristmill.preload(weight), lambda: gristmill.to_device(host, "cuda:0"), x.to_numpy,
                lambda: DeviceArray.empty("cuda:1", (2, 2), "float16"), lambda: cuda.synchronize(0),
                lambda: prepared.launch(choice, 3, x.address, 136, out.address, 72, 0),
                lambda: loader_for(Device("cuda", 0)), lambda: get_driver("cuda").device_count(),
            ):
                assert expected in fails(ForkedProcessError, call), call
            assert expected in cuda.unavailable_reason()
            global_names = globals()
            for name in ("x", "out", "weight", "prepared", "choice"):
                del global_names[name]  # frees nothing: the memory is the parent's
            import gc
            gc.collect()
            forget_loaders()
            in_fork(lambda: fails(ForkedProcessError, gristmill.to_device, host, "cuda:0"))
            assert os.path.getsize(log) == size

        in_fork(work)
        gristmill.linear(x, weight)  # the parent goes on as before
        x.to_numpy()
        """
    )
    assert len(named(calls, "cuLaunchKernel")) == 2


def test_fork_while_another_thread_holds_the_locks(run):
    run(
        """
        import threading
        import gristmill.loader, gristmill.drivers
        host, weight = place("cuda:0")
        held, done = threading.Event(), threading.Event()

        def hold():
            with gristmill.loader._lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        in_fork(lambda: fails(ForkedProcessError, gristmill.to_device, host, "cuda:0"))
        done.set()
        thread.join()
        """
    )


def test_fork_before_the_driver_is_used_while_another_thread_holds_the_locks(run):
    run(
        """
        import signal, threading
        import gristmill.loader, gristmill.drivers
        held, done = threading.Event(), threading.Event()

        def hold():
            with gristmill.loader._lock, gristmill.drivers._lock:
                held.set()
                done.wait()

        def work():
            signal.alarm(20)  # the end of a child that waits for ever
            multiply("cuda:0")

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        held.wait()
        in_fork(work)
        done.set()
        thread.join()
        """
    )


def test_fork_before_the_driver_is_used(run):
    """A child that is the first to use the driver uses it; so does its parent afterwards."""
    run(
        """
        get_driver("cuda")
        in_fork(lambda: multiply("cuda:0"))
        multiply("cuda:0")
        """
    )


def test_fork_of_a_process_in_which_another_library_used_cuda(run):
    run(
        """
        message = fails(ForkedProcessError, gristmill.to_device, fake_driver.random_weight(8, 32, 32), "cuda:0")
        assert message.startswith("cuInit failed: NAME_OF_3"), message
        assert "this is a fork of a process that had used CUDA; start workers with multiprocessing's 'spawn'" in message
        """,
        STUB_FAIL="cuInit=3",
    )


def test_spawn_after_the_driver_was_used(run):
    """New processes have a driver of their own; a host weight goes to them by pickling."""
    run(
        """
        import multiprocessing
        import spawned_job
        host, x = fake_driver.random_weight(72, 136, 64, zero_points=True), fake_driver.random_x(3, 136)
        weight = gristmill.to_device(host, "cuda:0")
        expected = gristmill.linear(DeviceArray.from_numpy(x, "cuda:0"), weight).to_numpy()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            np.testing.assert_array_equal(pool.apply(spawned_job.multiply, (host, x, "cuda:1", True)), expected)
        """,
        STUB_DEVICES="9.0,9.0",
    )


@pytest.mark.parametrize("devices", ["9.0", "9.0,8.0", "9.0,9.0"])
def test_twenty_threads(run, devices):
    """Right results for all, and each object loaded once on each device, whoever comes first."""
    calls = run(
        """
        from together import together
        devices = [f"cuda:{i}" for i in range(get_driver("cuda").device_count())]
        hosts = [fake_driver.random_weight(72, 136, 64, dtype, zero_points=zeros, bias=True, seed=seed)
                 for seed, (dtype, zeros) in enumerate((("float16", True), ("bfloat16", True), ("float16", False)))]
        weights = {  # nothing is loaded yet
            (i, device): host.map(lambda array: DeviceArray.from_numpy(array, device))
            for i, host in enumerate(hosts) for device in devices
        }
        done = []

        def work(thread):
            for turn in range(6):
                i, device = (thread + turn) % 3, devices[(thread + turn // 3) % len(devices)]
                x = fake_driver.random_x(1 + thread, 136, hosts[i].dtype, seed=thread)
                check(gristmill.linear(DeviceArray.from_numpy(x, device), weights[i, device]), x, hosts[i])
                done.append(turn)

        together(20, work)
        assert len(done) == 120
        """,
        STUB_DEVICES=devices,
    )
    loads = [details["device"] for details in named(calls, "cuModuleLoadData")]
    assert sorted(loads) == sorted(str(i) for i in range(devices.count(",") + 1) for _ in range(3))
    launches = [details["device"] for details in named(calls, "cuLaunchKernel")]
    assert len(launches) == 120
    assert set(launches) == set(loads)


def test_what_strict_mode_costs_a_call(run):
    """Its hook is asked about Python's `id`, from 3.14 on about ctypes' calls too, and looks into neither."""
    run(
        """
        host, weight = place("cuda:0")
        x = DeviceArray.from_numpy(fake_driver.random_x(3, 136), "cuda:0")
        out = DeviceArray.empty("cuda:0", (3, 72), "float16")
        stub_compute.detach()  # its computation is not the call's
        gristmill.linear(x, weight, out=out)
        seen, watching = [], False
        sys.addaudithook(lambda event, _: watching and seen.append(event))
        watching = True
        for _ in range(3):
            gristmill.linear(x, weight, out=out)
        watching = False
        assert [event for event in seen if event != "ctypes.call_function"] == ["builtins.id"] * 3, seen
        assert len(seen) == 3 or sys.version_info >= (3, 14), seen
        """
    )
