"""W4A16 GEMM in layout k8x, for NVIDIA sm80 and later and AMD RDNA3 and RDNA4.

C[M,N] = x[M,K] @ ((q - z) * s)[N,K]^T + bias

  x, out      fp16 or bf16, row-major, any row stride
  qweight     int32 [N, ceil(K/8)]: word j of a row holds k = 8j .. 8j+7, value i at bit 4*(i//2) + 16*(i%2)
  scales      [N, ceil(K/group_size)] in the dtype of x
  zero_points like scales, real-valued, or None at compile time: then z = 8
  bias        [N] in the dtype of x, or a null pointer

Grid (ceil(M/BLOCK_M) * ceil(N/BLOCK_N), 1, 1), since y and z end at 65535 blocks. Strides count elements;
every row offset is 64 bits wide. Accumulates in fp32 and rounds once.

How it is laid out
- The product is computed transposed, out^T = W @ x^T. Tensor cores take their left operand from registers, so
  the weights go from packed words to the matrix unit without a trip through shared memory; only x is staged.
- On NVIDIA a fragment of the left operand gives each of four neighbouring lanes one pair (k, k+1) out of
  eight k. Layout k8x stores just such a pair in one nibble position of both halves of a word: all four
  lanes read the same word (a broadcast), each shifts it by its own 4*pair, and one mask yields two halves.
  Seen as [BLOCK_N, words, 4 pairs, 2] the unpacked tile has that register layout already, so the compiler
  inserts no conversion. On RDNA a lane holds whole words of one row, which is the same view with the pairs
  in registers.
- Decode (M <= 16) is bound by reading qweight once. Prefill is bound by the matrix unit and, on Hopper, by
  shared memory: every 64 rows of W read the staged x again.
"""

import triton
import triton.language as tl


