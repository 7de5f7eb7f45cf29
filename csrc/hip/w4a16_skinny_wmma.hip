// W4A16 GEMM for 9 to 32 tokens on RDNA3.5 and RDNA4: out[M,N] = x[M,K] @ ((q - z) * s)[N,K]^T + bias
//
//   x, out       fp16 or bf16, row-major; rows of x at multiples of 4 bytes
//   qweight      layout k8x, 8 values a word, [N, ceil(K/8)]; see k8x.h
//   scales       [N, num_groups] in the dtype of x; zero_points the same with ZEROS, else the zero is 8
//   bias         [N] in the dtype of x, or null
//
// Grid: ceil(N / (16 * COLUMNS)) blocks. Block: WAVES waves of 32, which split K.
// LDS: WAVES * COLUMNS * TOKEN_TILES KiB.
// Needs M <= 16 * TOKEN_TILES, K >= 32, K % 8 == 0, a group size of 32, 64, 128, ... (a power of two) or one group for
// all of K.
//
// How it works. One WMMA multiplies 16 tokens by 16 output columns over 16 of K. Tokens are operand A, weights operand
// B, so a lane has one output column throughout: one row of qweight, one scale, one zero point, and eight sums that are
// all scaled alike. The unit of work is a chunk of 32 weights of each row, which always lies in one group: two WMMAs,
// then the scale. The waves of a block take chunks in turn: eight neighbours read one 128-byte line of each row. Every
// wave keeps DEPTH chunks in flight in a ring, weights and activations alike, straight from memory to registers: a wave's
// part of x is its own, so LDS has nothing to share. At the end the waves' sums are added in LDS, in the order of waves.
//
// Numbers. As in w4a16_skinny.hip: q - z exact or rounded once, everything else float32, one rounding at the end.
//
// What binds, by count (see w4a16_skinny.hip). Issue slots a weight and lane, a WMMA counted as the 32 (gfx1151) or 16
// (gfx1201) cycles that it keeps a SIMD busy:
//     tokens           16            32
//     fp16          7.1 / 3.9    11.7 / 6.5      gfx1151 / gfx1201, of 15 / 9.6 that fit into the time of reading
//     fp16, zeros   8.4 / 4.8    13.0 / 7.3
//     bf16         10.0 / 5.5    14.6 / 7.7
//     bf16, zeros  10.9 / 5.9    15.5 / 8.4      at 32 tokens gfx1151 is at the border
// gfx11 keeps every weight in two lanes and unpacks it twice: that is the difference.

#include "k8x.h"

// Macros, all of them from the row:
//   TOKEN_TILES     tiles of 16 tokens
//   COLUMNS         tiles of 16 output columns of a wave
//   DEPTH           chunks in flight
//   WAVES           of a block
//   WAVES_PER_SIMD  occupancy that registers are to allow
//   BF16            bfloat16 instead of float16
//   ZEROS           zero points are given; else all are 8
#pragma clang diagnostic error "-Wundef"  // one that is missing would read as 0 and build another kernel

