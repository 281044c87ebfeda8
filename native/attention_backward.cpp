// Attention backward: scores are computed again tile by tile, so nothing was kept from the forward pass.
//
// For a block of queries and a tile of keys, per head: scores S = QK^T and dP = dO V^T, weights P = SiLU(S) and dS = dP SiLU'(S),
// then dQ += dS K for the block, dV += P^T dO and dK += dS^T Q for the tile. The bias gradient is dS summed over heads.
// FuXi's two bias maps M have channels of their own: dV += M^T dO, and dM = dO V^T summed over heads.
#include <atomic>
#include <memory>

#include "attention_bias.h"
#include "export.h"

namespace slipstream {
namespace {

struct Shape {
    int64_t key_width, value_width, key_padded, value_padded, key_stride, value_stride, channels;
    explicit Shape(const AttentionCall& c)
        : key_width(c.key_width), value_width(c.value_width), key_padded(round_up(c.key_width, W)),
          value_padded(round_up(c.value_width, W)), key_stride(c.heads * c.key_width), value_stride(c.heads * c.value_width), channels(c.channels) {}
};

// Per head of a task; steps between heads are the sizes given to `take`.
struct Buffers {
    int64_t n, key_rows, value_rows, keys_t_size, values_t_size, q_size, o_size, channel_size;
    float *keys_t, *values_t, *keys, *grad_keys, *grad_values, *queries, *grad_out, *grad_queries;

    Buffers(const Shape& shape, int64_t keys, int64_t heads) : n(round_up(keys, W2)) {
        key_rows = n * shape.key_padded, value_rows = n * shape.value_padded;
        keys_t_size = n * shape.key_width, values_t_size = n * shape.value_width;
        q_size = ROWS * shape.key_padded, channel_size = ROWS * shape.value_padded, o_size = shape.channels * channel_size;
        floats = heads * (keys_t_size + values_t_size + 2 * key_rows + value_rows + 2 * q_size + o_size) + 8 * 16 + 64;
        heads_ = heads;
    }
    void place(Scratch& s) {
        keys_t = s.take(heads_ * keys_t_size), values_t = s.take(heads_ * values_t_size);
        keys = s.take(heads_ * key_rows), grad_keys = s.take(heads_ * key_rows), grad_values = s.take(heads_ * value_rows);
        queries = s.take(heads_ * q_size), grad_queries = s.take(heads_ * q_size), grad_out = s.take(heads_ * o_size);
        std::fill(grad_keys, grad_keys + heads_ * key_rows, 0.0f);
        std::fill(grad_values, grad_values + heads_ * value_rows, 0.0f);
    }
    int64_t floats;

  private:
    int64_t heads_;
};

struct Tiles {
    alignas(64) float weights[ROWS * LD], grads[ROWS * LD];
    BiasTile bias;
    std::vector<float> along;  // the task's position gradient
};

// One row of a tile: scores S that become weights P, dP that becomes dS, the bias, and the sum of dS over heads.
struct WeighRow {
    float scale;
    float *scores, *grads;
    const float* bias;
    float* bias_grad;
    bool first_head;
    int64_t low, high;  // the keys it sees

    template <bool BIAS, int N, bool EDGE>
    inline __attribute__((always_inline)) void vectors(int64_t c) const {
        vf x[N], s[N], y[N], d[N];
        SLIPSTREAM_EACH x[i] = BIAS ? load(scores + c + i * W) * scale + load(bias + c + i * W) : load(scores + c + i * W) * scale;
        sigmoid(x, s);
        SLIPSTREAM_EACH y[i] = x[i] * s[i];
        SLIPSTREAM_EACH d[i] = load(grads + c + i * W) * (s[i] + y[i] * (1.0f - s[i]));
        if (EDGE) {
            const vi seen = lanes_within(c, low, high);
            y[0] = (vf)((vi)y[0] & seen), d[0] = (vf)((vi)d[0] & seen);
        }
        SLIPSTREAM_EACH store(scores + c + i * W, y[i]);
        SLIPSTREAM_EACH store(grads + c + i * W, d[i]);
        if (!BIAS) return;
        SLIPSTREAM_EACH store(bias_grad + c + i * W, first_head ? d[i] : load(bias_grad + c + i * W) + d[i]);
    }

