// W4A16 GEMM for few tokens, sm80 and later: out[M,N] = x[M,K] @ ((q - z) * s)[N,K]^T + bias
#include "k8x_mma.h"

#ifndef UNITS
#define UNITS 1
#endif
#ifndef MAX_CHAINS
#define MAX_CHAINS 4
#endif
#ifndef LOAD_HINT
#define LOAD_HINT 1
#endif

constexpr int CHUNK = 128;                       // k per step of a warp: four lanes of 32
constexpr int WARPS = WARPS_N * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * TILES * WARPS_N;       // output features per block and turn
constexpr int OWN_ROWS = ROWS / CLUSTER;         // of which this block writes
constexpr int PITCH = OWN_ROWS + 4;              // floats; 2 * PITCH % 32 == 8 spreads a warp's partial sums over all banks
constexpr int COLUMNS = TOKENS / 8;              // n-tiles of the mma
static_assert(ROWS % CLUSTER == 0 && THREADS % OWN_ROWS == 0);
constexpr int SOURCES = CLUSTER * WARPS_K;       // partial sums per output

__device__ __forceinline__ u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }

// LOAD_WORDS words of a weight row into registers that keep their old content where `wanted` is false.
template <int WORDS>
__device__ __forceinline__ void load_words(u32 *w, const u32 *p, bool wanted) {
    if constexpr (WORDS == 4) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n"
#if LOAD_HINT == 0
            "@p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4]; }"
#elif LOAD_HINT == 1
            "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
#elif LOAD_HINT == 2
            "@p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
#elif LOAD_HINT == 3
            "@p ld.global.nc.L1::evict_first.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
#endif
            : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]) : "l"(p), "r"(u32(wanted)));
    } else if constexpr (WORDS == 2) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0;\n"
            "@p ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2]; }"
            : "+r"(w[0]), "+r"(w[1]) : "l"(p), "r"(u32(wanted)));
    } else {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
            "@p ld.global.nc.u32 %0, [%1]; }"
            : "+r"(w[0]) : "l"(p), "r"(u32(wanted)));
    }
}

__device__ __forceinline__ void load_half(u32 &d, const u16 *p, bool wanted) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
        "@p ld.global.nc.u16 %0, [%1]; }"
        : "+r"(d) : "l"(p), "r"(u32(wanted)));
}

__device__ __forceinline__ void copy_16_bytes_async(u32 to, const u16 *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

#if CLUSTER > 1
__device__ __forceinline__ int cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return int(r);
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 map_to_rank(u32 address, int rank) {
    u32 d;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
    return d;
}
__device__ __forceinline__ void store_cluster(u32 address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
#endif

struct Arguments {
    const u16 *x;
    const u32 *qweight;
    const u16 *scales, *zero_points, *bias;
    u16 *out;
    int M, N, K, group_size;
    long long x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride;
};

template <int SPAN>
struct Skinny {
    static constexpr int WORDS = SPAN / 32;  // per load
    static constexpr int SPANS = CHUNK / SPAN;

    const Arguments &a;
    int quad, row, warp_n, warp_k;
    int rank, slice_begin, slice_end, steps;
    int first_tile, tile_stride, tiles;
    u32 magic, shift;
    u32 tokens;  // of this block
    u32 bias;
    float *partial;
    unsigned char *x_shared;
    u32 x_chunk_bytes, x_lane;

    // stream
    u32 w[DEPTH][UNITS][TILES][2][4];
    u32 s[DEPTH][UNITS][TILES][2];
#if ZEROS
    u32 z[DEPTH][UNITS][TILES][2];
#endif
    const u32 *w_row[TILES][2];
    const u16 *s_row[TILES][2];
    int load_tile, load_step;
    float acc[TILES][COLUMNS][4];

    __device__ __forceinline__ Skinny(const Arguments &arguments) : a(arguments) {}

    __device__ __forceinline__ void point_at(int tile) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const long long n = min(tile * ROWS + (warp_n * TILES + t) * 16 + 8 * h + row, a.N - 1);
                w_row[t][h] = a.qweight + n * a.qweight_row_stride + WORDS * quad;
                s_row[t][h] = a.scales + n * a.scales_row_stride;
            }
    }

    __device__ __forceinline__ void load(int u) {
        const int first = slice_begin + (warp_k + load_step * WARPS_K) * UNITS;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) {
            const int chunk = first + i;
            const int k0 = chunk * CHUNK;
            const int limit = chunk < slice_end && load_tile < tiles ? a.K : 0;
            const int k_scale = k0 + (32 * quad & ~(SPAN - 1));
            const int group = SPAN == 128 ? chunk >> shift : int((u64(u32(k_scale) >> 5) * magic) >> 31);
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int j = 0; j < SPANS; ++j)
                        load_words<WORDS>(&w[u][i][t][h][j * WORDS], w_row[t][h] + (first * CHUNK + i * CHUNK + j * SPAN) / 8,
                                          k0 + j * SPAN + 8 * WORDS * quad < limit);
                    load_half(s[u][i][t][h], s_row[t][h] + group, k_scale < limit);
#if ZEROS
                    load_half(z[u][i][t][h], s_row[t][h] + group + (a.zero_points - a.scales), k_scale < limit);
#endif
                }
        }
        if (++load_step == steps) {
            load_step = 0;
            load_tile += tile_stride;
            if (load_tile < tiles) point_at(load_tile);
        }
    }

    __device__ __forceinline__ u32 of_span(u32 v, int span) {
        if constexpr (SPANS == 1) return v;
        return __shfl_sync(~0u, v, (threadIdx.x & 28) | (span * WORDS));
    }

    // The weights of one span as operands A, and their scales.
    __device__ __forceinline__ void unpack_span(int u, int i, int j, u32 pair[TILES][2 * WORDS][4], float scale[TILES][2]) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                scale[t][h] = to_float(of_span(s[u][i][t][h], j));
