"""A small Triton W4A16 kernel, masked in every direction: for tests of the emulator, independent of the one
that we ship."""

import triton
import triton.language as tl


@triton.jit
def w4a16(
    a, q, s, z, bias, c, M, N, K, groups,
    GROUP: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    place = k % 8
    shift = 4 * (place // 2) + 16 * (place % 2)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        kk = k0 + k
        x = tl.load(a + m[:, None] * K + kk[None, :], mask=(m[:, None] < M) & (kk[None, :] < K), other=0.0)
        inside = (kk[:, None] < K) & (n[None, :] < N)
        word = tl.load(q + n[None, :] * ((K + 7) // 8) + (kk // 8)[:, None], mask=inside, other=0)
        nibble = (word >> shift[:, None]) & 15
        at = n[None, :] * groups + (kk // GROUP)[:, None]
        zero = tl.load(z + at, mask=inside, other=0.0).to(tl.float32) if ZERO else 8.0
        w = (nibble.to(tl.float32) - zero) * tl.load(s + at, mask=inside, other=0.0).to(tl.float32)
        acc = tl.dot(x, w.to(a.dtype.element_ty), acc)
    acc += tl.load(bias + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
