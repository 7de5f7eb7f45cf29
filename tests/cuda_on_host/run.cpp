// Runs a kernel on a CPU, one cluster after the other. KERNEL_SOURCE is its file, KERNEL its name.
#include "wgmma.h"

#include KERNEL_SOURCE

Index threadIdx, blockIdx, gridDim;
Cluster *cluster;
Fiber *current;
bool late;

namespace {
constexpr size_t STACK_BYTES = 64 << 10;
unsigned char stacks[CLUSTER * THREADS][STACK_BYTES];

struct Range {
    const unsigned char *begin, *end;
};
std::vector<Range> ranges;
ucontext_t scheduler;
u32 random_state;
long faults;
const char *first_fault;

struct Call {
    const u16 *x;
    const u32 *qweight;
    const u16 *scales, *zero_points, *bias;
    u16 *out;
    int M, N, K, group_size;
    long long x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride;
} call;

void fiber_main() {
    KERNEL(call.x, call.qweight, call.scales,
#if ZEROS
           call.zero_points,
#endif
           call.bias, call.out, call.M, call.N, call.K, call.group_size, call.x_row_stride, call.qweight_row_stride,
           call.scales_row_stride, call.out_row_stride);
    current->done = true;
    --block().running;
    swapcontext(&current->context, &scheduler);
}

void start(Fiber &fiber, int x0, int y, int rank, int thread) {
    fiber.thread = {thread, 0};
    fiber.block = {x0 + rank, y};
    fiber.rank = rank;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[rank * THREADS + thread];
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, fiber_main, 0);
}

void run(Fiber &fiber) {
    fiber.waits_for = nullptr;
    current = &fiber;
    threadIdx = fiber.thread;
    blockIdx = fiber.block;
    block().started = true;
    swapcontext(&scheduler, &fiber.context);
}

u32 random_below(u32 limit) {
    random_state = random_state * 1664525 + 1013904223;
    return u32(u64(random_state) * limit >> 32);
}

// One round, in random order, of those that can run on. Each then lets some rounds pass, now and then many: any thread
// may fall far behind the others of its warp.
bool run_round(std::vector<Fiber *> &fibers) {
    bool any = false;
    for (size_t i = fibers.size(); i > 1; --i) std::swap(fibers[i - 1], fibers[random_below(u32(i))]);
    for (Fiber *fiber : fibers) {
        if (fiber->done || (fiber->waits_for && *fiber->waits_for == fiber->turn)) continue;
        any = true;
        if (fiber->rounds_to_pass-- > 0) continue;
        run(*fiber);
        fiber->rounds_to_pass = random_below(1024) ? random_below(4) : 200;
    }
    return any;
}

void run_cluster(int x0, int y, int shared_bytes) {
    Cluster state;
    cluster = &state;
    state.barrier.expected = CLUSTER * THREADS;
    state.blocks.resize(CLUSTER);
    std::vector<Fiber> fibers(CLUSTER * THREADS);
    for (int rank = 0; rank < CLUSTER; ++rank) {
        Block &block = state.blocks[rank];
        block.running = block.barrier.expected = THREADS;
        block.warps.resize(THREADS / 32);
        for (Barrier &warp : block.warps) warp.expected = 32;
        block.shared.assign(shared_bytes, 0xFF);  // NaN, were it read as a result
        for (int thread = 0; thread < THREADS; ++thread) start(fibers[rank * THREADS + thread], x0, y, rank, thread);
    }
    std::vector<Fiber *> started;
    for (int blocks = 0;;) {
        while (run_round(started)) {}
        // A block starts, and a store to another block lands, only when nothing else can happen.
        if (blocks < CLUSTER) {
            for (int thread = 0; thread < THREADS; ++thread) started.push_back(&fibers[blocks * THREADS + thread]);
            ++blocks;
        } else if (!state.on_their_way.empty()) {
            for (; !state.on_their_way.empty(); state.on_their_way.pop_back()) land(state.on_their_way.back());
        } else {
            break;
        }
    }
    for (const Fiber &fiber : fibers) {
        if (!fiber.done) fault("waits for ever");
        const Fiber &first = *(&fiber - fiber.thread.x % 128);  // of its warpgroup
        if (fiber.operands != first.operands) fault("multiplies without the rest of its warpgroup");
    }
}
}  // namespace

void fault(const char *what) {
    if (faults++ == 0) first_fault = what;
}

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

// Returns what the first fault was, or null. `sizes`: bytes that may be read from x, qweight, scales, zero_points and
// bias. `seed`: of the order in which threads run.
extern "C" const char *run(const u16 *x, const u32 *qweight, const u16 *scales, const u16 *zero_points, const u16 *bias,
                           u16 *out, int M, int N, int K, int group_size, long long x_row_stride,
                           long long qweight_row_stride, long long scales_row_stride, long long out_row_stride,
                           const long long *sizes, int grid_x, int grid_y, int shared_bytes, int lands_late,
                           int seed) {
    call = {x, qweight, scales, zero_points, bias, out, M, N, K, group_size,
            x_row_stride, qweight_row_stride, scales_row_stride, out_row_stride};
    const void *starts[] = {x, qweight, scales, zero_points, bias};
    ranges.clear();
    for (int i = 0; i < 5; ++i) {
        const unsigned char *start = static_cast<const unsigned char *>(starts[i]);
        // The 4 bytes that an array starts in may all be read, whoever owns the others.
        if (start) ranges.push_back({start - uintptr_t(start) % 4, start + sizes[i]});
    }
    late = lands_late;
    random_state = seed;
    faults = 0;
    first_fault = nullptr;
    gridDim = {grid_x, grid_y};
    for (int y = 0; y < grid_y; ++y)
        for (int block = 0; block < grid_x; block += CLUSTER) run_cluster(block, y, shared_bytes);
    return first_fault;
}
