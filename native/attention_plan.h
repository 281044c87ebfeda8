// The shape of one attention call: who sees whom, how the work is cut into tasks, and the scratch
// memory of a thread.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "matrix_tiles.h"
#include "stored_rows.h"

namespace slipstream {

// One sequence's past in one layer: keys [tokens, H, K] and values [tokens, H, V] as they are
// stored, each head of a token with its scale where it is stored in bytes.
struct Past {
    const void *k, *v;
    const uint16_t *k_scales, *v_scales;
    int64_t tokens;
    int64_t first_time;                 // where the sequence begins in k_times, which holds the past's too
};

// Mirrored field by field by slipstream/ops/attention_native.py.
struct AttentionCall {
    const float *q, *k, *v;             // [T, H, K], [S, H, K], [S, H, V], contiguous
    const int64_t *q_offsets, *k_offsets;
    const int64_t *q_times, *k_times;   // null without a time bias
    const int64_t* candidates;          // null for none
    const float *position, *time;       // tables or null
    const int64_t* borders;             // smallest |dt| of every bucket
    const float* decay;                 // instead of a time table: a, b, c of a exp(-b (|dt| / time_unit)^c), or null
    float* out;                         // [T, H, V], or [T, 3, H, V]
    const float* grad_out;              // backward only, like out
    float *grad_q, *grad_k, *grad_v, *grad_position, *grad_time, *grad_decay;
    int64_t sequences, heads, key_width, value_width;
    int64_t position_entries, time_entries;
    int64_t window;                     // 0 for none
    float inverse_divisor, scale, time_unit;
    int32_t threads;
    int32_t channels;                   // 1: HSTU, 3: FuXi
};

// A call of Python, or one of a pass through the layers, whose sequences may have a past.
struct Attention : AttentionCall {
    const Past* pasts = nullptr;        // of every sequence, before its rows of k and v (forward only)
    Stored stored = Stored::FLOAT;      // how the pasts are stored
};

// Attention without gradients; false when memory ran out.
bool attention_forward(const Attention& call);

constexpr int ROWS = 96;       // queries of a block, a multiple of MR
constexpr int KEYS = 96;       // keys of a tile, a multiple of MR and of W2
constexpr int LD = KEYS + 16;  // row stride of a tile: an odd number of cache lines, and room for zeros past the end

// `keys` counts those of the past, too; row j of k is key past + j.
struct Sequence {
    int64_t q0, k0, queries, keys, history, past, first_time;
};

inline Sequence sequence_of(const Attention& call, int64_t b) {
    const int64_t q0 = call.q_offsets[b], k0 = call.k_offsets[b];
    const int64_t past = call.pasts ? call.pasts[b].tokens : 0, keys = past + call.k_offsets[b + 1] - k0;
    return {q0, k0, call.q_offsets[b + 1] - q0, keys, keys - (call.candidates ? call.candidates[b] : 0), past,
            call.pasts ? call.pasts[b].first_time : k0};
}

// Rows of every head, where a product adds to: the caller's tensor itself, or scratch where a
// head's width is no multiple of a vector.
struct Rows {
    float* first;
    int64_t head_step, stride;
    float* at(int64_t head, int64_t row) const { return first + head * head_step + row * stride; }
    void clear(int64_t heads, int64_t begin, int64_t end, int64_t width) const {
        for (int64_t r = begin; r < end; ++r)
            for (int64_t h = 0; h < heads; ++h) std::fill(at(h, r), at(h, r) + width, 0.0f);
    }
};

// One block of query rows: the keys [low, high) each row sees (a candidate sees itself besides),
// and the row's position.
struct RowBlock {
    int64_t first, rows;
    int64_t low[ROWS], high[ROWS], position[ROWS];

    // Blocks share the rows evenly: a short last block would visit every key for a few rows.
    static int64_t even(int64_t queries) {
        const int64_t blocks = (queries + ROWS - 1) / ROWS;
        return round_up((queries + blocks - 1) / blocks, MR);
    }
    int64_t end() const { return first + rows; }
    RowBlock(const Sequence& s, int64_t window, int64_t start) : first(start), rows(std::min(even(s.queries), s.queries - start)) {
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t p = s.keys - s.queries + start + r;
            position[r] = std::min(p, s.history);
            high[r] = std::min(p + 1, s.history);
            low[r] = window ? std::max<int64_t>(0, position[r] - window + 1) : 0;
        }
    }
    int panel(int64_t r) const { return panel_rows(rows - r); }
    // Whether `tile` is the first in which the panel at row r sees keys.
    bool begins(int64_t r, int64_t tile) const { return low[r] >= tile; }
    // The tiles that some row of the block sees: both ends grow from row to row.
    int64_t tile_begin() const { return low[0] / KEYS * KEYS; }
    int64_t tile_end() const { return high[rows - 1]; }
};

