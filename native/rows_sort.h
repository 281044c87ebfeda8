// A stable radix sort of int64 keys that carries each key's place; equal keys keep their order, so sums over them are fixed.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

namespace slipstream {

struct Sorted {
    const uint64_t* keys;  // ascending, sign bit flipped: see key_of
    const int32_t* places;
};

static inline int64_t key_of(uint64_t sortable) { return static_cast<int64_t>(sortable ^ (1ull << 63)); }

// scratch_keys and scratch_places hold 2 * count values each. Digits of 11 bits; digits that all keys share cost nothing.
static inline Sorted radix_sort(const int64_t* keys, int64_t count, int64_t* scratch_keys, int32_t* scratch_places) {
    constexpr int kBits = 11, kDigits = 1 << kBits;
    uint64_t* from = reinterpret_cast<uint64_t*>(scratch_keys);
    uint64_t* to = from + count;
    int32_t* places = scratch_places;
    int32_t* next_places = scratch_places + count;
    uint64_t differ = 0;
    for (int64_t i = 0; i < count; ++i) {
        from[i] = static_cast<uint64_t>(keys[i]) ^ (1ull << 63);
        places[i] = static_cast<int32_t>(i);
        differ |= from[i] ^ from[0];
    }
    for (int shift = 0; shift < 64; shift += kBits) {
        if (((differ >> shift) & (kDigits - 1)) == 0) continue;
        int64_t starts[kDigits];
        std::memset(starts, 0, sizeof(starts));
        for (int64_t i = 0; i < count; ++i) starts[(from[i] >> shift) & (kDigits - 1)]++;
        int64_t place = 0;
        for (int d = 0; d < kDigits; ++d) {
            const int64_t size = starts[d];
            starts[d] = place;
            place += size;
        }
        for (int64_t i = 0; i < count; ++i) {
            const int64_t target = starts[(from[i] >> shift) & (kDigits - 1)]++;
            to[target] = from[i];
            next_places[target] = places[i];
        }
        std::swap(from, to);
        std::swap(places, next_places);
    }
    return {from, places};
}

}  // namespace slipstream