    // Over the computed columns; zero outside [low, high) and a little beyond them on both sides, which products over rows may touch.
    template <bool BIAS>
    inline void run(const PanelRange& range) const {
        int64_t c = range.first;
        for (; c < range.last && c < low; c += W) vectors<BIAS, 1, true>(c);
        for (; c + 4 * W <= high; c += 4 * W) vectors<BIAS, 4, false>(c);
        for (; c + W <= high; c += W) vectors<BIAS, 1, false>(c);
        for (; c < range.last; c += W) vectors<BIAS, 1, true>(c);
        store(scores + range.last, vf{}), store(grads + range.last, vf{});
        for (c = std::max<int64_t>(0, range.first - 8); c < range.first; ++c) scores[c] = grads[c] = 0.0f;
    }
};

// The head's part of a tile: pointers into the buffers.
struct Head {
    const float *keys_t, *values_t, *keys, *queries, *grad_out;
    float *grad_queries, *grad_keys, *grad_values;
    Head(const Shape& shape, const Buffers& buf, int64_t i, int64_t tile)
        : keys_t(buf.keys_t + i * buf.keys_t_size + tile * shape.key_width),
          values_t(buf.values_t + i * buf.values_t_size + tile * shape.value_width),
          keys(buf.keys + i * buf.key_rows + tile * shape.key_padded),
          queries(buf.queries + i * buf.q_size),
          grad_out(buf.grad_out + i * buf.o_size),
          grad_queries(buf.grad_queries + i * buf.q_size),
          grad_keys(buf.grad_keys + i * buf.key_rows + tile * shape.key_padded),
          grad_values(buf.grad_values + i * buf.value_rows + tile * shape.value_padded) {}
};

// Rows of dO times values: dP, or (ZERO false) one more head's share of a map's gradient.
template <bool ZERO>
inline void times_values(const Shape& shape, const Head& head, const float* grad_out, int count, const PanelRange& range, float* to) {
    multiply_panel<false, ZERO>(count, range.last - range.first, shape.value_width, grad_out, shape.value_padded,
                                head.values_t + range.first * shape.value_width, W2, W2 * shape.value_width, to + range.first, LD);
}

// grad[key] += sum over rows of map[row][key] * rows[row], for every key of the tile and the rows that see it.
inline void add_over_keys(const RowBlock& block, int64_t tile, int64_t width, const float* map, const float* rows, float* grad) {
    const int64_t end = std::min<int64_t>(KEYS, block.tile_end() - tile);
    int64_t from = 0, to = 0;  // the rows that see some key of the panel
    for (int64_t c = 0; c < end; c += MR) {
        const int count = static_cast<int>(std::min<int64_t>(MR, end - c));
        while (from < block.rows && block.high[from] <= tile + c) ++from;
        while (to < block.rows && block.low[to] < tile + c + count) ++to;
        if (from < to)
            multiply_panel<true, false>(count, width, to - from, map + c + from * LD, LD, rows + from * width, width, W2, grad + c * width, width);
    }
}

// FuXi: every map's gradient from this head, over a panel of rows.
inline void add_map_gradients(const BiasTables& tables, const Shape& shape, const Buffers& buf, const Head& head, int64_t r0, int count,
                              const PanelRange& range, bool first_head, BiasTile& bias) {
    float* gradients[2] = {tables.time ? bias.gradient : nullptr, tables.position.present() ? bias.position_gradient : nullptr};
    for (int64_t m = 0; m < 2; ++m)
        if (gradients[m])
            (first_head ? times_values<true> : times_values<false>)(shape, head, head.grad_out + (m + 1) * buf.channel_size + r0 * shape.value_padded,
                                                                    count, range, gradients[m] + r0 * LD);
}

template <bool BIAS, bool FUXI>
void run_head(const AttentionCall& call, const BiasTables& tables, const Shape& shape, const RowBlock& block, int64_t tile,
              const Buffers& buf, int64_t i, Tiles& t) {
    const Head head(shape, buf, i, tile);
    for (int64_t r0 = 0; r0 < block.rows; r0 += MR) {
        const int count = static_cast<int>(std::min<int64_t>(MR, block.rows - r0));
        const PanelRange range(block, r0, count, tile);
        if (range.empty()) continue;
        float *weights = t.weights + r0 * LD, *grads = t.grads + r0 * LD;
        multiply_panel<false, true>(count, range.last - range.first, shape.key_width, head.queries + r0 * shape.key_padded,
                                    shape.key_padded, head.keys_t + range.first * shape.key_width, W2, W2 * shape.key_width,
                                    weights + range.first, LD);
        times_values<true>(shape, head, head.grad_out + r0 * shape.value_padded, count, range, grads);
        for (int64_t r = r0; r < r0 + count; ++r)
            WeighRow{call.scale, t.weights + r * LD, t.grads + r * LD, t.bias.values + r * LD, t.bias.gradient + r * LD, i == 0,
                     block.low[r] - tile, std::min<int64_t>(range.end, block.high[r] - tile)}
                .template run<BIAS>(range);
        multiply_panel<false, false>(count, shape.key_padded, range.end - range.begin, grads + range.begin, LD,
                                     head.keys + range.begin * shape.key_padded, shape.key_padded, W2,
                                     head.grad_queries + r0 * shape.key_padded, shape.key_padded);
        if (FUXI) add_map_gradients(tables, shape, buf, head, r0, count, range, i == 0, t.bias);
    }
    // One product after the other over all keys: its rows (dO or Q) stay in the first-level cache.
    add_over_keys(block, tile, shape.value_padded, t.weights, head.grad_out, head.grad_values);
    add_over_keys(block, tile, shape.key_padded, t.grads, head.queries, head.grad_keys);
    if (!FUXI) return;
    if (tables.time) add_over_keys(block, tile, shape.value_padded, t.bias.values, head.grad_out + buf.channel_size, head.grad_values);
    if (tables.position.present())
        add_over_keys(block, tile, shape.value_padded, t.bias.position_values, head.grad_out + 2 * buf.channel_size, head.grad_values);
}

// A candidate's own key, which no tile holds.
void add_self(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
              const Shape& shape, const Buffers& buf, BiasGradients& bias_grads) {
    for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t p = s.keys - s.queries + block.first + r;
        if (p < s.history) continue;
        const int64_t query = s.q0 + block.first + r, key = s.k0 + p;
        const int bucket = tables.time ? tables.buckets.of(time_apart(call.q_times[query], call.k_times[key])) : 0;
        const float position = tables.position.present() ? *tables.position.at(0) : 0.0f, time = tables.time ? tables.time[bucket] : 0.0f;
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i;
            const Head head(shape, buf, i, 0);
            const float* q = head.queries + r * shape.key_padded;
            const float* k = call.k + key * shape.key_stride + h * shape.key_width;
            const float* v = call.v + key * shape.value_stride + h * shape.value_width;
            float score = 0.0f, grads[3] = {};
            for (int64_t d = 0; d < shape.key_width; ++d) score += q[d] * k[d];
            const float x = score * call.scale + (shape.channels == 1 ? position + time : 0.0f), sig = sigmoid(splat(x))[0];
            const float weights[3] = {x * sig, time, position};
            for (int64_t m = 0; m < shape.channels; ++m) {
                const float* grad_out = head.grad_out + m * buf.channel_size + r * shape.value_padded;
                float* grad_v = head.grad_values + p * shape.value_padded;
                for (int64_t d = 0; d < shape.value_width; ++d) grads[m] += grad_out[d] * v[d], grad_v[d] += weights[m] * grad_out[d];
            }
            grads[0] *= sig + weights[0] * (1.0f - sig);
            float *grad_q = head.grad_queries + r * shape.key_padded, *grad_k = head.grad_keys + p * shape.key_padded;
            for (int64_t d = 0; d < shape.key_width; ++d) grad_q[d] += grads[0] * k[d], grad_k[d] += grads[0] * q[d];
            if (tables.position.present()) bias_grads.distance[0] += grads[shape.channels == 1 ? 0 : 2];
            if (tables.time) bias_grads.bucket[bucket] += grads[shape.channels == 1 ? 0 : 1];
        }
    }
}

