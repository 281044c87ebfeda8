// Attention backward: scores are computed again tile by tile, so the forward pass keeps nothing.
//
// For a block of queries and a tile of keys, per head: scores S = QK^T and dP = dO V^T, weights P =
// SiLU(S) and dS = dP SiLU'(S), then dQ += dS K for the block, dV += P^T dO and dK += dS^T Q for
// the tile. The bias gradient is dS summed over heads. FuXi's two bias maps M have channels of
// their own: dV += M^T dO, and dM = dO V^T summed over heads.
#include <atomic>
#include <memory>

#include "attention_ahead.h"
#include "attention_bias.h"
#include "attention_weigh.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Shape {
    int64_t key_width, value_width, key_padded, value_padded, key_stride, value_stride, channels;
    explicit Shape(const AttentionCall& c)
        : key_width(c.key_width), value_width(c.value_width), key_padded(round_up(c.key_width, W)),
          value_padded(round_up(c.value_width, W)), key_stride(c.heads * c.key_width), value_stride(c.heads * c.value_width), channels(c.channels) {}
};

// Scratch of a task, head by head. Gradients stand in the caller's tensors, or here where a head's
// width is no multiple of a vector.
struct Buffers {
    int64_t n, key_rows, value_rows, keys_t_size, values_t_size, q_size, o_size, channel_size;
    bool keys_in_place, values_in_place;
    float *keys_t, *values_t, *keys, *queries, *grad_out;
    Rows grad_keys, grad_values, grad_queries;
    int64_t fresh = 0;  // the first key that no block before this one has seen

    Buffers(const Shape& shape, int64_t keys, int64_t heads) : n(round_up(keys, W2)) {
        key_rows = n * shape.key_padded, value_rows = n * shape.value_padded;
        keys_t_size = n * shape.key_width, values_t_size = n * shape.value_width;
        q_size = ROWS * shape.key_padded, channel_size = ROWS * shape.value_padded, o_size = shape.channels * channel_size;
        keys_in_place = shape.key_width == shape.key_padded, values_in_place = shape.value_width == shape.value_padded;
        floats = heads * (keys_t_size + values_t_size + 2 * key_rows + value_rows + 2 * q_size + o_size) + 8 * 16 + 64;
        heads_ = heads;
    }
    void place(Scratch& s, const Attention& call, const Shape& shape, const Sequence& sequence, int64_t first_head) {
        keys_t = s.take(heads_ * keys_t_size), values_t = s.take(heads_ * values_t_size), keys = s.take(heads_ * key_rows);
        queries = s.take(heads_ * q_size), grad_out = s.take(heads_ * o_size);
        float* grad_k = call.grad_k + sequence.k0 * shape.key_stride + first_head * shape.key_width;
        float* grad_v = call.grad_v + sequence.k0 * shape.value_stride + first_head * shape.value_width;
        grad_keys = {grad_k, shape.key_width, shape.key_stride}, grad_queries = {nullptr, shape.key_width, shape.key_stride};
        grad_values = {grad_v, shape.value_width, shape.value_stride};
        if (!keys_in_place) grad_keys = {s.take(heads_ * key_rows), key_rows, shape.key_padded};
        if (!keys_in_place) grad_queries = {s.take(heads_ * q_size), q_size, shape.key_padded};
        if (!values_in_place) grad_values = {s.take(heads_ * value_rows), value_rows, shape.value_padded};
    }
    // Clears the gradients of keys that no tile holds or no query sees: candidates, and what lies
    // before the first window.
    void clear_unseen(const Shape& shape, const Sequence& s, int64_t window) const {
        const int64_t seen = s.queries ? RowBlock(s, window, 0).low[0] : s.history;
        grad_keys.clear(heads_, 0, seen, shape.key_padded), grad_keys.clear(heads_, s.history, s.keys, shape.key_padded);
        grad_values.clear(heads_, 0, seen, shape.value_padded), grad_values.clear(heads_, s.history, s.keys, shape.value_padded);
    }
    int64_t floats;

  private:
    int64_t heads_;
};

