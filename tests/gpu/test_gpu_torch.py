"""How calls on a GPU behave: streams, graphs, threads, devices, compile; and the way without torch."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fake_driver
import gristmill
import gristmill.nn
import numpy as np
import pytest
from gristmill.arrays import Device, DeviceArray, torch_driver, view
from gristmill.drivers import get_driver
from gristmill.errors import (
    ArgumentError,
    DeviceMismatchError,
    DriverError,
    DTypeError,
    NotLoadedError,
    PreloadLimitError,
)
from gristmill.gemm import linear
from gristmill.loader import forget_loaders, loader_for
from gristmill.packed_weight import dequantize
from gristmill.packs import find_pack
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from together import together

torch = pytest.importorskip("torch")
from gristmill.torch_weights import tensor_of  # noqa: E402

pytestmark = pytest.mark.gpu

K, N = 576, 136


def host_weight(seed=0, **options):
    return fake_driver.random_weight(N, K, 32, "bfloat16", zero_points=True, bias=True, seed=seed, **options)


def rows(*shape, device, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def close(out, x, weight):
    """Whether `out` is the product to within the bound of the coarsest kernel; see test_gpu_numerics for exact ones."""
    K = weight.K
    rows = x.reshape(-1, K).double().cpu().numpy()
    w, bias = dequantize(weight), np.asarray(weight.bias).astype(np.float64)
    bound = error_bound(rows, w, bias, dtype=weight.dtype, roundings=3, weights_in_dtype=True)
    found = out.reshape(-1, weight.N).double().cpu().numpy()
    return worst_error_over_bound(found, linear_float64(rows, w, bias), bound) <= 1


def driver_and_ordinal(device):
    return get_driver(torch_driver(torch)), device.index


def test_facts(device):
    driver, ordinal = driver_and_ordinal(device)
    facts, properties = driver.device_facts(ordinal), torch.cuda.get_device_properties(device)
    assert driver.unavailable_reason() is None
    assert driver.device_count() == torch.cuda.device_count()
    assert facts.name == properties.name
    assert facts.multiprocessor_count == properties.multi_processor_count
    assert facts.warp_size == properties.warp_size
    if facts.backend == "cuda":
        assert facts.arch == "sm{}{}".format(*torch.cuda.get_device_capability(device))
        assert facts.lds_bytes_per_block == properties.shared_memory_per_block_optin
    else:
        assert facts.arch == properties.gcnArchName.split(":")[0]


def test_any_rank(device):
    weight = host_weight()
    placed = gristmill.to_torch(weight, device)
    wide = rows(4, 6, K + 8, device=device)
    for x in (
        wide[..., :K],
        wide[0, 0, :K],
        wide[:, :1, 1 : K + 1],
        wide[::2, 1:3, :K],
        wide[:, :, :K].transpose(0, 1),
    ):
        out = gristmill.linear(x, placed)
        assert out.shape == (*x.shape[:-1], N)
        assert close(out, x, weight)
    assert gristmill.linear(wide[:0, :, :K], placed).shape == (0, 6, N)


def test_bad_input_launches_nothing(device):
    placed = gristmill.to_torch(host_weight(), device)
    x = rows(3, K, device=device)
    with pytest.raises(DeviceMismatchError, match="x must be on cuda:0, the device of weight, got cpu"):
        gristmill.linear(x.cpu(), placed)
    with pytest.raises(DeviceMismatchError, match="weight must be on a device, got arrays on cpu"):
        gristmill.linear(x, gristmill.to_torch(host_weight(), "cpu"))
    with pytest.raises(ArgumentError, match="out must not overlap x"):
        gristmill.linear(x, placed, out=x.view(-1)[: 3 * N].view(3, N))
    torch.cuda.synchronize()


def test_side_stream(device):
    weight = host_weight()
    placed = gristmill.to_torch(weight, device)
    source = rows(33, K, device=device)
    x = torch.zeros_like(source)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # a launch on another stream would read x before the copy
        x.copy_(source)
        out = gristmill.linear(x, placed)
    stream.synchronize()
    assert close(out, source, weight)


def test_explicit_stream(device):
    weight = host_weight()
    placed = gristmill.to_torch(weight, device)
    source = rows(33, K, device=device)
    x, out = torch.zeros_like(source), torch.zeros((33, N), dtype=source.dtype, device=device)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.copy_(source)
    gristmill.linear(x, placed, out=out, stream=stream)
    gristmill.linear(x, placed, out=out, stream=stream.cuda_stream)
    stream.synchronize()
    assert close(out, source, weight)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_and_tangents_come_to_the_op(device):
    weight = host_weight()
    placed = gristmill.to_torch(weight, device)
    x = rows(2, 3, K, device=device)
    gristmill.linear(x, placed)  # known to the fast path
    gristmill.linear(x[0], placed)
    assert close(torch.func.vmap(lambda x: gristmill.linear(x, placed))(x), x, weight)
    with pytest.raises(NotImplementedError, match="is for inference"):
        torch.func.grad(lambda x: gristmill.linear(x, placed).sum())(x)
    with pytest.raises(NotImplementedError, match="is for inference"):
        torch.func.jvp(lambda x: gristmill.linear(x, placed), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="is for inference"):
        gristmill.linear(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), placed)


@pytest.mark.parametrize("perm", [False, True])
def test_explicit_stream_refuses_what_would_run_on_the_current_one(device, perm):
    """A copy or a gather of x would not wait for what is still being written there."""
    weight = host_weight(perm=perm)
    placed = gristmill.to_torch(weight, device)
    x = rows(3, 4, K, device=device) if perm else rows(4, 3, K, device=device).transpose(0, 1)
    out = torch.zeros((3, 4, N), dtype=x.dtype, device=device)
    stream = torch.cuda.Stream(device)
    with pytest.raises(ArgumentError, match="stream must be torch's current stream where x has to be copied"):
        gristmill.linear(x, placed, out=out, stream=stream)
    torch.cuda.synchronize()
    assert not out.any()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        gristmill.linear(x, placed, out=out, stream=stream)
    stream.synchronize()
    assert close(out, x, weight)


def test_capture_without_preload_is_refused_and_leaves_the_capture_whole(device, unloaded):
    weight = host_weight()
    placed = weight.map(lambda array: tensor_of(array).to(device))
    x = rows(5, K, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotLoadedError, match=r"is being captured; call gristmill\.preload\(weight\)"):
            gristmill.linear(x, placed)
        doubled = x * 2
    assert loader_for(Device(torch_driver(torch), 0)).loaded() == []
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, x * 2)


def test_capture_after_preload_replays_with_new_inputs(device, unloaded):
    weight = host_weight()
    placed = gristmill.to_torch(weight, device)  # loads all that any call can hit
    loaded = loader_for(Device(torch_driver(torch), 0)).loaded()
    for M in (1, 5, 64, 300):
        x = rows(M, K, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gristmill.linear(x, placed)
        for seed in (2, 3):
            x.copy_(rows(M, K, device=device, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            assert close(out, x, weight)
    assert loader_for(Device(torch_driver(torch), 0)).loaded() == loaded


def test_capture_of_the_module(device, unloaded):
    """As above for what takes the place of nn.Linear: moving it loads; if that is undone, capture is refused."""
    weight = host_weight()
    model = torch.nn.Sequential(torch.nn.ReLU(), gristmill.nn.W4A16Linear(weight)).to(device)
    x = rows(5, K, device=device)
    torch.cuda.synchronize()
    forget_loaders()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(NotLoadedError, match=r"call gristmill\.preload\(weight\)"):
        model(x)
    gristmill.preload(model[1].packed_weight())
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = model(x)
    for seed in (2, 3):
        x.copy_(rows(5, K, device=device, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, x.relu(), weight)


def test_preload_reports_and_keeps_a_limit(device, unloaded):
    placed = [host_weight(seed).map(lambda array: tensor_of(array).to(device)) for seed in range(3)]
    with pytest.raises(PreloadLimitError, match="bytes of device code are to be loaded, the limit is 1000 bytes"):
        gristmill.preload(placed, limit_bytes=1000)
    loader = loader_for(Device(torch_driver(torch), 0))
    assert loader.loaded() == []
    report = gristmill.preload(placed)
    assert list(report.entries) == list(report.loaded) == loader.loaded()
    entries = [loader.pack.manifest.entries[name] for name in report.entries]
    assert report.code_bytes == sum({entry.object: loader.pack.object_bytes(entry) for entry in entries}.values())
    assert 0 < report.time_us < 10e6
    assert gristmill.preload(placed, limit_bytes=0).loaded == ()
    x = rows(5, K, device=device)
    assert close(gristmill.linear(x, placed[0]), x, host_weight())
    torch.cuda.synchronize()
    gristmill.unload()
    assert close(gristmill.linear(x, placed[0]), x, host_weight())


def test_load_while_another_thread_captures(device, unloaded):
    """A load in one thread does not break a capture, in the strictest mode, in another."""
    weight = host_weight()
    placed = weight.map(lambda array: tensor_of(array).to(device))
    x = rows(5, K, device=device)
    torch.cuda.synchronize()
    failures = []

    def load():
        try:
            gristmill.preload(placed)
        except BaseException as error:
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        doubled = x * 2
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert not failures
    assert torch.equal(doubled, x * 2)
    assert close(gristmill.linear(x, placed), x, weight)


def test_twenty_threads(device, unloaded):
    """Fresh threads have no current context; each gets a right result, and each module is loaded once."""
    weights = [host_weight(seed) for seed in range(3)]
    placed = [weight.map(lambda array: tensor_of(array).to(device)) for weight in weights]
    inputs = [rows(1 + seed, K, device=device, seed=seed) for seed in range(20)]
    torch.cuda.synchronize()
    driver, _ = driver_and_ordinal(device)
    loads, load_module = [], driver.load_module
    driver.load_module = lambda *arguments: loads.append(arguments[1]) or load_module(*arguments)
    results = {}

    def work(thread):
        for i in range(10):
            at = (thread + i) % 3
            results[thread, i] = at, linear(inputs[thread], placed[at])

    try:
        together(20, work)
    finally:
        del driver.load_module
    torch.cuda.synchronize()
    assert len(results) == 200
    for (thread, _), (at, out) in results.items():
        assert close(out, inputs[thread], weights[at])
    assert len(loads) == len(set(loads))


def test_second_gpu(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight = host_weight()
    second = torch.device("cuda", 1)
    placed = gristmill.to_torch(weight, second)
    assert torch.cuda.current_device() == 0
    x = rows(17, K, device=second)
    out = gristmill.linear(x, placed)
    assert out.device == second
    assert torch.cuda.current_device() == 0
    assert close(out, x, weight)
    with pytest.raises(DeviceMismatchError, match="x must be on cuda:1, the device of weight, got cuda:0"):
        gristmill.linear(x.to(device), placed)


def test_opcheck(device):
    for perm in (False, True):
        weight = gristmill.to_torch(host_weight(perm=perm), device)
        torch.library.opcheck(
            torch.ops.gristmill.w4a16_linear,
            (
                rows(2, 3, K, device=device), weight.qweight, weight.scales, weight.zero_points, weight.bias,
                weight.perm, K, 32,
            ),
        )  # fmt: skip


def test_compile_with_dynamic_rows_compiles_once(device):
    weight = host_weight()
    placed = gristmill.to_torch(weight, device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: gristmill.linear(x, placed), fullgraph=True, dynamic=True, backend=backend)
    for M in (4, 5, 17, 33):
        x = rows(M, K, device=device)
        assert torch.equal(compiled(x), gristmill.linear(x, placed))
    assert len(graphs) == 1


def test_inductor(device):
    pytest.importorskip("triton")
    weight = host_weight()
    layer = gristmill.nn.W4A16Linear(weight).to(device)
    compiled = torch.compile(lambda x: torch.relu(layer(x) + 1), fullgraph=True, dynamic=True)
    for M in (4, 5, 17):
        x = rows(M, K, device=device)
        with torch.inference_mode():
            assert torch.equal(compiled(x), torch.relu(layer(x) + 1))


def test_inductor_compiles_once_for_all_rows(device):
    pytest.importorskip("triton")
    from torch._dynamo.utils import counters

    layer = gristmill.nn.W4A16Linear(host_weight()).to(device)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for M in (2, 4, 5, 17, 33, 300):
            x = rows(M, K, device=device)
            assert torch.equal(compiled(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_as_nn_linear(device, x_dtype):
    weight = host_weight()
    layer = gristmill.nn.W4A16Linear(weight).to(device)
    dense = torch.nn.Linear(K, N, device=device)
    dense.weight.data = torch.from_numpy(dequantize(weight)).float().to(device)
    x = rows(5, K, device=device).to(x_dtype)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        out, expected = layer(x), dense(x)
        assert out.dtype == expected.dtype == torch.bfloat16
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(x), out)
    assert close(out, x.bfloat16(), weight)
    if x_dtype != torch.bfloat16:
        with torch.autocast("cuda", torch.float16), pytest.raises(DTypeError, match="convert the layer with"):
            layer(x)
        with pytest.raises(DTypeError, match="x must be bfloat16, the dtype of weight"):
            layer(x)


def test_inference_mode(device):
    layer = gristmill.nn.W4A16Linear(host_weight()).to(device)
    with torch.inference_mode():
        x = rows(5, K, device=device).clone()
        assert all(layer(x).is_inference() for _ in range(3))  # the first in Python, the others in C
    assert not any(layer(x).is_inference() for _ in range(3))


def test_fork_after_use_is_refused(device, unloaded):
    """In a process of its own, which may fork: the child raises, the parent goes on, a spawned worker works."""
    program = f"""
