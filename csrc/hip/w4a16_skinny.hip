// W4A16 GEMM for few tokens on RDNA3.5 and RDNA4: out[M,N] = x[M,K] @ ((q - z) * s)[N,K]^T + bias, M <= TOKENS
//
//   x, out       fp16 or bf16, row-major, rows of any stride and alignment
//   qweight      layout k8x, 8 values a word, [N, ceil(K/8)]; see k8x.h
//   scales       [N, num_groups] in the dtype of x; zero_points the same with ZEROS, else the zero is 8
//   bias         [N] in the dtype of x, or null
//
// Grid: any number of blocks; one per multiprocessor (a pair of compute units) is meant. Block: WAVES waves of 32.
// LDS: as many steps of TOKENS * 2048 bytes as the launch gives, one at least (see "Activations").
// Needs M <= TOKENS, K >= 32 and a group size that is K or more, or 32, 64, 128, ... (with ANY_GROUP any multiple of 8,
// and K < 2^19). Takes any N >= 1 and any K from there.
//
// How it works. Reading the weights once is all that counts at small M, so each wave streams whole rows of qweight:
// a lane's 16-byte load is 32 weights, a wave's load 1024 weights in 512 consecutive bytes, called a step. A wave keeps
// ROWS rows at once, so that activations read from LDS serve ROWS times, and DEPTH steps in flight in a ring: a slot is
// loaded again as soon as it has been used, across the ends of rows, so the memory system never waits for arithmetic.
// Waves do not talk to each other; the launch is as wide as the device and each wave walks down the rows.
//
// Numbers. q - z is exact with the implied zero, else rounded once to the dtype of x. Products and sums are float32:
// a lane adds the 32 products of its chunk (one group, one scale) with v_dot2, multiplies by the scale and adds to its
// accumulator in one fma; lanes meet in a tree of 5 additions; then the bias, then the one rounding. A product passes
// no more than K + 1 float32 additions. v_dot2 takes denormals of bf16 and float32 as zero: activations, and sums before
// the scale, below 2^-126 may vanish. Sums before the scale that pass float32 are infinite or NaN. An infinity that meets
// a weight of zero is NaN, as in the reference; an overflow of the output is an infinity.
//
// What binds, by count. VALU instructions a weight and lane in the main loop, executed in the emulator, gfx1151 (gfx1201
// within 10 %; all rows in ../w4a16_skinny_hip_counts.py):
//     tokens            1     2     3     4     6     8        128-bit LDS reads: tokens / 16
//     fp16            1.8   2.3   2.9   3.4   4.4   5.4
//     fp16, zeros     2.4   3.0   3.5   3.9   5.0   6.0
//     bf16            3.5   4.0   4.5   5.0   6.1   7.1
//     bf16, zeros     3.7   4.3   4.8   5.3   6.4   7.5
// A weight takes 0.516 bytes (group size 128). At 2.9 GHz and one instruction a SIMD and cycle gfx1151 (80 SIMDs) issues
// 15 a weight in the time that 256 GB/s need to bring it, gfx1201 (128 SIMDs, 640 GB/s) 9.6: memory binds at every M
// here. Predicted, not measured; v_dot2 is taken to issue every cycle.

#include "k8x.h"

// Macros, all of them from the row:
//   TOKENS          that the code holds; M may be less
//   ROWS            output rows of a wave
//   DEPTH           steps in flight, each of ROWS 128-bit loads a lane
//   WAVES           of a block
//   WAVES_PER_SIMD  occupancy that registers are to allow
//   BF16            bfloat16 instead of float16
//   ZEROS           zero points are given; else all are 8
//   ANY_GROUP       0: group size 32, 64, 128, ... or one group; 1: any multiple of 8, a scale for each word
#pragma clang diagnostic error "-Wundef"  // one that is missing would read as 0 and build another kernel

