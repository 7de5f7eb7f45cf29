// The weights of one warp on their way to its registers: a ring of slots in shared memory that no other warp touches,
// so that neither filling nor reading it takes a barrier. The kernel that includes this has said
//   WARP_ROWS            output features of the warp            UNIT         k in a slot
//   ROWS                 of a tile, of all warps                UNIT_STRIDE  units from one of the warp's to its next
//   SPAN                 k that lie in one group for sure       ZEROS        1 with zero points
#pragma once

#include "ptx.h"

constexpr int LINE = UNIT / 2;                    // bytes of a row in a slot
constexpr int PIECES = LINE / 16;                 // of a line, one per copy of a lane
constexpr int COPY_ROWS = 32 / PIECES;            // per copy of a warp
constexpr int UNIT_SPANS = UNIT / SPAN;           // scales of a row in a slot
constexpr int SPAN_PAIRS = (UNIT_SPANS + 1) / 2;  // words of two of these
constexpr int SCALE_ROWS = 32 / UNIT_SPANS;       // per copy of a warp, where each scale has a copy of its own
constexpr int LANE_ROWS = WARP_ROWS / 8;          // rows that a lane has of an operand: row, row + 8, ...

// A slot: weights [WARP_ROWS][LINE bytes], scales [WARP_ROWS][4 * UNIT_SPANS bytes], zero points likewise. A copy is
// aligned and has at least 4 bytes. Where Weight::in_one_piece(), a row's are one piece at the start of its bytes; else
// each has 4 bytes of its own and comes with a neighbour, before it or behind it.
constexpr int SCALES_AT = LINE * WARP_ROWS;
constexpr int SCALES_PITCH = 4 * UNIT_SPANS;
constexpr int SCALES_BYTES = SCALES_PITCH * WARP_ROWS;
constexpr int SLOT_BYTES = SCALES_AT + (1 + ZEROS) * SCALES_BYTES;

static_assert(SPAN == 128 || SPAN == 64 || SPAN == 32);
static_assert(UNIT == 128 || UNIT == 256);
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32);

// The pieces of a row lie at their number XOR this: eight rows of one piece, which ldmatrix reads at a time, are then
// 128 bytes from all banks.
__device__ __forceinline__ u32 swizzle(u32 row) { return row / (8 / PIECES) % PIECES; }
// Where in a slot piece `piece` of row `row` lies.
__device__ __forceinline__ u32 place_of(u32 row, u32 piece) { return row * LINE + 16 * (piece ^ swizzle(row)); }

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

struct Weight {
    const u32 *words;
    const u16 *scales;
    long long zeros_from_scales;    // in elements
    u32 word_stride, scale_stride;  // strides of a weight fit 32 bits
    int N, K, group_size;
    bool one_piece;        // the scales of a row in a unit are copied as one piece, and so are its zero points
    u32 group_reciprocal;  // the next whole number above 2^31 / (group_size / SPAN); 0 for one group

    // The group that k lies in, exact below K = 2^20.
    __device__ __forceinline__ int group(u32 k) const { return int((u64(k / SPAN) * group_reciprocal) >> 31); }
    // With one span in a unit there is no such piece, which the compiler sees here.
    __device__ __forceinline__ bool in_one_piece() const { return UNIT_SPANS > 1 && one_piece; }
};

__device__ __forceinline__ Weight make_weight(
    const u32 *words, const u16 *scales, const u16 *zero_points, long long word_stride, long long scale_stride, int N,
    int K, int group_size) {
    Weight w;
    w.words = words;
    w.scales = scales;
    w.zeros_from_scales = ZEROS ? zero_points - scales : 0;
    w.word_stride = u32(word_stride);
    w.scale_stride = u32(scale_stride);
    w.N = N;
    w.K = K;
    w.group_size = group_size;
    // In elements: where scales and zero points begin, how far rows are apart, and where a row's last piece must end.
    const u64 multiples = u64(scales) / 2 | u64(w.zeros_from_scales) | w.scale_stride | (K + SPAN - 1) / SPAN;
    w.one_piece = group_size == SPAN && multiples % UNIT_SPANS == 0;
    w.group_reciprocal = group_size >= K ? 0 : (1u << 31) / u32(group_size / SPAN) + 1;
    return w;
}

