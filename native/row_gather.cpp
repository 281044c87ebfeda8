// Copies rows of a table by number. A row read at random misses every cache, so coming rows are
// prefetched.
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t kAhead = 8;
constexpr int64_t kWorthSharing = 1 << 17;  // bytes

inline void prefetch_bytes(const char* row, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

}  // namespace

// Returns -1 where a row lies outside the table (it is left out), else how many rows are not
// present. present: a bit per row, or NULL.
SLIPSTREAM_API int64_t ss_gather_rows(const char* table, int64_t num_rows, const uint8_t* present, const int64_t* rows, int64_t count,
                                      int64_t row_bytes, char* out, int threads) {
    int64_t outside = 0, absent = 0;
    const auto within = [num_rows](int64_t row) { return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows); };
#pragma omp parallel for num_threads(threads) if (count * row_bytes > kWorthSharing) schedule(static) reduction(+ : outside, absent)
    for (int64_t u = 0; u < count; ++u) {
        if (u + kAhead < count && within(rows[u + kAhead])) {
            prefetch_bytes(table + rows[u + kAhead] * row_bytes, row_bytes);
            if (present != nullptr) __builtin_prefetch(present + (rows[u + kAhead] >> 3));
        }
        if (!within(rows[u])) {
            ++outside;
            continue;
        }
        if (present != nullptr) absent += ((present[rows[u] >> 3] >> (rows[u] & 7)) & 1) == 0;
        std::memcpy(out + u * row_bytes, table + rows[u] * row_bytes, row_bytes);
    }
    return outside ? -1 : absent;
}