namespace {

#if BF16
typedef Bfloat Format;
#else
typedef Half Format;
#endif

constexpr int CHUNK_WORDS = 4;                      // words of a 128-bit load: 32 weights
constexpr int STEP_WORDS = WAVE * CHUNK_WORDS;      // words of a row that a wave takes at once: 1024 weights
constexpr int PIECE_BYTES = 16;                     // activations that meet one word
constexpr int TOKEN_BYTES = STEP_WORDS * PIECE_BYTES;
constexpr int STEP_BYTES = TOKENS * TOKEN_BYTES;    // activations of a step in LDS
constexpr int THREADS = WAVES * WAVE;
constexpr int OUTPUTS = TOKENS * ROWS;              // of a wave: output token * ROWS + row
constexpr int SCALES = ANY_GROUP ? CHUNK_WORDS : 1; // of a chunk

typedef typename Format::Pair Pair;
struct alignas(16) Piece { Pair pair[4]; };         // 8 activations, k in order

// All that a launch passes, and what follows from it. The same in all lanes.
struct Problem {
  const u16* x;
  const u32* qweight;
  const u16* scales;
  const u16* zero_points;
  const u16* bias;
  u16* out;
  int M, N, K;
  long x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride;  // in elements
  int words;         // of a row
  int last_chunk;    // of a row
  int steps;         // of a row
  int band_steps;    // of which LDS holds the activations at once
  int group_shift;   // chunk >> group_shift is its group
  u32 group_words;   // ANY_GROUP: words of a group, and the number that divides by it
  u32 group_inverse;
};

// Groups. A chunk of 32 weights starts at a multiple of 32, so it lies in one group if the group size is a multiple of
// 32; for a power of two a shift finds it. One group for all of K is shift 31.
// ANY_GROUP divides word indices by the group's words: floor(word / d) = floor(word * m / 2^32) with
// m = floor((2^32 - 1) / d) + 1 is exact while word * d < 2^32, hence K < 2^19. d = 1 needs no division.
DEVICE void plan_groups(Problem& p, int group_size) {
  p.group_shift = group_size >= p.K ? 31 : __builtin_ctz(group_size) - 5;
  p.group_words = group_size >= p.K ? 0x7fffffff : u32(group_size) / 8;
  p.group_inverse = 0xffffffffu / p.group_words + 1;
}

DEVICE int group_of_chunk(const Problem& p, int chunk) { return chunk >> p.group_shift; }

DEVICE int group_of_word(const Problem& p, int word) {
  const int group = int((u64(u32(word)) * p.group_inverse) >> 32);
  return p.group_words == 1 ? word : group;
}

// The end of a row. Words behind it belong to nobody, so the last chunk is moved back to end with the row: it then
// repeats words of the chunk before, and the activations that meet those in LDS are zero. Lanes past the row do the
// same with all their activations zero.
DEVICE int first_word(const Problem& p, int chunk) { return minimum(chunk * CHUNK_WORDS, p.words - CHUNK_WORDS); }

// --- Activations -----------------------------------------------------------------------------------------------------
// LDS holds them in the order of use: [step][token][word of the chunk][lane], 16 bytes each, so that the 32 lanes of a
// read lie side by side and no two meet in a bank. Launches give what fits the device: if that is all of K the
// activations stay (resident); if not, the block walks K in bands of `band_steps` and refills LDS for each.

SHARED extern char lds[];

DEVICE u32x4 load_activations(const Problem& p, const u16* row, int k, bool aligned) {
  if (aligned && k + 8 <= p.K) return *reinterpret_cast<const u32x4*>(row + k);
  u32x4 piece = 0;
#pragma nounroll
  for (int i = 0; i < 8; ++i)
    if (k + i < p.K) piece[i / 2] |= u32(row[k + i]) << (16 * (i % 2));
  return piece;
}

// Fill LDS with the activations of steps first_step .. first_step + count - 1.
DEVICE void fill_lds(const Problem& p, int first_step, int count) {
  const bool aligned = ((u64(p.x) | u64(2 * p.x_row_stride)) & 15) == 0;
#pragma nounroll
  for (int m = 0; m < TOKENS; ++m) {
    const u16* row = p.x + long(minimum(m, p.M - 1)) * p.x_row_stride;
#pragma nounroll
    for (int i = thread_index(); i < count * STEP_WORDS; i += THREADS) {
      // Thirty-two threads take 512 consecutive bytes of the row, and eight at a time store 128 consecutive bytes.
      const int lane = (i >> 2 & 24) | (i & 7), part = i >> 3 & 3, step = i >> 7;
      const int chunk = (first_step + step) * WAVE + lane;
      const int word = first_word(p, chunk) + part;
      u32x4 piece = 0;
      if (chunk <= p.last_chunk && word >= chunk * CHUNK_WORDS) piece = load_activations(p, row, 8 * word, aligned);
      char* to = lds + step * STEP_BYTES + m * TOKEN_BYTES + (part * WAVE + lane) * PIECE_BYTES;
      *reinterpret_cast<u32x4*>(to) = piece;
    }
  }
}

DEVICE void next_band(const Problem& p, int first_step) {
  barrier_for_lds();  // all waves have read the band before
  fill_lds(p, first_step, minimum(p.band_steps, p.steps - first_step));
  barrier_for_lds();
}

// --- Weights ---------------------------------------------------------------------------------------------------------

// One step of ROWS rows in registers.
struct Slot {
  u32x4 words[ROWS];
  u32 scale[ROWS][SCALES];  // 16 bits each; as wide as a register, so that they stay where they were loaded
  u32 zero[ROWS][SCALES];
  u32 bias;  // of the output that the lane stores
};

// Where the next load goes: the rows of a tile and the step in them.
struct Cursor {
  const u32* qweight[ROWS];
  const u16* scales[ROWS];
  const u16* zero_points[ROWS];
  u32 bias_offset;  // in bytes
  int tile, step;
};

// The output that a lane stores: token lane / ROWS, row lane % ROWS of the tile.
DEVICE int token_of_lane(int lane) { return lane / ROWS; }
DEVICE int column_of_lane(int tile, int lane) { return tile * ROWS + lane % ROWS; }

// Rows past N are read as the last one and never written.
DEVICE void point_at(const Problem& p, Cursor& cursor, int tile, int lane) {
  for (int r = 0; r < ROWS; ++r) {
    const long n = minimum(tile * ROWS + r, p.N - 1);
    cursor.qweight[r] = p.qweight + n * p.qweight_row_stride;
    cursor.scales[r] = p.scales + n * p.scales_row_stride;
    cursor.zero_points[r] = p.zero_points + n * p.scales_row_stride;
  }
  cursor.bias_offset = 2 * minimum(column_of_lane(tile, lane), p.N - 1);
  cursor.tile = tile;
  cursor.step = 0;
}

DEVICE void load(const Problem& p, const Cursor& cursor, int lane, bool any_left, Slot& slot) {
  // Behind the last tile the ring would run on: all lanes then read one line, so that no bandwidth is spent.
  const int chunk = any_left ? minimum(cursor.step * WAVE + lane, p.last_chunk) : 0;
  const int word = first_word(p, chunk);
  for (int r = 0; r < ROWS; ++r) slot.words[r] = load_once(cursor.qweight[r], 4 * word);
  for (int i = 0; i < SCALES; ++i) {
    const u32 offset = 2 * (ANY_GROUP ? group_of_word(p, word + i) : group_of_chunk(p, chunk));
    for (int r = 0; r < ROWS; ++r) {
      slot.scale[r][i] = *at_byte<u16>(cursor.scales[r], offset);
      if (ZEROS) slot.zero[r][i] = *at_byte<u16>(cursor.zero_points[r], offset);
    }
  }
  // Loaded with every step: a load when the row ends would come last and wait for the whole ring. Without a bias any
  // memory of N numbers will do.
  slot.bias = *at_byte<u16>(p.bias ? p.bias : p.scales, cursor.bias_offset);
}

// acc += the products of one step.
DEVICE void multiply(const Slot& slot, const char* activations, float (&acc)[OUTPUTS]) {
  float sum[OUTPUTS] = {}, scale[ROWS];
  typename Format::Zero zero[ROWS] = {};
  for (int i = 0; i < CHUNK_WORDS; ++i) {
    Piece piece[TOKENS];
    for (int m = 0; m < TOKENS; ++m)
      piece[m] = *reinterpret_cast<const Piece*>(activations + m * TOKEN_BYTES + i * WAVE * PIECE_BYTES);
    for (int r = 0; r < ROWS; ++r) {
      if (i < SCALES) {
        scale[r] = Format::to_float(taken_here(slot.scale[r][i]));
        if (ZEROS) zero[r] = Format::zero(taken_here(slot.zero[r][i]));
      }
      Pair w[4];
      Format::unpack<ZEROS>(slot.words[r][i], zero[r], w);
      for (int m = 0; m < TOKENS; ++m) {
        float& total = sum[m * ROWS + r];
        for (int j = 0; j < 4; ++j) total = Format::dot(w[j], piece[m].pair[j], total);
        if (ANY_GROUP || i == CHUNK_WORDS - 1) {
          acc[m * ROWS + r] = __builtin_fmaf(total, scale[r], acc[m * ROWS + r]);
          total = 0;
        }
      }
    }
  }
}

// --- Results ---------------------------------------------------------------------------------------------------------

constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

// Sum COUNT values over the lanes so that lane l ends with the total of value l % COUNT. Where values remain, a step
// keeps one half of them and sends the other to the lane across, so it costs as much as the values that are left.
template <int COUNT, int MASK>
DEVICE float sum_over_lanes(float* value, int lane) {
  if constexpr (MASK == WAVE) {
    return value[0];
  } else if constexpr (COUNT == 1) {
    value[0] += from_lane_xor<MASK>(value[0]);
    return sum_over_lanes<1, 2 * MASK>(value, lane);
  } else {
    const bool odd = lane & MASK;
    for (int i = 0; i < COUNT / 2; ++i) {
      const float keep = odd ? value[2 * i + 1] : value[2 * i], send = odd ? value[2 * i] : value[2 * i + 1];
      value[i] = keep + from_lane_xor<MASK>(send);
    }
    return sum_over_lanes<COUNT / 2, 2 * MASK>(value, lane);
  }
}

// Reduce the tile's accumulators, add the bias, round, store, and clear them.
DEVICE void finish(const Problem& p, int tile, int lane, u32 bias, float (&acc)[OUTPUTS]) {
  constexpr int COUNT = next_power_of_two(OUTPUTS);
  static_assert(COUNT <= WAVE, "a wave stores one value a lane");
  float value[COUNT] = {};
  for (int i = 0; i < OUTPUTS; ++i) {
    value[i] = acc[i];
    acc[i] = 0;
  }
  float total = sum_over_lanes<COUNT, 1>(value, lane);
  if (p.bias) total += Format::to_float(bias);
  const int m = token_of_lane(lane), n = column_of_lane(tile, lane);
  if (m >= p.M || m >= TOKENS || n >= p.N) return;
  p.out[m * p.out_row_stride + n] = Format::from_float(total);
}

}  // namespace

