// Divides a batch into parts whose samples share keys, by simulated annealing. Integer arithmetic
// only, so that the reference finds the same division. Work is counted in key visits, never by the
// clock.
#include <vector>

#include "kernels.h"

namespace {

constexpr int64_t kStages = 40, kCold = 8;  // the last stages accept improvements only

// Sets of keys as bits, one row of words per sample or part.
struct KeySets {
    int64_t words = 0;
    std::vector<uint64_t> bits;

    void make(int64_t rows, int64_t of_words) { words = of_words, bits.assign(rows * words, 0); }
    const uint64_t* row(int64_t r) const { return bits.data() + r * words; }
    void put(int64_t r, int64_t key, bool in) {
        uint64_t& word = bits[r * words + (key >> 6)];
        const uint64_t bit = 1ull << (key & 63);
        word = in ? word | bit : word & ~bit;
    }
};

inline int64_t bits_of(uint64_t word) { return __builtin_popcountll(word); }

struct Division {
    int64_t samples, parts;
    std::vector<int64_t> begins;   // [samples + 1] into columns
    std::vector<int32_t> columns;  // each sample's keys that another sample has too
    std::vector<int32_t> counts;   // [columns, parts]: samples of a part that have a key
    std::vector<int64_t> lengths, tokens;
    int64_t* part_of;
    uint64_t random = 0x5bd1e9955bd1e995ull;
    // Where samples have many of the keys, sets of 64 keys a word take fewer visits than lists.
    bool dense = false;
    KeySets keys_of, absent, single;  // of a sample; those no sample, and one sample, of a part has

