// Runs w4a16_skinny.cu on a CPU, one cluster after the other.
#include "ptx.h"

#include "../../csrc/cuda/w4a16_skinny.cu"

thread_local Index threadIdx, blockIdx, gridDim;
Cluster *cluster;
Fiber *current;
long faults;

namespace {
constexpr size_t STACK_BYTES = 128 << 10;

struct Range {
    const unsigned char *begin, *end;
};
std::vector<Range> ranges;
ucontext_t scheduler;

struct Call {
    const u16 *x;
    const u32 *qweight;
    const u16 *scales, *zero_points, *bias;
    u16 *out;
    int M, N, K, group_size;
    long long x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride;
} call;

void fiber_main() {
    w4a16_skinny(call.x, call.qweight, call.scales,
#if ZEROS
                 call.zero_points,
#endif
                 call.bias, call.out, call.M, call.N, call.K, call.group_size, call.x_row_stride,
                 call.qweight_row_stride, call.scales_row_stride, call.out_row_stride);
    current->done = true;
    swapcontext(&current->context, &scheduler);
}

void run_cluster(int x0, int y, int shared_bytes) {
    Cluster state;
    cluster = &state;
    state.barrier.expected = CLUSTER * THREADS;
    state.blocks.resize(CLUSTER);
    std::vector<Fiber> fibers(CLUSTER * THREADS);
    for (int rank = 0; rank < CLUSTER; ++rank) {
        Block &block = state.blocks[rank];
        block.barrier.expected = THREADS;
        block.warps.resize(THREADS / 32);
        for (Warp &warp : block.warps) warp.barrier.expected = 32;
        block.shared.assign(shared_bytes, 0xFF);  // NaN, were it read as a result
        for (int thread = 0; thread < THREADS; ++thread) {
            Fiber &fiber = fibers[rank * THREADS + thread];
            fiber.stack = std::make_unique<unsigned char[]>(STACK_BYTES);
            fiber.thread = {thread, 0};
            fiber.block = {x0 + rank, y};
            fiber.rank = rank;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = STACK_BYTES;
            makecontext(&fiber.context, fiber_main, 0);
        }
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (Fiber &fiber : fibers) {
            if (fiber.done || (fiber.waits_for && *fiber.waits_for == fiber.turn)) continue;
            fiber.waits_for = nullptr;
            current = &fiber;
            threadIdx = fiber.thread;
            blockIdx = fiber.block;
            swapcontext(&scheduler, &fiber.context);
            moved = true;
        }
    }
    for (const Fiber &fiber : fibers) faults += !fiber.done;  // waits for ever
}
}  // namespace

void pause(const int *turn, int value) {
    if (*turn != value) return;
    current->waits_for = turn;
    current->turn = value;
    swapcontext(&current->context, &scheduler);
}

bool is_inside(const void *p, size_t bytes) {
    const unsigned char *at = static_cast<const unsigned char *>(p);
    return std::any_of(ranges.begin(), ranges.end(),
                       [=](const Range &range) { return range.begin <= at && at + bytes <= range.end; });
}

// Returns the number of faults. `sizes`: bytes that may be read from x, qweight, scales, zero_points and bias.
extern "C" long run(const u16 *x, const u32 *qweight, const u16 *scales, const u16 *zero_points, const u16 *bias, u16 *out,
                    int M, int N, int K, int group_size, long long x_row_stride, long long qweight_row_stride,
                    long long scales_row_stride, long long out_row_stride, const long long *sizes, int grid_x, int grid_y,
                    int shared_bytes) {
    call = {x, qweight, scales, zero_points, bias, out, M, N, K, group_size,
            x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride};
    const void *starts[] = {x, qweight, scales, zero_points, bias};
    ranges.clear();
    for (int i = 0; i < 5; ++i) {
        const unsigned char *start = static_cast<const unsigned char *>(starts[i]);
        if (start) ranges.push_back({start, start + sizes[i]});
    }
    faults = 0;
    gridDim = {grid_x, grid_y};
    for (int y = 0; y < grid_y; ++y)
        for (int block = 0; block < grid_x; block += CLUSTER) run_cluster(block, y, shared_bytes);
    return faults;
}
