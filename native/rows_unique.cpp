// Sorted unique keys and each key's place among them. Keys of a narrow range are marked in a table
// (two passes, no sort); others go through a radix sort that skips the digits all keys share. No
// memory is allocated here: the caller passes scratch.
#include "kernels.h"
#include "simd.h"
#include "rows_sort.h"

using slipstream::simd::kWorthSharing;

// marks: uint8 [threads, range], zeroed; ranks: int64 [range]; unique: [min(count, range)]. Returns
// the number of unique keys.
SLIPSTREAM_API int64_t ss_unique_narrow(const int64_t* keys, int64_t count, int64_t low, int64_t range, uint8_t* marks,
                                        int64_t* ranks, int64_t* unique, int64_t* inverse, int threads) {
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        uint8_t* own = marks + part * range;
        for (int64_t i = count * part / threads; i < count * (part + 1) / threads; ++i) own[keys[i] - low] = 1;
    }
    int64_t found = 0;
    for (int64_t k = 0; k < range; ++k) {
        uint8_t seen = 0;
        for (int part = 0; part < threads; ++part) seen |= marks[part * range + k];
        ranks[k] = found;
        if (seen) unique[found++] = low + k;
    }
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int64_t i = 0; i < count; ++i) inverse[i] = ranks[keys[i] - low];
    return found;
}

// scratch_keys: [2, count]; scratch_places: int32 [2, count]. Returns the number of unique keys.
SLIPSTREAM_API int64_t ss_unique_wide(const int64_t* keys, int64_t count, int64_t* scratch_keys, int32_t* scratch_places,
                                      int64_t* unique, int64_t* inverse, int threads) {
    const slipstream::sorting::Sorted sorted = slipstream::sorting::radix_sort(keys, count, scratch_keys, scratch_places, threads);
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (i == 0 || sorted.keys[i] != sorted.keys[i - 1]) unique[found++] = slipstream::sorting::key_of(sorted.keys[i]);
        inverse[sorted.places[i]] = found - 1;
    }
    return found;
}
