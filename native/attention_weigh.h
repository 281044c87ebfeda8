// From scores to weights, and in backward to the gradients of scores, for a panel of rows.
//
// All rows of a panel are done together, a few columns at a time: one loop whose length changes
// from panel to panel, where a loop per row would cost a mispredicted branch or two each, as much
// as its sigmoids. Rows go in pairs, so that four vectors stand side by side.
#pragma once
#include "attention_plan.h"

namespace slipstream {

enum class Bias { NONE, FIRST, MORE };  // none; or with the sum of dS over heads begun by the first head, added to by the others

// A panel of rows against the computed columns of a tile. The pointers are those of the panel's
// first row and the tile's first key.
struct Panel {
    PanelRange range;
    int64_t whole_begin, whole_end;  // the keys that all rows see
    const int64_t *low, *high;       // the keys that each row sees
    int64_t tile;
    float *scores, *grads;           // S that becomes P, dP that becomes dS (backward only)
    const float* bias;
    float* bias_grad;

    Panel(const RowBlock& block, int64_t tile, int64_t r0, int64_t count)
        : range(block, r0, count, tile), whole_begin(block.low[r0 + count - 1] - tile), whole_end(block.high[r0] - tile),
          low(block.low + r0), high(block.high + r0), tile(tile) {}

    vi seen(int r, int64_t c) const { return lanes_within(c, low[r] - tile, high[r] - tile); }
};

#define SLIPSTREAM_INLINE inline __attribute__((always_inline))

// Forward, G rows by NV vectors: P = factor * SiLU(scale * S + bias); with EDGE, zero where a row
// does not see.
template <bool BIAS>
struct ForwardWeights {
    float scale, factor;
    template <int G, int NV, bool EDGE>
    SLIPSTREAM_INLINE void run(const Panel& p, int r, int64_t c) const {
        constexpr int N = G * NV;
        const auto at = [&](int i) { return (r + i / NV) * LD + c + i % NV * W; };
        vf x[N], s[N];
        SLIPSTREAM_EACH x[i] = BIAS ? load(p.scores + at(i)) * scale + load(p.bias + at(i)) : load(p.scores + at(i)) * scale;
        sigmoid(x, s);
        SLIPSTREAM_EACH x[i] *= BIAS ? s[i] : s[i] * factor;
        if (EDGE) SLIPSTREAM_EACH x[i] = (vf)((vi)x[i] & p.seen(r + i / NV, c + i % NV * W));
        SLIPSTREAM_EACH store(p.scores + at(i), x[i]);
    }
};

// Backward: P = SiLU(S + bias), dS = dP SiLU'(S + bias), and the sum of dS over heads.
template <Bias BIAS>
struct BackwardWeights {
    template <int G, int NV, bool EDGE>
    SLIPSTREAM_INLINE void run(const Panel& p, int r, int64_t c) const {
        constexpr int N = G * NV;
        const auto at = [&](int i) { return (r + i / NV) * LD + c + i % NV * W; };
        vf x[N], s[N], d[N];
        SLIPSTREAM_EACH x[i] = BIAS == Bias::NONE ? load(p.scores + at(i)) : load(p.scores + at(i)) + load(p.bias + at(i));
        sigmoid(x, s);
        SLIPSTREAM_EACH x[i] *= s[i];
        SLIPSTREAM_EACH d[i] = load(p.grads + at(i)) * (s[i] + x[i] * (1.0f - s[i]));
        if (EDGE) SLIPSTREAM_EACH {
            const vi seen = p.seen(r + i / NV, c + i % NV * W);
            x[i] = (vf)((vi)x[i] & seen), d[i] = (vf)((vi)d[i] & seen);
        }
        SLIPSTREAM_EACH store(p.scores + at(i), x[i]);
        SLIPSTREAM_EACH store(p.grads + at(i), d[i]);
        if (BIAS == Bias::FIRST) SLIPSTREAM_EACH store(p.bias_grad + at(i), d[i]);
        if (BIAS == Bias::MORE) SLIPSTREAM_EACH store(p.bias_grad + at(i), load(p.bias_grad + at(i)) + d[i]);
    }
};

template <int M, int NV, bool EDGE, typename Weights>
SLIPSTREAM_INLINE void weigh_columns(const Weights& weights, const Panel& p, int64_t c) {
#pragma GCC unroll 8
    for (int r = 0; r + 2 <= M; r += 2) weights.template run<2, NV, EDGE>(p, r, c);
    if (M % 2) weights.template run<1, NV, EDGE>(p, M - 1, c);
}

template <int M, typename Weights>
SLIPSTREAM_NOINLINE void weigh_rows(const Weights& weights, const Panel& p) {
    int64_t c = p.range.first;
    for (; c < p.range.last && c < p.whole_begin; c += W) weigh_columns<M, 1, true>(weights, p, c);
    for (; c + W2 <= p.whole_end && c + W2 <= p.range.last; c += W2) weigh_columns<M, 2, false>(weights, p, c);
    for (; c < p.range.last; c += W) weigh_columns<M, 1, true>(weights, p, c);
}

template <typename Weights>
inline void weigh_panel(int64_t rows, const Weights& weights, const Panel& p) {
    typedef void (*Rows)(const Weights&, const Panel&);
    static constexpr Rows table[MR] = {weigh_rows<1, Weights>, weigh_rows<2, Weights>, weigh_rows<3, Weights>,
                                       weigh_rows<4, Weights>, weigh_rows<5, Weights>, weigh_rows<6, Weights>};
    table[rows - 1](weights, p);
}

}  // namespace slipstream
