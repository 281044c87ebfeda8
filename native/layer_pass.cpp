// Whole layers of HSTU, FuXi and SASRec for inference, all of a pass in one call.
//
// The calling thread holds no lock of the interpreter meanwhile, and nothing but the pass's own
// arithmetic is left of a layer. A row's result never depends on the rows beside it: products are
// chains over the depth in ascending order, norms and weights are computed row by row.
#include <atomic>
#include <cmath>
#include <vector>

#include "attention_softmax.h"
#include "kernels.h"
#include "layer_pass.h"
#include "row_norm.h"
#include "tall_panels.h"

namespace slipstream {
namespace {

constexpr int64_t SHARED_ROWS = 64;  // fewer rows are not worth a second thread

inline vf silu(vf x) { return x / (1.0f + simd::exponential(-x)); }

// erf(x) as a ratio of polynomials, a few units in the last place.
inline vf error_function(vf x) {
    x = clamp(x, -3.832506856900711f, 3.832506856900711f);
    const vf x2 = x * x;
    vf p = splat(-2.72614225801306e-10f), q = splat(-1.45660718464996e-05f);
    for (float c : {2.77068142495902e-08f, -2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                    -1.60960333262415e-02f})
        p = p * x2 + c;
    for (float c : {-2.13374055278905e-04f, -1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f}) q = q * x2 + c;
    return x * p / q;
}

inline vf gelu(vf x) { return 0.5f * x * (1.0f + error_function(x * 0.7071067811865476f)); }
inline vf relu(vf x) { return (vf)((vi)x & (x > splat(0.0f))); }

struct PassMemory {
    float *x, *normed, *picked, *gate, *q, *attended, *inner, *gated, *packed, *k, *v;
};

// The tokens whose outputs a layer computes: all, or the last ones of every sequence.
struct Outputs {
    int64_t count;
    const float *x, *normed;
    const int64_t *offsets, *times;
};

class Pass {
  public:
    explicit Pass(const LayerPass& pass)
        : p(pass),
          tokens(pass.q_offsets[pass.sequences]),
          rows(pass.k_offsets[pass.sequences]),
          value_row(pass.heads * pass.value_width),
          key_row(pass.heads * pass.key_width),
          gates(pass.kind == LayerKind::FUXI ? 3 : 1),
          gated(pass.kind != LayerKind::SASREC) {}

    bool run() {
        Scratch& scratch = pass_scratch();
        if (!reserve(scratch)) return false;
        join_times();
        const float* x = p.x;
        for (int64_t i = 0; i < p.num_layers; ++i, x = m.x) {
            const bool last = i + 1 == p.num_layers;
            if (!run_layer(p.layers[i], p.first_layer + i, x, last)) return false;
        }
        scratch.trim();
        return true;
    }

  private:
    static Scratch& pass_scratch() {  // attention uses that of the thread
        static thread_local Scratch scratch;
        return scratch;
    }

    bool reserve(Scratch& scratch) {
        const int64_t wide = std::max({gates * value_row, key_row, p.inner, p.width});
        const int64_t deep = std::max({gates * value_row, p.inner, p.width});
        const int64_t packed = round_up(wide, W2) * deep, per_token = 4 * p.width + 2 * gates * value_row + key_row + 2 * p.inner;
        if (!scratch.reserve(tokens * per_token + rows * (key_row + value_row) + packed + 16 * 16)) return false;
        m.x = scratch.take(tokens * p.width);
        m.normed = scratch.take(tokens * p.width);
        m.picked = scratch.take(2 * tokens * p.width);
        m.gate = scratch.take(tokens * gates * value_row);
        m.attended = scratch.take(tokens * gates * value_row);
        m.q = scratch.take(tokens * key_row);
        m.inner = scratch.take(tokens * p.inner);
        m.gated = scratch.take(tokens * p.inner);
        m.packed = scratch.take(packed);
        m.k = scratch.take(rows * key_row);
        m.v = scratch.take(rows * value_row);
        return true;
    }

    // Every sequence's times, those of its past first.
    void join_times() {
        pasts.resize(p.past_tokens ? p.sequences : 0);
        if (!p.past_tokens) return;
        int64_t total = 0;
        for (int64_t b = 0; b < p.sequences; ++b) {
            pasts[b].tokens = p.past_tokens[b], pasts[b].first_time = total;
            total += p.past_tokens[b] + p.k_offsets[b + 1] - p.k_offsets[b];
        }
        if (!p.k_times) return;
        times.resize(total);
        for (int64_t b = 0; b < p.sequences; ++b) {
            const int64_t *past = reinterpret_cast<const int64_t*>(p.past_times[b]), *more = p.k_times + p.k_offsets[b];
            int64_t* to = std::copy(past, past + p.past_tokens[b], times.data() + pasts[b].first_time);
            std::copy(more, more + p.k_offsets[b + 1] - p.k_offsets[b], to);
        }
    }

