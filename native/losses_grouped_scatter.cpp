// The rows' gradient of the grouped softmax: every negative of a group gets the weighted sum of the
// group's tokens. Few rows: each thread adds into a copy of its own. Many rows: the negatives are
// first sorted into buckets of near rows (order kept), then one thread sums each bucket; this
// result does not depend on the number of threads.
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace {

using namespace slipstream::simd;

constexpr int64_t kAhead = 4;  // rows fetched before they are added to

struct Groups {
    const float* source;     // [T, D]: hidden states times the gradient of their loss
    const int64_t* offsets;  // [G + 1] tokens
    const int64_t* sets;     // [G + 1] sets of negatives
    const int64_t* places;   // [G]: where a group's weights begin
    const float* weights;
    int64_t per_set, width;
    int block;

    int64_t negatives(int64_t g) const { return (sets[g + 1] - sets[g]) * per_set; }
};

// to += the weighted sum of `block` token vectors; kBlock > 0 fixes the block so that the loop
// unrolls.
template <int kBlock>
void add_block(float* to, const float* source, const float* weights, int64_t present, int64_t width) {
    const float* token[kBlock];
    for (int m = 0; m < kBlock; ++m) token[m] = source + (m < present ? m : 0) * width;
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) {
        Floats total = load(to + d);
#pragma GCC unroll 4
        for (int m = 0; m < kBlock; ++m) total += load(token[m] + d) * weights[m];
        store(to + d, total);
    }
    for (; d < width; ++d) {
        float total = to[d];
        for (int m = 0; m < kBlock; ++m) total += token[m][d] * weights[m];
        to[d] = total;
    }
}

// to += what the j-th negative of group g gets.
template <int kBlock>
void add_negative(const Groups& in, int64_t g, int64_t j, float* to) {
    const int64_t count = in.negatives(g), end = in.offsets[g + 1];
    const float* weights = in.weights + in.places[g] + j * kBlock;
    for (int64_t first = in.offsets[g]; first < end; first += kBlock, weights += count * kBlock) {
        const int64_t left = end - first;
        add_block<kBlock>(to, in.source + first * in.width, weights, left < kBlock ? left : kBlock, in.width);
    }
}

// Rows padded to whole vectors; the block's tokens stay in the innermost cache over all negatives
// of the group.
template <int kBlock>
void add_padded(const float* tokens, int64_t stride, int64_t vectors, const float* weights, const int64_t* index, int64_t count,
                float* own) {
    for (int64_t j = 0; j < count; ++j) {
        if (j + kAhead < count) prefetch_row(own + index[j + kAhead] * stride, vectors * kLanes);
        float* row = own + index[j] * stride;
        Floats w[kBlock];
#pragma GCC unroll 4
        for (int m = 0; m < kBlock; ++m) w[m] = splat(weights[j * kBlock + m]);
        for (int64_t c = 0; c < vectors; ++c) {
            Floats total = load(row + c * kLanes);
#pragma GCC unroll 4
            for (int m = 0; m < kBlock; ++m) total += load(tokens + m * stride + c * kLanes) * w[m];
            store(row + c * kLanes, total);
        }
    }
}

template <int kBlock>
void add_group(const Groups& in, int64_t g, const int64_t* index, float* tokens, int64_t stride, int64_t vectors, float* own) {
    const int64_t count = in.negatives(g), end = in.offsets[g + 1];
    const float* weights = in.weights + in.places[g];
    index += in.sets[g] * in.per_set;
    for (int64_t first = in.offsets[g]; first < end; first += kBlock, weights += count * kBlock) {
        for (int64_t m = 0; m < kBlock; ++m)
            std::memcpy(tokens + m * stride, in.source + (first + m < end ? first + m : first) * in.width, sizeof(float) * in.width);
        add_padded<kBlock>(tokens, stride, vectors, weights, index, count, own);
    }
}

}  // namespace

