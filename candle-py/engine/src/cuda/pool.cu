// Pooling: the rows of each sequence become one.

#ifndef EMULATED
#include <math.h>
#endif

#define FIRST 0
#define LAST 1
#define GREATEST 2
#define MEAN 3
#define MEAN_OVER_ROOT 4
#define WEIGHTED_MEAN 5

// Pools rows `offsets[s]` to `offsets[s + 1]` of x into out[s], but for the first `skip` of them: a block for each sequence
// and so many features, a thread for each feature. Sums are in double precision, so that texts of any length keep the
// digits. Without a row that is left, the first mode gives the first row all the same, the greatest minus infinity, all
// others zeros.
extern "C" __global__ void pool(float *out, const float *x, const unsigned *offsets, int width, int skip, int mode) {
    int feature = blockIdx.y * blockDim.x + threadIdx.x;
    if (feature >= width) {
        return;
    }
    long long start = offsets[blockIdx.x], end = offsets[blockIdx.x + 1], first = start + skip < end ? start + skip : end;
    float found = mode == GREATEST ? -INFINITY : 0.0f;
    if (mode == FIRST) {
        found = x[(first < end ? first : start) * width + feature];
    } else if (mode == LAST) {
        found = first < end ? x[(end - 1) * width + feature] : 0.0f;
    } else if (mode == GREATEST) {
        for (long long row = first; row < end; row++) {
            float value = x[row * width + feature];
            if (value > found || value != value) {  // not a number: nothing is greater
                found = value;
            }
        }
    } else {
        double sum = 0.0, weights = 0.0;
        for (long long row = first; row < end; row++) {
            double weight = mode == WEIGHTED_MEAN ? (double)(row - start + 1) : 1.0;
            sum += weight * x[row * width + feature];
            weights += weight;
        }
        double divisor = mode == MEAN_OVER_ROOT ? sqrt(weights) : weights;
        found = divisor > 0.0 ? (float)(sum / divisor) : 0.0f;
    }
    out[(size_t)blockIdx.x * width + feature] = found;
}
