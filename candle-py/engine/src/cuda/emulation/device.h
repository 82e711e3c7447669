// A CUDA device that is no more than one thread of the host, for tests of the kernels where there is no other: what CUDA
// adds to C++, as far as the kernels use it. Blocks run one after the other, the threads of a block in turns, each as far as
// the next point where it waits for others. Threads that wait for some that never come are found out.
#pragma once

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __shared__

struct Index {
    unsigned x, y, z;
};

static Index threadIdx, blockIdx, blockDim, gridDim;

namespace device {

const unsigned WARP_THREADS = 32;
const unsigned MOST_THREADS = 1024;
const size_t STACK_BYTES = 64 << 10;

// What a thread waits for.
enum Wait { NOTHING, FOR_WARP, FOR_BLOCK, FOR_NONE_ANY_MORE };

struct Thread {
    jmp_buf at;
    ucontext_t start;
    Wait wait;
    bool is_new;
    unsigned shuffles;
};

static Thread threads[MOST_THREADS];
static std::vector<char> stacks(MOST_THREADS * STACK_BYTES);
static float slots[2][MOST_THREADS];
static jmp_buf scheduler;
static ucontext_t first_return;
static const std::function<void()> *kernel;

[[noreturn]] inline void fail(const char *reason) {
    std::fprintf(stderr, "%s: block %u %u %u, thread %u\n", reason, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
    std::exit(3);
}

inline void wait(Wait what) {
    Thread &own = threads[threadIdx.x];
    own.wait = what;
    if (!_setjmp(own.at)) {
        _longjmp(scheduler, 1);
    }
}

inline void run_thread() {
    (*kernel)();
    threads[threadIdx.x].wait = FOR_NONE_ANY_MORE;
    _longjmp(scheduler, 1);
}

inline void resume(unsigned number) {
    Thread &thread = threads[number];
    threadIdx = {number, 0, 0};
    thread.wait = NOTHING;
    if (_setjmp(scheduler)) {
        return;
    }
    if (thread.is_new) {
        thread.is_new = false;
        setcontext(&thread.start);
    }
    _longjmp(thread.at, 1);
}

// Whether threads `first` to `end` all wait for the same; then they wait no more.
inline bool release(unsigned first, unsigned end, Wait what) {
    for (unsigned number = first; number < end; number++) {
        if (threads[number].wait != what) {
            return false;
        }
    }
    for (unsigned number = first; number < end; number++) {
        threads[number].wait = NOTHING;
    }
    return true;
}

// Runs the threads of a warp to where each waits next; whether any could.
inline bool run_warp(unsigned first) {
    bool has_moved = false;
    for (unsigned number = first; number < first + WARP_THREADS; number++) {
        if (threads[number].wait == NOTHING) {
            resume(number);
            has_moved = true;
        }
    }
    return release(first, first + WARP_THREADS, FOR_WARP) || has_moved;
}

inline void run_block() {
    for (unsigned number = 0; number < blockDim.x; number++) {
        Thread &thread = threads[number];
        thread.wait = NOTHING;
        thread.is_new = true;
        thread.shuffles = 0;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = stacks.data() + number * STACK_BYTES;
        thread.start.uc_stack.ss_size = STACK_BYTES;
        thread.start.uc_link = &first_return;
        makecontext(&thread.start, run_thread, 0);
    }
    // A warp runs as far as it can before the next one starts, the last warp first in every other block: what one does too
    // early for another shows.
    unsigned warps = blockDim.x / WARP_THREADS;
    for (;;) {
        bool has_moved = false, is_over = true;
        for (unsigned turn = 0; turn < warps; turn++) {
            unsigned first = (blockIdx.x % 2 ? warps - 1 - turn : turn) * WARP_THREADS;
            while (run_warp(first)) {
                has_moved = true;
            }
        }
        for (unsigned number = 0; number < blockDim.x; number++) {
            is_over = is_over && threads[number].wait == FOR_NONE_ANY_MORE;
        }
        if (is_over) {
            return;
        }
        if (!(release(0, blockDim.x, FOR_BLOCK) || has_moved)) {
            fail("threads wait for others that do not come");
        }
    }
}

// Runs `work` as a kernel; `prepare` before each block, `inspect` after it.
inline void launch(Index grid, unsigned block_threads, const std::function<void()> &work, const std::function<void()> &prepare,
                   const std::function<void()> &inspect) {
    if (block_threads == 0 || block_threads > MOST_THREADS || block_threads % WARP_THREADS != 0) {
        fail("blocks are of whole warps, 1024 threads at most");
    }
    kernel = &work;
    gridDim = grid;
    blockDim = {block_threads, 1, 1};
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++) {
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++) {
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                prepare();
                run_block();
                inspect();
            }
        }
    }
}

// The value of another thread of the warp; all of its threads call together.
inline float shuffle(unsigned mask, float value, unsigned lane) {
    if (mask != 0xffffffffu) {
        fail("a warp exchanges values whole");
    }
    // Two places for each thread, in turns: one is read while a faster thread writes to the other.
    float *places = slots[threads[threadIdx.x].shuffles++ % 2];
    unsigned first = threadIdx.x / WARP_THREADS * WARP_THREADS;
    places[threadIdx.x] = value;
    wait(FOR_WARP);
    return places[first + lane % WARP_THREADS];
}

}  // namespace device

inline void __syncthreads() {
    device::wait(device::FOR_BLOCK);
}

inline float __shfl_sync(unsigned mask, float value, int lane) {
    return device::shuffle(mask, value, lane);
}

inline float __shfl_xor_sync(unsigned mask, float value, int apart) {
    return device::shuffle(mask, value, threadIdx.x % device::WARP_THREADS ^ apart);
}
