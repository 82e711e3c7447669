// Norms of rows and of heads, in float32 and in two passes: the mean first, then the squares of what is left.

#include "warp.cuh"

// out[row] = (x[row] - mean) / sqrt(mean square + eps) * weight + bias, a block for each row. The mean is only taken off
// where `centred`, and there are biases, after the weights, only where `has_bias`.
extern "C" __global__ void norm_rows(float *out, const float *x, const float *weights, int width, float eps,
                                     int centred, int has_bias) {
    extern __shared__ float shared[];
    x += (size_t)blockIdx.x * width;
    out += (size_t)blockIdx.x * width;
    float mean = 0.0f;
    if (centred) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            sum += x[i];
        }
        mean = block_sum(sum, shared) / width;
    }
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float apart = x[i] - mean;
        squares += apart * apart;
    }
    float factor = 1.0f / sqrtf(block_sum(squares, shared) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = (x[i] - mean) * factor * weights[i];
        out[i] = has_bias ? value + weights[width + i] : value;
    }
}

// Normalises the heads of queries and keys in rows of (queries, keys, values), in place, a warp for each row and head.
extern "C" __global__ void norm_heads(float *qkv, const float *of_queries, const float *of_keys, int heads, int kv_heads,
                                      int head_dim, float query_eps, float key_eps) {
    int head = blockIdx.y;
    bool is_key = head >= heads;
    const float *weights = is_key ? of_keys : of_queries;
    float *x = qkv + ((size_t)blockIdx.x * (heads + 2 * kv_heads) + head) * head_dim;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < head_dim; i += WARP) {
        squares += x[i] * x[i];
    }
    float factor = 1.0f / sqrtf(warp_sum(squares) / head_dim + (is_key ? key_eps : query_eps));
    for (int i = threadIdx.x; i < head_dim; i += WARP) {
        x[i] = x[i] * factor * weights[i];
    }
}