// The columns of a tile that a panel of rows needs: visible ones [begin, end), computed ones
// [first, last).
struct PanelRange {
    int64_t begin, end, first, last;

    PanelRange(const RowBlock& block, int64_t row, int64_t count, int64_t tile) {
        begin = std::max<int64_t>(0, block.low[row] - tile);
        end = std::min<int64_t>(KEYS, block.high[row + count - 1] - tile);
        first = begin / W2 * W2;
        last = round_up(end, W);
    }
    bool empty() const { return begin >= end; }
};

// Clears what no product will write: rows that see no key in any tile.
inline void clear_blind_rows(const RowBlock& block, const Rows& to, int64_t heads, int64_t width) {
    for (int64_t r = 0, count; r < block.rows; r += count) {
        count = block.panel(r);
        if (block.low[r] >= block.high[r + count - 1]) to.clear(heads, r, r + count, width);
    }
}

// A task is one sequence with some of its heads; a bin is a list of tasks with its own partial bias
// gradients. Which task falls in which bin depends only on the shapes and the number of threads, so
// sums have a fixed order whoever runs the bin.
struct Task {
    int64_t sequence, head_begin, head_end;
    double cost;
};

inline std::vector<std::vector<Task>> plan_bins(const Attention& call) {
    std::vector<Task> tasks;
    double total = 0;
    for (int64_t b = 0; b < call.sequences; ++b) {
        const Sequence s = sequence_of(call, b);
        const double rows = static_cast<double>(s.queries);
        const double seen = static_cast<double>(s.keys) - rows / 2 + 16;
        if (s.keys) tasks.push_back({b, 0, call.heads, rows * seen + 32.0 * s.keys});
    }
    for (const Task& t : tasks) total += t.cost;
    const int64_t parts = std::min<int64_t>(call.heads, call.threads);
    if (parts > 1) {  // a sequence that would keep one thread busy alone is cut by heads
        std::vector<Task> cut;
        for (const Task& t : tasks) {
            const int64_t pieces = t.cost * 2 * call.threads > total ? parts : 1;
            for (int64_t i = 0; i < pieces; ++i)
                cut.push_back({t.sequence, call.heads * i / pieces, call.heads * (i + 1) / pieces, t.cost / pieces});
        }
        tasks.swap(cut);
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
    // Longest first, in bins that shrink with what is left, so that the threads end together.
    std::vector<std::vector<Task>> bins;
    double left = total, room = 0;
    for (const Task& t : tasks) {
        if (bins.empty() || t.cost > room) {
            bins.emplace_back();
            room = std::max(left / (3 * std::max(1, call.threads)), total / (64 * std::max(1, call.threads)));
        }
        bins.back().push_back(t);
        room -= t.cost;
        left -= t.cost;
    }
    return bins;
}

// Whether a second thread saves more than it takes to wake it. A single short history is not worth
// it, above all on a machine that does something else, too.
inline bool worth_sharing(const Attention& call, const std::vector<std::vector<Task>>& bins) {
    constexpr double kProducts = 1 << 21;
    double total = 0;
    for (const auto& bin : bins)
        for (const Task& t : bin) total += t.cost;
    return total * static_cast<double>(call.heads * (call.key_width + call.value_width)) > kProducts;
}

// Runs every bin once: run(bin, task, the task after it or null). A thread takes its next bin when
// it begins the last task of this one.
template <typename F>
inline void run_bins(const std::vector<std::vector<Task>>& bins, std::atomic<size_t>& taken, F&& run) {
    for (size_t i = taken++, following = 0; i < bins.size(); i = following)
        for (size_t t = 0; t < bins[i].size(); ++t) {
            const bool last = t + 1 == bins[i].size();
            if (last) following = taken++;
            run(i, bins[i][t], !last ? &bins[i][t + 1] : following < bins.size() ? &bins[following][0] : nullptr);
        }
}

inline int64_t longest(const Attention& call) {
    int64_t most = 0;
    for (int64_t b = 0; b < call.sequences; ++b) most = std::max(most, sequence_of(call, b).keys);
    return most;
}

// Memory of one thread, kept between calls (mapping new pages takes time) unless it is very large.
class Scratch {
  public:
    ~Scratch() { free(base_); }
    bool reserve(int64_t floats) {
        if (floats > size_) {
            free(base_);
            base_ = static_cast<float*>(aligned_alloc(64, round_up(floats * 4, 64)));
            size_ = base_ ? floats : 0;
        }
        next_ = base_;
        return base_ || !floats;
    }
    float* take(int64_t floats) {
        float* p = next_;
        next_ += round_up(floats, 16);
        return p;
    }
    void trim() {
        if (size_ > (int64_t{64} << 20) / 4) {
            free(base_);
            base_ = nullptr;
            size_ = 0;
        }
    }

  private:
    float *base_ = nullptr, *next_ = nullptr;
    int64_t size_ = 0;
};

inline Scratch& thread_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

}  // namespace slipstream
