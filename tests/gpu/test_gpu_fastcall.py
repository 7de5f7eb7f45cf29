"""Eager calls made in C, on a GPU: the same results, streams and devices as those made in Python."""

import threading

import fake_driver
import gristmill
import pytest
from gristmill import fastcall
from gristmill.errors import DriverError
from gristmill.prepared import prepare

torch = pytest.importorskip("torch")
import gristmill.torch_adapter as adapter  # noqa: E402

pytestmark = pytest.mark.gpu

K, N = 576, 136


@pytest.fixture
def weight(device):
    """A weight whose calls are made in C from now on."""
    weight = gristmill.to_torch(fake_driver.random_weight(N, K, 32, "bfloat16", zero_points=True, bias=True), device)
    gristmill.linear(rows(3, device=device), weight)
    if not prepare(weight).fast:
        reasons = (fastcall._fastcall is None, not fastcall._has_exchange_table())
        pytest.skip("calls are made in Python: no extension {}, no exchange table {}".format(*reasons))
    return weight


def rows(*shape, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*shape, K), generator=generator).bfloat16().to(device)


def in_c(x, weight, out=None, stream=None):
    result = prepare(weight).fast(x, out, stream)
    assert result is not None
    return result


def test_bits_are_those_of_the_python_path(device, weight):
    wide = torch.randn(9, K + 8, device=device).bfloat16()
    for x in (rows(1, device=device), rows(2, 17, device=device), rows(300, device=device), wide[:, 3 : K + 3]):
        expected = adapter._launch(x, prepare(weight), None)
        found = in_c(x, weight)
        assert torch.equal(found, expected)
        assert (found.stride(), found.device) == (expected.stride(), expected.device)
        assert torch.equal(in_c(x, weight, out=torch.empty_like(expected)), expected)


def test_output_belongs_to_the_caching_allocator(device, weight):
    x = rows(3, device=device)
    before = torch.cuda.memory_allocated(device)
    out = in_c(x, weight)
    assert torch.cuda.memory_allocated(device) > before
    stream = torch.cuda.Stream(device)
    out.record_stream(stream)
    address = out.data_ptr()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
    del out
    assert in_c(x, weight).data_ptr() != address  # still in use by the other stream
    torch.cuda.synchronize()


def test_current_stream_and_given_stream(device, weight):
    x = rows(3, device=device)
    expected = in_c(x, weight).clone()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    for stream in (None, side.cuda_stream):
        late = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            out = in_c(late, weight, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_capture(device, weight):
    """A kernel that starts early is recorded by Python, any other in C; both are right when they are replayed."""
    for M in (3, 300):
        x = rows(M, device=device)
        gristmill.linear(x, weight)
        (choice,) = {choice for key, choice in prepare(weight).choices.items() if key >> 4 == M}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gristmill.linear(x, weight)
            left_to_python = prepare(weight).fast(x, out, None) is None
        assert left_to_python == choice.kernel.entry.early_start
        for seed in (2, 3):
            x.copy_(rows(M, device=device, seed=seed))
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, adapter._launch(x, prepare(weight), None))


def test_threads_without_a_context_of_their_own(device, weight):
    x = rows(3, device=device)
    expected = in_c(x, weight)
    found = []
    thread = threading.Thread(target=lambda: found.append(gristmill.linear(x, weight)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_a_device_that_is_not_current(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    host = fake_driver.random_weight(N, K, 32, "bfloat16", zero_points=True, bias=True)
    other = torch.device("cuda", 1)
    first, second = gristmill.to_torch(host, device), gristmill.to_torch(host, other)
    x = rows(3, device=device)
    expected = gristmill.linear(x, first)
    with torch.cuda.device(device):
        for _ in range(3):
            out = gristmill.linear(x.to(other), second)
            assert out.device == other
            assert torch.equal(out.to(device), expected)
        assert prepare(second).fast(x.to(other), None, None) is None
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(other):
        assert torch.equal(in_c(x.to(other), second).to(device), expected)


def test_a_launch_that_is_refused(device, weight):
    x = rows(3, device=device)
    in_c(x, weight)
    prepared = prepare(weight)
    choice = next(choice for key, choice in prepared.choices.items() if key >> 4 == len(x))
    kernel, record = choice.kernel, choice.record
    sources = fastcall._sources(kernel)
    choice.record = fastcall._fastcall.record(
        kernel.function.handle,
        choice.grid,
        (4096, 1, 1),
        choice.shared_bytes,
        kernel.entry.early_start,
        kernel.row_stride_limit,
        sources,
    )
    with pytest.raises(DriverError, match=r"^cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE .*symbol "):
        gristmill.linear(x, weight)
    choice.record = record
    torch.cuda.synchronize()
    assert in_c(x, weight) is not None