struct Tiles {
    alignas(64) float weights[ROWS * LD], grads[ROWS * LD];
    BiasTile bias;
    std::vector<float> along;  // the task's position gradient
    Ahead ahead;
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
          grad_queries(buf.grad_queries.at(i, 0)),
          grad_keys(buf.grad_keys.at(i, tile)),
          grad_values(buf.grad_values.at(i, tile)) {}
};

// Rows of dO times values: dP, or (ZERO false) one more head's share of a map's gradient.
template <bool ZERO>
inline void times_values(const Shape& shape, const Head& head, const float* grad_out, int count, const PanelRange& range, float* to) {
    multiply_panel<false, ZERO>(count, range.last - range.first, shape.value_width, grad_out, shape.value_padded,
                                head.values_t + range.first * shape.value_width, W2, W2 * shape.value_width, to + range.first, LD);
}

// Where the gradients of a tile's keys stand. No earlier block has seen the keys from `fresh` on:
// they are written, not added to.
struct KeyRows {
    float* first;
    int64_t stride, fresh;
};

// grad[key] += sum over rows of map[row][key] * rows[row], for every key of the tile and the rows
// that see it.
inline void add_over_keys(const RowBlock& block, int64_t tile, int64_t width, const float* map, const float* rows, const KeyRows& grad,
                          Ahead& ahead) {
    const int64_t end = std::min<int64_t>(KEYS, block.tile_end() - tile);
    int64_t from = 0, to = 0;  // the rows that see some key of the panel
    for (int64_t c = 0, count; c < end; c += count) {
        count = panel_rows(end - c);
        ahead.some();
        while (from < block.rows && block.high[from] <= tile + c) ++from;
        while (to < block.rows && block.low[to] < tile + c + count) ++to;
        if (from >= to) continue;
        for (int64_t key = std::max(c + 1, grad.fresh); c < grad.fresh && key < c + count; ++key)
            std::fill(grad.first + key * grad.stride, grad.first + key * grad.stride + width, 0.0f);
        (c < grad.fresh ? multiply_panel<true, false> : multiply_panel<true, true>)(
            count, width, to - from, map + c + from * LD, LD, rows + from * width, width, W2, grad.first + c * grad.stride, grad.stride);
    }
}

// FuXi: every map's gradient from this head, over a panel of rows.
inline void add_map_gradients(const BiasTables& tables, const Shape& shape, const Buffers& buf, const Head& head, int64_t r0, int count,
                              const PanelRange& range, bool first_head, BiasTile& bias) {
    float* gradients[2] = {tables.timed() ? bias.gradient : nullptr, tables.position.present() ? bias.position_gradient : nullptr};
    for (int64_t m = 0; m < 2; ++m)
        if (gradients[m])
            (first_head ? times_values<true> : times_values<false>)(shape, head, head.grad_out + (m + 1) * buf.channel_size + r0 * shape.value_padded,
                                                                    count, range, gradients[m] + r0 * LD);
}

// Zero a little beyond the computed columns on both sides, which products over rows may touch.
inline void clear_beyond(const PanelRange& range, float* row) {
    for (int64_t c = range.last; c < range.last + 8 && c < KEYS; c += W) store(row + c, vf{});
    for (int64_t c = std::max<int64_t>(0, range.first - 8); c < range.first; ++c) row[c] = 0.0f;
}

