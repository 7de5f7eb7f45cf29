// The weights of one warp on their way to its registers: a ring of slots in shared memory that no other warp touches,
// so that neither filling nor reading it takes a barrier. The kernel that includes this has said
//   WARP_ROWS            output features of the warp            UNIT         k in a slot
//   ROWS                 of a tile, of all warps                UNIT_STRIDE  units from one of the warp's to its next
//   SPAN                 k that lie in one group for sure       ZEROS        1 with zero points
//   EXACT                1 if a group is SPAN k, which puts the scales of a row in a unit into one piece
#pragma once

#include "k8x_mma.h"

constexpr int LINE = UNIT / 2;                    // bytes of a row in a slot
constexpr int PIECES = LINE / 16;                 // of a line, one per copy of a lane
constexpr int COPY_ROWS = 32 / PIECES;            // per copy of a warp
constexpr int UNIT_SPANS = UNIT / SPAN;           // scales of a row in a slot
constexpr int SCALE_ROWS = 32 / UNIT_SPANS;       // per copy of a warp, unless in one piece

// A slot: weights [WARP_ROWS][LINE bytes], scales [WARP_ROWS][4 * UNIT_SPANS bytes], zero points likewise; Factors may
// take the place of both. A copy is aligned and has at least 4 bytes: a scale comes with a neighbour, before it
// or behind it. If EXACT all of a row are neighbours, else each has 4 bytes of its own.
constexpr int SCALES_AT = LINE * WARP_ROWS;
constexpr int SCALES_PITCH = 4 * UNIT_SPANS;
constexpr int SCALES_BYTES = SCALES_PITCH * WARP_ROWS;
constexpr int SLOT_BYTES = SCALES_AT + (1 + ZEROS) * SCALES_BYTES;

static_assert(SPAN == 64 || SPAN == 32 || (SPAN == 128 && !EXACT));
static_assert(UNIT == 128 || UNIT == 256);
static_assert(WARP_ROWS == 16 || WARP_ROWS == 32);

// The pieces of a row lie at their number XOR this: eight rows of one piece, which ldmatrix reads at a time, are then
// 128 bytes from all banks.
__device__ __forceinline__ u32 swizzle(u32 row) { return row / (8 / PIECES) % PIECES; }
// Where in a slot piece `piece` of row `row` lies.
__device__ __forceinline__ u32 place_of(u32 row, u32 piece) { return row * LINE + 16 * (piece ^ swizzle(row)); }

struct Weight {
    const u32 *words;
    const u16 *scales;
    long long zeros_from_scales;    // in elements
    u32 word_stride, scale_stride;  // strides of a weight fit 32 bits
    int N, K, group_size;
    u32 groups;  // the next whole number above 2^31 / (group_size / SPAN), exact below K = 2^20; 0 for one group

    __device__ __forceinline__ int group(u32 k) const {
        return EXACT ? k / SPAN : int((u64(k / SPAN) * groups) >> 31);
    }
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
    w.groups = group_size >= K ? 0 : (1u << 31) / u32(group_size / SPAN) + 1;
    return w;
}

// Bit 1 says which half of 4 aligned bytes the first scale of row `row` is, bit 2 the same of the first zero point. All
// rows that are a multiple of 2 apart are alike.
__device__ __forceinline__ u32 scale_parity(const Weight &w, u32 row) {
    const u32 first = u32(u64(w.scales) / 2) + row * w.scale_stride;
    return (first & 1) << 1 | ((first + u32(w.zeros_from_scales)) & 1) << 2;
}

// Where in a row's scales in the slot that of span `span` of unit `unit` lies, with bit 1 of `parity` as above.
__device__ __forceinline__ u32 scale_offset(const Weight &w, u32 parity, int unit, int span) {
    if (EXACT) return 2 * span + (parity & 2);
    return 4 * span + ((parity ^ u32(unit * UNIT_SPANS + span) * w.groups >> 30) & 2);
}

