// Attention forward over jagged sequences, tile by tile: HSTU's SiLU(scale q·k + bias) / divisor ·
// v, and FuXi's three channels SiLU(scale q·k) / divisor · v, time bias · v, position bias · v.
//
// For a block of queries and a tile of keys the bias is made once and used by all heads. Six rows
// of scores are computed, turned into weights and multiplied with the values while they are still
// in the first-level cache.
#include <atomic>
#include <memory>

#include "attention_ahead.h"
#include "attention_bias.h"
#include "attention_pack.h"
#include "attention_weigh.h"
#include "kernels.h"

namespace slipstream {
namespace {

struct Buffers {
    PackedKeys packed;
    float* sums;     // per head: the block's outputs (channel by channel) if not in place
    int64_t sums_step;
    Rows out[3];     // the block's outputs by channel
};

// One panel's product with the values, into the rows of a channel.
inline void add_values(const RowBlock& block, int64_t tile, int64_t r0, int count, const PanelRange& range, const float* weights,
                       const float* values, int64_t padded, float* to, int64_t stride) {
    (block.begins(r0, tile) ? multiply_panel<false, true> : multiply_panel<false, false>)(
        count, padded, range.end - range.begin, weights + range.begin, LD, values + range.begin * padded, padded, W2, to, stride);
}

template <bool BIAS, bool FUXI>
void run_tile(const Attention& call, const Task& task, const Sequence& s, const RowBlock& block, int64_t tile, const Buffers& buf,
              const BiasTables& tables, const BiasTile& bias, Ahead& ahead, int64_t padded) {
    alignas(64) float scores[MR * LD];
    const int64_t q_stride = call.heads * call.key_width;
    const ForwardWeights<BIAS> weights{call.scale, FUXI ? call.inverse_divisor : 1.0f};
    for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
        const float* q = call.q + (s.q0 + block.first) * q_stride + (task.head_begin + i) * call.key_width;
        const float* keys_t = buf.packed.keys_t + i * buf.packed.keys_t_step + tile * call.key_width;
        const float* values = buf.packed.values + i * buf.packed.values_step + tile * padded;
        for (int64_t r0 = 0, count; r0 < block.rows; r0 += count) {
            count = block.panel(r0);
            Panel panel(block, tile, r0, count);
            const PanelRange& range = panel.range;
            if (range.empty()) continue;
            ahead.some();
            multiply_panel<false, true>(count, range.last - range.first, call.key_width, q + r0 * q_stride, q_stride,
                                        keys_t + range.first * call.key_width, W2, W2 * call.key_width, scores + range.first, LD);
            ahead.some();
            panel.scores = scores, panel.bias = bias.values + r0 * LD;
            weigh_panel(count, weights, panel);
            ahead.some();
            add_values(block, tile, r0, count, range, scores, values, padded, buf.out[0].at(i, r0), buf.out[0].stride);
            if (!FUXI) continue;
            const float* maps[2] = {tables.timed() ? bias.values : nullptr, tables.position.present() ? bias.position_values : nullptr};
            for (int64_t m = 0; m < 2; ++m)
                if (maps[m])
                    add_values(block, tile, r0, count, range, maps[m] + r0 * LD, values, padded, buf.out[m + 1].at(i, r0), buf.out[m + 1].stride);
        }
    }
}

// Adds a candidate's own key, which no tile holds.
void add_self(const Attention& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
              const Buffers& buf) {
    for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t p = s.keys - s.queries + block.first + r;
        if (p < s.history) continue;
        const int64_t query = s.q0 + block.first + r, key = s.k0 + p - s.past;
        const float position = tables.position.present() ? *tables.position.at(0) : 0.0f;
        const float time = tables.timed() ? tables.time_bias(time_apart(call.q_times[query], call.k_times[s.first_time + p])) : 0.0f;
        for (int64_t h = task.head_begin; h < task.head_end; ++h) {
            const float* q = call.q + (query * call.heads + h) * call.key_width;
            const float* k = call.k + (key * call.heads + h) * call.key_width;
            const float* v = call.v + (key * call.heads + h) * call.value_width;
            float score = 0.0f;
            for (int64_t d = 0; d < call.key_width; ++d) score += q[d] * k[d];
            const vf x = splat(score * call.scale + (call.channels == 1 ? position + time : 0.0f));
            const float weights[3] = {(x * sigmoid(x))[0] * call.inverse_divisor, time, position};
            for (int64_t m = 0; m < call.channels; ++m) {
                float* sum = buf.out[m].at(h - task.head_begin, r);
                for (int64_t d = 0; d < call.value_width; ++d) sum[d] += weights[m] * v[d];
            }
        }
    }
}

// Prefetches what is read next: rows of this sequence, or the first ones of the next task.
void prefetch_block(const Attention& call, const Sequence& s, int64_t query, int64_t key, Ahead& ahead) {
    const int64_t queries = std::min<int64_t>(ROWS, s.queries - query);
    const int64_t fresh = std::max<int64_t>(0, key - s.past), keys = std::min<int64_t>(ROWS, s.history - s.past - fresh);
    ahead.add(call.q + (s.q0 + query) * call.heads * call.key_width, queries * call.heads * call.key_width);
    ahead.add(call.k + (s.k0 + fresh) * call.heads * call.key_width, keys * call.heads * call.key_width);
    ahead.add(call.v + (s.k0 + fresh) * call.heads * call.value_width, keys * call.heads * call.value_width);
}

