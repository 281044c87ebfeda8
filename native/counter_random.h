// Random numbers without state: the same numbers as slipstream/ops/counter_random.py, bit for bit.
#pragma once
#include <cstdint>

namespace slipstream {

inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// The part of random_bits that depends only on (seed, row); add the column and mix once more for
// the final bits.
inline uint64_t row_state(uint64_t seed, uint64_t row) { return mix64(row ^ mix64(seed)); }
inline uint64_t random_bits(uint64_t state, uint64_t column) { return mix64(state + column); }
inline float random_uniform(uint64_t state, uint64_t column) {
    return static_cast<float>(random_bits(state, column) >> 40) * (1.0f / 16777216.0f);
}

}  // namespace slipstream