template <bool BIAS, bool FUXI>
void run_head(const Attention& call, const BiasTables& tables, const Shape& shape, const RowBlock& block, int64_t tile,
              const Buffers& buf, int64_t i, Tiles& t) {
    const Head head(shape, buf, i, tile);
    for (int64_t r0 = 0, count; r0 < block.rows; r0 += count) {
        count = block.panel(r0);
        Panel panel(block, tile, r0, count);
        const PanelRange& range = panel.range;
        if (range.empty()) continue;
        t.ahead.some();
        panel.scores = t.weights + r0 * LD, panel.grads = t.grads + r0 * LD;
        panel.bias = t.bias.values + r0 * LD, panel.bias_grad = t.bias.gradient + r0 * LD;
        multiply_panel<false, true>(count, range.last - range.first, shape.key_width, head.queries + r0 * shape.key_padded,
                                    shape.key_padded, head.keys_t + range.first * shape.key_width, W2, W2 * shape.key_width,
                                    panel.scores + range.first, LD);
        times_values<true>(shape, head, head.grad_out + r0 * shape.value_padded, count, range, panel.grads);
        t.ahead.some();
        if (!BIAS)
            weigh_panel(count, BackwardWeights<Bias::NONE>(), panel);
        else if (i)
            weigh_panel(count, BackwardWeights<Bias::MORE>(), panel);
        else
            weigh_panel(count, BackwardWeights<Bias::FIRST>(), panel);
        if (range.last < KEYS || range.first)
            for (int64_t r = 0; r < count; ++r) clear_beyond(range, panel.scores + r * LD), clear_beyond(range, panel.grads + r * LD);
        t.ahead.some();
        (block.begins(r0, tile) ? multiply_panel<false, true> : multiply_panel<false, false>)(
            count, shape.key_padded, range.end - range.begin, panel.grads + range.begin, LD, head.keys + range.begin * shape.key_padded,
            shape.key_padded, W2, buf.grad_queries.at(i, r0), buf.grad_queries.stride);
        if (FUXI) add_map_gradients(tables, shape, buf, head, r0, count, range, i == 0, t.bias);
    }
    // One product after the other over all keys: its rows (dO or Q) stay in the first-level cache.
    KeyRows values{head.grad_values, buf.grad_values.stride, buf.fresh - tile};
    add_over_keys(block, tile, shape.value_padded, t.weights, head.grad_out, values, t.ahead);
    add_over_keys(block, tile, shape.key_padded, t.grads, head.queries, {head.grad_keys, buf.grad_keys.stride, buf.fresh - tile}, t.ahead);
    if (!FUXI) return;
    values.fresh = KEYS;
    const float *time = tables.timed() ? t.bias.values : nullptr, *position = tables.position.present() ? t.bias.position_values : nullptr;
    if (time) add_over_keys(block, tile, shape.value_padded, time, head.grad_out + buf.channel_size, values, t.ahead);
    if (position) add_over_keys(block, tile, shape.value_padded, position, head.grad_out + 2 * buf.channel_size, values, t.ahead);
}

// Adds a candidate's own key, which no tile holds.
void add_self(const Attention& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
              const Shape& shape, const Buffers& buf, BiasGradients& bias_grads) {
    for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t p = s.keys - s.queries + block.first + r;
        if (p < s.history) continue;
        const int64_t query = s.q0 + block.first + r, key = s.k0 + p;
        const uint64_t apart = tables.timed() ? time_apart(call.q_times[query], call.k_times[key]) : 0;
        const float position = tables.position.present() ? *tables.position.at(0) : 0.0f, time = tables.time_bias(apart);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i;
            const Head head(shape, buf, i, 0);
            const float* q = head.queries + r * shape.key_padded;
            const float* k = call.k + key * shape.key_stride + h * shape.key_width;
            const float* v = call.v + key * shape.value_stride + h * shape.value_width;
            float score = 0.0f, grads[3] = {};
            for (int64_t d = 0; d < shape.key_width; ++d) score += q[d] * k[d];
            const float x = score + (shape.channels == 1 ? position + time : 0.0f), sig = sigmoid(splat(x))[0];
            const float weights[3] = {x * sig, time, position};
            for (int64_t m = 0; m < shape.channels; ++m) {
                const float* grad_out = head.grad_out + m * buf.channel_size + r * shape.value_padded;
                float* grad_v = buf.grad_values.at(i, p);
                for (int64_t d = 0; d < shape.value_width; ++d) grads[m] += grad_out[d] * v[d], grad_v[d] += weights[m] * grad_out[d];
            }
            grads[0] *= sig + weights[0] * (1.0f - sig);
            float *grad_q = buf.grad_queries.at(i, r), *grad_k = buf.grad_keys.at(i, p);
            for (int64_t d = 0; d < shape.key_width; ++d) grad_q[d] += grads[0] * call.scale * k[d], grad_k[d] += grads[0] * q[d];
            if (tables.position.present()) bias_grads.distance[0] += grads[shape.channels == 1 ? 0 : 2];
            bias_grads.add_time(tables, apart, grads[shape.channels == 1 ? 0 : 1]);
        }
    }
}