    // The tokens that the last layer computes, side by side.
    Outputs pick(const float* x) {
        float *to = m.picked, *normed = m.picked + tokens * p.width;
        picked_offsets.assign(1, 0);
        picked_times.clear();
        for (int64_t b = 0; b < p.sequences; ++b) {
            const int64_t first = p.q_offsets[b + 1] - p.wanted[b], count = p.wanted[b];
            to = std::copy(x + first * p.width, x + (first + count) * p.width, to);
            normed = std::copy(m.normed + first * p.width, m.normed + (first + count) * p.width, normed);
            if (p.q_times) picked_times.insert(picked_times.end(), p.q_times + first, p.q_times + first + count);
            picked_offsets.push_back(picked_offsets.back() + count);
        }
        return {picked_offsets.back(), m.picked, m.picked + tokens * p.width, picked_offsets.data(),
                p.q_times ? picked_times.data() : nullptr};
    }

    // finish(row, first column, columns, sums) for every row of x W^T.
    template <typename Finish>
    void product(const float* x, int64_t count, int64_t depth, const float* weight, int64_t width, Finish finish) const {
        pack_transposed(weight, depth, width, depth, m.packed);
        const int64_t padded = round_up(width, W), panels = (count + TALL - 1) / TALL;
#pragma omp parallel for num_threads(p.threads) if (p.threads > 1 && count >= SHARED_ROWS) schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel) {
            alignas(64) float sums[TALL * COLUMNS];
            const int64_t row = panel * TALL, of_panel = std::min<int64_t>(TALL, count - row);
            for (int64_t c = 0; c < padded; c += COLUMNS) {
                const int64_t columns = std::min(COLUMNS, padded - c);
                multiply_tall<false, true>(of_panel, columns, depth, x + row * depth, depth, m.packed + c * depth, W2, W2 * depth, sums,
                                           columns);
                for (int64_t r = 0; r < of_panel; ++r) finish(row + r, c, std::min(COLUMNS, width - c), sums + r * columns);
            }
        }
    }

    // out = function(x W^T + bias); there may be no bias.
    template <typename Function>
    void linear(const float* x, int64_t count, int64_t depth, const float* weight, const float* bias, int64_t width, float* out,
                Function function) const {
        product(x, count, depth, weight, width, [=](int64_t row, int64_t first, int64_t columns, float* sums) {
            if (bias)
                for (int64_t d = 0; d < columns; ++d) sums[d] += bias[first + d];
            for (int64_t d = 0; d < columns; d += W) store(sums + d, function(load(sums + d)));
            std::memcpy(out + row * width + first, sums, sizeof(float) * columns);
        });
    }

    // out = residual + (x W^T + bias).
    void linear_residual(const float* x, int64_t count, int64_t depth, const float* weight, const float* bias, const float* residual,
                         float* out) const {
        const int64_t width = p.width;
        product(x, count, depth, weight, width, [=](int64_t row, int64_t first, int64_t columns, float* sums) {
            const float* before = residual + row * width + first;
            float* to = out + row * width + first;
            for (int64_t d = 0; d < columns; ++d) to[d] = before[d] + (bias ? sums[d] + bias[first + d] : sums[d]);
        });
    }

    void norm(const float* x, int64_t count, const float* weight, const float* bias) const {
        for (int64_t t = 0; t < count; ++t) {
            const float* row = x + t * p.width;
            const Moments moments = moments_of(row, p.width, p.kind != LayerKind::FUXI, p.eps);
            norm_row(row, moments, weight, nullptr, bias, p.width, m.normed + t * p.width);
        }
    }

    bool run_layer(const LayerWeights& w, int64_t layer, const float* x, bool last) {
        norm(x, tokens, w.norm, w.norm_bias);
        float *k = w.k ? w.k : m.k, *v = w.v ? w.v : m.v;
        const bool keys_only = last && p.keys_only;
        const Outputs of = last && p.wanted ? pick(x) : Outputs{keys_only ? 0 : tokens, x, m.normed, p.q_offsets, p.q_times};
        project(w, of, k + (rows - tokens) * key_row, v + (rows - tokens) * value_row);
        keep(w, k + (rows - tokens) * key_row, v + (rows - tokens) * value_row);
        if (keys_only) return true;
        if (!attend(w, layer, of, k, v)) return false;
        if (gated) gate(w, of.count);
        float* out = last ? p.out : m.x;
        linear_residual(m.attended, of.count, gates * value_row, w.output, w.output_bias, of.x, out);
        if (p.kind == LayerKind::FUXI) feed_forward_gated(w, of.count, out);
        if (p.kind == LayerKind::SASREC) feed_forward(w, of.count, out);
        return true;
    }