    uint64_t draw() {  // splitmix64
        uint64_t z = (random += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    int64_t size(int64_t sample) const { return begins[sample + 1] - begins[sample]; }

    // How many more keys there are if the sample goes from its part to another.
    int64_t change(int64_t sample, int64_t from, int64_t to) const {
        int64_t more = 0;
        if (dense) {
            const uint64_t *own = keys_of.row(sample), *none = absent.row(to), *last = single.row(from);
            for (int64_t w = 0; w < keys_of.words; ++w) more += bits_of(own[w] & none[w]) - bits_of(own[w] & last[w]);
            return more;
        }
        for (int64_t i = begins[sample]; i < begins[sample + 1]; ++i) {
            const int32_t* row = counts.data() + int64_t(columns[i]) * parts;
            more += (row[to] == 0) - (row[from] == 1);
        }
        return more;
    }

    // How many more there are if sample `two` comes from `to` in return, once `one` has gone there:
    // of a key of both, one is then in `to`, and `from` lacks it if only `one` had it there.
    int64_t change_in_return(int64_t one, int64_t two, int64_t from, int64_t to) {
        if (!dense) {
            assign(one, from, to);
            const int64_t more = change(two, to, from);
            assign(one, to, from);
            return more;
        }
        const uint64_t *first = keys_of.row(one), *second = keys_of.row(two);
        const uint64_t *none = absent.row(from), *last = single.row(from), *only = single.row(to);
        int64_t more = 0;
        for (int64_t w = 0; w < keys_of.words; ++w) {
            const uint64_t both = second[w] & first[w], alone = second[w] & ~first[w];
            more += bits_of((alone & none[w]) | (both & last[w])) - bits_of(alone & only[w]);
        }
        return more;
    }

    void assign(int64_t sample, int64_t from, int64_t to) {
        for (int64_t i = begins[sample]; i < begins[sample + 1]; ++i) {
            int32_t* row = counts.data() + int64_t(columns[i]) * parts;
            --row[from], ++row[to];
            if (dense) note(columns[i], from, row[from]), note(columns[i], to, row[to]);
        }
        tokens[from] -= lengths[sample], tokens[to] += lengths[sample];
        part_of[sample] = to;
    }

    void note(int64_t key, int64_t part, int32_t count) {
        absent.put(part, key, count == 0);
        single.put(part, key, count == 1);
    }

    // Makes the sets, where they are smaller than the lists.
    void make_sets() {
        const int64_t found = int64_t(counts.size()) / parts, words = (found + 63) / 64;
        dense = words * samples <= int64_t(columns.size());
        if (!dense) return;
        keys_of.make(samples, words), absent.make(parts, words), single.make(parts, words);
        for (int64_t sample = 0; sample < samples; ++sample)
            for (int64_t i = begins[sample]; i < begins[sample + 1]; ++i) keys_of.put(sample, columns[i], true);
        for (int64_t key = 0; key < found; ++key)
            for (int64_t part = 0; part < parts; ++part) note(key, part, counts[key * parts + part]);
    }
};

// Distinct keys of every sample, without those that no other sample has: they cost the same in
// every part.
void fill(Division& division, const int64_t* places, const int64_t* offsets, int64_t keys) {
    std::vector<int64_t> last(keys, -1);
    std::vector<int32_t> holders(keys, 0), column(keys, -1);
    for (int64_t sample = 0; sample < division.samples; ++sample)
        for (int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i)
            if (last[places[i]] != sample) last[places[i]] = sample, ++holders[places[i]];
    int32_t found = 0;
    for (int64_t key = 0; key < keys; ++key) {
        last[key] = -1;
        if (holders[key] > 1) column[key] = found++;
    }
    division.counts.assign(int64_t(found) * division.parts, 0);
    division.begins.push_back(0);
    for (int64_t sample = 0; sample < division.samples; ++sample) {
        for (int64_t i = offsets[sample]; i < offsets[sample + 1]; ++i) {
            const int64_t key = places[i];
            if (column[key] < 0 || last[key] == sample) continue;
            last[key] = sample;
            division.columns.push_back(column[key]);
            ++division.counts[int64_t(column[key]) * division.parts + division.part_of[sample]];
        }
        division.begins.push_back(int64_t(division.columns.size()));
        division.lengths.push_back(offsets[sample + 1] - offsets[sample]);
        division.tokens[division.part_of[sample]] += division.lengths.back();
    }
}

// Accepts with a probability of about 2^-(change / temperature).
bool accepts(Division& division, int64_t change, int64_t heat) {
    if (change <= 0) return true;
    if (heat == 0) return false;
    const uint64_t bits = division.draw();
    const int64_t halvings = bits == 0 ? 64 : __builtin_clzll(bits);
    return change * 256 <= heat * halvings;
}

}  // namespace

// places: each token's key, 0 … keys - 1; low, high: tokens a part should hold; part_of: a first
// division, improved in place.
SLIPSTREAM_API void ss_assign_samples(const int64_t* places, const int64_t* offsets, int64_t samples, int64_t keys, int64_t parts,
                                  const int64_t* low, const int64_t* high, int64_t budget, int64_t* part_of, int) {
    Division division{samples, parts, {}, {}, {}, {}, std::vector<int64_t>(parts, 0), part_of};
    fill(division, places, offsets, keys);
    if (division.columns.empty() || parts < 2) return;
    division.make_sets();
    std::vector<int64_t>& tokens = division.tokens;
    int64_t heat = 256 * 4, spent = 0, stage = 0;
    if (const int64_t wide = 16 * int64_t(division.columns.size()) / samples; wide > heat) heat = wide;
    while (spent < budget) {
        while (stage < spent * kStages / budget) heat = ++stage < kStages - kCold ? heat * 230 / 256 : 0;
        const uint64_t bits = division.draw();
        const int64_t one = int64_t((bits >> 32) * uint64_t(samples) >> 32), from = part_of[one], length = division.lengths[one];
        const int64_t to = int64_t((bits & 0xffffffffull) * uint64_t(parts) >> 32);
        ++spent;
        if (to == from) continue;
        if (tokens[to] + length <= high[to] && tokens[from] - length >= low[from]) {
            spent += division.size(one);
            const int64_t change = tokens[from] > high[from] ? 0 : division.change(one, from, to);
            if (accepts(division, change, heat)) division.assign(one, from, to);
            continue;
        }
        const int64_t two = int64_t((division.draw() >> 32) * uint64_t(samples) >> 32), shift = length - division.lengths[two];
        if (part_of[two] != to) continue;
        const int64_t full = tokens[to] + shift, empty = tokens[from] - shift;
        if (shift > 0 ? (full > high[to] || empty < low[from]) : shift < 0 && (empty > high[from] || full < low[to])) continue;
        spent += 2 * (division.size(one) + division.size(two));
        const int64_t change = division.change(one, from, to) + division.change_in_return(one, two, from, to);
        if (!accepts(division, change, heat)) continue;
        division.assign(one, from, to);
        division.assign(two, to, from);
    }
}
