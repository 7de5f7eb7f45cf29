"""Kernels of a recorded graph start while the one ahead ends: what one writes and the next reads is still right."""

import fake_driver
import gristmill
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LAYERS = 12
REPLAYS = 20


def layers(size: int, dtype: str):
    """Square weights that keep activations of size one."""
    for seed in range(LAYERS):
        host = fake_driver.random_weight(size, size, 128, dtype, seed=seed)
        yield gristmill.to_torch(host, "cuda")


def scaled(x):
    return (x.float() / x.float().abs().amax().clamp(min=1e-3)).to(x.dtype)


def starts_early(weight, M: int) -> bool:
    from gristmill.prepared import prepare

    choices = prepare(weight).choices
    return all(choice.kernel.entry.early_start for key, choice in choices.items() if key >> 4 == M)


@pytest.mark.parametrize("M", [1, 3, 8])
@pytest.mark.parametrize("between", [True, False], ids=["with kernels of torch between", "back to back"])
def test_a_chain_gives_the_same_bits_as_eager_calls(M, between):
    weights = list(layers(1024, "float16"))
    inputs = [torch.randn(M, 1024, dtype=torch.float16, device="cuda") for _ in range(REPLAYS)]
    step = scaled if between else lambda x: x
    static = inputs[0] / 256

    def chain(x):
        for weight in weights[: None if between else 3]:  # without scaling, before it overflows
            x = step(gristmill.linear(x, weight))
        return x

    expected = [chain(x / 256) for x in inputs]
    assert all(starts_early(weight, M) for weight in weights[:3])
    assert all(torch.isfinite(y).all() for y in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    for x, y in zip(inputs, expected, strict=True):
        static.copy_(x / 256)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, y)


def test_buffers_that_are_written_again_while_a_kernel_starts():
    """Two buffers in turn, so that each kernel writes what the one ahead has just read."""
    weights = list(layers(2048, "float16"))[:2]
    a, b = (torch.empty(2, 2048, dtype=torch.float16, device="cuda") for _ in range(2))
    x = torch.randn(2, 2048, dtype=torch.float16, device="cuda") / 64

    def run():
        a.copy_(x)
        for _ in range(16):
            gristmill.linear(a, weights[0], out=b)
            b.mul_(1 / 64)
            gristmill.linear(b, weights[1], out=a)
            a.mul_(1 / 64)

    run()
    expected = a.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(REPLAYS):
        a.fill_(float("nan"))
        b.fill_(float("nan"))
        graph.replay()
        assert torch.equal(a, expected)