#if ZEROS
                const u32 zero = of_span(z[u][i][t][h], j);
                const u32 minus_zero = negate2(zero | zero << 16);
#endif
#pragma unroll
                for (int v = 0; v < WORDS; ++v) {
                    u32 p[4];
#if ZEROS
                    unpack(w[u][i][t][h][j * WORDS + v], minus_zero, p);
#else
                    unpack(w[u][i][t][h][j * WORDS + v], p);
#endif
                    pair[t][2 * v][h] = p[0];
                    pair[t][2 * v][2 + h] = p[1];
                    pair[t][2 * v + 1][h] = p[2];
                    pair[t][2 * v + 1][2 + h] = p[3];
                }
            }
    }

    __device__ __forceinline__ void multiply(int u, int first) {
        constexpr int BLOCK = COLUMNS * TILES > MAX_CHAINS ? (MAX_CHAINS / TILES > COLUMNS ? COLUMNS : MAX_CHAINS / TILES) : COLUMNS;
        constexpr int SPLIT = BLOCK * TILES * UNITS < 4 && WORDS > 1 ? 2 : 1;  // accumulators for even and odd words
        static_assert(COLUMNS % BLOCK == 0);
        const u32 at = (first - slice_begin) * x_chunk_bytes + x_lane;
        const unsigned char *x_word[2] = {x_shared + at, x_shared + (at ^ 64)};
#pragma unroll
        for (int j = 0; j < SPANS; ++j) {
            u32 pair[UNITS][TILES][2 * WORDS][4];
            float scale[UNITS][TILES][2];
#pragma unroll
            for (int i = 0; i < UNITS; ++i) unpack_span(u, i, j, pair[i], scale[i]);
#pragma unroll
            for (int c0 = 0; c0 < COLUMNS; c0 += BLOCK) {
                float sum[UNITS][SPLIT][BLOCK][TILES][4] = {};
#pragma unroll
                for (int v = 0; v < WORDS; ++v)
#pragma unroll
                    for (int i = 0; i < UNITS; ++i)
#pragma unroll
                        for (int c = 0; c < BLOCK; ++c) {
                            const int n = j * WORDS + v;
                            const uint4 b = *reinterpret_cast<const uint4 *>(x_word[n % 2] + i * x_chunk_bytes + (c0 + c) * 2048 + n / 2 * 128);
#pragma unroll
                            for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[i][0][c][t], pair[i][t][2 * v], b.x, b.y);
#pragma unroll
                            for (int t = 0; t < TILES; ++t) mma_16x8x16(sum[i][SPLIT - 1][c][t], pair[i][t][2 * v + 1], b.z, b.w);
                        }
#pragma unroll
                for (int i = 0; i < UNITS; ++i)
#pragma unroll
                    for (int c = 0; c < BLOCK; ++c)
#pragma unroll
                        for (int t = 0; t < TILES && (i == 0 || first + i < slice_end); ++t)
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                float v = sum[i][0][c][t][e];
                                if constexpr (SPLIT == 2) v += sum[i][1][c][t][e];
                                acc[t][c0 + c][e] += scale[i][t][e / 2] * v;
                            }
            }
        }
    }

    __device__ __forceinline__ void stage_x(int m0) {
        const u32 pieces = (slice_end - slice_begin) * (CHUNK / 8);  // of one token
        if (pieces == 0) return;
        const u32 base = shared_address(x_shared);
        // Blocks start at different pieces, so that not all of them ask the same part of the L2 at the same time.
        const u32 start = (threadIdx.x + blockIdx.x / CLUSTER * 160u) % (pieces * tokens);
        u32 t = start / pieces, p = start % pieces;
        const u32 dt = THREADS / pieces, dp = THREADS % pieces;
#pragma unroll 2
        for (u32 done = threadIdx.x; done < pieces * tokens; done += THREADS) {
            const u32 r = p % (SPAN / 8);
            const u32 word = p % (CHUNK / 8) / (SPAN / 8) * WORDS + r % WORDS;
            const u32 to = p / (CHUNK / 8) * x_chunk_bytes + t * 256 + (word ^ (t & 1)) * 64 + r / WORDS * 16;
            const int k = slice_begin * CHUNK + 8 * p;
            const bool inside = k < a.K;
            copy_16_bytes_async(base + to, a.x + (m0 + t) * a.x_row_stride + (inside ? k : 0), inside);
            p += dp;
            t += dt;
            if (p >= pieces) p -= pieces, ++t;
            while (t >= tokens) t -= tokens;
        }
    }

    __device__ __forceinline__ int own_feature(int tile) { return tile * ROWS + rank * OWN_ROWS + threadIdx.x % OWN_ROWS; }

    // Add up and write.
    __device__ __forceinline__ void flush(int tile, int m0, int &buffer) {
        const int source = rank * WARPS_K + warp_k;
        float *mine = partial + buffer * (SOURCES * TOKENS * PITCH);
#if CLUSTER > 1
        cluster_wait();
#else
        buffer ^= 1;
#endif
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int r = (warp_n * TILES + t) * 16 + 8 * h + row;
#if CLUSTER > 1
                const u32 to = map_to_rank(shared_address(mine), r / OWN_ROWS) +
                               4 * ((source * TOKENS + 2 * quad) * PITCH + r % OWN_ROWS);
#else
                float *to = mine + (source * TOKENS + 2 * quad) * PITCH + r;
#endif
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (8 * c + 2 * quad + e < tokens)
#if CLUSTER > 1
                            store_cluster(to + 4 * (8 * c + e) * PITCH, acc[t][c][2 * h + e]);
#else
                            to[(8 * c + e) * PITCH] = acc[t][c][2 * h + e];
#endif
            }