import os, sys, multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
sys.path.append({str(Path(__file__).parents[1])!r})
import fake_driver, gristmill, spawned_job
from gristmill.errors import ForkedProcessError
host = fake_driver.random_weight(136, 576, 32, "bfloat16", zero_points=True, bias=True)
x = torch.ones(5, 576, dtype=torch.bfloat16, device="cuda")

def in_fork(work):
    child = os.fork()
    if not child:
        try:
            work()
        except ForkedProcessError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

name = "hip:0" if torch.version.hip else "cuda:0"
if name == "cuda:0":
    in_fork(lambda: gristmill.to_device(host, name))  # torch alone has used CUDA
weight = gristmill.to_torch(host, "cuda")
for _ in range(3):  # the first in Python, the others in C
    expected = gristmill.linear(x, weight)
torch.cuda.synchronize()
in_fork(lambda: gristmill.linear(x, weight))
in_fork(lambda: gristmill.to_device(host, name))
assert torch.equal(gristmill.linear(x, weight), expected)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    out = pool.apply(spawned_job.multiply, (host, fake_driver.random_x(5, 576, "bfloat16"), name))
    assert out.shape == (5, 136)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_module_moves(device, unloaded):
    weight = host_weight()
    layer = gristmill.nn.W4A16Linear(weight)
    x = rows(2, 5, K, device=device)
    expected = layer(x.cpu())
    layer.to(device)
    assert loader_for(Device(torch_driver(torch), 0)).loaded()
    with torch.inference_mode():
        assert torch.allclose(layer(x).cpu().double(), expected.double(), rtol=2**-7, atol=2**-4)
    assert torch.equal(layer.cpu()(x.cpu()), expected)


