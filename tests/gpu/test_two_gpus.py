"""Two GPUs in one process: threads, current devices, streams and graphs keep apart."""

import contextlib
import threading

import fake_driver
import gristmill
import gristmill.nn
import numpy as np
import pytest
from gristmill.arrays import Device, torch_driver
from gristmill.drivers import get_driver
from gristmill.errors import NotLoadedError
from gristmill.loader import forget_loaders, loader_for
from gristmill.packed_weight import dequantize
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from together import together

torch = pytest.importorskip("torch")
from gristmill.torch_weights import tensor_of  # noqa: E402

pytestmark = pytest.mark.gpu

K, N = 576, 136
DTYPES = ("float16", "bfloat16")


@pytest.fixture
def devices(unloaded):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, torch sees {torch.cuda.device_count()}")
    assert torch.cuda.current_device() == 0
    yield [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert torch.cuda.current_device() == 0, "the current device was not put back"


def host_weight(dtype="bfloat16", seed=0):
    return fake_driver.random_weight(N, K, 32, dtype, zero_points=True, bias=True, seed=seed)


def rows(M, device, dtype="bfloat16", seed=1):
    return torch.randn((M, K), generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype)).to(device)


def close(out, x, weight):
    flat, dense = x.double().cpu().numpy(), dequantize(weight)
    bias = np.asarray(weight.bias).astype(np.float64)
    bound = error_bound(flat, dense, bias, dtype=weight.dtype, roundings=3, weights_in_dtype=True)
    return worst_error_over_bound(out.double().cpu().numpy(), linear_float64(flat, dense, bias), bound) <= 1


def unloaded_on(weight, device):
    """The weight on `device`, with nothing loaded for it."""
    return weight.map(lambda array: tensor_of(array).to(device))


def loaders(devices):
    return [loader_for(Device(torch_driver(torch), device.index)) for device in devices]


@pytest.fixture
def loads():
    """(ordinal, code) of each module that is loaded."""
    driver = get_driver(torch_driver(torch))
    seen, load_module = [], driver.load_module
    driver.load_module = lambda ordinal, code: seen.append((ordinal, code)) or load_module(ordinal, code)
    yield seen
    del driver.load_module


def test_twenty_threads_on_two_devices(devices, loads):
    """Fresh threads, each going from device to device: right results, and each module loaded once on each."""
    weights = [host_weight(dtype, seed) for seed, dtype in enumerate(DTYPES * 2)]
    placed = {(i, d.index): unloaded_on(weight, d) for i, weight in enumerate(weights) for d in devices}
    inputs = {
        (t, dtype, d.index): rows(1 + t, d, dtype, seed=t) for t in range(20) for dtype in DTYPES for d in devices
    }
    for device in devices:
        torch.cuda.synchronize(device)
    results = []

    def work(thread):
        for turn in range(12):
            i, ordinal = (thread + turn) % len(weights), (thread + turn // 2) % 2
            x = inputs[thread, weights[i].dtype, ordinal]
            current = (thread + turn) % 2  # now the tensors' device, now the other one
            with torch.cuda.device(current):
                results.append((i, x, gristmill.linear(x, placed[i, ordinal])))
                assert torch.cuda.current_device() == current

    together(20, work)
    for device in devices:
        torch.cuda.synchronize(device)
    assert len(results) == 240
    for i, x, out in results:
        assert out.device == x.device
        assert close(out, x, weights[i])
    assert len(loads) == len(set(loads))
    assert {ordinal for ordinal, _ in loads} == {0, 1}
    by_device = [{code for ordinal, code in loads if ordinal == device.index} for device in devices]
    assert len(by_device[0]) == len(by_device[1])


def test_tensors_on_the_second_device_while_the_first_is_current(devices):
    weight = host_weight()
    placed = gristmill.to_torch(weight, devices[1])
    layer = gristmill.nn.W4A16Linear(weight).to(devices[1])
    for M in (1, 5, 300):
        x = rows(M, devices[1])
        for call in (lambda x: gristmill.linear(x, placed), layer):
            out = call(x)
            assert torch.cuda.current_device() == 0
            assert out.device == devices[1]
            assert close(out, x, weight)
    first, second = loaders(devices)
    assert first.loaded() == []
    assert second.loaded()


def test_a_thread_that_has_never_used_a_gpu(devices):
    """Such a thread has no current context; it gets one for the call, and nothing else changes."""
    weight = host_weight()
    placed = [gristmill.to_torch(weight, device) for device in devices]
    inputs = [rows(5, device) for device in devices]
    outs = [torch.empty((5, N), dtype=torch.bfloat16, device=device) for device in devices]
    for device in devices:
        torch.cuda.synchronize(device)

    def work():
        for i in (1, 0):
            gristmill.linear(inputs[i], placed[i], out=outs[i], stream=torch.cuda.default_stream(devices[i]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for device, x, out in zip(devices, inputs, outs, strict=True):
        torch.cuda.synchronize(device)
        assert close(out, x, weight)


def test_side_streams_on_both_devices(devices):
    """On each device the call runs behind what its stream holds, and not before."""
    weight = host_weight()
    placed = [gristmill.to_torch(weight, device) for device in devices]
    sources = [rows(33, device, seed=device.index) for device in devices]
    inputs = [torch.zeros_like(source) for source in sources]
    streams = [torch.cuda.Stream(device) for device in devices]
    outs = []
    for device, stream in zip(devices, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream(device))
    with contextlib.ExitStack() as stack:
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                torch.cuda._sleep(50_000_000)
                inputs[i].copy_(sources[i])
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))  # the last one's device is current now
        outs = [gristmill.linear(inputs[i], placed[i]) for i in (0, 1)]
    for i in (0, 1):
        streams[i].synchronize()
        assert close(outs[i], sources[i], weight)


def test_capture_on_the_second_device(devices):
    """Refused with nothing loaded there, whatever is loaded on the first; right after preload, with new inputs too."""
    weight = host_weight()
    gristmill.to_torch(weight, devices[0])
    placed = unloaded_on(weight, devices[1])
    with torch.cuda.device(1):
        x = rows(5, devices[1])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(NotLoadedError, match=r"on \w+:1 .* call gristmill\.preload"):
            gristmill.linear(x, placed)
        gristmill.preload(placed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gristmill.linear(x, placed)
    for seed in (2, 3):
        x.copy_(rows(5, devices[1], seed=seed))
        with torch.cuda.device(1):
            graph.replay()
        torch.cuda.synchronize(devices[1])
        assert close(out, x, weight)


def test_unloading_one_device_leaves_the_other(devices):
    weight = host_weight()
    placed = [gristmill.to_torch(weight, device) for device in devices]
    inputs = [rows(5, device) for device in devices]
    for device in devices:
        torch.cuda.synchronize(device)
    gristmill.unload(f"{torch_driver(torch)}:1")
    first, second = loaders(devices)
    assert first.loaded()
    assert second.loaded() == []
    for x, there in zip(inputs, placed, strict=True):
        assert close(gristmill.linear(x, there), x, weight)
    for device in devices:
        torch.cuda.synchronize(device)
    forget_loaders()