// Bit 1 says which half of 4 aligned bytes the first scale of row `row` is, bit 2 the same of the first zero point. All
// rows that are a multiple of 2 apart are alike.
__device__ __forceinline__ u32 scale_parity(const Weight &w, u32 row) {
    const u32 first = u32(u64(w.scales) / 2) + row * w.scale_stride;
    return (first & 1) << 1 | ((first + u32(w.zeros_from_scales)) & 1) << 2;
}

enum Factor { SCALE, ZERO_POINT };

// Where a lane finds the scales and zero points of its rows in a unit.
struct LaneScales {
    u32 slot, row;  // `row`: of the warp, the lane's first
    u32 parity;     // scale_parity() of that row
    int unit;
};

// That of row `row` + `more`, a multiple of 8 that is known when compiling, for span `span` of the unit.
__device__ __forceinline__ u32 load_scale(const LaneScales &at, const Weight &w, Factor factor, u32 more, int span) {
    u32 place = at.slot + SCALES_AT + factor * SCALES_BYTES + at.row * SCALES_PITCH;
    if (w.in_one_piece()) {
        place += 2 * span;
    } else {
        // The lowest bit of the group is bit 31 of the product in group().
        const u32 group_parity = u32(at.unit * UNIT_SPANS + span) * w.group_reciprocal >> 30;
        place += 4 * span + ((at.parity >> factor ^ group_parity) & 2);
    }
    return load_shared_half(place + more * SCALES_PITCH);
}

// Those of all spans of the unit in all rows that the lane has, two spans a word.
__device__ __forceinline__ void load_scales(
    u32 words[LANE_ROWS][SPAN_PAIRS], const LaneScales &at, const Weight &w, Factor factor) {
    if (w.in_one_piece()) {
        const u32 place = at.slot + SCALES_AT + factor * SCALES_BYTES + at.row * SCALES_PITCH;
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) load_shared_words<SPAN_PAIRS>(words[i], place + 8 * i * SCALES_PITCH);
    } else {
#pragma unroll
        for (int span = 0; span < UNIT_SPANS; ++span)
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i) {
                const u32 scale = load_scale(at, w, factor, 8 * i, span);
                words[i][span / 2] = span % 2 ? words[i][span / 2] | scale << 16 : scale;
            }
    }
}
// That of one span in both halves, out of a row of these.
__device__ __forceinline__ u32 twice_of_span(const u32 words[SPAN_PAIRS], int span) {
    return span % 2 ? twice_high(words[span / 2]) : twice_low(words[span / 2]);
}

// Where a lane copies from in one tile of rows.
struct Source {
    const u32 *words;
    const u16 *scales;
    int rows;        // that the weight still has, from the warp's first on
    int inside_end;  // units before it can be copied whole, with the neighbour of each scale
};

// The row of the warp whose scales a lane copies. Where each has a copy of its own, the lanes of a row's in a unit are
// neighbours: a copy of the warp then touches no more rows than it must, each of which takes the copy unit a cycle.
__device__ __forceinline__ u32 scale_row(const Weight &w) {
    return lane_id() / (w.in_one_piece() ? 1 : UNIT_SPANS) % WARP_ROWS;
}

__device__ __forceinline__ Source source_of(const Weight &w, int first_row) {
    Source s;
    s.words = w.words + u64(first_row + lane_id() / PIECES) * w.word_stride + 4 * (lane_id() % PIECES);
    s.scales = w.scales + u64(first_row + scale_row(w)) * w.scale_stride;
    s.rows = w.N - first_row;
    int whole = s.rows >= WARP_ROWS ? w.K : 0;
    // Behind the last row's last scale the array may end.
    if (s.rows == WARP_ROWS && !w.in_one_piece()) whole = w.group(w.K - 1) * w.group_size;
    s.inside_end = whole / UNIT;
    return s;
}

// Copy the scale, or zero point, of a row for the span from k on, with a neighbour, if there is one.
__device__ __forceinline__ void copy_one_scale(u32 to, const u16 *row, const Weight &w, bool row_inside, int k) {
    const int group = w.group(k);
    const int first = group - int(u64(row + group) / 2 % 2);  // of the two groups in 4 aligned bytes
    const bool wanted = row_inside && k < w.K;
    if (wanted && first == w.group(w.K - 1))
        store_shared_word(to, load_half(row + first));  // the array may end behind it
    else
        copy_async<4>(to, row + first, wanted);
}

