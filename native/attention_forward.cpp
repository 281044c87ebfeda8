// Attention forward over jagged sequences, tile by tile: HSTU's SiLU(scale q·k + bias) / divisor · v, and FuXi's three channels
// SiLU(scale q·k) / divisor · v, time bias · v, position bias · v.
//
// For a block of queries and a tile of keys the bias is made once and used by all heads. Six rows of scores are computed, turned
// into weights and multiplied with the values while they are still in the first-level cache.
#include <atomic>
#include <memory>

#include "attention_bias.h"
#include "export.h"

namespace slipstream {
namespace {

struct Buffers {
    float *keys_t, *values, *sums;  // per head: transposed keys, padded values, the block's outputs (channel by channel)
    int64_t keys_t_step, values_step, sums_step;
};

int64_t scratch_floats(const AttentionCall& call, int64_t most, int64_t padded) {
    const int64_t n = round_up(most, W2);
    return call.heads * (round_up(n * call.key_width, 16) + round_up(n * padded, 16) + call.channels * ROWS * padded) + 64;
}

// N vectors of scores -> weights, in place.
template <bool BIAS, int N>
inline void weigh(float* row, const float* bias, float scale) {
    vf x[N], s[N];
    SLIPSTREAM_EACH x[i] = BIAS ? load(row + i * W) * scale + load(bias + i * W) : load(row + i * W) * scale;
    sigmoid(x, s);
    SLIPSTREAM_EACH store(row + i * W, x[i] * s[i]);
}

// A row's scores -> weights; what it does not see becomes zero.
template <bool BIAS>
inline void weigh_row(float* row, const float* bias, float scale, const PanelRange& range, int64_t low, int64_t high) {
    int64_t c = range.first;
    for (; c + 4 * W <= range.last; c += 4 * W) weigh<BIAS, 4>(row + c, bias + c, scale);
    for (; c < range.last; c += W) weigh<BIAS, 1>(row + c, bias + c, scale);
    for (c = range.begin; c < low; ++c) row[c] = 0.0f;
    for (c = high / W * W; c < range.last; c += W) store(row + c, (vf)((vi)load(row + c) & lanes_within(c, 0, high)));
}

template <bool BIAS, bool FUXI>
void run_tile(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, int64_t tile, const Buffers& buf,
              const BiasTables& tables, const BiasTile& bias, int64_t padded) {
    alignas(64) float scores[MR * LD];
    const int64_t q_stride = call.heads * call.key_width;
    for (int64_t h = task.head_begin; h < task.head_end; ++h) {
        const float* q = call.q + (s.q0 + block.first) * q_stride + h * call.key_width;
        const int64_t local = h - task.head_begin;
        const float* keys_t = buf.keys_t + local * buf.keys_t_step + tile * call.key_width;
        const float* values = buf.values + local * buf.values_step + tile * padded;
        float* sums = buf.sums + local * buf.sums_step;
        const bool more = tile == block.tile_begin() && h + 1 < task.head_end;  // ask for the next head's queries meanwhile
        for (int64_t r0 = 0; r0 < block.rows; r0 += MR) {
            const int count = static_cast<int>(std::min<int64_t>(MR, block.rows - r0));
            const PanelRange range(block, r0, count, tile);
            if (more) prefetch_rows(q + r0 * q_stride + call.key_width, q_stride, count, call.key_width);
            if (range.empty()) continue;
            multiply_panel<false, true>(count, range.last - range.first, call.key_width, q + r0 * q_stride, q_stride,
                                        keys_t + range.first * call.key_width, W2, W2 * call.key_width, scores + range.first, LD);
            for (int64_t r = 0; r < count; ++r)
                weigh_row<BIAS>(scores + r * LD, bias.values + (r0 + r) * LD, call.scale, range, block.low[r0 + r] - tile,
                                std::max(range.begin, block.high[r0 + r] - tile));
            multiply_panel<false, false>(count, padded, range.end - range.begin, scores + range.begin, LD, values + range.begin * padded,
                                         padded, W2, sums + r0 * padded, padded);
            if (!FUXI) continue;
            const float* maps[2] = {tables.time ? bias.values : nullptr, tables.position.present() ? bias.position_values : nullptr};
            for (int64_t m = 0; m < 2; ++m)
                if (maps[m])
                    multiply_panel<false, false>(count, padded, range.end - range.begin, maps[m] + r0 * LD + range.begin, LD,
                                                 values + range.begin * padded, padded, W2, sums + ((m + 1) * ROWS + r0) * padded, padded);
        }
    }
}

// A candidate's own key, which no tile holds.
void add_self(const AttentionCall& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
              const Buffers& buf, int64_t padded) {
    for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t p = s.keys - s.queries + block.first + r;
        if (p < s.history) continue;
        const int64_t query = s.q0 + block.first + r, key = s.k0 + p;
        const float position = tables.position.present() ? *tables.position.at(0) : 0.0f;
        const float time = tables.time ? tables.time[tables.buckets.of(time_apart(call.q_times[query], call.k_times[key]))] : 0.0f;
        for (int64_t h = task.head_begin; h < task.head_end; ++h) {
            const float* q = call.q + (query * call.heads + h) * call.key_width;
            const float* k = call.k + (key * call.heads + h) * call.key_width;
            const float* v = call.v + (key * call.heads + h) * call.value_width;
            float score = 0.0f;
            for (int64_t d = 0; d < call.key_width; ++d) score += q[d] * k[d];
            const vf x = splat(score * call.scale + (call.channels == 1 ? position + time : 0.0f));
            const float weights[3] = {(x * sigmoid(x))[0], time, position};
            for (int64_t m = 0; m < call.channels; ++m) {
                float* sum = buf.sums + (h - task.head_begin) * buf.sums_step + (m * ROWS + r) * padded;
                for (int64_t d = 0; d < call.value_width; ++d) sum[d] += weights[m] * v[d];
            }
        }
    }
}

// A few keys of every head at a time, in the order of memory, the next ones asked for ahead.
SLIPSTREAM_NOINLINE void pack_sequence(const AttentionCall& call, const Task& task, const Sequence& s, const Buffers& buf, int64_t padded) {
    const int64_t k_stride = call.heads * call.key_width, v_stride = call.heads * call.value_width;
    for (int64_t row = 0; row < s.history; row += W2) {
        const int64_t rows = std::min<int64_t>(W2, s.history - row), ahead = std::min<int64_t>(W2, s.history - row - rows);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const float* k = call.k + (s.k0 + row) * k_stride + (task.head_begin + i) * call.key_width;
            const float* v = call.v + (s.k0 + row) * v_stride + (task.head_begin + i) * call.value_width;
            prefetch_rows(k + rows * k_stride, k_stride, ahead, call.key_width);
            prefetch_rows(v + rows * v_stride, v_stride, ahead, call.value_width);
            pack_transposed(k, k_stride, rows, call.key_width, buf.keys_t + i * buf.keys_t_step + row * call.key_width);
            pack_rows(v, v_stride, rows, call.value_width, 1.0f, buf.values + i * buf.values_step + row * padded, padded);
        }
    }
}

