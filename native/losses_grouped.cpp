// Softmax of groups: the tokens of a group all compete with the group's negatives (their own sets
// and each other's, or one set). A row is loaded once for a block of kBlock tokens, so scoring
// other tokens' negatives costs arithmetic, not memory. Weights (d loss / d logit / temperature)
// are kept as [block][negative][kBlock], absent tokens of a last block with weight 0.
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "simd_sums.h"

namespace {

using namespace slipstream::simd;

struct Grouped {
    const float* hidden;          // [T, D], group after group
    const float* targets;         // [T, D]: the row of each token's target
    const int64_t* same;          // [T]: the negative that is the token's target, or -1
    const float* rows;            // [U, D]
    const int64_t* negatives;     // [X, R]
    const float* target_log_q;    // [T] or null
    const float* negative_log_q;  // [X, R] or null
    int64_t width;
    float inverse_temperature;
    Tail tail;
    int64_t vectors;  // of a row, an overlapping last one included
    bool prefetch;
};

inline int64_t at_vector(const Tail& tail, int64_t v) { return v * kLanes < tail.whole ? v * kLanes : tail.at; }

// The tokens of a block in whole vectors, zero where a row's last vector reaches back over values
// already counted.
template <int kBlock>
void pack_block(const Grouped& in, int64_t first, int64_t present, float* packed) {
    for (int m = 0; m < kBlock; ++m) {
        const float* hidden = in.hidden + (first + (m < present ? m : 0)) * in.width;
        for (int64_t v = 0; v < in.vectors; ++v) {
            const Floats values = load(hidden + at_vector(in.tail, v));
            store(packed + (m * in.vectors + v) * kLanes, v * kLanes < in.tail.whole ? values : masked(values, in.tail));
        }
    }
}

// Logits [count][kBlock] over temperature: kLanes products at a time, so many rows times kBlock
// tokens.
template <int kBlock>
void block_logits(const Grouped& in, const int64_t* negatives, int64_t count, const float* packed, float* logits) {
    constexpr int kRows = kLanes / kBlock;
    const Floats inverse_temperature = splat(in.inverse_temperature);
    for (int64_t j = 0; j < count; j += kRows) {
        const float* row[kRows];
        for (int r = 0; r < kRows; ++r) row[r] = in.rows + negatives[j + r < count ? j + r : count - 1] * in.width;
        if (in.prefetch)
            for (int r = 0; r < kRows; ++r)
                if (j + 2 * kRows + r < count) prefetch_row(in.rows + negatives[j + 2 * kRows + r] * in.width, in.width);
        Floats total[kLanes] = {};
        for (int64_t v = 0; v < in.vectors; ++v) {
            const int64_t at = at_vector(in.tail, v);
            Floats token[kBlock];
#pragma GCC unroll 16
            for (int m = 0; m < kBlock; ++m) token[m] = load(packed + (m * in.vectors + v) * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const Floats values = load(row[r] + at);
#pragma GCC unroll 16
                for (int m = 0; m < kBlock; ++m) total[r * kBlock + m] += values * token[m];
            }
        }
        const Floats sums = sums_of(total) * inverse_temperature;
        if (j + kRows <= count)
            store(logits + j * kBlock, sums);
        else
            std::memcpy(logits + j * kBlock, &sums, sizeof(float) * (count - j) * kBlock);
    }
}

// The same for rows narrower than one vector.
template <int kBlock>
void narrow_logits(const Grouped& in, int64_t first, int64_t present, const int64_t* negatives, int64_t count, float* logits) {
    for (int64_t j = 0; j < count; ++j)
        for (int m = 0; m < kBlock; ++m) {
            const float* hidden = in.hidden + (first + (m < present ? m : 0)) * in.width;
            float total = 0.0f;
            for (int64_t d = 0; d < in.width; ++d) total += hidden[d] * in.rows[negatives[j] * in.width + d];
            logits[j * kBlock + m] = total * in.inverse_temperature;
        }
}

bool contains(const int64_t* values, int64_t count, int64_t wanted) {
    int64_t found = 0;
    for (int64_t j = 0; j < count; ++j) found |= values[j] == wanted;
    return found != 0;
}

// log_q, and -inf where a negative is the token's own target; the largest logit of each token into
// `best`.
template <int kBlock>
void correct(const Grouped& in, int64_t first, int64_t present, int64_t at, int64_t count, float* logits, float* best) {
    const int64_t* negatives = in.negatives + at;
    if (in.negative_log_q != nullptr)
        for (int64_t j = 0; j < count; ++j)
            for (int m = 0; m < kBlock; ++m) logits[j * kBlock + m] -= in.negative_log_q[at + j];
    for (int64_t m = 0; m < present; ++m)
        if (contains(negatives, count, in.same[first + m]))
            for (int64_t j = 0; j < count; ++j)
                if (negatives[j] == in.same[first + m]) logits[j * kBlock + m] = -std::numeric_limits<float>::infinity();
    Floats most = splat(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kLanes <= count * kBlock; i += kLanes) most = most > load(logits + i) ? most : load(logits + i);
    float part[kLanes];
    std::memcpy(part, &most, sizeof(most));
    for (int m = 0; m < kBlock; ++m) best[m] = -std::numeric_limits<float>::infinity();
    for (int k = 0; k < kLanes; ++k) best[k % kBlock] = part[k] > best[k % kBlock] ? part[k] : best[k % kBlock];
    for (; i < count * kBlock; ++i) best[i % kBlock] = logits[i] > best[i % kBlock] ? logits[i] : best[i % kBlock];
}

// logits become e^(logit - shift of their token); the sums of each token into `others`.
template <int kBlock>
void exponentiate(float* logits, int64_t count, const float* shift, float* others) {
    Floats shifts, total{};
    for (int k = 0; k < kLanes; ++k) shifts[k] = shift[k % kBlock];
    const int64_t values = count * kBlock;
    for (int64_t i = 0; i < values; i += kLanes) {
        float padded[kLanes];
        const int64_t here = values - i < kLanes ? values - i : kLanes;
        float* from = logits + i;
        if (here < kLanes) {
            for (int k = 0; k < kLanes; ++k) padded[k] = k < here ? logits[i + k] : -std::numeric_limits<float>::infinity();
            from = padded;
        }
        const Floats e = exponential(load(from) - shifts);
        store(from, e);
        if (here < kLanes) std::memcpy(logits + i, padded, sizeof(float) * here);
        total += e;
    }
    for (int m = 0; m < kBlock; ++m) others[m] = 0.0f;
    for (int k = 0; k < kLanes; ++k) others[k % kBlock] += total[k];
}

// kCount vectors from vector `v` on of every token's weighted sum of rows.
template <int kBlock, int kCount>
void weighted_columns(const Grouped& in, const int64_t* negatives, int64_t count, const float* weights, int64_t v, float* unit) {
    Floats total[kBlock][kCount] = {};
    int64_t at[kCount];
    for (int c = 0; c < kCount; ++c) at[c] = at_vector(in.tail, v + c);
    for (int64_t j = 0; j < count; ++j) {
        const float* row = in.rows + negatives[j] * in.width;
        Floats values[kCount];
#pragma GCC unroll 16
        for (int c = 0; c < kCount; ++c) values[c] = load(row + at[c]);
#pragma GCC unroll 16
        for (int m = 0; m < kBlock; ++m) {
            const Floats w = splat(weights[j * kBlock + m]);
#pragma GCC unroll 16
            for (int c = 0; c < kCount; ++c) total[m][c] += values[c] * w;
        }
    }
    for (int m = 0; m < kBlock; ++m)
        for (int c = 0; c < kCount; ++c) store(unit + m * in.width + at[c], total[m][c]);
}

template <int kBlock>
void weighted_rows(const Grouped& in, const int64_t* negatives, int64_t count, const float* weights, float* unit) {
    if (in.width < kLanes) {
        std::memset(unit, 0, sizeof(float) * kBlock * in.width);
        for (int64_t j = 0; j < count; ++j)
            for (int m = 0; m < kBlock; ++m)
                add_scaled(unit + m * in.width, in.rows + negatives[j] * in.width, weights[j * kBlock + m], in.width);
        return;
    }
    column_passes<kKept / kBlock>(in.vectors, [&](auto columns, int64_t v) {
        weighted_columns<kBlock, decltype(columns)::value>(in, negatives, count, weights, v, unit);
    });
}

struct Out {
    float* loss;
    float* target_weights;
    float* unit;  // [T, D] or null where no gradient is wanted
};

// One block: `present` tokens from `first` against the `count` negatives from `at`; logits become
// weights where wanted.
template <int kBlock>
void block_loss(const Grouped& in, int64_t first, int64_t present, int64_t at, int64_t count, float* logits, float* scratch,
                const Out& out) {
    const int64_t* negatives = in.negatives + at;
    if (in.width < kLanes) {
        narrow_logits<kBlock>(in, first, present, negatives, count, logits);
    } else {
        pack_block<kBlock>(in, first, present, scratch);
        block_logits<kBlock>(in, negatives, count, scratch, logits);
    }
    float best[kBlock], shift[kBlock], target[kBlock], others[kBlock], scale[kBlock] = {};
    correct<kBlock>(in, first, present, at, count, logits, best);
    for (int m = 0; m < kBlock; ++m) {
        const int64_t t = first + (m < present ? m : 0);
        target[m] = dot(in.hidden + t * in.width, in.targets + t * in.width, in.tail) * in.inverse_temperature;
        if (in.target_log_q != nullptr) target[m] -= in.target_log_q[t];
        shift[m] = best[m] > target[m] ? best[m] : target[m];
    }
    exponentiate<kBlock>(logits, count, shift, others);
    for (int m = 0; m < present; ++m) {
        const float own = std::exp(target[m] - shift[m]);
        out.loss[first + m] = shift[m] == target[m] ? std::log1p(others[m]) : std::log(others[m] + own) + (shift[m] - target[m]);
        scale[m] = in.inverse_temperature / (others[m] + own);
        if (out.unit != nullptr) out.target_weights[first + m] = -others[m] * scale[m];
    }
    if (out.unit == nullptr) return;
    Floats scales;
    for (int k = 0; k < kLanes; ++k) scales[k] = scale[k % kBlock];
    int64_t i = 0;
    for (; i + kLanes <= count * kBlock; i += kLanes) store(logits + i, load(logits + i) * scales);
    for (; i < count * kBlock; ++i) logits[i] *= scale[i % kBlock];
    weighted_rows<kBlock>(in, negatives, count, logits, scratch);
    for (int64_t m = 0; m < present; ++m) {
        float* unit = out.unit + (first + m) * in.width;
        std::memcpy(unit, scratch + m * in.width, sizeof(float) * in.width);
        add_scaled(unit, in.targets + (first + m) * in.width, out.target_weights[first + m], in.width);
    }
}

template <int kBlock>
void all_groups(const Grouped& in, const int64_t* offsets, const int64_t* sets, int64_t groups, int64_t per_set,
                const int64_t* places, float* weights, const Out& out, int threads) {
    const bool worth = groups > 1 && (offsets[groups] - offsets[0]) * per_set * in.width > kWorthSharing;
#pragma omp parallel num_threads(threads) if (worth)
    {
        std::vector<float> scratch(kBlock * (in.vectors + 1) * kLanes), kept;
#pragma omp for schedule(dynamic, 16)
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t at = sets[g] * per_set, count = (sets[g + 1] - sets[g]) * per_set;
            if (out.unit == nullptr) kept.resize(count * kBlock + kLanes);
            for (int64_t first = offsets[g]; first < offsets[g + 1]; first += kBlock) {
                const int64_t left = offsets[g + 1] - first, block = (first - offsets[g]) / kBlock;
                float* logits = out.unit == nullptr ? kept.data() : weights + places[g] + block * count * kBlock;
                block_loss<kBlock>(in, first, left < kBlock ? left : kBlock, at, count, logits, scratch.data(), out);
            }
        }
    }
}

}  // namespace

