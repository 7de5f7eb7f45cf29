"""W4A16 GEMM in layout k8x: C[M,N] = x[M,K] @ ((q - z) * s)[N,K]^T + bias, for NVIDIA sm80+ and AMD RDNA3/4."""

import triton
import triton.language as tl


@triton.jit
def w4a16_gemm(
    x, qweight, scales, zero_points, bias, out,
    M, N, K, group_size,
    x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_of_block(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_read = tl.minimum(m, M - 1).to(tl.int64)
    n_read = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // 8)
    x_tile = x + (m_read * x_row_stride)[None, :] + k[:, None]
    word_tile = qweight + (n_read * qweight_row_stride)[:, None] + word[None, :]
    scale_row = scales + n_read * scales_row_stride
    zero_row = scale_row
    if zero_points is not None:
        zero_row = zero_points + n_read * scales_row_stride

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    full = K // BLOCK_K
    for tile in range(full):
        k0 = tile * BLOCK_K
        if SCALE == "word":
            group = (k0 + 8 * word) // group_size
            scale = tl.load(scale_row[:, None] + group[None, :])
            zero = None if zero_points is None else tl.load(zero_row[:, None] + group[None, :])
        else:
            scale = tl.load(scale_row + k0 // group_size)
            zero = None if zero_points is None else tl.load(zero_row + k0 // group_size)
        words = tl.load(word_tile)
        a = tl.load(x_tile)
        w = _weights(words, scale, zero, SCALE, a.dtype)
        if SCALE == "after":
            acc += tl.dot(w, a) * scale.to(tl.float32)[:, None]
        else:
            acc = tl.dot(w, a, acc)
        word_tile += BLOCK_K // 8
        x_tile += BLOCK_K

    if full * BLOCK_K < K:
        k0 = full * BLOCK_K
        a = tl.load(x_tile, mask=(k0 + k < K)[:, None], other=0.0)
        words = tl.load(word_tile, mask=(k0 + 8 * word < K)[None, :], other=0)
        if SCALE == "word":
            group = (k0 + 8 * word) // group_size
            inside = (k0 + 8 * word < K)[None, :]
            scale = tl.load(scale_row[:, None] + group[None, :], mask=inside, other=0.0)
            zero = None
            if zero_points is not None:
                zero = tl.load(zero_row[:, None] + group[None, :], mask=inside, other=0.0)
        else:
            scale = tl.load(scale_row + k0 // group_size)
            zero = None if zero_points is None else tl.load(zero_row + k0 // group_size)
        w = _weights(words, scale, zero, SCALE, a.dtype)
        w = tl.where((k0 + k < K)[None, :], w, 0.0)
        if SCALE == "after":
            acc += tl.dot(w, a) * scale.to(tl.float32)[:, None]
        else:
            acc = tl.dot(w, a, acc)

    if bias.to(tl.int64) != 0:
        acc += tl.load(bias + n_read).to(tl.float32)[:, None]
    out_tile = out + (m.to(tl.int64) * out_row_stride)[:, None] + n[None, :]
    tl.store(out_tile, tl.trans(acc).to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _tile_of_block(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    block = tl.program_id(0)
    first_m = block // (GROUP_M * tiles_n) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = block % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


@triton.jit
def _weights(words, scale, zero, SCALE: tl.constexpr, dtype: tl.constexpr):
    BLOCK_N: tl.constexpr = words.shape[0]
    BLOCK_K: tl.constexpr = words.shape[1] * 8
    MAGIC: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
    BASE: tl.constexpr = 1024 if dtype == tl.float16 else 128
    pairs = (words[:, :, None] >> (4 * tl.arange(0, 4))[None, None, :]) & 0x000F000F | MAGIC
    low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    q = tl.join(low, high)  # [BLOCK_N, words, 4, 2]
    if zero is None:
        w = q - (BASE + 8)
    elif SCALE == "word":
        w = (q - BASE) - zero[:, :, None, None]
    else:
        w = (q - BASE) - zero[:, None, None, None]
    if SCALE == "word":
        w = (w.to(tl.float32) * scale[:, :, None, None].to(tl.float32)).to(dtype)
    elif SCALE == "before":
        w = w * scale[:, None, None, None]
    return tl.reshape(w, (BLOCK_N, BLOCK_K))
