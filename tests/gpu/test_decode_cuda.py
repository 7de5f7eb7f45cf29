"""Every entry for few tokens of the pack on a GPU: each M that it takes, tails, groups, same bits twice."""

from __future__ import annotations

import fake_driver
import gristmill
import numpy as np
import pytest
from gristmill.packed_weight import dequantize, pack
from gristmill.prepared import Choice, prepare
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound
from gristmill.select import launch_shape, unmet_needs

torch = pytest.importorskip("torch")
from gristmill.torch_weights import array_of, tensor_of  # noqa: E402

pytestmark = pytest.mark.gpu

SKINNY, WGMMA = (f"csrc/cuda/w4a16_{name}.cu" for name in ("skinny", "wgmma"))
# N, K, group size: tails of tiles, chunks, slices and groups; the last have blocks take several turns.
SIZES = (
    (8, 8, -1), (24, 136, -1), (72, 328, 128), (136, 1160, 256), (40, 576, 32), (136, 1280, 32), (200, 1152, 96),
    (136, 1280, 192), (264, 2112, 64), (4104, 2560, 128), (20000, 512, 64),
)  # fmt: skip
ROWS = range(66)


def _entries(prepared, M):
    for entry in prepared.loader.pack.manifest.entries.values():
        problem = prepared.problem(M, 16)
        if entry.source in (SKINNY, WGMMA) and not unmet_needs(entry, problem, prepared.loader.facts):
            grid, shared_bytes = launch_shape(entry, problem, prepared.loader.facts)
            yield entry, Choice(prepared.loader.kernel(entry), grid, shared_bytes, "test")


def _launch(prepared, choice, x):
    out = torch.full((x.shape[0] + 1, prepared.N + 8), torch.nan, device="cuda", dtype=x.dtype)
    stream = torch.cuda.current_stream().cuda_stream
    prepared.launch(choice, x.shape[0], x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), stream)
    torch.cuda.synchronize()
    assert out[:, prepared.N :].isnan().all()
    assert out[x.shape[0] :].isnan().all()
    return out[: x.shape[0], : prepared.N]


@pytest.mark.parametrize("zero_points", [0, 1])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_every_entry_is_within_the_bound_and_gives_the_same_bits_twice(device, size, dtype, zero_points):
    N, K, group_size = size
    weight = fake_driver.random_weight(N, K, group_size, dtype, zero_points=bool(zero_points), bias=N % 16 == 8)
    dense = dequantize(weight)
    on_device = gristmill.to_torch(weight, device)
    prepared = prepare(on_device)
    rows = ROWS if N < 1000 else (1, 8, 9, 33, 64)
    for M in rows:
        x = fake_driver.random_x(M, K, dtype, seed=M)
        padded = torch.full((M, K + 8), torch.nan, device=device, dtype=getattr(torch, dtype))
        padded[:, :K] = tensor_of(x).to(device)
        for entry, choice in _entries(prepared, M) if M else ():
            first = _launch(prepared, choice, padded[:, :K])
            assert torch.equal(first, _launch(prepared, choice, padded[:, :K])), entry.name
            found = array_of(first.cpu().contiguous())
            bias = None if weight.bias is None else np.asarray(weight.bias)
            bound = error_bound(
                x,
                dense,
                bias,
                dtype=dtype,
                roundings=entry.roundings,
                weights_in_dtype=entry.weights_in_dtype,
            )
            ratio = worst_error_over_bound(found, linear_float64(x, dense, bias), bound)
            assert ratio <= 1, f"{entry.name} M={M}: {ratio} of the bound"


def test_selection_takes_the_skinny_kernel_for_few_tokens(device):
    weight = gristmill.to_torch(fake_driver.random_weight(4096, 4096, 128), device)
    prepared = prepare(weight)
    for M in (1, 4, 8):
        gristmill.linear(torch.randn(M, 4096, device=device, dtype=torch.float16), weight)
    chosen = {choice.kernel.entry.source for choice in prepared.choices.values()}
    assert chosen == {SKINNY}


def test_overflow_gives_infinity(device):
    weight = gristmill.to_torch(fake_driver.random_weight(64, 1024, 128), device)
    x = torch.full((2, 1024), 60000.0, device=device, dtype=torch.float16)
    out = gristmill.linear(x, weight)
    assert not out.isnan().any()
    assert out.isinf().any()


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("dtype", "smallest"), [("float16", 2.0**-24), ("bfloat16", 2.0**-133)])
def test_the_smallest_zero_points_count(device, dtype, smallest, group_size):
    """Beside ordinary ones, and in rows of nothing else: all q are 0 there."""
    N, K = 72, 1280
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (N, K))
    codes[:24] = 0
    zero_points = rng.uniform(0, 15, (N, K // group_size))
    zero_points[:48] = smallest * rng.integers(1, 100, (48, K // group_size))
    scales = np.full(zero_points.shape, min(1.0, 2.0**-20 / smallest))
    scales[:24] = min(1.0, 1 / smallest)
    weight = pack(codes, scales, zero_points, group_size=group_size, dtype=dtype)
    dense = dequantize(weight)
    on_device = gristmill.to_torch(weight, device)
    prepared = prepare(on_device)
    for M in (1, 8, 16):
        x = abs(fake_driver.random_x(M, K, dtype))
        for entry, choice in _entries(prepared, M):
            found = array_of(_launch(prepared, choice, tensor_of(x).to(device)).cpu().contiguous())
            bound = error_bound(
                x, dense, dtype=dtype, roundings=entry.roundings, weights_in_dtype=entry.weights_in_dtype
            )
            ratio = worst_error_over_bound(found, linear_float64(x, dense, None), bound)
            assert ratio <= 1, f"{entry.name} M={M}: {ratio} of the bound"
