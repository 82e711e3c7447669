// Rotary positions. The angles come from the host, which has them in double precision.

// Turns the heads of queries and keys in rows of (queries, keys, values), in place, a block for each row: number i of the
// first half of a head with number i of the second. A row's cosines are followed by its sines.
extern "C" __global__ void rotate(float *qkv, const float *angles, int heads, int kv_heads, int head_dim) {
    int half = head_dim / 2;
    qkv += (size_t)blockIdx.x * (heads + 2 * kv_heads) * head_dim;
    angles += (size_t)blockIdx.x * head_dim;
    for (int i = threadIdx.x; i < (heads + kv_heads) * half; i += blockDim.x) {
        int pair = i % half;
        float *one = qkv + i / half * head_dim + pair, *two = one + half;
        float x = *one, y = *two, cosine = angles[pair], sine = angles[half + pair];
        *one = x * cosine - y * sine;
        *two = y * cosine + x * sine;
    }
}
