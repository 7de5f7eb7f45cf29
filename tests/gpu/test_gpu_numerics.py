"""Numbers on a GPU, element by element against the float64 reference, with poisoned outputs and guards around them."""

import itertools
from dataclasses import dataclass

import fake_driver
import gristmill
import numpy as np
import pytest
from gristmill.packed_weight import dequantize
from gristmill.prepared import prepare
from gristmill.reference import error_bound, linear_float64, worst_error_over_bound

torch = pytest.importorskip("torch")
from gristmill.torch_weights import tensor_of  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = (0, 1, 15, 16, 17, 33)
POISON = 0x7FD5  # a NaN in float16 and in bfloat16
GUARD = 64


@dataclass(frozen=True)
class Case:
    N: int
    K: int
    group_size: int
    dtype: str
    zero_points: bool
    bias: bool

    def weight(self):
        return fake_driver.random_weight(
            self.N,
            self.K,
            self.group_size,
            self.dtype,
            zero_points=self.zero_points,
            bias=self.bias,
            seed=self.N + self.K,
        )


SIZES = itertools.product((1, 7, 8, 24, 72, 136, 576), (8, 72, 128, 576, 1536, 2112), (8, 32, 48, 64, 128, -1))
# Each size in both dtypes; zero points and bias go through their four combinations from size to size.
CASES = [
    Case(*size, dtype, zero_points=bool((i + j) & 1), bias=bool((i + j) & 2))
    for i, size in enumerate(SIZES)
    for j, dtype in enumerate(("float16", "bfloat16"))
]


class Poisoned:
    """A (M, N) output in a buffer whose every element is poison; `check_guards` finds what was written around it."""

    def __init__(self, M, N, dtype, device, row_stride=None, offset=0):
        row_stride = N if row_stride is None else row_stride
        extent = max(0, (M - 1) * row_stride + N)
        self.buffer = torch.full((GUARD + offset + extent + GUARD,), POISON, dtype=torch.int16, device=device)
        self.out = self.buffer.view(dtype).as_strided((M, N), (row_stride, 1), GUARD + offset)

    def check_guards(self):
        around = self.buffer.clone()
        around.as_strided(self.out.shape, self.out.stride(), self.out.storage_offset()).fill_(POISON)
        assert bool((around == POISON).all()), "an element around the output was written"


def check(out, x, weight, entry):
    """Compare with the reference, within the bound of `entry`."""
    host = torch.empty(x.shape, dtype=torch.float64).copy_(x).numpy()
    dense = dequantize(weight)
    bound = error_bound(
        host, dense, weight.bias, dtype=weight.dtype, roundings=entry.roundings, weights_in_dtype=entry.weights_in_dtype
    )
    found = out.double().cpu().numpy()
    worst = worst_error_over_bound(found, linear_float64(host, dense, weight.bias), bound)
    assert worst <= 1, f"{entry.name}: error over bound is {worst}"


def run_and_entry(x, placed, out):
    """`linear` into `out`, and the entry that it took."""
    prepared = prepare(placed)
    prepared.choices.clear()
    assert gristmill.linear(x, placed, out=out) is out
    (choice,) = prepared.choices.values()
    return choice.kernel.entry


def random_rows(M, K, dtype, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((M, K), generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, device):
    weight = case.weight()
    placed = gristmill.to_torch(weight, device)
    dtype = getattr(torch, case.dtype)
    for M in ROWS:
        x = random_rows(M, case.K, dtype, device)
        poisoned = Poisoned(M, case.N, dtype, device)
        if M == 0:
            gristmill.linear(x, placed, out=poisoned.out)
        else:
            entry = run_and_entry(x, placed, poisoned.out)
            check(poisoned.out, x, weight, entry)
            assert torch.equal(gristmill.linear(x, placed), poisoned.out)
        poisoned.check_guards()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("M", [1, 5, 17, 64])
@pytest.mark.parametrize(("N", "K", "group_size"), [(72, 576, 32), (136, 72, 48), (7, 2112, 64), (576, 1536, -1)])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("padding", [0, 1, 8])
def test_misaligned_and_strided(M, N, K, group_size, shift, padding, dtype, device):
    weight = fake_driver.random_weight(N, K, group_size, dtype, zero_points=True, bias=True)
    placed = gristmill.to_torch(weight, device)
    torch_dtype = getattr(torch, dtype)
    storage = torch.full((shift + M * (K + padding),), float("nan"), dtype=torch_dtype, device=device)
    x = storage.as_strided((M, K), (K + padding, 1), shift)
    x.copy_(random_rows(M, K, torch_dtype, device))
    poisoned = Poisoned(M, N, torch_dtype, device, row_stride=N + padding, offset=shift)
    entry = run_and_entry(x, placed, poisoned.out)
    check(poisoned.out, x, weight, entry)
    poisoned.check_guards()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weight_rows_without_padding(dtype, device):
    weight = fake_driver.random_weight(24, 72, 8, dtype, zero_points=True)  # rows of 9 words
    placed = weight.map(lambda array: tensor_of(np.ascontiguousarray(array)).to(device))
    assert placed.qweight.stride() == (9, 1)
    for M in (1, 17):
        x = random_rows(M, 72, getattr(torch, dtype), device)
        out = torch.empty((M, 24), dtype=x.dtype, device=device)
        check(out, x, weight, run_and_entry(x, placed, out))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_act_order(dtype, device):
    weight = fake_driver.random_weight(72, 576, 64, dtype, zero_points=True, bias=True, perm=True)
    placed = gristmill.to_torch(weight, device)
    for M in (1, 17):
        x = random_rows(M, 576, getattr(torch, dtype), device)
        out = torch.empty((M, 72), dtype=x.dtype, device=device)
        check(out, x, weight, run_and_entry(x, placed, out))
        assert torch.equal(gristmill.linear(x, placed), out)


def test_overflow_gives_infinity(device):
    weight = fake_driver.random_weight(24, 576, 32)
    x = torch.full((5, 576), 60000.0, dtype=torch.float16, device=device)
    dense = dequantize(weight)
    reference = linear_float64(np.full((5, 576), 60000.0), dense)
    out = gristmill.linear(x, gristmill.to_torch(weight, device)).double().cpu().numpy()
    assert not np.isnan(out).any()
    assert (np.isinf(out) == (np.abs(reference) > 65520)).all()


def test_deterministic(device):
    weight = fake_driver.random_weight(576, 2112, 64, zero_points=True)
    placed = gristmill.to_torch(weight, device)
    for M in (1, 4, 17, 300):
        x = random_rows(M, 2112, torch.float16, device)
        first = gristmill.linear(x, placed)
        assert all(torch.equal(gristmill.linear(x, placed), first) for _ in range(10))