// copies: [threads, num_rows, stride] zeroed scratch, stride a multiple of 16; out [num_rows, D] is
// overwritten.
SLIPSTREAM_API void ss_grouped_copies(float* out, int64_t num_rows, int64_t width, const float* source, const int64_t* offsets,
                                      const int64_t* sets, int64_t groups, int64_t per_set, const int64_t* index,
                                      const int64_t* places, const float* weights, int block, float* copies, int64_t stride,
                                      int threads) {
    const Groups in{source, offsets, sets, places, weights, per_set, width, block};
    const int64_t size = num_rows * stride, vectors = (width + kLanes - 1) / kLanes;
    const auto add = block == 1 ? add_group<1> : block == 2 ? add_group<2> : add_group<4>;
#pragma omp parallel for num_threads(threads) if (sets[groups] * per_set * width > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        std::vector<float> tokens(4 * stride, 0.0f);
        for (int64_t g = groups * part / threads; g < groups * (part + 1) / threads; ++g)
            add(in, g, index, tokens.data(), stride, vectors, copies + part * size);
    }
    sum_copies(out, num_rows, width, copies, size, stride, threads);
}

// Sorts entries 0 … count - 1 into buckets of near keys, stable: order [count] and starts [buckets
// + 1]. The bucket of a key is key * buckets / below. counts: scratch [threads * buckets].
SLIPSTREAM_API void ss_bucket_entries(const int64_t* keys, int64_t count, int64_t below, int64_t buckets, int32_t* order,
                                    int64_t* starts, int64_t* counts, int threads) {
    const auto bucket = [=](int64_t e) {
        return static_cast<int64_t>(static_cast<unsigned __int128>(keys[e]) * static_cast<uint64_t>(buckets) / below);
    };
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        int64_t* mine = counts + part * buckets;
        std::memset(mine, 0, sizeof(int64_t) * buckets);
        for (int64_t e = count * part / threads; e < count * (part + 1) / threads; ++e) mine[bucket(e)]++;
    }
    int64_t place = 0;
    for (int64_t b = 0; b < buckets; ++b) {
        starts[b] = place;
        for (int part = 0; part < threads; ++part) {
            const int64_t here = counts[part * buckets + b];
            counts[part * buckets + b] = place;
            place += here;
        }
    }
    starts[buckets] = place;
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        int64_t* next = counts + part * buckets;
        for (int64_t e = count * part / threads; e < count * (part + 1) / threads; ++e) order[next[bucket(e)]++] = static_cast<int32_t>(e);
    }
}

// out[place of entry] += what that negative gets, for the entries order[starts[b] … starts[b + 1])
// of buckets first … last - 1. rows: the place of entry e is rows[e], or with by_position that of
// the i-th entry of these buckets is rows[i].
SLIPSTREAM_API void ss_grouped_scatter(float* out, int64_t width, const float* source, const int64_t* offsets, const int64_t* sets,
                                       int64_t per_set, const int32_t* group_of_set, const int64_t* places, const float* weights,
                                       int block, const int32_t* order, const int64_t* starts, int64_t first, int64_t last,
                                       const int64_t* rows, int by_position, int threads) {
    const Groups in{source, offsets, sets, places, weights, per_set, width, block};
    const auto add = block == 1 ? add_negative<1> : block == 2 ? add_negative<2> : add_negative<4>;
    const int64_t base = starts[first];
    const auto row_of = [=](int64_t i) { return out + rows[by_position ? i - base : order[i]] * width; };
#pragma omp parallel for num_threads(threads) if ((starts[last] - base) * width > kWorthSharing) schedule(dynamic, 1)
    for (int64_t b = first; b < last; ++b)
        for (int64_t i = starts[b]; i < starts[b + 1]; ++i) {
            if (i + kAhead < starts[b + 1]) {
                const int32_t soon = group_of_set[order[i + kAhead] / per_set];
                prefetch_row(row_of(i + kAhead), width);
                prefetch_row(source + offsets[soon] * width, width);
            }
            const int64_t g = group_of_set[order[i] / per_set];
            add(in, g, order[i] - sets[g] * per_set, row_of(i));
        }
}
