// Random items without state: the same draws as slipstream/ops/item_draws.py, bit for bit.
#include "counter_random.h"
#include "kernels.h"

// threshold == nullptr: uniform. Otherwise Walker's alias table: the top 32 bits choose a column,
// the low 32 between its two items.
SLIPSTREAM_API void ss_draw_items(int64_t seed, const int64_t* rows, int64_t num_rows, int64_t columns, int64_t below,
                                  const int64_t* threshold, const int64_t* alias, int64_t* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < num_rows; ++t) {
        const uint64_t state = slipstream::row_state(static_cast<uint64_t>(seed), static_cast<uint64_t>(rows[t]));
        int64_t* mine = out + t * columns;
        if (threshold == nullptr) {
            for (int64_t c = 0; c < columns; ++c) {
                const uint64_t bits = slipstream::random_bits(state, static_cast<uint64_t>(c));
                mine[c] = static_cast<int64_t>(((bits >> 32) * static_cast<uint64_t>(below)) >> 32);
            }
            continue;
        }
        for (int64_t c = 0; c < columns; ++c) {
            const uint64_t bits = slipstream::random_bits(state, static_cast<uint64_t>(c));
            const int64_t column = static_cast<int64_t>(((bits >> 32) * static_cast<uint64_t>(below)) >> 32);
            mine[c] = static_cast<int64_t>(bits & 0xffffffffull) < threshold[column] ? column : alias[column];
        }
    }
}
