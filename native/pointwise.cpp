// The operators around attention, one pass each: bias + SiLU, norm x weight x gate x dropout,
// dropout. Masks come from counter_random.h and are recomputed in backward, never stored.
#include <cmath>

#include "counter_random.h"
#include "kernels.h"
#include "row_norm.h"
#include "simd.h"
#include "threads.h"

namespace {

using namespace slipstream::simd;
using slipstream::moments_of;
using slipstream::norm_row;
using slipstream::sum_of;

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// Applies a function of vectors to columns [0, width), the rest through a padded copy. The function
// gets the column it starts at.
template <typename Function>
void over_columns(const float* in, float* out, int64_t width, Function function) {
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) store(out + d, function(load(in + d), d));
    if (d < width) {
        float padded[kLanes] = {};
        std::memcpy(padded, in + d, sizeof(float) * (width - d));
        store(padded, function(load(padded), d));
        std::memcpy(out + d, padded, sizeof(float) * (width - d));
    }
}

struct Dropout {
    bool active;
    uint64_t seed;
    uint32_t threshold;  // of the 24 random bits: below it a value is dropped
    float scale;
};

// random_uniform >= p in integers: p in fp32, as the reference compares, times 2^24 is exact.
Dropout dropout_of(const int64_t* token_ids, int64_t seed, float p, float scale) {
    return {token_ids != nullptr, static_cast<uint64_t>(seed), static_cast<uint32_t>(std::ceil(p * 16777216.0f)), scale};
}

constexpr int kWords = kLanes / 2;
typedef uint64_t Words __attribute__((vector_size(8 * kWords)));
typedef int32_t WordInts __attribute__((vector_size(4 * kWords)));
typedef float WordFloats __attribute__((vector_size(4 * kWords)));

inline Words mixed(Words x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// What each column of a token is multiplied by: 0 or 1 / (1 - p). The vectors compute
// slipstream::mix64 for several columns at once.
void fill_mask(const Dropout& dropout, int64_t token_id, int64_t width, float* mask) {
    const uint64_t state = slipstream::row_state(dropout.seed, static_cast<uint64_t>(token_id));
    const int32_t threshold = static_cast<int32_t>(dropout.threshold);
    Words column;
    for (int k = 0; k < kWords; ++k) column[k] = state + static_cast<uint64_t>(k);
    int64_t d = 0;
    for (; d + kWords <= width; d += kWords, column += kWords) {
        const WordInts bits = __builtin_convertvector(mixed(column) >> 40, WordInts);
        const WordFloats kept = bits >= WordInts{} + threshold ? WordFloats{} + dropout.scale : WordFloats{};
        std::memcpy(mask + d, &kept, sizeof(kept));
    }
    for (; d < width; ++d)
        mask[d] = static_cast<int32_t>(slipstream::random_bits(state, static_cast<uint64_t>(d)) >> 40) >= threshold ? dropout.scale : 0.0f;
}

}  // namespace

// out = silu(z + bias); z keeps the sum for backward.
SLIPSTREAM_API void ss_bias_silu(float* z, const float* bias, float* out, int64_t tokens, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * width > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        float* row = z + t * width;
        if (bias != nullptr)
            for (int64_t d = 0; d < width; ++d) row[d] += bias[d];
        over_columns(row, out + t * width, width, [](Floats x, int64_t) { return x * sigmoid(x); });
    }
}

// dz = grad * silu'(z).
SLIPSTREAM_API void ss_silu_backward(const float* z, const float* grad, float* dz, int64_t count, int threads) {
    constexpr int64_t kBlock = 4096;
#pragma omp parallel for num_threads(threads) if (count > kWorthSharing) schedule(static)
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t size = count - start < kBlock ? count - start : kBlock;
        over_columns(z + start, dz + start, size, [](Floats x, int64_t) {
            const Floats s = sigmoid(x);
            return s * (1.0f + x * (1.0f - s));
        });
        for (int64_t i = start; i < start + size; ++i) dz[i] *= grad[i];
    }
}