    // Keys and values of all tokens, gates and queries of those whose outputs are computed.
    void project(const LayerWeights& w, const Outputs& of, float* k, float* v) const {
        const float *from = w.project, *bias = w.project_bias;
        const auto part = [&](const float* normed, int64_t count, int64_t width, float* out) {
            if (gated)
                linear(normed, count, p.width, from, bias, width, out, silu);
            else
                linear(normed, count, p.width, from, bias, width, out, [](vf z) { return z; });
            from += width * p.width;
            bias = bias ? bias + width : nullptr;
        };
        if (gated) part(of.normed, of.count, gates * value_row, m.gate);
        part(m.normed, tokens, value_row, v);
        part(of.normed, of.count, key_row, m.q);
        part(m.normed, tokens, key_row, k);
    }

    // Rounds the new keys and values to their stored form, and keeps that where it is asked for.
    void keep(const LayerWeights& w, float* k, float* v) const {
        if (p.stored == Stored::FLOAT) return;
        const StoredTarget keys{p.stored, w.stored_k, w.stored_k_scales}, values{p.stored, w.stored_v, w.stored_v_scales};
        for (int64_t row = 0; row < tokens * p.heads; ++row) {
            keys.write(row, p.key_width, k + row * p.key_width);
            values.write(row, p.value_width, v + row * p.value_width);
        }
    }

    bool attend(const LayerWeights& w, int64_t layer, const Outputs& of, const float* k, const float* v) {
        for (size_t b = 0; b < pasts.size(); ++b) {
            const int64_t* rows_of = p.past_rows + (static_cast<int64_t>(b) * p.model_layers + layer) * 4;
            pasts[b].k = reinterpret_cast<const void*>(rows_of[0]), pasts[b].v = reinterpret_cast<const void*>(rows_of[1]);
            pasts[b].k_scales = reinterpret_cast<const uint16_t*>(rows_of[2]);
            pasts[b].v_scales = reinterpret_cast<const uint16_t*>(rows_of[3]);
        }
        Attention call{};
        call.q = m.q, call.k = k, call.v = v, call.q_offsets = of.offsets, call.k_offsets = p.k_offsets;
        call.q_times = of.times, call.k_times = times.empty() ? p.k_times : times.data();
        call.candidates = p.candidates, call.position = w.position, call.time = w.time, call.borders = w.borders, call.decay = w.decay;
        call.out = m.attended, call.pasts = pasts.empty() ? nullptr : pasts.data();
        call.sequences = p.sequences, call.heads = p.heads, call.key_width = p.key_width, call.value_width = p.value_width;
        call.position_entries = w.position_entries, call.time_entries = w.time_entries;
        call.inverse_divisor = p.inverse_divisor, call.scale = p.scale, call.time_unit = p.time_unit;
        call.threads = p.threads, call.channels = static_cast<int32_t>(gates), call.stored = p.stored;
        return gated ? attention_forward(call) : softmax_attention(call);
    }

    void gate(const LayerWeights& w, int64_t count) const {
        const int64_t width = gates * value_row;
        for (int64_t t = 0; t < count; ++t) {
            float* row = m.attended + t * width;
            norm_row(row, moments_of(row, width, p.kind == LayerKind::HSTU, p.eps), w.channels_norm, m.gate + t * width, nullptr, width, row);
        }
    }

    void feed_forward_gated(const LayerWeights& w, int64_t count, float* out) const {
        norm(out, count, w.inner_norm, nullptr);
        linear(m.normed, count, p.width, w.gate, nullptr, p.inner, m.gated, silu);
        linear(m.normed, count, p.width, w.up, nullptr, p.inner, m.inner, [](vf z) { return z; });
        for (int64_t i = 0; i < count * p.inner; ++i) m.inner[i] *= m.gated[i];
        linear_residual(m.inner, count, p.inner, w.down, nullptr, out, out);
    }

    void feed_forward(const LayerWeights& w, int64_t count, float* out) const {
        norm(out, count, w.inner_norm, w.inner_norm_bias);
        if (p.activation == Activation::GELU)
            linear(m.normed, count, p.width, w.up, w.up_bias, p.inner, m.inner, gelu);
        else
            linear(m.normed, count, p.width, w.up, w.up_bias, p.inner, m.inner, relu);
        linear_residual(m.inner, count, p.inner, w.down, w.down_bias, out, out);
    }

    static constexpr int64_t COLUMNS = 8 * W2;  // of a product at once
    const LayerPass& p;
    const int64_t tokens, rows, value_row, key_row, gates;
    const bool gated;
    PassMemory m;
    std::vector<Past> pasts;
    std::vector<int64_t> times, picked_offsets, picked_times;
};

}  // namespace
}  // namespace slipstream

// Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_layer_pass(const slipstream::LayerPass* pass) {
    try {
        return slipstream::Pass(*pass).run() ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