// Packs keys and values from `row` on until at least `end`, a few of every head at a time, in
// memory order. Returns where it ended.
SLIPSTREAM_NOINLINE int64_t pack_keys(const Attention& call, const Task& task, const Sequence& s, const Shape& shape, const Buffers& buf,
                                      int64_t row, int64_t end) {
    for (; row < end; row += W2) {
        const int64_t rows = std::min<int64_t>(W2, s.history - row), ahead = std::min<int64_t>(W2, s.history - row - rows);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i;
            const float* k = call.k + (s.k0 + row) * shape.key_stride + h * shape.key_width;
            const float* v = call.v + (s.k0 + row) * shape.value_stride + h * shape.value_width;
            prefetch_rows(k + rows * shape.key_stride, shape.key_stride, ahead, shape.key_width);
            prefetch_rows(v + rows * shape.value_stride, shape.value_stride, ahead, shape.value_width);
            pack_transposed(k, shape.key_stride, rows, shape.key_width, buf.keys_t + i * buf.keys_t_size + row * shape.key_width);
            pack_transposed(v, shape.value_stride, rows, shape.value_width, buf.values_t + i * buf.values_t_size + row * shape.value_width);
            pack_rows(k, shape.key_stride, rows, shape.key_width, call.scale, buf.keys + i * buf.key_rows + row * shape.key_padded, shape.key_padded);
        }
    }
    return row;
}

// Prefetches what is read next: rows of this sequence, or the first ones of the next task.
void prefetch_block(const Attention& call, const Sequence& s, const Shape& shape, int64_t query, int64_t key, Ahead& ahead) {
    const int64_t queries = std::min<int64_t>(ROWS, s.queries - query), keys = std::min<int64_t>(ROWS, s.history - key);
    const int64_t row = s.q0 + query;
    ahead.add(call.k + (s.k0 + key) * shape.key_stride, keys * shape.key_stride);
    ahead.add(call.v + (s.k0 + key) * shape.value_stride, keys * shape.value_stride);
    ahead.add(call.q + row * shape.key_stride, queries * shape.key_stride);
    ahead.add(call.grad_out + row * shape.channels * shape.value_stride, queries * shape.channels * shape.value_stride);
}

// Prefetches what this block writes.
void prefetch_gradients(const Attention& call, const Sequence& s, const Shape& shape, const RowBlock& block, Ahead& ahead) {
    const int64_t row = s.q0 + block.first, keys = std::min(block.rows, s.keys - block.first);
    ahead.add(call.grad_q + row * shape.key_stride, block.rows * shape.key_stride);
    ahead.add(call.grad_k + (s.k0 + block.first) * shape.key_stride, keys * shape.key_stride);
    ahead.add(call.grad_v + (s.k0 + block.first) * shape.value_stride, keys * shape.value_stride);
}

// Packs the block's queries and output gradients, a few rows of every head at a time.
SLIPSTREAM_NOINLINE void pack_block(const Attention& call, const Task& task, const Sequence& s, const RowBlock& block, const Shape& shape,
                                    const Buffers& buf) {
    for (int64_t r = 0; r < block.rows; r += MR) {
        const int64_t rows = std::min<int64_t>(MR, block.rows - r), ahead = std::min<int64_t>(MR, block.rows - r - rows);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i, row = s.q0 + block.first + r;
            const float* q = call.q + row * shape.key_stride + h * shape.key_width;
            prefetch_rows(q + rows * shape.key_stride, shape.key_stride, ahead, shape.key_width);
            pack_rows(q, shape.key_stride, rows, shape.key_width, call.scale, buf.queries + i * buf.q_size + r * shape.key_padded, shape.key_padded);
            for (int64_t m = 0; m < shape.channels; ++m) {
                const float* o = call.grad_out + (row * shape.channels + m) * shape.value_stride + h * shape.value_width;
                prefetch_rows(o + rows * shape.channels * shape.value_stride, shape.channels * shape.value_stride, ahead, shape.value_width);
                pack_rows(o, shape.channels * shape.value_stride, rows, shape.value_width, m ? 1.0f : call.inverse_divisor,
                          buf.grad_out + i * buf.o_size + m * buf.channel_size + r * shape.value_padded, shape.value_padded);
            }
        }
    }
}