SLIPSTREAM_API void ss_dropout(const float* x, const int64_t* token_ids, int64_t seed, float p, float scale, float* out,
                               int64_t tokens, int64_t width, float* masks, int threads) {
    const Dropout dropout = dropout_of(token_ids, seed, p, scale);
#pragma omp parallel for num_threads(threads) if (tokens * width > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        float* mask = masks + omp_get_thread_num() * width;
        fill_mask(dropout, token_ids[t], width, mask);
        for (int64_t d = 0; d < width; ++d) out[t * width + d] = x[t * width + d] * mask[d];
    }
}

// out = norm(x) * weight * gate * mask; weight, gate and token_ids may be NULL. moments: [tokens,
// 2], mean and 1 / deviation.
SLIPSTREAM_API void ss_norm_gate_forward(const float* x, const float* gate, const float* weight, const int64_t* token_ids, int64_t seed,
                                         float p, float scale, int centred, float eps, float* out, float* moments, int64_t tokens,
                                         int64_t width, float* masks, int threads) {
    const Dropout dropout = dropout_of(token_ids, seed, p, scale);
#pragma omp parallel for num_threads(threads) if (tokens * width > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const float* row = x + t * width;
        float* __restrict result = out + t * width;
        const slipstream::Moments found = moments_of(row, width, centred, eps);
        moments[2 * t] = found.mean;
        moments[2 * t + 1] = found.inverse;
        norm_row(row, found, weight, gate == nullptr ? nullptr : gate + t * width, nullptr, width, result);
        if (dropout.active) {
            float* mask = masks + omp_get_thread_num() * width;
            fill_mask(dropout, token_ids[t], width, mask);
            for (int64_t d = 0; d < width; ++d) result[d] *= mask[d];
        }
    }
}

// d_gate may be NULL (no gate); d_weights is [threads, width] of partial sums, zeroed by the
// caller, or NULL. scratch: [threads, 2, width].
SLIPSTREAM_API void ss_norm_gate_backward(const float* x, const float* gate, const float* weight, const int64_t* token_ids,
                                          int64_t seed, float p, float scale, int centred, const float* moments, const float* grad,
                                          float* d_x, float* d_gate, float* d_weights, int64_t tokens, int64_t width, float* scratch,
                                          int threads) {
    const Dropout dropout = dropout_of(token_ids, seed, p, scale);
#pragma omp parallel for num_threads(threads) if (tokens * width > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const int thread = omp_get_thread_num();
        float* __restrict upstream = scratch + thread * 2 * width;
        float* __restrict normed = upstream + width;
        const float mean = moments[2 * t], inverse = moments[2 * t + 1];
        const float* row = x + t * width;
        if (dropout.active) {
            fill_mask(dropout, token_ids[t], width, upstream);
            for (int64_t d = 0; d < width; ++d) upstream[d] *= grad[t * width + d];
        } else {
            std::memcpy(upstream, grad + t * width, sizeof(float) * width);
        }
        for (int64_t d = 0; d < width; ++d) normed[d] = (row[d] - mean) * inverse;
        if (d_gate != nullptr) {
            for (int64_t d = 0; d < width; ++d)
                d_gate[t * width + d] = upstream[d] * normed[d] * (weight == nullptr ? 1.0f : weight[d]);
            for (int64_t d = 0; d < width; ++d) upstream[d] *= gate[t * width + d];
        }
        if (d_weights != nullptr)
            for (int64_t d = 0; d < width; ++d) d_weights[thread * width + d] += upstream[d] * normed[d];
        if (weight != nullptr)
            for (int64_t d = 0; d < width; ++d) upstream[d] *= weight[d];
        const float along = dot(upstream, normed, tail_of(width)) / static_cast<float>(width);
        const float offset = centred ? sum_of(upstream, width) / static_cast<float>(width) : 0.0f;
        for (int64_t d = 0; d < width; ++d) d_x[t * width + d] = inverse * (upstream[d] - offset - normed[d] * along);
    }
}
