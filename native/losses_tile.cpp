// One pass over a tile of logits (tokens x columns, from a matrix product) for softmax losses
// against many columns at once: shared negatives or a whole catalogue. Forward reduces a tile to
// losses, backward turns it into gradients, in place.
#include <cmath>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace {

using namespace slipstream::simd;

constexpr float kNever = -std::numeric_limits<float>::infinity();

// logits * scale - log_q, and -inf where a column is the token's target. Where column_ids is NULL
// nothing is left out.
void finish_logits(float* logits, int64_t columns, float scale, const float* log_q, const int32_t* column_ids, int32_t target) {
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
        Floats x = load(logits + c) * scale;
        if (log_q != nullptr) x -= load(log_q + c);
        if (column_ids != nullptr) x = load(column_ids + c) == Ints{} + target ? splat(kNever) : x;
        store(logits + c, x);
    }
    for (; c < columns; ++c) {
        const float x = logits[c] * scale - (log_q == nullptr ? 0.0f : log_q[c]);
        logits[c] = column_ids != nullptr && column_ids[c] == target ? kNever : x;
    }
}

float largest_of(const float* logits, int64_t columns) {
    float best = kNever;
    int64_t c = 0;
    if (columns >= kLanes) {
        Floats most = load(logits);
        for (c = kLanes; c + kLanes <= columns; c += kLanes) {
            const Floats x = load(logits + c);
            most = most > x ? most : x;  // keeps a NaN of x, drops one of most: the sum finds it again
        }
        best = largest(most);
    }
    for (; c < columns; ++c) best = logits[c] > best ? logits[c] : best;
    return best;
}

// Sum of e^(x - shift); with kKeep the terms, times scale, replace the logits.
template <bool kKeep>
float exponentials(float* logits, int64_t columns, float shift, float scale) {
    Floats total{};
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
        const Floats e = exponential(load(logits + c) - shift);
        if (kKeep) store(logits + c, e * scale);
        total += e;
    }
    if (c < columns) {
        float padded[kLanes];
        for (int k = 0; k < kLanes; ++k) padded[k] = c + k < columns ? logits[c + k] - shift : kNever;
        const Floats e = exponential(load(padded));
        store(padded, e * scale);
        if (kKeep) std::memcpy(logits + c, padded, sizeof(float) * (columns - c));
        total += e;
    }
    return sum(total);
}

}  // namespace

// The target's own logit; one that is a column of the tile is taken out of it, so that what is left
// are the others.
static float take_own(float* row, const float* own_logits, int64_t t, int32_t target) {
    if (own_logits != nullptr) return own_logits[t];
    const float own = row[target];
    row[target] = kNever;
    return own;
}

// Losses of a tile, and for backward the largest logit and the sum of exponentials below it
// ([tokens, 2]). With column_ids the target is no column (own_logits holds its logit, columns equal
// to it are left out); without, it is column targets[t] of the tile.
SLIPSTREAM_API void ss_softmax_tile_forward(float* logits, int64_t tokens, int64_t columns, float scale, const int32_t* targets,
                                            const int32_t* column_ids, const float* log_q, const float* own_logits, float* loss,
                                            float* sums, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * columns > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        float* row = logits + t * columns;
        finish_logits(row, columns, scale, log_q, column_ids, targets[t]);
        const float own = take_own(row, own_logits, t, targets[t]);
        const float most = largest_of(row, columns);
        const float shift = most > own ? most : own;
        const float others = exponentials<false>(row, columns, shift, 1.0f);
        const float total = others + std::exp(own - shift);
        loss[t] = shift == own ? std::log1p(others) : std::log(total) + (shift - own);
        sums[2 * t] = shift;
        sums[2 * t + 1] = total;
    }
}

// Logits become d sum(grad * loss) / d (matrix product); own_grad receives the same for a target
// that is no column.
SLIPSTREAM_API void ss_softmax_tile_backward(float* logits, int64_t tokens, int64_t columns, float scale, const int32_t* targets,
                                             const int32_t* column_ids, const float* log_q, const float* sums, const float* grad,
                                             float* own_grad, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * columns > kWorthSharing) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        float* row = logits + t * columns;
        finish_logits(row, columns, scale, log_q, column_ids, targets[t]);
        if (own_grad == nullptr) row[targets[t]] = kNever;
        const float weight = grad[t] * scale / sums[2 * t + 1];
        const float others = exponentials<true>(row, columns, sums[2 * t], weight);
        (own_grad != nullptr ? own_grad[t] : row[targets[t]]) = -others * weight;
    }
}
