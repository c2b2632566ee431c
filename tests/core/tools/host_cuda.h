// CUDA's words for a processor, so that the kernels' own text runs in tests on a machine without a device.
//
// The threads of a block are fibers of one OS thread: a fiber runs until it meets a barrier or the end, then the next one
// does. Blocks run one after the other. Both orders can be shuffled by a seed: results must not depend on them. Fibers
// that wait for each other at different barriers are found out: the process ends with a message.
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <tuple>
#include <utility>
#include <vector>
#include <ucontext.h>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(n)
#define __restrict__
#define __align__(n) alignas(n)

struct Index {
    unsigned x;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace host {

struct Barrier {
    unsigned members = 0, arrived = 0, generation = 0;
};

struct Fiber {
    ucontext_t start;
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(256 * 1024);
    bool begun = false, ended = false;
    const Barrier* waits = nullptr;
    unsigned since = 0;
};

struct Machine {
    std::vector<Fiber> fibers;
    Barrier block;
    std::vector<Barrier> warps;
    std::vector<uint64_t> slots;
    std::vector<char> votes;
    unsigned current = 0;
    jmp_buf scheduler;
    void (*body)(void*) = nullptr;
    void* data = nullptr;
};
static thread_local Machine machine;

inline void resume_scheduler() { _longjmp(machine.scheduler, 1); }

inline void arrive(Barrier& barrier) {
    if (++barrier.arrived < barrier.members) return;
    barrier.arrived = 0;
    barrier.generation++;
}

inline void wait(Barrier& barrier) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.waits = &barrier;
    fiber.since = barrier.generation;
    arrive(barrier);
    if (_setjmp(fiber.place) == 0) resume_scheduler();
}

inline Barrier& own_warp() { return machine.warps[threadIdx.x / 32]; }

static void fiber_main() {
    machine.body(machine.data);
    Fiber& fiber = machine.fibers[machine.current];
    fiber.ended = true;
    // Threads that have ended count as arrived.
    for (Barrier* barrier : {&machine.block, &own_warp()}) {
        barrier->members--;
        if (barrier->members > 0 && barrier->arrived == barrier->members) {
            barrier->arrived = 0;
            barrier->generation++;
        }
    }
    resume_scheduler();
}

// Let one fiber run to its next barrier or its end. Returns whether it could.
inline bool resume(unsigned t) {
    Machine& m = machine;
    Fiber& fiber = m.fibers[t];
    if (fiber.ended || (fiber.waits && fiber.waits->generation == fiber.since)) return false;
    fiber.waits = nullptr;
    m.current = t;
    threadIdx.x = t;
    if (_setjmp(m.scheduler) == 0) {
        if (fiber.begun) _longjmp(fiber.place, 1);
        fiber.begun = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
        setcontext(&fiber.start);
    }
    return true;
}

// Run one block's fibers to their ends: in turns, or, for every second shuffled block, one warp after the other as far
// as it comes. The latter shows a missing barrier: a warp is then ahead of the others as far as the code allows.
inline void run_block(unsigned threads, void (*body)(void*), void* data, std::mt19937* random) {
    Machine& m = machine;
    if (m.fibers.size() < threads) m.fibers.resize(threads);
    m.body = body;
    m.data = data;
    m.block = Barrier{threads};
    m.warps.assign((threads + 31) / 32, Barrier{32});
    m.slots.assign(threads, 0);
    m.votes.assign(threads, 0);
    for (unsigned t = 0; t < threads; t++) {
        m.fibers[t].begun = m.fibers[t].ended = false;
        m.fibers[t].waits = nullptr;
    }
    const bool ahead = random && (*random)() % 2;
    std::vector<unsigned> order(ahead ? threads / 32 : threads);
    std::iota(order.begin(), order.end(), 0u);
    auto running = [&] {
        for (unsigned t = 0; t < threads; t++)
            if (!m.fibers[t].ended) return true;
        return false;
    };
    while (running()) {
        bool progress = false;
        if (random) std::shuffle(order.begin(), order.end(), *random);
        for (unsigned next : order) {
            if (!ahead) {
                progress |= resume(next);
                continue;
            }
            for (bool again = true; again;) {
                again = false;
                for (unsigned t = next * 32; t < next * 32 + 32; t++) again |= resume(t);
                progress |= again;
            }
        }
        if (!progress) {
            std::fprintf(stderr, "threads of block %u wait for each other at different barriers\n", blockIdx.x);
            std::abort();
        }
    }
}

template <class... A>
struct Call {
    void (*kernel)(A...);
    std::tuple<A...> arguments;
    static void run(void* self) {
        Call& call = *static_cast<Call*>(self);
        std::apply(call.kernel, call.arguments);
    }
};

template <class... A, size_t... I>
void launch(void (*kernel)(A...), unsigned grid, unsigned block, void** arguments, unsigned seed,
            std::index_sequence<I...>) {
    Call<A...> call{kernel, std::tuple<A...>(*static_cast<std::remove_reference_t<A>*>(arguments[I])...)};
    std::mt19937 random(seed);
    std::vector<unsigned> blocks(grid);
    std::iota(blocks.begin(), blocks.end(), 0u);
    if (seed) std::shuffle(blocks.begin(), blocks.end(), random);
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned b : blocks) {
        blockIdx.x = b;
        run_block(block, Call<A...>::run, &call, seed ? &random : nullptr);
    }
}

template <class... A>
void launch(void (*kernel)(A...), unsigned grid, unsigned block, void** arguments, unsigned seed) {
    launch(kernel, grid, block, arguments, seed, std::index_sequence_for<A...>{});
}

template <class T>
uint64_t packed(T value) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T>
T exchange(T value, unsigned from, bool valid) {
    machine.slots[threadIdx.x] = packed(value);
    wait(own_warp());
    const uint64_t bits = valid ? machine.slots[from] : packed(value);
    wait(own_warp());
    T result;
    __builtin_memcpy(&result, &bits, sizeof result);
    return result;
}

}  // namespace host

static inline void __syncthreads() { host::wait(host::machine.block); }

static inline int __syncthreads_or(int predicate) {
    host::machine.votes[threadIdx.x] = predicate != 0;
    host::wait(host::machine.block);
    int any = 0;
    for (char vote : host::machine.votes) any |= vote;
    host::wait(host::machine.block);
    return any;
}

template <class T>
T __shfl_up_sync(unsigned, T value, unsigned d) {
    return host::exchange(value, threadIdx.x - d, threadIdx.x % 32 >= d);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned d) {
    return host::exchange(value, threadIdx.x ^ d, true);
}

static inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned mask = 0;
    host::machine.slots[threadIdx.x] = predicate != 0;
    host::wait(host::own_warp());
    for (unsigned lane = 0; lane < 32; lane++) mask |= unsigned(host::machine.slots[threadIdx.x / 32 * 32 + lane]) << lane;
    host::wait(host::own_warp());
    return mask;
}

template <class T, class U>
T atomicAdd(T* place, U value) {
    const T before = *place;
    *place += value;
    return before;
}

template <class T>
T atomicMax(T* place, T value) {
    const T before = *place;
    if (value > before) *place = value;
    return before;
}

static inline void __threadfence() {}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