// The bias of one thread, kept between calls: mapping its pages anew takes as long as a short call.
BiasTile* thread_bias_tile() {
    static thread_local std::unique_ptr<BiasTile> tile;
    if (!tile) tile.reset(new (std::nothrow) BiasTile);
    return tile.get();
}

void run_block(const Attention& call, const Task& task, const Sequence& s, const RowBlock& block, const BiasTables& tables,
               BiasTile& bias, Ahead& ahead, Buffers& buf, int64_t padded) {
    const int64_t heads = task.head_end - task.head_begin, v_stride = call.heads * call.value_width;
    const bool in_place = padded == call.value_width, fuxi = call.channels == 3;
    float* out = call.out + (s.q0 + block.first) * call.channels * v_stride + task.head_begin * call.value_width;
    for (int64_t m = 0; m < call.channels; ++m) {
        buf.out[m] = in_place ? Rows{out + m * v_stride, call.value_width, call.channels * v_stride}
                              : Rows{buf.sums + m * ROWS * padded, buf.sums_step, padded};
        if (m && !(m == 1 ? tables.timed() : tables.position.present()))
            buf.out[m].clear(heads, 0, block.rows, padded);
        else
            clear_blind_rows(block, buf.out[m], heads, padded);
    }
    const auto run = fuxi ? run_tile<false, true> : tables.any() ? run_tile<true, false> : run_tile<false, false>;
    for (int64_t tile = block.tile_begin(); tile < block.tile_end(); tile += KEYS) {
        if (tables.any()) bias.fill(call, tables, s, block, tile, !fuxi, false);
        if (fuxi && tables.any()) bias.fill_maps();
        run(call, task, s, block, tile, buf, tables, bias, ahead, padded);
    }
    ahead.rest();
    if (s.history < s.keys) add_self(call, task, s, block, tables, buf);
    for (int64_t m = 0; m < call.channels && !in_place; ++m)
        unpack_heads(buf.sums + m * ROWS * padded, buf.sums_step, padded, heads, block.rows, call.value_width, 1.0f, out + m * v_stride,
                     call.channels * v_stride);
}

void run_task(const Attention& call, const Task& task, const Task* next, const BiasTables& tables, BiasTile& bias, Ahead& ahead,
              Scratch& scratch) {
    const Sequence s = sequence_of(call, task.sequence);
    const int64_t heads = task.head_end - task.head_begin, padded = round_up(call.value_width, W);
    const int64_t v_stride = call.heads * call.value_width;
    const float factor = call.channels == 1 ? call.inverse_divisor : 1.0f;
    Buffers buf{PackedKeys(call, heads, s.keys, scratch), nullptr, call.channels * ROWS * padded, {}};
    buf.sums = scratch.take(heads * buf.sums_step);
    int64_t packed = 0;
    for (int64_t start = 0; start < s.queries;) {
        const RowBlock block(s, call.window, start);
        packed = pack_keys(call, task, s, buf.packed, packed, block.tile_end(), factor);
        ahead.start(3 * heads * block.rows * (block.tile_end() - block.tile_begin()) / (2 * KEYS * MR));
        ahead.add(call.out + (s.q0 + start) * call.channels * v_stride, block.rows * call.channels * v_stride);
        start = block.end();
        if (start < s.queries)
            prefetch_block(call, s, start, packed, ahead);
        else if (next)
            prefetch_block(call, sequence_of(call, next->sequence), 0, 0, ahead);
        run_block(call, task, s, block, tables, bias, ahead, buf, padded);
    }
}

}  // namespace

bool attention_forward(const Attention& call) {
    const auto bins = plan_bins(call);
    const int threads = worth_sharing(call, bins) ? call.threads : 1;
    const BiasTables tables(call);
    const int64_t sums = call.heads * call.channels * ROWS * round_up(call.value_width, W);
    const int64_t floats = PackedKeys::floats(call, call.heads, longest(call)) + sums;
    std::atomic<int32_t> failed{0};
    std::atomic<size_t> taken{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch& scratch = thread_scratch();
        Ahead ahead;
        BiasTile* bias = thread_bias_tile();
        if (!bias || !scratch.reserve(floats)) failed = 1;
        run_bins(bins, taken, [&](size_t, const Task& task, const Task* next) {
            if (failed) return;
            scratch.reserve(floats);
            run_task(call, task, next, tables, *bias, ahead, scratch);
        });
        scratch.trim();
    }
    return !failed;
}

}  // namespace slipstream

// Returns 0, or 1 when memory ran out.
SLIPSTREAM_API int32_t ss_attention_forward(const slipstream::AttentionCall* call) {
    return slipstream::attention_forward({*call}) ? 0 : 1;
}
