// A stable radix sort of int64 keys that carries each key's place; equal keys keep their order, so
// sums over them are fixed. Many keys are first split by their top differing bits into parts that
// fit the cache; all threads sort parts.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

namespace slipstream::sorting {

struct Sorted {
    const uint64_t* keys;  // ascending, sign bit flipped: see key_of
    const int32_t* places;
};

struct Pairs {
    uint64_t* keys;
    int32_t* places;
    Pairs after(int64_t count) const { return {keys + count, places + count}; }
};

constexpr int kBits = 8, kDigits = 1 << kBits;
constexpr int64_t kFitsCache = 1 << 15;

static inline int64_t key_of(uint64_t sortable) { return static_cast<int64_t>(sortable ^ (1ull << 63)); }

// One stable pass by the digit at `shift`; starts receives where each digit begins.
static inline void split(Pairs from, Pairs to, int64_t count, int shift, int64_t* starts) {
    int64_t next[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) next[(from.keys[i] >> shift) & (kDigits - 1)]++;
    int64_t place = 0;
    for (int d = 0; d < kDigits; ++d) {
        starts[d] = place;
        place += next[d];
        next[d] = starts[d];
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t target = next[(from.keys[i] >> shift) & (kDigits - 1)]++;
        to.keys[target] = from.keys[i];
        to.places[target] = from.places[i];
    }
}

// Sorts with the lowest digit first; digits that all keys share cost nothing. The result lies in
// what is returned.
static inline Pairs sort_part(Pairs pairs, Pairs spare, int64_t count) {
    uint64_t differ = 0;
    for (int64_t i = 1; i < count; ++i) differ |= pairs.keys[i] ^ pairs.keys[0];
    int64_t starts[kDigits];
    for (int shift = 0; shift < 64; shift += kBits) {
        if (((differ >> shift) & (kDigits - 1)) == 0) continue;
        split(pairs, spare, count, shift, starts);
        std::swap(pairs, spare);
    }
    return pairs;
}

// scratch_keys and scratch_places hold 2 * count values each.
static inline Sorted radix_sort(const int64_t* keys, int64_t count, int64_t* scratch_keys, int32_t* scratch_places, int threads) {
    const Pairs first{reinterpret_cast<uint64_t*>(scratch_keys), scratch_places}, second = first.after(count);
    uint64_t differ = 0;
    for (int64_t i = 0; i < count; ++i) {
        first.keys[i] = static_cast<uint64_t>(keys[i]) ^ (1ull << 63);
        first.places[i] = static_cast<int32_t>(i);
        differ |= first.keys[i] ^ first.keys[0];
    }
    if (count <= kFitsCache || differ == 0) {
        const Pairs done = sort_part(first, second, count);
        return {done.keys, done.places};
    }
    const int top = 63 - __builtin_clzll(differ);
    int64_t starts[kDigits + 1];
    // Above the top differing bit all keys agree, so the digit that ends there orders the parts.
    split(first, second, count, top >= kBits - 1 ? top - (kBits - 1) : 0, starts);
    starts[kDigits] = count;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int d = 0; d < kDigits; ++d) {
        const int64_t begin = starts[d], size = starts[d + 1] - begin;
        const Pairs target = second.after(begin), done = sort_part(target, first.after(begin), size);
        if (done.keys == target.keys || size == 0) continue;
        std::memcpy(target.keys, done.keys, sizeof(uint64_t) * size);
        std::memcpy(target.places, done.places, sizeof(int32_t) * size);
    }
    return {second.keys, second.places};
}

}  // namespace slipstream::sorting