def test_profiler_sees_op_and_kernel(device):
    placed = gristmill.to_torch(host_weight(), device)
    x = rows(5, K, device=device)
    with torch.profiler.profile() as profile:
        gristmill.linear(x, placed)
        torch.cuda.synchronize()
    assert "gristmill::w4a16_linear" in {event.key for event in profile.key_averages()}


def test_without_torch(device):
    weight = host_weight()
    name = f"{torch_driver(torch)}:0"
    placed = gristmill.to_device(weight, name)
    for M in (1, 17):
        x = fake_driver.random_x(M, K, "bfloat16")
        driver = get_driver(torch_driver(torch))
        placed_x = DeviceArray.from_numpy(x, name, row_stride=K + 8)
        start = driver.record_event(0, 0)
        out = gristmill.linear(placed_x, placed)
        assert 0 < driver.elapsed_us(0, start, driver.record_event(0, 0)) < 1e6
        as_tensor = torch.from_numpy(x.astype(np.float32)).bfloat16()
        assert close(torch.from_numpy(out.to_numpy().astype(np.float32)), as_tensor, weight)
        tensor = gristmill.linear(as_tensor.to(device), gristmill.to_torch(weight, device))
        assert np.array_equal(tensor.float().cpu().numpy(), out.to_numpy().astype(np.float32))


