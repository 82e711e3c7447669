// What follows a product, in one pass over it: biases, an activation, the residual stream, the gate of a feed-forward.

#ifndef EMULATED
#include <math.h>
#endif

#define IDENTITY 0
#define GELU 1
#define GELU_TANH 2
#define RELU 3
#define SILU 4
#define TANH 5
#define SIGMOID 6

__device__ inline float activated(float x, int activation) {
    switch (activation) {
        case GELU:
            return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case GELU_TANH:
            return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        case RELU:
            return x < 0.0f ? 0.0f : x;
        case SILU:
            return x / (1.0f + expf(-x));
        case TANH:
            return tanhf(x);
        case SIGMOID:
            return 1.0f / (1.0f + expf(-x));
        default:
            return x;
    }
}

// A thread has one number of a row: the blocks of a row lie in y.

// x = activation(x + bias)
extern "C" __global__ void add_bias(float *x, const float *bias, int width, int activation) {
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column < width) {
        float *own = x + (size_t)blockIdx.x * width + column;
        *own = activated(*own + bias[column], activation);
    }
}

// x += bias + residual
extern "C" __global__ void add_bias_and_residual(float *x, const float *bias, const float *residual, int width) {
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column < width) {
        size_t at = (size_t)blockIdx.x * width + column;
        x[at] += bias[column] + residual[at];
    }
}

// out = activation(first half of x) * second half of x
extern "C" __global__ void gate(float *out, const float *x, int half, int activation) {
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column < half) {
        const float *pair = x + (size_t)blockIdx.x * 2 * half + column;
        out[(size_t)blockIdx.x * half + column] = activated(pair[0], activation) * pair[half];
    }
}