// Start the copies of a unit's scales, or zero points, into a slot. What lies past N or K becomes zero; where the unit
// is INSIDE nothing does.
template <bool INSIDE>
__device__ __forceinline__ void copy_scales(u32 slot, const Source &s, const Weight &w, int unit, Factor factor) {
    const u32 to = slot + SCALES_AT + factor * SCALES_BYTES, lane = lane_id();
    const u16 *scales = s.scales + factor * w.zeros_from_scales;
    if (w.in_one_piece()) {
        constexpr int BYTES = UNIT_SPANS > 1 ? 2 * UNIT_SPANS : 4;
        if (lane < WARP_ROWS)
            copy_async<BYTES>(to + lane * SCALES_PITCH, scales + unit * UNIT_SPANS, INSIDE || int(lane) < s.rows);
    } else if (INSIDE) {
        constexpr int COPIES = (WARP_ROWS + SCALE_ROWS - 1) / SCALE_ROWS;
        const u16 *from = scales + w.group(unit * UNIT + lane % UNIT_SPANS * SPAN);
        u64 at = u64(from) / 4 * 4;
        // Two, unrolled, would be predicated, and so take their turn in the case above as well (4 % of the loop).
#pragma unroll COPIES == 2 ? 1 : COPIES
        for (int i = 0; i < COPIES; ++i) {
            if (lane < WARP_ROWS * UNIT_SPANS)
                copy_async<4>(to + i * SCALE_ROWS * SCALES_PITCH + 4 * lane, reinterpret_cast<const u16 *>(at), true);
            at += u64(2 * SCALE_ROWS) * w.scale_stride;
        }
    } else {
#pragma unroll 1
        for (int i = lane; i < WARP_ROWS * UNIT_SPANS; i += 32) {
            const int row = i / UNIT_SPANS;
            const u16 *of_row = w.scales + u64(w.N - s.rows + row) * w.scale_stride + factor * w.zeros_from_scales;
            copy_one_scale(to + 4 * i, of_row, w, row < s.rows, unit * UNIT + i % UNIT_SPANS * SPAN);
        }
    }
}

// Start the copies of one unit into a slot; `place` is that of the lane's first. INSIDE as above.
template <bool INSIDE>
__device__ __forceinline__ void copy_unit(u32 slot, u32 place, const Source &s, const Weight &w, int unit) {
    const int k0 = unit * UNIT;
    const int rows = k0 + 32 * (lane_id() % PIECES) < w.K ? s.rows - lane_id() / PIECES : 0;
    const u32 *from = s.words + k0 / 8;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += COPY_ROWS) {
        copy_16_bytes_async(slot + (place ^ 16 * swizzle(first)) + first * LINE, from, INSIDE || first < rows);
        from += u64(COPY_ROWS) * w.word_stride;
    }
    copy_scales<INSIDE>(slot, s, w, unit, SCALE);
    if (ZEROS) copy_scales<INSIDE>(slot, s, w, unit, ZERO_POINT);
}

// Tiles of ROWS output features that a block takes one after the other.
struct Tiles {
    int first, end, stride;
};

// Which units a warp takes, the same of each tile.
struct Walk {
    Tiles tiles;
    int first_unit, unit_end;
    int first_row;  // of the warp in a tile
};

// The copying side of a ring: units ahead of the multiplying one, over the ends of tiles.
struct Copier {
    const Weight &weight;
    const Walk &walk;
    int tile, unit;
    u32 place;
    Source source;

    __device__ __forceinline__ Copier(const Weight &weight, const Walk &walk)
        : weight(weight), walk(walk), tile(walk.first_unit < walk.unit_end ? walk.tiles.first : walk.tiles.end),
          unit(walk.first_unit), place(place_of(lane_id() / PIECES, lane_id() % PIECES)),
          source(source_of(weight, tile * ROWS + walk.first_row)) {}

    // Start the copies of the next unit, if there is one, as a group.
    __device__ __forceinline__ void copy_next(u32 slot) {
        if (tile < walk.tiles.end) {
            if (unit < source.inside_end)
                copy_unit<true>(slot, place, source, weight, unit);
            else
                copy_unit<false>(slot, place, source, weight, unit);
            unit += UNIT_STRIDE;
            if (unit >= walk.unit_end) {
                unit = walk.first_unit;
                tile += walk.tiles.stride;
                source = source_of(weight, tile * ROWS + walk.first_row);
            }
        }
        close_copies();
    }
};