namespace {

#if BF16
typedef Bfloat Format;
#else
typedef Half Format;
#endif

// --- Fragments -------------------------------------------------------------------------------------------------------
// Operands A and B alike: lane l holds row (A) or column (B) l % 16. The order of k is free as long as both agree.
//   gfx11: 16 values of k, the same in lane l and lane l + 16. A lane takes all four words of a chunk, two a WMMA.
//   gfx12: 8 values of k; lanes 16..31 hold other ones. Lanes below 16 take words 0 and 1 of a chunk, the others words
//          2 and 3, one a WMMA: both halves stay in the chunk, so in one group, at any group size.
// Result: eight floats of column l % 16, token 2 * i + l / 16 (gfx11) or i + 8 * (l / 16) (gfx12).
#if defined(__GFX11__)
constexpr int LANE_WORDS = 4;  // of a chunk
typedef f16x16 HalfFragment;
typedef i16x16 BfloatFragment;
DEVICE int first_lane_word(int) { return 0; }
DEVICE int token_of_sum(int i, int lane) { return 2 * i + lane / 16; }
DEVICE f32x8 wmma(HalfFragment a, HalfFragment b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
}
DEVICE f32x8 wmma(BfloatFragment a, BfloatFragment b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
}
#elif defined(__GFX12__)
constexpr int LANE_WORDS = 2;
typedef f16x8 HalfFragment;
typedef i16x8 BfloatFragment;
DEVICE int first_lane_word(int lane) { return lane / 16 * 2; }
DEVICE int token_of_sum(int i, int lane) { return i + 8 * (lane / 16); }
DEVICE f32x8 wmma(HalfFragment a, HalfFragment b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}
DEVICE f32x8 wmma(BfloatFragment a, BfloatFragment b, f32x8 c) {
  return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
}
#else
#error "WMMA of this architecture is not known here"
#endif

#if BF16
typedef BfloatFragment Fragment;
#else
typedef HalfFragment Fragment;
#endif

constexpr int WMMAS = 2;                                  // of a chunk
constexpr int FRAGMENT_WORDS = LANE_WORDS / WMMAS;
constexpr int CHUNK_WORDS = 4;
constexpr int SUMS = 8;                                   // of a lane and a tile
// Of a lane, in the order (column tile * TOKEN_TILES + token tile) * SUMS + i.
constexpr int OUTPUTS = COLUMNS * TOKEN_TILES * SUMS;
constexpr int THREADS = WAVES * WAVE;

typedef u32 LaneWords __attribute__((ext_vector_type(LANE_WORDS), aligned(4)));
struct WeightFragment { typename Format::Pair pair[FRAGMENT_WORDS][4]; };
struct ActivationFragment { u32x4 piece[FRAGMENT_WORDS]; };

// One chunk of all rows and tokens of the wave, in registers.
struct Slot {
  LaneWords words[COLUMNS];
  ActivationFragment x[TOKEN_TILES][WMMAS];
  u32 scale[COLUMNS];  // 16 bits each; as wide as a register, so that they stay where they were loaded
  u32 zero[COLUMNS];
};

// The lane's rows: the k of its first word of chunk 0.
struct Rows {
  const u32* qweight[COLUMNS];
  const u16* scales[COLUMNS];
  const u16* zero_points[COLUMNS];
  const u16* x[TOKEN_TILES];
};

// K % 32 != 0: the last chunk is moved back to end with the row (see w4a16_skinny.hip), and repeats words.
DEVICE int first_word(int chunk, int words) { return minimum(chunk * CHUNK_WORDS, words - CHUNK_WORDS); }

DEVICE void load(const Rows& rows, int chunk, int words, int group_shift, Slot& slot) {
  const int word = first_word(chunk, words), group = chunk >> group_shift;
  for (int c = 0; c < COLUMNS; ++c)
    slot.words[c] = __builtin_nontemporal_load(reinterpret_cast<const LaneWords*>(rows.qweight[c] + word));
  for (int t = 0; t < TOKEN_TILES; ++t)
    for (int j = 0; j < LANE_WORDS; ++j)
      slot.x[t][j / FRAGMENT_WORDS].piece[j % FRAGMENT_WORDS] =
          *reinterpret_cast<const u32x4_at_word*>(rows.x[t] + 8 * (word + j));
  for (int c = 0; c < COLUMNS; ++c) {
    slot.scale[c] = rows.scales[c][group];
    if (ZEROS) slot.zero[c] = rows.zero_points[c][group];
  }
}

// Words that the moved chunk shares with the one before must count once: their activations become zero.
DEVICE void drop_repeated(Slot& slot, int chunk, int words, int lane) {
  const int repeated = chunk * CHUNK_WORDS - first_word(chunk, words) - first_lane_word(lane);
  for (int t = 0; t < TOKEN_TILES; ++t)
    for (int j = 0; j < LANE_WORDS; ++j)
      if (j < repeated) slot.x[t][j / FRAGMENT_WORDS].piece[j % FRAGMENT_WORDS] = 0;
}

// acc += the products of one chunk.
DEVICE void multiply(const Slot& slot, float (&acc)[OUTPUTS]) {
  for (int c = 0; c < COLUMNS; ++c) {
    const auto zero = Format::zero(ZEROS ? taken_here(slot.zero[c]) : 0);
    const float scale = Format::to_float(taken_here(slot.scale[c]));
    f32x8 sum[TOKEN_TILES] = {};
    for (int j = 0; j < WMMAS; ++j) {
      WeightFragment w;
      for (int i = 0; i < FRAGMENT_WORDS; ++i)
        Format::unpack<ZEROS>(slot.words[c][j * FRAGMENT_WORDS + i], zero, w.pair[i]);
      for (int t = 0; t < TOKEN_TILES; ++t)
        sum[t] = wmma(__builtin_bit_cast(Fragment, slot.x[t][j]), __builtin_bit_cast(Fragment, w), sum[t]);
    }
    for (int t = 0; t < TOKEN_TILES; ++t)
      for (int i = 0; i < SUMS; ++i) {
        float& total = acc[(c * TOKEN_TILES + t) * SUMS + i];
        total = __builtin_fmaf(sum[t][i], scale, total);
      }
  }
}

SHARED float sums[WAVES][OUTPUTS][WAVE];

}  // namespace

