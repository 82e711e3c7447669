// Attention over ragged batches: of whole sequences to themselves, and of new tokens to their sequences in the cache.
//
// The host cuts sequences into tiles of up to 16 tokens. A block of threads has a tile and a key/value head: its rows are the
// tile's tokens, each with all query heads that share that head, 16 such rows at a time. Keys come through shared memory, 32
// at a time, one for each lane of a warp. A warp has four of the rows, and for each the greatest score so far, the sum of
// weights and the weighted sum of values, which are scaled anew where a greater score comes (online softmax, Milakov and
// Gimelshein 2018). All of it is float32.

#include "warp.cuh"

#define TILE_TOKENS 16
#define TILE_NUMBERS 5
#define WARPS 4
#define WARP_ROWS 4
#define BLOCK_ROWS (WARPS * WARP_ROWS)
#define PAGE_TOKENS 16
#define MOST_HEAD_DIM 256
#define LANE_FEATURES (MOST_HEAD_DIM / WARP)

// Some tokens of a sequence: their first row in the batch, how many, the position of the first, and how many keys the
// sequence has. `base` tells where these are.
struct Tile {
    unsigned first, tokens, position, keys, base;
};

// The sizes of a call. Without a window, `window` is negative.
struct Shape {
    int heads, kv_heads, head_dim;
    float scale;
    int causal, window;
};

// Keys and values that are rows of the batch.
struct InBatch {
    const float *keys, *values;
    int width;

    __device__ InBatch(const float *qkv, const Tile &tile, const Shape &shape, int head) {
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        keys = qkv + (size_t)tile.base * width + (shape.heads + head) * shape.head_dim;
        values = keys + shape.kv_heads * shape.head_dim;
    }

    __device__ const float *key(int at) const {
        return keys + (size_t)at * width;
    }

    __device__ const float *value(int at) const {
        return values + (size_t)at * width;
    }
};

// Keys and values that are in pages (blocks, 2, kv_heads, 16, head_dim), in the order of a table.
struct InCache {
    const float *pages;
    const unsigned *table;
    int head, kv_heads, head_dim;

    __device__ InCache(const float *pages, const unsigned *table, const Shape &shape, int head)
        : pages(pages), table(table), head(head), kv_heads(shape.kv_heads), head_dim(shape.head_dim) {}

    __device__ const float *row(int at, int of) const {
        size_t page = (size_t)table[at / PAGE_TOKENS] * 2 * kv_heads + of;
        return pages + (page * PAGE_TOKENS + at % PAGE_TOKENS) * head_dim;
    }

    __device__ const float *key(int at) const {
        return row(at, head);
    }

    __device__ const float *value(int at) const {
        return row(at, kv_heads + head);
    }
};

__device__ inline bool is_seen(const Shape &shape, int position, int at) {
    return (!shape.causal || at <= position) &&
           (shape.window < 0 || (at >= position - shape.window && at <= position + shape.window));
}