// A few keys of every head at a time, in the order of memory, the next ones asked for ahead.
SLIPSTREAM_NOINLINE void pack_sequence(const AttentionCall& call, const Task& task, const Sequence& s, const Shape& shape, const Buffers& buf) {
    for (int64_t row = 0; row < s.history; row += W2) {
        const int64_t rows = std::min<int64_t>(W2, s.history - row), ahead = std::min<int64_t>(W2, s.history - row - rows);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i;
            const float* k = call.k + (s.k0 + row) * shape.key_stride + h * shape.key_width;
            const float* v = call.v + (s.k0 + row) * shape.value_stride + h * shape.value_width;
            prefetch_rows(k + rows * shape.key_stride, shape.key_stride, ahead, shape.key_width);
            prefetch_rows(v + rows * shape.value_stride, shape.value_stride, ahead, shape.value_width);
            pack_transposed(k, shape.key_stride, rows, shape.key_width, buf.keys_t + i * buf.keys_t_size + row * shape.key_width);
            pack_transposed(v, shape.value_stride, rows, shape.value_width, buf.values_t + i * buf.values_t_size + row * shape.value_width);
            pack_rows(k, shape.key_stride, rows, shape.key_width, 1.0f, buf.keys + i * buf.key_rows + row * shape.key_padded, shape.key_padded);
        }
    }
}