@triton.jit
def w4a16_gemm(
    x, qweight, scales, zero_points, bias, out,  # zero_points is None at compile time in variants without
    M, N, K, group_size,
    x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride,
    BLOCK_M: tl.constexpr,  # rows of x per block
    BLOCK_N: tl.constexpr,  # rows of qweight per block
    BLOCK_K: tl.constexpr,  # a multiple of 8
    GROUP_M: tl.constexpr,  # tiles of M that are worked on together
    SCALE_WEIGHTS: tl.constexpr,  # round (q - z) * s to the dtype of x; else scale a tile's sum in fp32
    SCALES: tl.constexpr,  # columns of scales per tile, each for BLOCK_K / SCALES consecutive k
    UNROLL: tl.constexpr,  # tiles per turn of the main loop
    RDNA: tl.constexpr,  # unpack with AMD's instructions
):  # fmt: skip
    HAS_ZERO: tl.constexpr = zero_points is not None
    dtype: tl.constexpr = x.dtype.element_ty
    tile_m, tile_n = _tile_of_block(M, N, BLOCK_M, BLOCK_N, GROUP_M)

    # Rows past the edge wrap around: nothing outside is touched and the loop needs no mask. Not all take
    # the last row, since many copies of one line, past L1, made a half empty tile take up to twice the time.
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_read = (m % M).to(tl.int64)
    n_read = (n % N).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // 8)
    x_tile = x + (m_read * x_row_stride)[:, None] + k[None, :]
    word_tile = qweight + (n_read * qweight_row_stride)[:, None] + word[None, :]
    scale_row = scales + n_read * scales_row_stride
    zero_row = zero_points + n_read * scales_row_stride if HAS_ZERO else scale_row

    # Groups are counted, not divided out: one integer division costs as much as unpacking eight words. Either
    # a group spans whole tiles or a tile spans whole groups; only the floor, with a scale per word, takes
    # what fits neither.
    last_group = (K - 1) // group_size
    tiles_per_group = tl.maximum(group_size // BLOCK_K, 1)
    groups_per_tile = tl.maximum(BLOCK_K // group_size, 1)
    tiles_left = tiles_per_group
    column = tl.arange(0, SCALES) * (BLOCK_K // SCALES)
    group = column // group_size
    tile_group = 0
    scale, column_scale, zero = _scales(
        scale_row, zero_row, tile_group, tl.minimum(group, last_group), SCALE_WEIGHTS, HAS_ZERO
    )

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    full_tiles = K // BLOCK_K
    for tile in tl.range(full_tiles, loop_unroll_factor=UNROLL):
        words = tl.load(word_tile + tile * (BLOCK_K // 8))
        if BLOCK_M > 16 or RDNA:
            x_part = tl.load(x_tile + tile * BLOCK_K)
        else:  # decode has too few rows to wrap over; its tiles do not feel a mask
            x_part = tl.load(x_tile + tile * BLOCK_K, mask=(m < M)[:, None], other=0.0)
        # The next tile's scales are on their way while this tile is multiplied: the pipeliner copies only
        # loads of 4 bytes and more ahead of time. Past the last tile the clamped group keeps the address
        # inside the row.
        if SCALE_WEIGHTS and SCALES == BLOCK_K // 8:
            group = ((tile + 1) * BLOCK_K + column) // group_size
        else:
            tiles_left -= 1
            step = tl.where(tiles_left == 0, groups_per_tile, 0)
            tiles_left = tl.where(tiles_left == 0, tiles_per_group, tiles_left)
            group += step
            tile_group += step
        next_scale, next_column_scale, next_zero = _scales(
            scale_row, zero_row, tl.minimum(tile_group, last_group), tl.minimum(group, last_group),
            SCALE_WEIGHTS, HAS_ZERO,
        )  # fmt: skip
        w = _unpack(words, column_scale, zero, dtype, SCALES, SCALE_WEIGHTS, HAS_ZERO, RDNA)
        acc = _accumulate(acc, w, x_part, scale, SCALE_WEIGHTS)
        scale, column_scale, zero = next_scale, next_column_scale, next_zero

    # K tail. Padding nibbles are real numbers that may even overflow, so they are cleared after the
    # arithmetic; x is not read past K, where a neighbour's NaN may lie.
    k_left = K - full_tiles * BLOCK_K
    if k_left > 0:
        words = tl.load(word_tile + full_tiles * (BLOCK_K // 8), mask=(8 * word < k_left)[None, :], other=0)
        x_part = tl.load(x_tile + full_tiles * BLOCK_K, mask=(k < k_left)[None, :], other=0.0)
        w = _unpack(words, column_scale, zero, dtype, SCALES, SCALE_WEIGHTS, HAS_ZERO, RDNA)
        w = tl.where((k < k_left)[None, :], w, 0.0)
        acc = _accumulate(acc, w, x_part, scale, SCALE_WEIGHTS)

    if bias.to(tl.int64) != 0:  # one uniform branch per block is cheaper than a second set of kernels
        acc += tl.load(bias + n_read).to(tl.float32)[:, None]
    out_tile = out + (m.to(tl.int64) * out_row_stride)[:, None] + n[None, :]
    tl.store(out_tile, tl.trans(acc.to(dtype)), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _tile_of_block(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile (m, n) of this block.

    GROUP_M tiles of M run side by side: the blocks in flight then find rows of both operands in the L2 cache.
    """
    tiles_m = (M - 1) // BLOCK_M + 1  # not M + BLOCK_M - 1, which passes 2^31 for the largest M
    tiles_n = (N - 1) // BLOCK_N + 1
    block = tl.program_id(0)
    first_m = block // (GROUP_M * tiles_n) * GROUP_M
    width = tl.minimum(tiles_m - first_m, GROUP_M)
    within = block % (GROUP_M * tiles_n)
    return first_m + within % width, within // width


@triton.jit
def _scales(scale_row, zero_row, tile_group, group, SCALE_WEIGHTS: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Scales and zero points of a tile: one scale a row for its sum, or SCALES columns for its weights.

    SCALES is at least threads / BLOCK_N, even where all columns fall into one group: with fewer elements than
    threads the compiler repeats the load for every register that wants the value (up to 64 loads a thread
    were seen) instead of sharing it through shared memory.
    """
    scale = 0.0 if SCALE_WEIGHTS else tl.load(scale_row + tile_group)
    column_scale = tl.load(scale_row[:, None] + group[None, :]) if SCALE_WEIGHTS else 0.0
    zero = tl.load(zero_row[:, None] + group[None, :]) if HAS_ZERO else 0.0
    return scale, column_scale, zero


@triton.jit
def _unpack(
    words, column_scale, zero, dtype: tl.constexpr,
    SCALES: tl.constexpr, SCALE_WEIGHTS: tl.constexpr, HAS_ZERO: tl.constexpr, RDNA: tl.constexpr,
):  # fmt: skip
    """Packed words [BLOCK_N, BLOCK_K/8] -> q - z or (q - z) * s, [BLOCK_N, BLOCK_K] in `dtype`.

    A nibble ORed into the low mantissa bits of 1024.0 (fp16: ten bits, 0x6400) or 128.0 (bf16: seven bits,
    0x4300) is the number 1024 + q or 128 + q. Taking the base off is exact; so is taking off base + 8 at
    once. A real zero point is a second subtraction, with one rounding, because base + z would not be exact.

    NVIDIA's compiler packs two halves to an instruction by itself. RDNA's does not, so there fp16 is done in
    inline assembly; and RDNA has no bf16 arithmetic, so bf16 is widened to fp32 (a shift or a mask) and cut
    back to its upper 16 bits, after adding half a unit where that rounds.
    """
    BLOCK_N: tl.constexpr = words.shape[0]
    BLOCK_K: tl.constexpr = words.shape[1] * 8
    MAGIC: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
    BASE: tl.constexpr = 1024 if dtype == tl.float16 else 128
    shift = 4 * tl.arange(0, 4)
    pairs = (words[:, :, None] >> shift[None, None, :]) & 0x000F000F | MAGIC
    pairs = tl.reshape(pairs, (BLOCK_N, SCALES, BLOCK_K // SCALES // 2))

    if RDNA and dtype == tl.float16:
        if HAS_ZERO:
            pairs = _packed_add(pairs, tl.full((1, 1, 1), -0x1BFF1C00, tl.int32))  # twice -1024.0
            pairs = _packed_add(pairs, _twice(zero)[:, :, None] ^ -0x7FFF8000)  # both signs turned
        else:
            pairs = _packed_add(pairs, tl.full((1, 1, 1), -0x1BF71BF8, tl.int32))  # twice -1032.0
        if SCALE_WEIGHTS:
            pairs = _packed_multiply(pairs, _twice(column_scale)[:, :, None])
    elif RDNA:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -0x10000).to(tl.float32, bitcast=True)
        if HAS_ZERO:
            zero = zero[:, :, None].to(tl.float32)
            low = (low - BASE) - zero
            high = (high - BASE) - zero
        else:
            low -= BASE + 8.0
            high -= BASE + 8.0
        if SCALE_WEIGHTS:
            column_scale = column_scale[:, :, None].to(tl.float32)
            low *= column_scale
            high *= column_scale
        low = low.to(tl.int32, bitcast=True)
        high = high.to(tl.int32, bitcast=True)
        if HAS_ZERO or SCALE_WEIGHTS:  # else the numbers are integers of a few bits: cutting them is exact
            low += 0x8000
            high += 0x8000
        pairs = _upper_halves(low, high)

    low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    w = tl.reshape(tl.join(low, high), (BLOCK_N, SCALES, BLOCK_K // SCALES))
    if not RDNA:
        w = (w - BASE) - zero[:, :, None] if HAS_ZERO else w - (BASE + 8)
        if SCALE_WEIGHTS:
            w = w * column_scale[:, :, None]
    return tl.reshape(w, (BLOCK_N, BLOCK_K))


@triton.jit
def _twice(half):
    """The bits of an fp16 in both halves of an int32."""
    bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _packed_add(a, b):
    assembly: tl.constexpr = "v_pk_add_f16 $0, $1, $2"
    return tl.inline_asm_elementwise(assembly, "=v,v,v", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _packed_multiply(a, b):
    assembly: tl.constexpr = "v_pk_mul_f16 $0, $1, $2"
    return tl.inline_asm_elementwise(assembly, "=v,v,v", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _upper_halves(low, high):
    """The upper 16 bits of two int32 in one: those of `low` in the lower half."""
    select = tl.full((1, 1, 1), 0x07060302, tl.int32)
    return tl.inline_asm_elementwise(
        "v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", [high, low, select], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _accumulate(acc, w, x_part, scale, SCALE_WEIGHTS: tl.constexpr):
    """Add a tile's product to `acc`. Scaling the sum costs a second set of accumulators but no rounding."""
    if SCALE_WEIGHTS:
        return tl.dot(w, tl.trans(x_part), acc)
    else:
        return acc + tl.dot(w, tl.trans(x_part)) * scale.to(tl.float32)[:, None]