void run_block(const Attention& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
               const Shape& shape, Buffers& buf, Tiles& tiles, BiasGradients& bias_grads) {
    const int64_t heads = task.head_end - task.head_begin;
    float* grad_q = call.grad_q + (s.q0 + block.first) * shape.key_stride + task.head_begin * shape.key_width;
    pack_block(call, task, s, block, shape, buf);
    if (buf.keys_in_place) buf.grad_queries.first = grad_q;
    clear_blind_rows(block, buf.grad_queries, heads, shape.key_padded);
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
        if (tables.decay.present()) bias.add_decay_gradient(bias_grads.decay, bias.gradient);
    }
    tiles.ahead.rest();
    if (s.history < s.keys) add_self(call, task, s, block, tables, shape, buf, bias_grads);
    if (!buf.keys_in_place)
        unpack_heads(buf.grad_queries.first, buf.q_size, shape.key_padded, heads, block.rows, shape.key_width, 1.0f, grad_q, shape.key_stride);
}

void run_task(const Attention& call, const Task& task, const Task* next, const BiasTables& tables, Tiles& tiles, Scratch& scratch,
              BiasGradients& bias_grads) {
    const Sequence s = sequence_of(call, task.sequence);
    const Shape shape(call);
    const int64_t heads = task.head_end - task.head_begin;
    Buffers buf(shape, s.keys, heads);
    buf.place(scratch, call, shape, s, task.head_begin);
    buf.clear_unseen(shape, s, call.window);
    if (tables.position.present()) tiles.along.assign(tables.position.size() + 1 + LD, 0.0f);
    int64_t packed = 0;
    for (int64_t start = 0; start < s.queries;) {
        const RowBlock block(s, call.window, start);
        packed = pack_keys(call, task, s, shape, buf, packed, block.tile_end());
        tiles.ahead.start(2 * heads * block.rows * (block.tile_end() - block.tile_begin()) / (KEYS * MR));
        prefetch_gradients(call, s, shape, block, tiles.ahead);
        start = block.end();
        if (start < s.queries)
            prefetch_block(call, s, shape, start, packed, tiles.ahead);
        else if (next)
            prefetch_block(call, sequence_of(call, next->sequence), shape, 0, 0, tiles.ahead);
        run_block(call, task, s, block, tables, shape, buf, tiles, bias_grads);
        buf.fresh = block.tile_end();
    }
    if (!buf.keys_in_place)
        unpack_heads(buf.grad_keys.first, buf.key_rows, shape.key_padded, heads, s.keys, shape.key_width, 1.0f,
                     call.grad_k + s.k0 * shape.key_stride + task.head_begin * shape.key_width, shape.key_stride);
    if (!buf.values_in_place)
        unpack_heads(buf.grad_values.first, buf.value_rows, shape.value_padded, heads, s.keys, shape.value_width, 1.0f,
                     call.grad_v + s.k0 * shape.value_stride + task.head_begin * shape.value_width, shape.value_stride);
    if (tables.position.present())
        for (int64_t d = 0; d <= s.history; ++d) bias_grads.distance[d] += tiles.along[tables.position.size() - d];
}

}  // namespace
}  // namespace slipstream

// Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_attention_backward(const slipstream::AttentionCall* call_pointer) {
    using namespace slipstream;
    const Attention call{*call_pointer};
    const auto bins = plan_bins(call);
    const BiasTables tables(call);
    const int64_t floats = Buffers(Shape(call), longest(call), call.heads).floats;
    std::vector<BiasGradients> partial(bins.size(), BiasGradients(tables, call.time_entries));
    std::atomic<int32_t> failed{0};
    std::atomic<size_t> taken{0};
#pragma omp parallel num_threads(call.threads)
    {
        Scratch& scratch = thread_scratch();
        std::unique_ptr<Tiles> tiles(new (std::nothrow) Tiles);
        if (!tiles || !scratch.reserve(floats)) failed = 1;
        run_bins(bins, taken, [&](size_t bin, const Task& task, const Task* next) {
            if (failed) return;
            scratch.reserve(floats);
            run_task(call, task, next, tables, *tiles, scratch, partial[bin]);
        });
        scratch.trim();
    }
    add_up(call, tables, partial);
    return failed;
}
