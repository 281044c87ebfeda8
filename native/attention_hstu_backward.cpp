// HSTU attention, backward: scores are computed again tile by tile, so nothing was kept from the forward pass.
//
// For a block of queries and a tile of keys, per head: scores S = QK^T and dP = dO V^T, weights P = SiLU(S) and dS = dP SiLU'(S),
// then dQ += dS K for the block, dV += P^T dO and dK += dS^T Q for the tile. The bias gradient is dS summed over heads.
#include <atomic>
#include <memory>

#include "attention_bias.h"
#include "export.h"

namespace slipstream {
namespace {

struct Shape {
    int64_t key_width, value_width, key_padded, value_padded, key_stride, value_stride;
    explicit Shape(const AttentionCall& c)
        : key_width(c.key_width), value_width(c.value_width), key_padded(round_up(c.key_width, W)),
          value_padded(round_up(c.value_width, W)), key_stride(c.heads * c.key_width), value_stride(c.heads * c.value_width) {}
};

// Per head of a task; steps between heads are the sizes given to `take`.
struct Buffers {
    int64_t n, key_rows, value_rows, keys_t_size, values_t_size, q_size, o_size;
    float *keys_t, *values_t, *keys, *grad_keys, *grad_values, *queries, *grad_out, *grad_queries;

