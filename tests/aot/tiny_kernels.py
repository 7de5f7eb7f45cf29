"""Small Triton kernels for the tests of the build; not GEMMs worth running."""

import triton
import triton.language as tl


@triton.jit
def tiny(x, qweight, out, M, N, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tile = row[:, None] * BLOCK + row[None, :]
    a = tl.load(x + tile, mask=row[:, None] < M, other=0.0)
    b = tl.load(qweight + tile, mask=row[None, :] < N, other=0.0)
    tl.store(out + tile, tl.dot(a, b).to(tl.float16), mask=row[:, None] < M)


@triton.jit
def crowded(x, qweight, out, M, N, BLOCK: tl.constexpr):
    """Keeps many values alive at once; with few registers allowed, some go to memory."""
    row = tl.arange(0, BLOCK)
    tile = row[:, None] * BLOCK + row[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(M):
        total = tl.dot(tl.load(x + tile), tl.load(qweight + tile), total)
        total += tl.sort(total, dim=1)
    tl.store(out + tile, total.to(tl.float16))


@triton.jit
def wants_scratch(x, qweight, out, M, N, BLOCK: tl.constexpr):
    """A tensor descriptor made on the device lives in global scratch memory."""
    descriptor = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
    row = tl.arange(0, BLOCK)
    tl.store(out + row[:, None] * N + row[None, :], descriptor.load([0, 0]))


@triton.jit
def wrong(x, qweight, out, M, N, BLOCK: tl.constexpr):
    tl.store(out, tl.load(x) + no_such_name)  # noqa: F821