def test_foreign_arrays(device):
    """Arrays that speak DLPack or __cuda_array_interface__ and are no torch tensors."""

    class Producer:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, stream=None):
            return self.tensor.__dlpack__(stream=stream)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    weight = host_weight()
    placed = gristmill.to_torch(weight, device)
    x, out = rows(5, K, device=device), torch.empty((5, N), dtype=torch.bfloat16, device=device)
    assert view(Producer(x)) == view(x)
    gristmill.linear(Producer(x), placed, out=Producer(out), stream=torch.cuda.current_stream())
    assert close(out, x, weight)
    if torch_driver(torch) == "cuda":
        half = x.half()
        interface = type("Foreign", (), {"__cuda_array_interface__": half.__cuda_array_interface__})()
        assert view(interface) == view(half)


def test_object_that_the_driver_refuses(device, tmp_path, monkeypatch, unloaded):
    driver, ordinal = driver_and_ordinal(device)
    arch = driver.device_facts(ordinal).arch
    source = Path(find_pack(arch).folder)
    shutil.copytree(source, tmp_path / source.name)
    monkeypatch.setenv("GRISTMILL_PACK_PATH", str(tmp_path))
    monkeypatch.setattr("gristmill.packs.Pack.read_object", lambda pack, entry: b"\x7fELF and nothing more" + bytes(64))
    with pytest.raises(DriverError, match=rf"ModuleLoadData failed: .*\({arch}\)"):
        gristmill.to_torch(host_weight(), device)
    monkeypatch.undo()
    forget_loaders()
    weight = host_weight()
    x = rows(3, K, device=device)
    assert close(gristmill.linear(x, gristmill.to_torch(weight, device)), x, weight)


def test_symbol_that_is_not_there(device):
    driver, ordinal = driver_and_ordinal(device)
    pack = find_pack(driver.device_facts(ordinal).arch)
    entry = next(iter(pack.manifest.entries.values()))
    module = driver.load_module(ordinal, pack.read_object(entry))
    with pytest.raises(DriverError, match=r"ModuleGetFunction failed: .*symbol missing, "):
        driver.function(ordinal, module, "missing", 0, False)
    driver.unload_module(ordinal, module)