// Without zero points: the scale of row `row` + `more`, a multiple of 8, of the warp; `parity` is of row `row`.
__device__ __forceinline__ u32 load_scale(
    u32 slot, const Weight &w, u32 row, u32 more, u32 parity, int unit, int span) {
    const u32 at = slot + SCALES_AT + row * SCALES_PITCH + scale_offset(w, parity, unit, span);
    return load_shared_half(at + more * SCALES_PITCH);
}

// With zero points: what multiplying needs of a row in a span, made once for all lanes that want it, in the place of
// the scales and zero points in their slot.
struct Factors {
    u32 minus;           // what unpacking adds (k8x_mma.h)
    u32 scale_and_rest;  // the lower half, and the higher: what unpacking leaves of the zero point
};

// Where row `row` of the warp has those of a span. Lanes read eight rows at a time, from different banks.
__device__ __forceinline__ u32 factors_place(u32 row, u32 span) {
    return SCALES_AT + 8 * (row * UNIT_SPANS + (span ^ row % 8 * UNIT_SPANS / 16));
}
// Of row `row` + `more`, a multiple of 8.
__device__ __forceinline__ Factors load_factors(u32 slot, u32 row, u32 more, u32 span) {
    const uint2 v = load_shared_words(slot + factors_place(row, span) + more * (8 * UNIT_SPANS));
    return {v.x, v.y};
}

// The first row of those whose factors a lane makes; every SCALE_ROWS-th follows.
__device__ __forceinline__ u32 factor_row() { return threadIdx.x % 32 / UNIT_SPANS % WARP_ROWS; }

// Make the factors of a unit: a lane those of one span in one row or several, `parity` is theirs. Tells whether any
// zero point of the warp has a rest.
__device__ __forceinline__ bool make_factors(u32 slot, const Weight &w, u32 parity, int unit) {
    constexpr int COUNT = WARP_ROWS > SCALE_ROWS ? WARP_ROWS / SCALE_ROWS : 1;
    const u32 span = threadIdx.x % UNIT_SPANS, row = factor_row();
    const u32 scales = slot + SCALES_AT + row * SCALES_PITCH;
    const u32 scale_at = scales + scale_offset(w, parity, unit, span);
    const u32 zero_at = scales + SCALES_BYTES + scale_offset(w, parity >> 1, unit, span);
    u32 scale[COUNT], zero[COUNT], rests = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        scale[i] = load_shared_half(scale_at + i * SCALE_ROWS * SCALES_PITCH);
        zero[i] = load_shared_half(zero_at + i * SCALE_ROWS * SCALES_PITCH);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        const int next = COUNT > 1 ? i + 1 : i;
        u32 minus[2], rest;
        take_apart(zero[i] | zero[next] << 16, minus, rest);
        store_shared_words(slot + factors_place(row + i * SCALE_ROWS, span), {minus[0], scale[i] | rest << 16});
        if (COUNT > 1)
            store_shared_words(
                slot + factors_place(row + next * SCALE_ROWS, span), {minus[1], scale[next] | (rest & 0xFFFF0000)});
        rests |= rest;
    }
    __syncwarp();  // the vote is no fence
    return __any_sync(~0u, rests & 0x7FFF7FFF);
}

// Where a lane copies from in one tile of rows.
struct Source {
    const u32 *words;
    const u16 *scales;
    int rows;        // that the weight still has, from the warp's first on
    int inside_end;  // units before it can be copied whole, with the neighbour of each scale
};

// The row whose scales a lane copies, of the warp's. Where each scale has a copy of its own, the lanes of a row's in a
// unit are neighbours: a copy of the warp then touches no more rows than it must, each of which takes the copy unit a
// cycle.
__device__ __forceinline__ u32 scale_row() { return EXACT ? threadIdx.x % WARP_ROWS : threadIdx.x % 32 / UNIT_SPANS; }