#if CLUSTER > 1
        __syncwarp();
        cluster_arrive();
        cluster_wait();
#else
        __syncthreads();
#endif
        const int r = threadIdx.x % OWN_ROWS;
        const int n = own_feature(tile);
        if (n < a.N) {
            u16 *out = a.out + n;
#pragma unroll 1
            for (u32 t = threadIdx.x / OWN_ROWS; t < tokens; t += THREADS / OWN_ROWS) {
                const float *from = mine + t * PITCH + r;
                float sum = 0;
#pragma unroll
                for (int i = 0; i < SOURCES; ++i) sum += from[i * TOKENS * PITCH];
                out[(m0 + t) * a.out_row_stride] = from_float(sum + to_float(bias));
            }
        }
#if CLUSTER > 1
        if (tile + tile_stride < tiles) {
            __syncwarp();
            cluster_arrive();
        }
#endif
    }

    __device__ __forceinline__ void run(unsigned char *shared) {
        const int lane = threadIdx.x % 32;
        quad = lane % 4;
        row = lane / 4;
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same for all lanes, which the compiler cannot know
        warp_k = warp % WARPS_K;
        warp_n = warp / WARPS_K;
        const int m0 = blockIdx.y * TOKENS;
        tokens = u32(min(a.M - m0, TOKENS));
        rank = 0;
#if CLUSTER > 1
        rank = cluster_rank();
        cluster_arrive();
#endif
        const int chunks = (a.K + CHUNK - 1) / CHUNK;
        slice_begin = chunks * rank / CLUSTER;
        slice_end = chunks * (rank + 1) / CLUSTER;
        steps = max(1, (slice_end - slice_begin + WARPS_K * UNITS - 1) / (WARPS_K * UNITS));
        tiles = (a.N + ROWS - 1) / ROWS;
        first_tile = blockIdx.x / CLUSTER;
        tile_stride = gridDim.x / CLUSTER;
        magic = a.group_size >= a.K ? 0 : (1u << 31) / u32(a.group_size / 32) + 1;
        shift = a.group_size >= a.K ? 31 : __ffs(a.group_size / CHUNK) - 1;

        load_tile = first_tile;
        load_step = 0;
#pragma unroll
        for (int u = 0; u < DEPTH; ++u)
#pragma unroll
            for (int i = 0; i < UNITS; ++i)
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        s[u][i][t][h] = 0;
#if ZEROS
                        z[u][i][t][h] = 0;
#endif
#pragma unroll
                        for (int j = 0; j < 4; ++j) asm volatile("" : "=r"(w[u][i][t][h][j]));
                    }
        x_shared = shared;
        x_chunk_bytes = (COLUMNS == 1 ? tokens : TOKENS) * CHUNK * 2;
        partial = reinterpret_cast<float *>(shared + (chunks + CLUSTER - 1) / CLUSTER * x_chunk_bytes);
        const int token = COLUMNS == 1 ? min(row, int(tokens) - 1) : row;
        x_lane = token * 256 + (token & 1) * 64 + quad * 16;
