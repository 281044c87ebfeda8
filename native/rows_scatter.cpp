// Adds weighted token vectors into rows, without atomics and in a fixed order: the backward of a
// gather. out[index[t, r]] += weights[t, r] * source[t]. Few rows: every thread adds into its own
// copy, and the copies are summed in order. Many rows: entries are first sorted into buckets of
// near rows (token order kept), then one thread sums each bucket, which fits the cache; this result
// does not depend on the number of threads.
#include "kernels.h"
#include "simd.h"

namespace {

using namespace slipstream::simd;

constexpr int64_t kAhead = 6;  // rows fetched before they are added to

struct Entry {
    int32_t token;
    int32_t row;
    float weight;
};

struct Slice {
    int64_t begin, end;
};
Slice slice_of(int64_t count, int64_t part, int64_t parts) { return {count * part / parts, count * (part + 1) / parts}; }

// own[index[e]] += weights[e] * source for the entries of one token; rows are padded to whole
// vectors, so nothing is left over. With kCount > 0 a row has that many vectors and the source
// stays in registers.
template <int kCount>
void add_token(float* own, int64_t stride, const float* source, const int64_t* index, const float* weights, int64_t entries,
               int64_t ahead) {
    const int64_t vectors = kCount > 0 ? kCount : stride / kLanes;
    Floats kept[kCount > 0 ? kCount : 1];
    for (int k = 0; k < kCount; ++k) kept[k] = load(source + k * kLanes);
    for (int64_t e = 0; e < entries; ++e) {
        if (e + kAhead < ahead) prefetch_row(own + index[e + kAhead] * stride, kCount > 0 ? kCount * kLanes : stride);
        float* row = own + index[e] * stride;
        const Floats w = splat(weights == nullptr ? 1.0f : weights[e]);
        for (int64_t k = 0; k < vectors; ++k)
            store(row + k * kLanes, load(row + k * kLanes) + (kCount > 0 ? kept[k] : load(source + k * kLanes)) * w);
    }
}

using AddToken = void (*)(float*, int64_t, const float*, const int64_t*, const float*, int64_t, int64_t);

AddToken add_token_for(int64_t vectors) {
    static constexpr AddToken by_count[9] = {add_token<0>, add_token<1>, add_token<2>, add_token<3>, add_token<4>,
                                             add_token<5>, add_token<6>, add_token<7>, add_token<8>};
    return by_count[vectors <= 8 ? vectors : 0];
}

}  // namespace

// copies: [threads, rows + 1, stride] scratch, zeroed by the caller, stride a multiple of 16 not
// below width; out is overwritten. The last row of a copy holds the padded source of the token at
// hand.
SLIPSTREAM_API void ss_scatter_copies(float* out, int64_t num_rows, int64_t width, const float* source, int64_t num_tokens,
                                      int64_t per_token, const int64_t* index, const float* weights, float* copies, int64_t stride,
                                      int threads) {
    const int64_t size = (num_rows + 1) * stride;
    const int64_t used = (width + kLanes - 1) / kLanes;
    const AddToken add = add_token_for(used);
#pragma omp parallel for num_threads(threads) if (num_tokens * per_token * width > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        float* own = copies + part * size;
        float* padded = own + num_rows * stride;
        const Slice slice = slice_of(num_tokens, part, threads);
        for (int64_t t = slice.begin; t < slice.end; ++t) {
            std::memcpy(padded, source + t * width, sizeof(float) * width);
            const int64_t first = t * per_token, ahead = slice.end * per_token - first;
            add(own, stride, padded, index + first, weights == nullptr ? nullptr : weights + first, per_token, ahead);
        }
    }
    sum_copies(out, num_rows, width, copies, size, stride, threads);
}

// entries: scratch of 12 bytes per index; starts: int64 scratch [threads * buckets + 1]; out is
// added to. A bucket holds 2^shift consecutive rows.
SLIPSTREAM_API void ss_scatter_buckets(float* out, int64_t num_rows, int64_t width, const float* source, int64_t num_tokens,
                                       int64_t per_token, const int64_t* index, const float* weights, int shift, void* entries,
                                       int64_t* starts, int threads) {
    Entry* sorted = static_cast<Entry*>(entries);
    const int64_t buckets = ((num_rows - 1) >> shift) + 1;
#pragma omp parallel for num_threads(threads) if (num_tokens * per_token > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        int64_t* counts = starts + part * buckets;
        std::memset(counts, 0, sizeof(int64_t) * buckets);
        const Slice slice = slice_of(num_tokens, part, threads);
        for (int64_t e = slice.begin * per_token; e < slice.end * per_token; ++e) counts[index[e] >> shift]++;
    }
    int64_t place = 0;
    for (int64_t b = 0; b < buckets; ++b)
        for (int part = 0; part < threads; ++part) {
            const int64_t count = starts[part * buckets + b];
            starts[part * buckets + b] = place;
            place += count;
        }
#pragma omp parallel for num_threads(threads) if (num_tokens * per_token > kWorthSharing) schedule(static)
    for (int part = 0; part < threads; ++part) {
        int64_t* next = starts + part * buckets;
        const Slice slice = slice_of(num_tokens, part, threads);
        for (int64_t t = slice.begin; t < slice.end; ++t)
            for (int64_t e = t * per_token; e < (t + 1) * per_token; ++e) {
                const float weight = weights == nullptr ? 1.0f : weights[e];
                sorted[next[index[e] >> shift]++] = {static_cast<int32_t>(t), static_cast<int32_t>(index[e]), weight};
            }
    }
    // The last part's pointers now stand at the end of each bucket.
    const int64_t* ends = starts + (threads - 1) * buckets;
#pragma omp parallel for num_threads(threads) if (num_tokens * per_token * width > kWorthSharing) schedule(dynamic, 1)
    for (int64_t b = 0; b < buckets; ++b)
        for (int64_t e = b == 0 ? 0 : ends[b - 1]; e < ends[b]; ++e) {
            const int64_t next = e + kAhead < ends[b] ? e + kAhead : e;
            prefetch_row(out + sorted[next].row * width, width);
            prefetch_row(source + sorted[next].token * width, width);
            add_scaled(out + sorted[e].row * width, source + sorted[e].token * width, sorted[e].weight, width);
        }
}
