// Sampled softmax: each token against its own negatives. Rows are read where they lie; tokens x
// negatives x width never exists. The forward pass keeps tokens x negatives weights (d loss / d
// logit / temperature) and, while a token's rows are still in the cache, its gradient for a unit
// loss gradient. The gradient of the rows is a scatter of weights x hidden (rows_scatter.cpp).
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace {

using namespace slipstream::simd;

struct Sampled {
    const float* hidden;
    const float* rows;
    const int64_t* targets;
    const int64_t* negatives;
    int64_t negatives_per_token, width;
    float inverse_temperature;
    const float* target_log_q;
    const float* negative_log_q;
    bool prefetch;
    Tail tail;
};

// Logits of one token's negatives; those that are the target become -inf. Returns the largest.
float negative_logits(const Sampled& in, int64_t t, float* logits) {
    const int64_t count = in.negatives_per_token, width = in.width;
    const int64_t* negatives = in.negatives + t * count;
    const float* hidden = in.hidden + t * width;
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        if (in.prefetch && j + 12 <= count)
            for (int k = 8; k < 12; ++k) prefetch_row(in.rows + negatives[j + k] * width, width);
        const float* four[4];
        for (int k = 0; k < 4; ++k) four[k] = in.rows + negatives[j + k] * width;
        dot4(hidden, four, in.tail, logits + j);
    }
    for (; j < count; ++j) logits[j] = dot(hidden, in.rows + negatives[j] * width, in.tail);
    const float* log_q = in.negative_log_q == nullptr ? nullptr : in.negative_log_q + t * count;
    for (j = 0; j < count; ++j) logits[j] *= in.inverse_temperature;
    if (log_q != nullptr)
        for (j = 0; j < count; ++j) logits[j] -= log_q[j];
    for (j = 0; j < count; ++j)
        if (negatives[j] == in.targets[t]) logits[j] = -std::numeric_limits<float>::infinity();
    float best = -std::numeric_limits<float>::infinity();
    Floats most = splat(best);
    for (j = 0; j + kLanes <= count; j += kLanes) most = most > load(logits + j) ? most : load(logits + j);
    for (; j < count; ++j) best = logits[j] > best ? logits[j] : best;
    return largest(most) > best ? largest(most) : best;
}

// logits become e^(logit - shift); returns their sum.
float exponentiate(float* logits, int64_t count, float shift) {
    Floats total{};
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        const Floats e = exponential(load(logits + j) - shift);
        store(logits + j, e);
        total += e;
    }
    if (j < count) {
        float padded[kLanes];
        for (int k = 0; k < kLanes; ++k) padded[k] = j + k < count ? logits[j + k] - shift : -1000.0f;
        const Floats e = exponential(load(padded));
        store(padded, e);
        std::memcpy(logits + j, padded, sizeof(float) * (count - j));
        total += e;
    }
    return sum(total);
}

// Columns of the weighted sum of a token's rows, kept in registers over all of them: kCount vectors
// from `at` and, with kTail, the last vector of the row, which may reach back over columns that are
// done (they come out the same).
template <int kCount, bool kTail>
void weighted_columns(const Sampled& in, int64_t t, const float* weights, float target_weight, int64_t at, float* out) {
    const int64_t count = in.negatives_per_token, width = in.width, tail_at = width - kLanes;
    const int64_t* negatives = in.negatives + t * count;
    const float* own = in.rows + in.targets[t] * width;
    Floats total[kCount + 1];
    for (int k = 0; k < kCount; ++k) total[k] = load(own + at + k * kLanes) * target_weight;
    if (kTail) total[kCount] = load(own + tail_at) * target_weight;
    for (int64_t j = 0; j < count; ++j) {
        const float* row = in.rows + negatives[j] * width;
        const Floats w = splat(weights[j]);
#pragma GCC unroll 8
        for (int k = 0; k < kCount; ++k) total[k] += load(row + at + k * kLanes) * w;
        if (kTail) total[kCount] += load(row + tail_at) * w;
    }
    for (int k = 0; k < kCount; ++k) store(out + at + k * kLanes, total[k]);
    if (kTail) store(out + tail_at, total[kCount]);
}

template <bool kTail>
void last_columns(int64_t vectors, const Sampled& in, int64_t t, const float* weights, float target_weight, int64_t at, float* out) {
    using Columns = void (*)(const Sampled&, int64_t, const float*, float, int64_t, float*);
    static constexpr Columns by_count[8] = {weighted_columns<0, kTail>, weighted_columns<1, kTail>, weighted_columns<2, kTail>,
                                            weighted_columns<3, kTail>, weighted_columns<4, kTail>, weighted_columns<5, kTail>,
                                            weighted_columns<6, kTail>, weighted_columns<7, kTail>};
    by_count[vectors](in, t, weights, target_weight, at, out);
}

void weighted_rows(const Sampled& in, int64_t t, const float* weights, float target_weight, float* out) {
    const int64_t width = in.width;
    if (width < kLanes) {
        for (int64_t d = 0; d < width; ++d) out[d] = in.rows[in.targets[t] * width + d] * target_weight;
        for (int64_t j = 0; j < in.negatives_per_token; ++j)
            add_scaled(out, in.rows + in.negatives[t * in.negatives_per_token + j] * width, weights[j], width);
        return;
    }
    int64_t at = 0;
    for (; at + 8 * kLanes <= width; at += 8 * kLanes) weighted_columns<8, false>(in, t, weights, target_weight, at, out);
    const int64_t vectors = (width - at) / kLanes;
    if (width % kLanes != 0)
        last_columns<true>(vectors, in, t, weights, target_weight, at, out);
    else if (vectors > 0)
        last_columns<false>(vectors, in, t, weights, target_weight, at, out);
}

}  // namespace

// loss [T]; with want_gradients also weights [T, R], target_weights [T] and unit_gradient [T, D]
// (else weights is [threads, R] scratch).
SLIPSTREAM_API void ss_sampled_softmax(const float* hidden, const float* rows, const int64_t* targets, const int64_t* negatives,
                                       int64_t num_tokens, int64_t negatives_per_token, int64_t width, int64_t num_rows,
                                       float inverse_temperature, const float* target_log_q, const float* negative_log_q,
                                       int want_gradients, float* loss, float* weights, float* target_weights, float* unit_gradient,
                                       int threads) {
    const Sampled in{hidden,       rows,           targets, negatives, negatives_per_token, width, inverse_temperature,
                     target_log_q, negative_log_q, num_rows * width > (1 << 18), tail_of(width)};
#pragma omp parallel for num_threads(threads) if (num_tokens * (negatives_per_token + 1) * width > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < num_tokens; ++t) {
        float* logits = weights + (want_gradients ? t : omp_get_thread_num()) * negatives_per_token;
        const float best = negative_logits(in, t, logits);
        float target = dot(hidden + t * width, rows + targets[t] * width, in.tail) * inverse_temperature;
        if (target_log_q != nullptr) target -= target_log_q[t];
        const float shift = best > target ? best : target;
        const float others = exponentiate(logits, negatives_per_token, shift);
        const float own = std::exp(target - shift);
        loss[t] = shift == target ? std::log1p(others) : std::log(others + own) + (shift - target);
        if (!want_gradients) continue;
        const float scale = inverse_temperature / (others + own);
        for (int64_t j = 0; j < negatives_per_token; ++j) logits[j] *= scale;
        target_weights[t] = -others * scale;
        weighted_rows(in, t, logits, target_weights[t], unit_gradient + t * width);
    }
}