__device__ __forceinline__ Source source_of(const Weight &w, int first_row) {
    const int lane = threadIdx.x % 32;
    Source s;
    s.words = w.words + u64(first_row + lane / PIECES) * w.word_stride + 4 * (lane % PIECES);
    s.scales = w.scales + u64(first_row + scale_row()) * w.scale_stride;
    s.rows = w.N - first_row;
    int whole = s.rows >= WARP_ROWS ? w.K : 0;
    if (EXACT) {
        // Only rows that are aligned can be copied in one piece.
        const u64 apart = u64(w.scales) | u64(ZEROS ? 2 * w.zeros_from_scales : 0) | 2 * w.scale_stride;
        if (apart % (2 * UNIT_SPANS)) whole = 0;
    } else if (s.rows == WARP_ROWS) {
        whole = w.group(w.K - 1) * w.group_size;  // behind the last row's last scale the array may end
    }
    s.inside_end = whole / UNIT;
    return s;
}

// Copy 4 bytes of a row's scales, or zero points, into a unit that is not inside: those that lane `lane_in_row` of
// UNIT_SPANS copies.
__device__ __forceinline__ void copy_4_bytes_of_scales(
    u32 to, const u16 *row, const Weight &w, int num_groups, bool row_inside, int unit, int lane_in_row) {
    const int k = unit * UNIT + lane_in_row * SPAN;
    const int group = EXACT ? unit * UNIT_SPANS + 2 * lane_in_row : w.group(k);
    const u64 at = u64(row + group), aligned = at / 4 * 4;
    const int first = group - int(at / 2 % 2);  // of the two groups in these 4 bytes
    const bool wanted = row_inside && (EXACT ? first < num_groups : k < w.K);
    if (wanted && first + 1 == num_groups)
        store_shared_word(to, load_half(aligned));  // the array may end behind it
    else
        copy_4_bytes_async(to, aligned, wanted);
}

// Start the copies of one unit into a slot; `place` is that of the lane's first. What lies past N or K becomes zero.
// Where the unit is INSIDE nothing does.
template <bool INSIDE>
__device__ __forceinline__ void copy_unit(u32 slot, u32 place, const Source &s, const Weight &w, int unit) {
    const int lane = threadIdx.x % 32;
    const int k0 = unit * UNIT;
    const int rows = k0 + 32 * (lane % PIECES) < w.K ? s.rows - lane / PIECES : 0;
    const u32 *from = s.words + k0 / 8;
#pragma unroll
    for (int first = 0; first < WARP_ROWS; first += COPY_ROWS) {
        copy_16_bytes_async(slot + (place ^ 16 * swizzle(first)) + first * LINE, from, INSIDE || first < rows);
        from += u64(COPY_ROWS) * w.word_stride;
    }
#pragma unroll
    for (int z = 0; z <= ZEROS; ++z) {
        const u32 to = slot + SCALES_AT + z * SCALES_BYTES;
        const u16 *scales = s.scales + z * w.zeros_from_scales;
        if (INSIDE && EXACT) {
            if (WARP_ROWS == 32 || lane < WARP_ROWS)
                copy_async<2 * UNIT_SPANS>(to + lane * SCALES_PITCH, scales + unit * UNIT_SPANS);
        } else if (INSIDE) {
            u64 at = u64(scales + w.group(k0 + lane % UNIT_SPANS * SPAN)) / 4 * 4;
#pragma unroll
            for (int first = 0; first < WARP_ROWS; first += SCALE_ROWS) {
                if (SCALE_ROWS <= WARP_ROWS || lane < WARP_ROWS * UNIT_SPANS)
                    copy_4_bytes_async(to + first * SCALES_PITCH + 4 * lane, at, true);
                at += u64(2 * SCALE_ROWS) * w.scale_stride;
            }
        } else {
            const int num_groups = w.group(w.K - 1) + 1;
#pragma unroll 1
            for (int i = lane; i < WARP_ROWS * UNIT_SPANS; i += 32) {
                const int row = i / UNIT_SPANS;
                const u16 *at = w.scales + u64(w.N - s.rows + row) * w.scale_stride + z * w.zeros_from_scales;
                copy_4_bytes_of_scales(to + 4 * i, at, w, num_groups, row < s.rows, unit, i % UNIT_SPANS);
            }
        }
    }
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
          unit(walk.first_unit), place(place_of(threadIdx.x % 32 / PIECES, threadIdx.x % PIECES)),
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