// clang-format off
KERNEL __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS), amdgpu_waves_per_eu(WAVES_PER_SIMD)))
void w4a16_skinny_wmma(
    const u16* x, const u32* qweight, const u16* scales,
#if ZEROS
    const u16* zero_points,
#endif
    const u16* bias, u16* out, int M, int N, int K, int group_size,
    long x_row_stride, long qweight_row_stride, long scales_row_stride, long out_row_stride) {
// clang-format on
#if !ZEROS
  const u16* zero_points = nullptr;
#endif
  const int lane = thread_index() % WAVE, wave = uniform(thread_index() / WAVE);
  const int first_column = block_index() * 16 * COLUMNS;
  const int words = K / 8, chunks = ceil_div(words, CHUNK_WORDS);
  const int group_shift = group_size >= K ? 31 : __builtin_ctz(group_size) - 5;

  // Tokens past M and columns past N are read as the last one and never written.
  Rows rows;
  for (int t = 0; t < TOKEN_TILES; ++t)
    rows.x[t] = x + minimum(16 * t + lane % 16, M - 1) * x_row_stride + 8 * first_lane_word(lane);
  for (int c = 0; c < COLUMNS; ++c) {
    const long n = minimum(first_column + 16 * c + lane % 16, N - 1);
    rows.qweight[c] = qweight + n * qweight_row_stride + first_lane_word(lane);
    rows.scales[c] = scales + n * scales_row_stride;
    rows.zero_points[c] = zero_points + n * scales_row_stride;
  }

  // The wave's chunks are wave, wave + WAVES, ... Behind its last one the ring loads the block's last chunk, whose lines
  // are at hand, and nobody uses it.
  int chunk = wave;
  Slot ring[DEPTH];
  const auto fetch = [&](Slot& slot, int next) { load(rows, minimum(next, chunks - 1), words, group_shift, slot); };
  float acc[OUTPUTS] = {};
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    fetch(ring[i], chunk + i * WAVES);
    end_turn(acc);  // in order, as the loop will wait for them in order
  }

  // Whole turns of the ring, without a branch: with one, the compiler loses count of the loads in flight and waits for
  // all of them. Then what is left, the moved chunk among it.
  const int whole_chunks = words / CHUNK_WORDS;
  for (; chunk + (DEPTH - 1) * WAVES < whole_chunks; chunk += DEPTH * WAVES) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      multiply(ring[i], acc);
      end_turn(acc);
      fetch(ring[i], chunk + (DEPTH + i) * WAVES);
    }
  }
#pragma unroll
  for (int i = 0; i < DEPTH; ++i, chunk += WAVES)
    if (chunk < chunks) {
      if (chunk >= whole_chunks) drop_repeated(ring[i], chunk, words, lane);
      multiply(ring[i], acc);
    }

  for (int i = 0; i < OUTPUTS; ++i) sums[wave][i][lane] = acc[i];
  barrier_for_lds();
  for (int i = wave; i < OUTPUTS; i += WAVES) {
    float total = 0;
    for (int w = 0; w < WAVES; ++w) total += sums[w][i][lane];
    const int n = first_column + i / (TOKEN_TILES * SUMS) * 16 + lane % 16;
    const int m = i / SUMS % TOKEN_TILES * 16 + token_of_sum(i % SUMS, lane);
    if (m >= M || n >= N) continue;
    if (bias) total += Format::to_float(bias[n]);
    out[m * out_row_stride + n] = Format::from_float(total);
  }
}
