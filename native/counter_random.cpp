// Fills an array with counter-based uniform numbers (initial embedding rows, dropout masks in
// tests).
#include "counter_random.h"
#include "kernels.h"

SLIPSTREAM_API void ss_random_uniform(int64_t seed, const int64_t* rows, int64_t num_rows, int64_t columns, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < num_rows; ++t) {
        const uint64_t state = slipstream::row_state(static_cast<uint64_t>(seed), static_cast<uint64_t>(rows[t]));
        for (int64_t c = 0; c < columns; ++c) out[t * columns + c] = slipstream::random_uniform(state, static_cast<uint64_t>(c));
    }
}