template <typename Rows>
__device__ void attend_tile(float *out, const float *qkv, const Rows &rows, const Tile &tile, const Shape &shape, float *shared) {
    int head_dim = shape.head_dim, group = shape.heads / shape.kv_heads;
    int first_row = blockIdx.z * BLOCK_ROWS, count = (int)tile.tokens * group - first_row;
    if (count <= 0) {
        return;  // all threads of the block do
    }
    count = count < BLOCK_ROWS ? count : BLOCK_ROWS;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    // Rows of queries, and of keys with a float between two, so that lanes read from different banks.
    float *queries = shared, *keys = shared + BLOCK_ROWS * head_dim;
    for (int r = warp; r < count; r += WARPS) {
        int token = (first_row + r) / group, head = blockIdx.y * group + (first_row + r) % group;
        const float *query = qkv + ((size_t)(tile.first + token) * (shape.heads + 2 * shape.kv_heads) + head) * head_dim;
        for (int f = lane; f < head_dim; f += WARP) {
            queries[r * head_dim + f] = query[f] * shape.scale;
        }
    }

    // The keys that any of the rows sees.
    int earliest = tile.position + first_row / group, latest = tile.position + (first_row + count - 1) / group;
    int start = 0, end = shape.causal ? latest + 1 : (int)tile.keys;
    if (shape.window >= 0) {
        start = earliest > shape.window ? earliest - shape.window : 0;
        end = end - latest - 1 < shape.window ? end : latest + shape.window + 1;
    }

    float most[WARP_ROWS], total[WARP_ROWS], sums[WARP_ROWS][LANE_FEATURES];
    for (int r = 0; r < WARP_ROWS; r++) {
        most[r] = -INFINITY;
        total[r] = 0.0f;
        for (int f = 0; f < LANE_FEATURES; f++) {
            sums[r][f] = 0.0f;
        }
    }
    for (; start < end; start += WARP) {
        int there = end - start < WARP ? end - start : WARP;
        __syncthreads();  // the keys before are done with; at first, the queries are there
        for (int k = warp; k < there; k += WARPS) {
            const float *key = rows.key(start + k);
            for (int f = lane; f < head_dim; f += WARP) {
                keys[k * (head_dim + 1) + f] = key[f];
            }
        }
        __syncthreads();

        float weights[WARP_ROWS];
        for (int r = 0; r < WARP_ROWS; r++) {
            int row = warp * WARP_ROWS + r, position = tile.position + (first_row + row) / group;
            bool seen = row < count && lane < there && is_seen(shape, position, start + lane);
            float score = 0.0f;
            for (int f = 0; seen && f < head_dim; f++) {
                score += queries[row * head_dim + f] * keys[lane * (head_dim + 1) + f];
            }
            float now = fmaxf(most[r], warp_max(seen ? score : -INFINITY));
            // Before the first key that the row sees there is nothing to scale.
            float kept = most[r] == -INFINITY ? 0.0f : expf(most[r] - now);
            weights[r] = seen ? expf(score - now) : 0.0f;
            total[r] = total[r] * kept + warp_sum(weights[r]);
            most[r] = now;
            for (int f = 0; f < LANE_FEATURES; f++) {
                sums[r][f] *= kept;
            }
        }
        for (int key = 0; key < there; key++) {
            float weight[WARP_ROWS];
            for (int r = 0; r < WARP_ROWS; r++) {
                weight[r] = __shfl_sync(ALL_LANES, weights[r], key);
            }
            const float *value = rows.value(start + key);
            for (int f = 0; f < LANE_FEATURES; f++) {
                float feature = lane + f * WARP < head_dim ? value[lane + f * WARP] : 0.0f;
                for (int r = 0; r < WARP_ROWS; r++) {
                    // A row takes nothing of a key that it does not see, not even what is not a number.
                    sums[r][f] += weight[r] != 0.0f ? weight[r] * feature : 0.0f;
                }
            }
        }
    }

    for (int r = 0; r < WARP_ROWS; r++) {
        int row = warp * WARP_ROWS + r;
        if (row >= count) {
            continue;
        }
        size_t token = tile.first + (first_row + row) / group, head = blockIdx.y * group + (first_row + row) % group;
        for (int f = 0; f < LANE_FEATURES; f++) {
            if (lane + f * WARP < head_dim) {
                out[(token * shape.heads + head) * head_dim + lane + f * WARP] = sums[r][f] / total[r];
            }
        }
    }
}

__device__ inline Tile tile_of(const unsigned *list) {
    const unsigned *numbers = list + (size_t)blockIdx.x * TILE_NUMBERS;
    return Tile{numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
}

// Rows of (queries, keys, values) to rows of their own sequences; a tile's base is the first row of its sequence.
extern "C" __global__ void attend(float *out, const float *qkv, const unsigned *list, int heads, int kv_heads, int head_dim,
                                  float scale, int causal, int window) {
    extern __shared__ float shared[];
    Shape shape = {heads, kv_heads, head_dim, scale, causal, window};
    Tile tile = tile_of(list);
    attend_tile(out, qkv, InBatch(qkv, tile, shape, blockIdx.y), tile, shape, shared);
}

// The same to the keys and values of the sequences in the cache, where those of the rows themselves are already; a tile's
// base is where its block table begins in the list.
extern "C" __global__ void attend_cached(float *out, const float *qkv, const float *pages, const unsigned *list, int heads,
                                         int kv_heads, int head_dim, float scale, int causal, int window) {
    extern __shared__ float shared[];
    Shape shape = {heads, kv_heads, head_dim, scale, causal, window};
    Tile tile = tile_of(list);
    attend_tile(out, qkv, InCache(pages, list + tile.base, shape, blockIdx.y), tile, shape, shared);
}