// offsets [G + 1]: tokens of each group; sets [G + 1]: its sets of `per_set` negatives; places [G]:
// where its weights begin. Without want_gradients only loss is written. block is 1, 2 or 4.
SLIPSTREAM_API void ss_grouped_softmax(const float* hidden, const float* targets, const int64_t* same, const float* rows,
                                       const int64_t* negatives, int64_t width, int64_t num_rows, const int64_t* offsets,
                                       const int64_t* sets, int64_t groups, int64_t per_set, float inverse_temperature,
                                       const float* target_log_q, const float* negative_log_q, int want_gradients, int block,
                                       const int64_t* places, float* loss, float* weights, float* target_weights, float* unit,
                                       int threads) {
    const Tail tail = tail_of(width);
    const Grouped in{hidden, targets, same,  rows, negatives, target_log_q, negative_log_q, width, inverse_temperature,
                     tail,   tail.whole / kLanes + (tail.overlaps ? 1 : 0), num_rows * width > (1 << 18)};
    const Out out{loss, target_weights, want_gradients ? unit : nullptr};
    if (block == 1)
        all_groups<1>(in, offsets, sets, groups, per_set, places, weights, out, threads);
    else if (block == 2)
        all_groups<2>(in, offsets, sets, groups, per_set, places, weights, out, threads);
    else
        all_groups<4>(in, offsets, sets, groups, per_set, places, weights, out, threads);
}
