// Sampled softmax: each token against its own negatives. Rows are read where they lie; tokens x
// negatives x width never exists. The forward pass keeps tokens x negatives weights (d loss / d
// logit / temperature) and, while a token's rows are still in the cache, its gradient for a unit
// loss gradient. The gradient of the rows is a scatter of weights x hidden (rows_scatter.cpp).
#include <cmath>
#include <limits>
#include <memory>

#include "aligned_block.h"
#include "kernels.h"
#include "simd.h"
#include "simd_sums.h"
#include "threads.h"

namespace {

using namespace slipstream::simd;
using slipstream::Block;

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
    const float* table;  // the rows as they are read here: themselves, or copies in whole cache lines
    int64_t stride, last;  // from row to row; to a row's last vector where that overlaps

    int64_t vectors() const { return tail.whole / kLanes + tail.overlaps; }
    int64_t at(int64_t v) const { return v * kLanes < tail.whole ? v * kLanes : last; }
};

constexpr int64_t kReads = 8;         // of a row, from which on a copy pays
constexpr int64_t kCopied = 1 << 20;  // bytes of copies, which must stay in a core's cache

// Copies of the rows, each from a cache line on, its overlapping last vector behind the others: few
// reads of the rows themselves lie within one line. Null where that does not pay.
std::unique_ptr<Block> copied_rows(const Sampled& in, int64_t num_tokens, int64_t num_rows, int threads) {
    const int64_t stride = in.vectors() * kLanes;
    if (in.tail.scalars > 0 || in.width % 16 == 0 || num_rows * stride * 4 > kCopied) return nullptr;
    if (num_tokens * in.negatives_per_token < kReads * num_rows) return nullptr;
    std::unique_ptr<Block> copies;
    try {
        copies = std::make_unique<Block>(num_rows * stride);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
    float* table = *copies;
#pragma omp parallel for num_threads(threads) if (num_rows * stride > kWorthSharing) schedule(static)
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t v = 0; v < in.vectors(); ++v) store(table + row * stride + v * kLanes, load(in.rows + row * in.width + in.at(v)));
    return copies;
}

// Products of a token with its negatives' rows, as many rows at a time as a vector has lanes: their
// chains of multiply-adds are independent, and their sums are made together. With kVectors > 0 a row
// has that many vectors, the overlapping last one included, and the token stays in registers.
constexpr int64_t kAhead = 8;  // rows fetched before they are read

template <int kVectors>
void products(const Sampled& in, const float* hidden, const int64_t* negatives, float* out) {
    const int64_t count = in.negatives_per_token, vectors = kVectors > 0 ? kVectors : in.vectors(), stride = in.stride;
    const auto token = [&](int64_t v) {
        return v * kLanes < in.tail.whole ? load(hidden + v * kLanes) : masked(load(hidden + in.tail.at), in.tail);
    };
    Floats kept[kVectors > 0 ? kVectors : 1];
    for (int v = 0; v < kVectors; ++v) kept[v] = token(v);
    for (int64_t j = 0; j < count; j += kLanes) {
        Floats total[kLanes] = {};
#pragma GCC unroll 16
        for (int k = 0; k < kLanes; ++k) {
            const float* row = in.table + negatives[j + k < count ? j + k : count - 1] * stride;
            if (in.prefetch && j + kAhead + k < count)
                prefetch_row(in.table + negatives[j + kAhead + k] * stride, kVectors > 0 ? kVectors * kLanes : stride);
#pragma GCC unroll 8
            for (int64_t v = 0; v < vectors; ++v) total[k] += load(row + in.at(v)) * (kVectors > 0 ? kept[v] : token(v));
        }
        const Floats sums = sums_of(total);
        if (j + kLanes <= count)
            store(out + j, sums);
        else
            std::memcpy(out + j, &sums, sizeof(float) * (count - j));
    }
}

using Products = void (*)(const Sampled&, const float*, const int64_t*, float*);

Products products_for(int64_t vectors) {
    static constexpr Products by_vectors[9] = {products<0>, products<1>, products<2>, products<3>, products<4>,
                                               products<5>, products<6>, products<7>, products<8>};
    return by_vectors[vectors <= 8 ? vectors : 0];
}

// Logits of one token's negatives; those that are the target become -inf. Returns the largest.
float negative_logits(const Sampled& in, Products multiply, int64_t t, float* logits) {
    const int64_t count = in.negatives_per_token, width = in.width;
    const int64_t* negatives = in.negatives + t * count;
    const float* hidden = in.hidden + t * width;
    int64_t j = 0;
    if (in.tail.scalars > 0)
        for (; j < count; ++j) logits[j] = dot(hidden, in.rows + negatives[j] * width, in.tail);
    else
        multiply(in, hidden, negatives, logits);
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
// done (they come out the same). Two rows in turn have sums of their own: one chain of multiply-adds
// would wait for itself.
template <int kCount, bool kTail>
void weighted_columns(const Sampled& in, int64_t t, const float* weights, float target_weight, int64_t at, float* out) {
    constexpr int kAll = kCount + kTail;
    const int64_t count = in.negatives_per_token, stride = in.stride, last = in.last;
    const int64_t* negatives = in.negatives + t * count;
    Floats total[2][kAll > 0 ? kAll : 1] = {};
    const auto add = [&](Floats(&to)[kAll > 0 ? kAll : 1], int64_t row, float weight) {
        const float* from = in.table + row * stride;
#pragma GCC unroll 16
        for (int k = 0; k < kAll; ++k) to[k] += load(from + (k < kCount ? at + k * kLanes : last)) * splat(weight);
    };
    add(total[0], in.targets[t], target_weight);
    int64_t j = 0;
    for (; j + 2 <= count; j += 2) {
        add(total[0], negatives[j], weights[j]);
        add(total[1], negatives[j + 1], weights[j + 1]);
    }
    if (j < count) add(total[0], negatives[j], weights[j]);
    for (int k = 0; k < kAll; ++k) store(out + (k < kCount ? at + k * kLanes : in.tail.at), total[0][k] + total[1][k]);
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
    const Tail tail = tail_of(width);
    Sampled in{hidden,       rows,           targets, negatives, negatives_per_token, width, inverse_temperature,
               target_log_q, negative_log_q, num_rows * width > (1 << 18), tail, rows, width, tail.at};
    const std::unique_ptr<Block> copies = copied_rows(in, num_tokens, num_rows, threads);
    if (copies) in.table = *copies, in.stride = in.vectors() * kLanes, in.last = tail.whole;
    const Products multiply = products_for(in.vectors());
#pragma omp parallel for num_threads(threads) if (num_tokens * (negatives_per_token + 1) * width > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < num_tokens; ++t) {
        float* logits = weights + (want_gradients ? t : omp_get_thread_num()) * negatives_per_token;
        const float best = negative_logits(in, multiply, t, logits);
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
