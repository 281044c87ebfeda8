// Causal softmax attention over jagged sequences (SASRec), forward only.
//
// Six rows of scores over all keys they see, their weights, and the product with the values; a
// candidate sees the history and itself. A row's sums run over its keys in ascending order whatever
// the other rows are, so a row behind a past equals the same row of the whole sequence bit for bit.
#pragma once
#include <cmath>

#include "attention_pack.h"

namespace slipstream {

// Turns a row of products into weights, not yet divided by their sum; returns the sum and the
// weight of the row's own key (0 where the row is no candidate).
struct SoftmaxSums {
    float total, own;
};

inline SoftmaxSums weigh_softmax(float* scores, int64_t seen, int64_t columns, float scale, bool candidate, float own_score) {
    float most = candidate ? own_score * scale : -INFINITY;
    for (int64_t c = 0; c < columns; c += W) {
        const vi visible = lanes_within(c, 0, seen);
        const vf x = load(scores + c) * scale;
        const vf shown = (vf)(((vi)x & visible) | ((vi)splat(-INFINITY) & ~visible));
        store(scores + c, shown);
        most = std::max(most, simd::largest(shown));
    }
    vf total{};
    for (int64_t c = 0; c < columns; c += W) {
        const vf weight = simd::exponential(load(scores + c) - most);
        store(scores + c, weight);
        total += weight;
    }
    const float own = candidate ? simd::exponential(splat(own_score * scale - most))[0] : 0.0f;
    return {simd::sum(total) + own, own};
}

inline void softmax_panel(const Attention& call, const Sequence& s, int64_t head, const PackedKeys& packed, int64_t first, int count,
                          float* scores, float* sums) {
    const int64_t before = s.keys - s.queries + first, most = std::min(before + count, s.history), columns = round_up(most, W);
    const int64_t q_stride = call.heads * call.key_width, stride = packed.padded;
    const float* q = call.q + (s.q0 + first) * q_stride + head * call.key_width;
    SoftmaxSums found[MR];
    if (columns)
        multiply_panel<false, true>(count, columns, call.key_width, q, q_stride, packed.keys_t, W2, W2 * call.key_width, scores, columns);
    for (int r = 0; r < count; ++r) {
        const int64_t position = before + r;
        const bool candidate = position >= s.history;
        float own = 0.0f;
        if (candidate) {
            const float* k = call.k + ((s.k0 + position - s.past) * call.heads + head) * call.key_width;
            for (int64_t d = 0; d < call.key_width; ++d) own += q[r * q_stride + d] * k[d];
        }
        found[r] = weigh_softmax(scores + r * columns, std::min(position + 1, s.history), columns, call.scale, candidate, own);
    }
    if (columns)
        multiply_panel<false, true>(count, stride, most, scores, columns, packed.values, stride, W2, sums, stride);
    else
        std::fill(sums, sums + count * stride, 0.0f);
    for (int r = 0; r < count; ++r) {
        const int64_t row = s.q0 + first + r, key = s.k0 + before + r - s.past;
        const float* v = call.v + (key * call.heads + head) * call.value_width;
        float* out = call.out + (row * call.heads + head) * call.value_width;
        const float inverse = 1.0f / found[r].total;
        for (int64_t d = 0; d < call.value_width; ++d) {
            const float sum = found[r].own > 0.0f ? sums[r * stride + d] + found[r].own * v[d] : sums[r * stride + d];
            out[d] = sum * inverse;
        }
    }
}

// Returns whether memory sufficed. `call` has no bias, window or divisor.
inline bool softmax_attention(const Attention& call) {
    const int64_t keys = longest(call), wide = round_up(keys, W2), padded = round_up(call.value_width, W);
    const int64_t floats = PackedKeys::floats(call, 1, keys) + MR * (wide + padded) + 64, heads = call.heads;
    std::atomic<int32_t> failed{0};
#pragma omp parallel for num_threads(call.threads) if (call.threads > 1) schedule(dynamic)
    for (int64_t i = 0; i < call.sequences * heads; ++i) {
        const Task task{i / heads, i % heads, i % heads + 1, 0.0};
        const Sequence s = sequence_of(call, task.sequence);
        Scratch& scratch = thread_scratch();
        if (failed || !scratch.reserve(floats)) {
            failed = 1;
            continue;
        }
        const PackedKeys packed(call, 1, keys, scratch);
        float *scores = scratch.take(MR * wide), *sums = scratch.take(MR * padded);
        pack_keys(call, task, s, packed, 0, s.history, 1.0f);
        for (int64_t row = 0, count; row < s.queries; row += count) {
            count = panel_rows(s.queries - row);
            softmax_panel(call, s, task.head_begin, packed, row, static_cast<int>(count), scores, sums);
        }
        scratch.trim();
    }
    return !failed;
}

}  // namespace slipstream
