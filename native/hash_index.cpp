// An open-addressing index from non-negative int64 keys to int64 values: linear probing over (key,
// value) pairs in the caller's memory, so that an index is one tensor that can be saved and loaded.
// Erasing shifts the followers back; there are no tombstones. All threads share lookups and
// prefetch the first pair of coming keys; one thread makes changes.
#include <cstring>

#include "counter_random.h"
#include "kernels.h"

struct slipstream::HashPair {
    int64_t key, value;  // key -1: empty
};

namespace {

using Pair = slipstream::HashPair;

constexpr int64_t kEmpty = -1, kAbsent = -1, kAhead = 12, kWorthSharing = 1 << 13;

inline int64_t home(int64_t key, int64_t mask) { return static_cast<int64_t>(slipstream::mix64(static_cast<uint64_t>(key))) & mask; }

// The place of the key, or of the empty pair where it would go.
inline int64_t probe(const Pair* pairs, int64_t mask, int64_t key) {
    int64_t at = home(key, mask);
    while (pairs[at].key != key && pairs[at].key != kEmpty) at = (at + 1) & mask;
    return at;
}

inline void prefetch_pair(const Pair* pairs, int64_t mask, const int64_t* keys, int64_t i, int64_t count) {
    if (i + kAhead < count) __builtin_prefetch(pairs + home(keys[i + kAhead], mask));
}

}  // namespace

// values: the key's value, or -1 where it is absent.
SLIPSTREAM_API void ss_hash_find(const Pair* pairs, int64_t mask, const int64_t* keys, int64_t count, int64_t* values, int threads) {
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        prefetch_pair(pairs, mask, keys, i, count);
        const Pair& found = pairs[probe(pairs, mask, keys[i])];
        values[i] = found.key == kEmpty ? kAbsent : found.value;
    }
}

// Inserts values; a key that is there gets the new value. The caller makes room for all. Returns
// how many keys are new.
SLIPSTREAM_API int64_t ss_hash_insert(Pair* pairs, int64_t mask, const int64_t* keys, const int64_t* values, int64_t count, int) {
    int64_t added = 0;
    for (int64_t i = 0; i < count; ++i) {
        prefetch_pair(pairs, mask, keys, i, count);
        Pair& pair = pairs[probe(pairs, mask, keys[i])];
        added += pair.key == kEmpty;
        pair = {keys[i], values[i]};
    }
    return added;
}

// Erases keys; absent ones are ignored. Returns how many were there.
SLIPSTREAM_API int64_t ss_hash_erase(Pair* pairs, int64_t mask, const int64_t* keys, int64_t count, int) {
    int64_t erased = 0;
    for (int64_t i = 0; i < count; ++i) {
        prefetch_pair(pairs, mask, keys, i, count);
        int64_t hole = probe(pairs, mask, keys[i]);
        if (pairs[hole].key == kEmpty) continue;
        ++erased;
        // A follower moves into the hole unless its home lies after the hole (cyclically), where a
        // search would not pass the hole.
        for (int64_t next = (hole + 1) & mask; pairs[next].key != kEmpty; next = (next + 1) & mask) {
            const int64_t wanted = home(pairs[next].key, mask);
            if (((next - wanted) & mask) < ((next - hole) & mask)) continue;
            pairs[hole] = pairs[next];
            hole = next;
        }
        pairs[hole].key = kEmpty;
    }
    return erased;
}

// Fills empty pairs of a new index with all of an old one's.
SLIPSTREAM_API void ss_hash_refill(const Pair* old, int64_t old_size, Pair* pairs, int64_t mask, int) {
    for (int64_t i = 0; i < old_size; ++i)
        if (old[i].key != kEmpty) pairs[probe(pairs, mask, old[i].key)] = old[i];
}
