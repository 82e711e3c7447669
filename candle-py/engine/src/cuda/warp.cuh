// What the kernels share: sums and maxima over the threads of a warp and of a block. Threads are numbered in x alone, and
// blocks are of whole warps, all of whose threads call.
#pragma once

// A test compiles the kernels for the host, and brings these itself (emulation/).
#ifndef EMULATED
#include <math.h>
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu

__device__ inline float warp_sum(float value) {
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, apart);
    }
    return value;
}

__device__ inline float warp_max(float value) {
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, apart));
    }
    return value;
}

// The sum over a block, the same on all of its threads. `parts` is shared, a float for each warp.
__device__ inline float block_sum(float value, float *parts) {
    value = warp_sum(value);
    __syncthreads();  // `parts` may still be read from the call before
    if (threadIdx.x % WARP == 0) {
        parts[threadIdx.x / WARP] = value;
    }
    __syncthreads();
    float total = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / WARP; warp++) {
        total += parts[warp];
    }
    return total;
}