// clang-format off
KERNEL __attribute__((amdgpu_flat_work_group_size(THREADS, THREADS), amdgpu_waves_per_eu(WAVES_PER_SIMD)))
void w4a16_skinny(
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
  const Launch launch = launch_of_kernel<THREADS>();
  Problem p = {x, qweight, scales, zero_points, bias, out, M, N, K,
               x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride, 0, 0, 0, 0, 0, 0, 0};
  p.words = ceil_div(K, 8);
  p.last_chunk = (p.words - 1) / CHUNK_WORDS;
  p.steps = ceil_div(p.words, STEP_WORDS);
  p.band_steps = minimum(p.steps, launch.lds_bytes / STEP_BYTES);
  plan_groups(p, group_size);
  const bool resident = p.band_steps == p.steps;
  const int lane = thread_index() % WAVE, wave = uniform(thread_index() / WAVE);

  // Rounds of tiles. All waves would leave the last round ragged; only as many as make the rounds even take part.
  const int tiles = ceil_div(N, ROWS);
  const int rounds = ceil_div(tiles, launch.blocks * WAVES);
  const int workers = ceil_div(tiles, launch.blocks * rounds);  // waves of a block that have tiles
  const int stride = launch.blocks * workers;
  int tile = wave * launch.blocks + block_index();
  const int tiles_left = wave < workers && tile < tiles ? (tiles - 1 - tile) / stride + 1 : 0;
  int idle_rounds = rounds - tiles_left;

  // The first weights are on their way before the block turns to the activations.
  Slot ring[DEPTH];
  Cursor cursor;
  const auto fetch = [&](Slot& slot, bool any_left) {
    load(p, cursor, lane, any_left, slot);
    if (++cursor.step == p.steps) point_at(p, cursor, cursor.tile + stride, lane);
  };
  int steps_left = tiles_left * p.steps;
  point_at(p, cursor, tile, lane);
  for (int i = 0; i < DEPTH; ++i) fetch(ring[i], i < steps_left);
  if (resident) {
    fill_lds(p, 0, p.steps);
    barrier_for_lds();
  }

  // The loop has one way out, at its end: with more, the compiler loses count of the loads in flight and waits for all.
  float acc[OUTPUTS] = {};
  int step = 0, band_step = 0;
  while (steps_left > 0) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const bool live = steps_left > 0;
      if (live) {
        if (!resident && band_step == 0) next_band(p, step);
        multiply(ring[i], lds + band_step * STEP_BYTES + lane * PIECE_BYTES, acc);
      }
      const u32 bias = ring[i].bias;
      end_turn(acc);
      fetch(ring[i], steps_left > DEPTH);
      if (++band_step == p.band_steps) band_step = 0;
      if (live && ++step == p.steps) {
        finish(p, tile, lane, bias, acc);
        tile += stride;
        step = band_step = 0;
      }
      --steps_left;
    }
  }
  // Waves without a tile in the last round, or at all, still carry activations and meet the others at the barriers.
  if (!resident)
    for (; idle_rounds > 0; --idle_rounds)
      for (int step = 0; step < p.steps; step += p.band_steps) next_band(p, step);
}