// The block's queries and output gradients, likewise.
SLIPSTREAM_NOINLINE void pack_block(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, const Shape& shape,
                                    const Buffers& buf) {
    for (int64_t r = 0; r < block.rows; r += MR) {
        const int64_t rows = std::min<int64_t>(MR, block.rows - r), ahead = std::min<int64_t>(MR, block.rows - r - rows);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i, row = s.q0 + block.first + r;
            const float* q = call.q + row * shape.key_stride + h * shape.key_width;
            prefetch_rows(q + rows * shape.key_stride, shape.key_stride, ahead, shape.key_width);
            pack_rows(q, shape.key_stride, rows, shape.key_width, 1.0f, buf.queries + i * buf.q_size + r * shape.key_padded, shape.key_padded);
            for (int64_t m = 0; m < shape.channels; ++m) {
                const float* o = call.grad_out + (row * shape.channels + m) * shape.value_stride + h * shape.value_width;
                prefetch_rows(o + rows * shape.channels * shape.value_stride, shape.channels * shape.value_stride, ahead, shape.value_width);
                pack_rows(o, shape.channels * shape.value_stride, rows, shape.value_width, m ? 1.0f : call.inverse_divisor,
                          buf.grad_out + i * buf.o_size + m * buf.channel_size + r * shape.value_padded, shape.value_padded);
            }
        }
    }
}

void run_block(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
               const Shape& shape, const Buffers& buf, Tiles& tiles, BiasGradients& bias_grads) {
    const int64_t heads = task.head_end - task.head_begin, row = s.q0 + block.first;
    pack_block(call, task, s, block, shape, buf);
    std::fill(buf.grad_queries, buf.grad_queries + heads * buf.q_size, 0.0f);
    const bool fuxi = shape.channels == 3;
    const auto run = fuxi ? run_head<false, true> : tables.any() ? run_head<true, false> : run_head<false, false>;
    for (int64_t tile = block.tile_begin(); tile < block.tile_end(); tile += KEYS) {
        BiasTile& bias = tiles.bias;
        if (tables.any()) bias.fill(call, tables, s, block, tile, !fuxi, true);
        if (fuxi && tables.any()) bias.fill_maps();
        for (int64_t i = 0; i < heads; ++i) run(call, tables, shape, block, tile, buf, i, tiles);
        if (fuxi && tables.any()) bias.mask(bias.gradient), bias.mask(bias.position_gradient);
        if (tables.position.present()) bias.add_position_gradient(tiles.along.data(), fuxi ? bias.position_gradient : bias.gradient);
        if (tables.time) bias.add_time_gradient(bias_grads.bucket, bias.gradient);
    }
    if (s.history < s.keys) add_self(call, task, s, block, tables, shape, buf, bias_grads);
    unpack_heads(buf.grad_queries, buf.q_size, shape.key_padded, heads, block.rows, shape.key_width, call.scale,
                 call.grad_q + row * shape.key_stride + task.head_begin * shape.key_width, shape.key_stride);
}

void run_task(const AttentionCall& call, const Task& task, const BiasTables& tables, Tiles& tiles, Scratch& scratch,
              BiasGradients& bias_grads) {
    const Sequence s = sequence_of(call, task.sequence);
    const Shape shape(call);
    const int64_t heads = task.head_end - task.head_begin;
    Buffers buf(shape, s.keys, heads);
    buf.place(scratch);
    pack_sequence(call, task, s, shape, buf);
    if (tables.position.present()) tiles.along.assign(tables.position.size() + 1 + LD, 0.0f);
    for (int64_t start = 0; start < s.queries; start += ROWS)
        run_block(call, task, s, RowBlock(s, call.window, start), tables, shape, buf, tiles, bias_grads);
    unpack_heads(buf.grad_keys, buf.key_rows, shape.key_padded, heads, s.keys, shape.key_width, call.scale,
                 call.grad_k + s.k0 * shape.key_stride + task.head_begin * shape.key_width, shape.key_stride);
    unpack_heads(buf.grad_values, buf.value_rows, shape.value_padded, heads, s.keys, shape.value_width, 1.0f,
                 call.grad_v + s.k0 * shape.value_stride + task.head_begin * shape.value_width, shape.value_stride);
    if (tables.position.present())
        for (int64_t d = 0; d <= s.history; ++d) bias_grads.distance[d] += tiles.along[tables.position.size() - d];
}

}  // namespace
}  // namespace slipstream

// Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_attention_backward(const slipstream::AttentionCall* call_pointer) {
    using namespace slipstream;
    const AttentionCall& call = *call_pointer;
    const auto bins = plan_bins(call);
    const BiasTables tables(call);
    const int64_t floats = Buffers(Shape(call), longest(call), call.heads).floats;
    std::vector<BiasGradients> partial(bins.size(), BiasGradients(tables, call.time_entries));
    std::atomic<int32_t> failed{0};
#pragma omp parallel num_threads(call.threads)
    {
        Scratch& scratch = thread_scratch();
        std::unique_ptr<Tiles> tiles(new (std::nothrow) Tiles);
        if (!tiles || !scratch.reserve(floats)) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < bins.size(); ++i)
            for (const Task& task : bins[i]) {
                if (failed) continue;
                scratch.reserve(floats);
                run_task(call, task, tables, *tiles, scratch, partial[i]);
            }
        scratch.trim();
    }
    add_up(call, partial);
    return failed;
}
