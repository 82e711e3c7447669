// The cache takes keys and values in.

#define PAGE_TOKENS 16

// Writes the keys and values of rows of (queries, keys, values) to pages (blocks, 2, kv_heads, 16, head_dim), a block of
// threads for each row. A row's place is the number of its page times 16, and which token of the page it is.
extern "C" __global__ void write_cache(float *pages, const float *qkv, const unsigned *places, int heads, int kv_heads,
                                       int head_dim) {
    unsigned place = places[blockIdx.x], page = place / PAGE_TOKENS, token = place % PAGE_TOKENS;
    qkv += ((size_t)blockIdx.x * (heads + 2 * kv_heads) + heads) * head_dim;
    pages += ((size_t)page * 2 * kv_heads * PAGE_TOKENS + token) * head_dim;
    for (int i = threadIdx.x; i < 2 * kv_heads * head_dim; i += blockDim.x) {
        pages[(size_t)(i / head_dim) * PAGE_TOKENS * head_dim + i % head_dim] = qkv[i];
    }
}