    Buffers(const Shape& shape, int64_t keys, int64_t heads) : n(round_up(keys, W2)) {
        key_rows = n * shape.key_padded, value_rows = n * shape.value_padded;
        keys_t_size = n * shape.key_width, values_t_size = n * shape.value_width;
        q_size = ROWS * shape.key_padded, o_size = ROWS * shape.value_padded;
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

// Scores and dP -> weights P and dS in place, zero outside [low, high) and a little beyond the computed columns on both sides.
template <bool BIAS>
inline void weigh_row(const AttentionCall& call, float* row, float* grad, const float* bias, float* bias_grad, bool first_head,
                      const PanelRange& range, int64_t low, int64_t high) {
    for (int64_t c = range.first; c < range.last; c += W) {
        vf x = load(row + c) * call.scale;
        if (BIAS) x += load(bias + c);
        const vf s = sigmoid(x), y = x * s;
        store(row + c, y);
        store(grad + c, load(grad + c) * call.inverse_divisor * (s + y * (1.0f - s)));
    }
    for (int64_t c = std::max<int64_t>(0, range.first - 8); c < low; ++c) row[c] = grad[c] = 0.0f;
    for (int64_t c = high; c < range.last + 8; ++c) row[c] = grad[c] = 0.0f;
    if (!BIAS) return;
    for (int64_t c = range.first; c < range.last; c += W) store(bias_grad + c, first_head ? load(grad + c) : load(bias_grad + c) + load(grad + c));
}

template <bool BIAS>
void run_head(const AttentionCall& call, const Shape& shape, const RowBlock& block, int64_t tile, const Buffers& buf, int64_t i, Tiles& t) {
    const float* keys_t = buf.keys_t + i * buf.keys_t_size + tile * shape.key_width;
    const float* values_t = buf.values_t + i * buf.values_t_size + tile * shape.value_width;
    const float* keys = buf.keys + i * buf.key_rows + tile * shape.key_padded;
    const float* queries = buf.queries + i * buf.q_size;
    const float* grad_out = buf.grad_out + i * buf.o_size;
    float* grad_queries = buf.grad_queries + i * buf.q_size;
    for (int64_t r0 = 0; r0 < block.rows; r0 += MR) {
        const int count = static_cast<int>(std::min<int64_t>(MR, block.rows - r0));
        const PanelRange range(block, r0, count, tile);
        if (range.empty()) continue;
        float *weights = t.weights + r0 * LD, *grads = t.grads + r0 * LD;
        multiply_panel<false, true>(count, range.last - range.first, shape.key_width, queries + r0 * shape.key_padded, shape.key_padded,
                                    keys_t + range.first * shape.key_width, W2, W2 * shape.key_width, weights + range.first, LD);
        multiply_panel<false, true>(count, range.last - range.first, shape.value_width, grad_out + r0 * shape.value_padded,
                                    shape.value_padded, values_t + range.first * shape.value_width, W2, W2 * shape.value_width,
                                    grads + range.first, LD);
        for (int64_t r = 0; r < count; ++r) {
            const int64_t row = (r0 + r) * LD;
            weigh_row<BIAS>(call, t.weights + row, t.grads + row, t.bias.values + row, t.bias.gradient + row, i == 0, range,
                            block.low[r0 + r] - tile, std::max<int64_t>(0, block.high[r0 + r] - tile));
        }
        multiply_panel<false, false>(count, shape.key_padded, range.end - range.begin, grads + range.begin, LD,
                                     keys + range.begin * shape.key_padded, shape.key_padded, W2, grad_queries + r0 * shape.key_padded,
                                     shape.key_padded);
    }
    float* grad_keys = buf.grad_keys + i * buf.key_rows + tile * shape.key_padded;
    float* grad_values = buf.grad_values + i * buf.value_rows + tile * shape.value_padded;
    const int64_t end = std::min<int64_t>(KEYS, block.tile_end() - tile);
    int64_t from = 0, to = 0;  // the rows that see some key of the panel
    for (int64_t c = 0; c < end; c += MR) {
        const int count = static_cast<int>(std::min<int64_t>(MR, end - c));
        while (from < block.rows && block.high[from] <= tile + c) ++from;
        while (to < block.rows && block.low[to] < tile + c + count) ++to;
        if (from >= to) continue;
        multiply_panel<true, false>(count, shape.value_padded, to - from, t.weights + from * LD + c, LD,
                                    grad_out + from * shape.value_padded, shape.value_padded, W2, grad_values + c * shape.value_padded,
                                    shape.value_padded);
        multiply_panel<true, false>(count, shape.key_padded, to - from, t.grads + from * LD + c, LD, queries + from * shape.key_padded,
                                    shape.key_padded, W2, grad_keys + c * shape.key_padded, shape.key_padded);
    }
}

// A candidate's own key, which no tile holds.
void add_self(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
              const Shape& shape, const Buffers& buf, BiasGradients& bias_grads) {
    for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t p = s.keys - s.queries + block.first + r;
        if (p < s.history) continue;
        const int64_t query = s.q0 + block.first + r, key = s.k0 + p;
        const int bucket = tables.time ? tables.buckets.of(time_apart(call.q_times[query], call.k_times[key])) : 0;
        const float bias = (tables.position.present() ? *tables.position.at(0) : 0.0f) + (tables.time ? tables.time[bucket] : 0.0f);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const int64_t h = task.head_begin + i;
            const float* q = buf.queries + i * buf.q_size + r * shape.key_padded;
            const float* grad_out = buf.grad_out + i * buf.o_size + r * shape.value_padded;
            const float* k = call.k + key * shape.key_stride + h * shape.key_width;
            const float* v = call.v + key * shape.value_stride + h * shape.value_width;
            float score = 0.0f, grad = 0.0f;
            for (int64_t d = 0; d < shape.key_width; ++d) score += q[d] * k[d];
            for (int64_t d = 0; d < shape.value_width; ++d) grad += grad_out[d] * v[d];
            const float x = score * call.scale + bias, sig = sigmoid(splat(x))[0], weight = x * sig;
            grad *= call.inverse_divisor * (sig + weight * (1.0f - sig));
            float* grad_q = buf.grad_queries + i * buf.q_size + r * shape.key_padded;
            float* grad_k = buf.grad_keys + i * buf.key_rows + p * shape.key_padded;
            float* grad_v = buf.grad_values + i * buf.value_rows + p * shape.value_padded;
            for (int64_t d = 0; d < shape.key_width; ++d) grad_q[d] += grad * k[d], grad_k[d] += grad * q[d];
            for (int64_t d = 0; d < shape.value_width; ++d) grad_v[d] += weight * grad_out[d];
            if (tables.position.present()) bias_grads.distance[0] += grad;
            if (tables.time) bias_grads.bucket[bucket] += grad;
        }
    }
}

void pack_sequence(const AttentionCall& call, const Task& task, const Sequence& s, const Shape& shape, const Buffers& buf) {
    for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
        const int64_t h = task.head_begin + i;
        const float* k = call.k + s.k0 * shape.key_stride + h * shape.key_width;
        const float* v = call.v + s.k0 * shape.value_stride + h * shape.value_width;
        pack_transposed(k, shape.key_stride, s.history, shape.key_width, buf.keys_t + i * buf.keys_t_size);
        pack_transposed(v, shape.value_stride, s.history, shape.value_width, buf.values_t + i * buf.values_t_size);
        pack_rows(k, shape.key_stride, s.history, shape.key_width, shape.key_padded, buf.keys + i * buf.key_rows);
    }
}

void run_block(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
               const Shape& shape, const Buffers& buf, Tiles& tiles, BiasGradients& bias_grads) {
    const int64_t heads = task.head_end - task.head_begin, row = s.q0 + block.first;
    for (int64_t i = 0; i < heads; ++i) {
        const int64_t h = task.head_begin + i;
        pack_rows(call.q + row * shape.key_stride + h * shape.key_width, shape.key_stride, block.rows, shape.key_width, shape.key_padded,
                  buf.queries + i * buf.q_size);
        pack_rows(call.grad_out + row * shape.value_stride + h * shape.value_width, shape.value_stride, block.rows, shape.value_width,
                  shape.value_padded, buf.grad_out + i * buf.o_size);
    }
    std::fill(buf.grad_queries, buf.grad_queries + heads * buf.q_size, 0.0f);
    for (int64_t tile = block.tile_begin(); tile < block.tile_end(); tile += KEYS) {
        if (tables.any()) tiles.bias.fill(call, tables, s, block, tile, true, true);
        for (int64_t i = 0; i < heads; ++i)
            (tables.any() ? run_head<true> : run_head<false>)(call, shape, block, tile, buf, i, tiles);
        if (tables.position.present()) tiles.bias.add_position_gradient(tiles.along.data(), tiles.bias.gradient);
        if (tables.time) tiles.bias.add_time_gradient(bias_grads.bucket, tiles.bias.gradient);
    }
    if (s.history < s.keys) add_self(call, task, s, block, tables, shape, buf, bias_grads);
    for (int64_t i = 0; i < heads; ++i)
        unpack_rows(buf.grad_queries + i * buf.q_size, shape.key_padded, block.rows, shape.key_width, call.scale,
                    call.grad_q + row * shape.key_stride + (task.head_begin + i) * shape.key_width, shape.key_stride);
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
    for (int64_t i = 0; i < heads; ++i) {
        const int64_t h = task.head_begin + i;
        unpack_rows(buf.grad_keys + i * buf.key_rows, shape.key_padded, s.keys, shape.key_width, call.scale,
                    call.grad_k + s.k0 * shape.key_stride + h * shape.key_width, shape.key_stride);
        unpack_rows(buf.grad_values + i * buf.value_rows, shape.value_padded, s.keys, shape.value_width, call.inverse_divisor,
                    call.grad_v + s.k0 * shape.value_stride + h * shape.value_width, shape.value_stride);
    }
    if (tables.position.present())
        for (int64_t d = 0; d <= s.history; ++d) bias_grads.distance[d] += tiles.along[tables.position.size() - d];
}

}  // namespace
}  // namespace slipstream

// Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_hstu_backward(const slipstream::AttentionCall* call_pointer) {
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