void run_task(const AttentionCall& call, const Task& task, const BiasTables& tables, BiasTile& bias, Scratch& scratch) {
    const Sequence s = sequence_of(call, task.sequence);
    const int64_t heads = task.head_end - task.head_begin, padded = round_up(call.value_width, W), n = round_up(s.keys, W2);
    Buffers buf;
    buf.keys_t_step = round_up(n * call.key_width, 16);
    buf.values_step = round_up(n * padded, 16);
    buf.sums_step = call.channels * ROWS * padded;
    buf.keys_t = scratch.take(heads * buf.keys_t_step);
    buf.values = scratch.take(heads * buf.values_step);
    buf.sums = scratch.take(heads * buf.sums_step);
    pack_sequence(call, task, s, buf, padded);
    const bool fuxi = call.channels == 3;
    for (int64_t start = 0; start < s.queries; start += ROWS) {
        const RowBlock block(s, call.window, start);
        prefetch_rows(call.q + ((s.q0 + start) * call.heads + task.head_begin) * call.key_width, call.heads * call.key_width, block.rows,
                      call.key_width);
        std::fill(buf.sums, buf.sums + heads * buf.sums_step, 0.0f);
        for (int64_t tile = block.tile_begin(); tile < block.tile_end(); tile += KEYS) {
            if (tables.any()) bias.fill(call, tables, s, block, tile, !fuxi, false);
            if (fuxi && tables.any()) bias.fill_maps();
            const auto run = fuxi ? run_tile<false, true> : tables.any() ? run_tile<true, false> : run_tile<false, false>;
            run(call, task, s, block, tile, buf, tables, bias, padded);
        }
        if (s.history < s.keys) add_self(call, task, s, block, tables, buf, padded);
        const int64_t v_stride = call.heads * call.value_width;
        for (int64_t m = 0; m < call.channels; ++m)
            unpack_heads(buf.sums + m * ROWS * padded, buf.sums_step, padded, heads, block.rows, call.value_width,
                         m ? 1.0f : call.inverse_divisor,
                         call.out + ((s.q0 + start) * call.channels + m) * v_stride + task.head_begin * call.value_width,
                         call.channels * v_stride);
    }
}

}  // namespace
}  // namespace slipstream

// Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_attention_forward(const slipstream::AttentionCall* call_pointer) {
    using namespace slipstream;
    const AttentionCall& call = *call_pointer;
    const auto bins = plan_bins(call);
    const BiasTables tables(call);
    const int64_t floats = scratch_floats(call, longest(call), round_up(call.value_width, W));
    std::atomic<int32_t> failed{0};
#pragma omp parallel num_threads(call.threads)
    {
        Scratch& scratch = thread_scratch();
        std::unique_ptr<BiasTile> bias(new (std::nothrow) BiasTile);
        if (!bias || !scratch.reserve(floats)) failed = 1;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < bins.size(); ++i)
            for (const Task& task : bins[i]) {
                if (failed) continue;
                scratch.reserve(floats);
                run_task(call, task, tables, *bias, scratch);
            }
        scratch.trim();
    }
    return failed;
}
