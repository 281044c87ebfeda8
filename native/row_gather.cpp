// Copies rows of a table by number. A row read at random misses every cache, so the rows to come are asked for well ahead.
#include <cstring>

#include "export.h"

namespace {

constexpr int64_t kAhead = 8;
constexpr int64_t kWorthSharing = 1 << 17;  // bytes

inline void ask_for(const char* row, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

}  // namespace

SLIPSTREAM_API void ss_gather_rows(const char* table, const int64_t* rows, int64_t count, int64_t row_bytes, char* out, int threads) {
#pragma omp parallel num_threads(threads) if (count * row_bytes > kWorthSharing)
    {
#pragma omp for schedule(static)
        for (int64_t u = 0; u < count; ++u) {
            if (u + kAhead < count) ask_for(table + rows[u + kAhead] * row_bytes, row_bytes);
            std::memcpy(out + u * row_bytes, table + rows[u] * row_bytes, row_bytes);
        }
    }
}