#if X_FIRST
        stage_x(m0);
#endif
        point_at(load_tile);
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) load(u);
#if !X_FIRST
        stage_x(m0);
#endif
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();

        int tile = first_tile, step = 0, buffer = 0;
        clear(tile);
        while (true) {
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                const int chunk = slice_begin + (warp_k + step * WARPS_K) * UNITS;
                if (chunk < slice_end) multiply(u, chunk);
                load(u);
                if (++step == steps) {
                    flush(tile, m0, buffer);
                    tile += tile_stride;
                    if (tile >= tiles) return;
                    step = 0;
                    clear(tile);
                }
            }
        }
    }

    __device__ __forceinline__ void clear(int tile) {
        bias = 0;  // positive zero in both dtypes
        if (a.bias) load_half(bias, a.bias + own_feature(tile), own_feature(tile) < a.N);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][c][e] = 0;
    }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS)
w4a16_skinny(
    const u16 *x, const u32 *qweight, const u16 *scales,
#if ZEROS
    const u16 *zero_points,
#endif
    const u16 *bias, u16 *out, int M, int N, int K, int group_size, long long x_row_stride,
    long long qweight_row_stride, long long scales_row_stride, long long out_row_stride) {
    extern __shared__ uint4 shared[];
    const Arguments arguments = {
        x, qweight, scales,
#if ZEROS
        zero_points,
#else
        nullptr,
#endif
        bias, out, M, N, K, group_size, x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride};
    unsigned char *bytes = reinterpret_cast<unsigned char *>(shared);
    if (group_size >= K || (group_size % 128 == 0 && (group_size & (group_size - 1)) == 0)) {
        Skinny<128>(arguments).run(bytes);
#ifndef ONLY_128
    } else if (group_size % 64 == 0) {
        Skinny<64>(arguments).run(bytes);
    } else {
        Skinny<32>(arguments).run(bytes);
#endif
    }
}
