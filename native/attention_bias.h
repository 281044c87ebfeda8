// Relative position and time bias of a tile, and their gradients, in one walk down the rows.
//
// The time bias is a table by buckets, or a function of the gap (attention_decay.h). Seen down a column, a key's time bucket changes rarely. So each column remembers its bucket and
// the query time at which the next one begins: a row costs one comparison per vector of columns,
// and only the columns that change are looked up. The changes are recorded; the gradient sums a
// column until its bucket changes. Nothing is gathered or scattered element by element.
#pragma once
#include <vector>

#include "attention_decay.h"

namespace slipstream {

// The bucket of |dt|: a guess from the leading bits of its float (an eighth of an octave, which
// holds at most one border), one step up if |dt| lies beyond that border, both without a branch;
// the exact integer borders then correct the guess.
class TimeBuckets {
  public:
    TimeBuckets(const int64_t* borders, int64_t entries) : borders_(borders), next_(entries, UINT64_MAX) {
        for (int64_t b = 0; b + 1 < entries; ++b) next_[b] = static_cast<uint64_t>(borders[b + 1]);
        for (int cell = 0; cell < CELLS && entries; ++cell) {
            const uint32_t bits = static_cast<uint32_t>(cell + ONE) << 20;
            float low;
            memcpy(&low, &bits, 4);
            guess_[cell] = static_cast<int16_t>(fix(0, low < 9.2e18f ? static_cast<uint64_t>(low) : uint64_t{1} << 63));
        }
    }
    int of(uint64_t apart) const {
        const float f = static_cast<float>(static_cast<int64_t>(std::min<uint64_t>(apart | (apart == 0), INT64_MAX)));
        uint32_t bits;
        memcpy(&bits, &f, 4);
        const int guess = guess_[(bits >> 20) - ONE];
        return fix(guess + (apart >= next_[guess]), apart);
    }
    // The first query time (for a query after the key) that leaves bucket `b` of a key at `time`.
    int64_t leaves(int b, int64_t time) const {
        const uint64_t room = time > 0 ? static_cast<uint64_t>(INT64_MAX - time) : INT64_MAX;
        return next_[b] > room ? INT64_MAX : static_cast<int64_t>(static_cast<uint64_t>(time) + next_[b]);
    }

  private:
    static constexpr int ONE = 127 * 8, CELLS = 64 * 8;
    int fix(int b, uint64_t apart) const {
        while (apart >= next_[b] && next_[b] != UINT64_MAX) ++b;
        while (b > 0 && apart < static_cast<uint64_t>(borders_[b])) --b;
        return b;
    }
    const int64_t* borders_;
    std::vector<uint64_t> next_;  // the border above every bucket
    int16_t guess_[CELLS];
};

// Position bias by distance, reversed so that it runs along the keys of a row: at(position)[key].
class PositionTable {
  public:
    PositionTable(const float* table, int64_t entries, int64_t longest) : size_(longest) {
        if (!table) return;
        const int64_t n = (entries + 1) / 2;
        values_.assign(longest + 1 + LD, 0.0f);
        for (int64_t d = 0; d <= longest; ++d) values_[longest - d] = table[std::min(d, n - 1) + n - 1];
    }
    bool present() const { return !values_.empty(); }
    const float* at(int64_t position) const { return values_.data() + size_ - position; }
    int64_t size() const { return size_; }

  private:
    int64_t size_;
    std::vector<float> values_;
};

struct BiasTables {
    TimeBuckets buckets;
    PositionTable position;
    const float* time;  // by bucket; null where the bias is a function, or absent
    TimeDecay decay;
    bool timed() const { return time || decay.present(); }
    bool any() const { return timed() || position.present(); }
    // The time bias of one pair.
    float time_bias(uint64_t apart) const {
        if (decay.present()) return decay.one(apart);
        return time ? time[buckets.of(apart)] : 0.0f;
    }
    explicit BiasTables(const Attention& call)
        : buckets(call.borders, call.time ? call.time_entries : 0),
          position(call.position, call.position_entries, longest(call)),
          time(call.time),
          decay(call.decay, call.time_unit) {}
};

// Partial gradients of a bin: by distance and by bucket, or the sums of TimeDecay.
struct BiasGradients {
    std::vector<double> distance, bucket;
    double decay[3] = {};
    BiasGradients() = default;
    BiasGradients(const BiasTables& t, int64_t entries)
        : distance(t.position.present() ? t.position.size() + 1 : 0), bucket(t.time ? entries : 0) {}
    // One pair's time gradient.
    void add_time(const BiasTables& t, uint64_t apart, float gradient) {
        if (t.time) bucket[t.buckets.of(apart)] += gradient;
        if (!t.decay.present()) return;
        float slopes[3];
        t.decay.one(apart, &slopes);
        for (int m = 0; m < 3; ++m) decay[m] += static_cast<double>(gradient) * slopes[m];
    }
};

// The bins' partial sums, added in their fixed order, into the gradients of the tables (distances
// beyond the table share its last entry).
inline void add_up(const Attention& call, const BiasTables& tables, const std::vector<BiasGradients>& partial) {
    std::vector<double> position(call.grad_position ? call.position_entries : 0), time(call.grad_time ? call.time_entries : 0);
    double decay[3] = {};
    const int64_t n = (call.position_entries + 1) / 2;
    for (const BiasGradients& bin : partial) {
        for (size_t d = 0; d < bin.distance.size() && !position.empty(); ++d)
            position[std::min<int64_t>(d, n - 1) + n - 1] += bin.distance[d];
        for (size_t b = 0; b < bin.bucket.size() && !time.empty(); ++b) time[b] += bin.bucket[b];
        for (int m = 0; m < 3; ++m) decay[m] += bin.decay[m];
    }
    std::copy(position.begin(), position.end(), call.grad_position);
    std::copy(time.begin(), time.end(), call.grad_time);
    if (call.grad_decay) tables.decay.gradient(decay, call.grad_decay);
}

inline void clear_unseen(float* row, const PanelRange& range, int64_t low, int64_t high) {
    for (int64_t c = std::max<int64_t>(0, range.first - 8); c < low; ++c) row[c] = 0.0f;
    int64_t c = std::max<int64_t>(0, high);
    for (; c < range.last + 8 && c + W <= LD; c += W) store(row + c, vf{});
    for (; c < range.last + 8; ++c) row[c] = 0.0f;  // a whole vector would reach into the next row
}

class BiasTile {
  public:
    alignas(64) float values[ROWS * LD];    // what a tile adds to the scores (HSTU), or the time map alone (FuXi)
    alignas(64) float gradient[ROWS * LD];  // theirs, summed over heads by the caller
    alignas(64) float position_values[ROWS * LD], position_gradient[ROWS * LD];  // the position map (FuXi only)

    // Fills `values` over every panel's computed columns. With `note`, records the changes of
    // buckets for `add_time_gradient`.
    SLIPSTREAM_NOINLINE void fill(const Attention& call, const BiasTables& tables, const Sequence& s, const RowBlock& block, int64_t tile,
              bool with_position, bool note) {
        tables_ = &tables, block_ = &block, tile_ = tile;
        if (tables.time) start_columns(call, s);
        if (tables.decay.present()) gaps_.start(call, s, block, tile);
        num_changes_ = 0;
        const bool sorted = tables.time && in_order(call, s);
        for (int64_t panel = 0, count; panel < block.rows; panel += count) {
            count = block.panel(panel);
            const PanelRange range(block, panel, count, tile);
            for (int64_t r = panel; r < panel + count; ++r) {
                row_begin_[r] = num_changes_;
                if (range.empty()) continue;
                if (tables.time) {
                    const int64_t time = call.q_times[s.q0 + block.first + r];
                    sorted ? step_sorted(time, range, note) : step_any(r, time, range, note);
                }
                if (tables.decay.present())
                    note ? write_decay<true>(r, range, with_position) : write_decay<false>(r, range, with_position);
                else
                    write_row(r, range, with_position);
            }
        }
        row_begin_[block.rows] = num_changes_;
    }

    // FuXi's maps multiply the values themselves: the position map, and both maps zero where
    // nothing is seen.
    void fill_maps() {
        if (tables_->position.present())
            for_rows([&](int64_t r, const PanelRange& range) {
                const float* along = tables_->position.at(block_->position[r]) + tile_;
                for (int64_t c = range.first; c < range.last; c += W) store(position_values + r * LD + c, load(along + c));
            });
        mask(values);
        mask(position_values);
    }

    // Zero outside the keys each row sees, and a little beyond the computed columns, which the
    // products over rows may touch.
    void mask(float* map) const {
        for_rows([&](int64_t r, const PanelRange& range) {
            clear_unseen(map + r * LD, range, block_->low[r] - tile_, block_->high[r] - tile_);
        });
    }

    // distance[d] += the gradient of every pair d apart; `along` is reversed like PositionTable.
    SLIPSTREAM_NOINLINE void add_position_gradient(float* along, const float* from) const {
        for_rows([&](int64_t r, const PanelRange& range) {
            float* to = along + tables_->position.size() - block_->position[r] + tile_;
            for (int64_t c = range.first; c < range.last; c += W) store(to + c, load(to + c) + load(from + r * LD + c));
        });
    }

    SLIPSTREAM_NOINLINE void add_time_gradient(std::vector<double>& bucket, const float* from) {
        float sum[KEYS + W] = {};
        for_rows([&](int64_t r, const PanelRange& range) {
            for (size_t i = row_begin_[r]; i < row_begin_[r + 1]; ++i) {
                const Change& change = changes_[i];
                bucket[change.from] += sum[change.column];
                sum[change.column] = 0.0f;
            }
            for (int64_t c = range.first; c < range.last; c += W) store(sum + c, load(sum + c) + load(from + r * LD + c));
        });
        for (int64_t c = 0; c < KEYS; ++c)
            if (sum[c] != 0.0f) bucket[bucket_[c]] += sum[c];
    }

    // sums += of every pair, the gradient of its bias times the slopes of TimeDecay. Floats along a
    // row, doubles from row to row.
    SLIPSTREAM_NOINLINE void add_decay_gradient(double (&sums)[3], const float* from) const {
        typedef double vd __attribute__((vector_size(W * 8)));
        vd lanes[3] = {};
        for_rows([&](int64_t r, const PanelRange& range) {
            vf sum[3] = {};
            for (int64_t at = r * LD + range.first; at < r * LD + range.last; at += W)
                for (int m = 0; m < 3; ++m) sum[m] += load(from + at) * load(slopes_[m] + at);
            for (int m = 0; m < 3; ++m) lanes[m] += __builtin_convertvector(sum[m], vd);
        });
        for (int m = 0; m < 3; ++m)
            for (int i = 0; i < W; ++i) sums[m] += lanes[m][i];
    }

  private:
    struct Change {
        uint16_t column;
        int16_t from;
    };

    template <typename F>
    void for_rows(F&& body) const {
        for (int64_t panel = 0, count; panel < block_->rows; panel += count) {
            count = block_->panel(panel);
            const PanelRange range(*block_, panel, count, tile_);
            if (range.empty()) continue;
            for (int64_t r = panel; r < panel + count; ++r) body(r, range);
        }
    }

    // Whether no query time falls and none lies before a key it sees: then buckets only grow down a
    // column.
    bool in_order(const Attention& call, const Sequence& s) const {
        const int64_t* queries = call.q_times + s.q0 + block_->first;
        for (int64_t r = 1; r < block_->rows; ++r)
            if (queries[r] < queries[r - 1]) return false;
        const int64_t end = std::min<int64_t>(tile_ + KEYS, block_->high[block_->rows - 1]);
        const int64_t first = s.keys - s.queries + block_->first;
        for (int64_t j = tile_; j < end; ++j) {
            const int64_t row = std::max<int64_t>(0, j - first);  // the first row that may see key j
            if (row < block_->rows && call.k_times[s.first_time + j] > queries[row]) return false;
        }
        return true;
    }

    void start_columns(const Attention& call, const Sequence& s) {
        const int64_t time = call.q_times[s.q0 + block_->first];
        const int64_t end = std::min<int64_t>(KEYS, s.keys - tile_);
        for (int64_t c = 0; c < end; ++c) {
            const int64_t key = key_time_[c] = call.k_times[s.first_time + tile_ + c];
            set(c, key > time ? 0 : tables_->buckets.of(time_apart(time, key)));
        }
        for (int64_t c = end; c < KEYS; ++c) {
            bucket_[c] = 0, value_[c] = 0.0f;
            key_time_[c] = 0, leaves_[c] = INT64_MAX;
        }
    }

    void set(int64_t c, int bucket) {
        bucket_[c] = static_cast<int16_t>(bucket);
        leaves_[c] = tables_->buckets.leaves(bucket, key_time_[c]);
        value_[c] = tables_->time[bucket];
    }

    void change(int64_t c, int bucket, bool note) {
        if (note) changes_[num_changes_++] = {static_cast<uint16_t>(c), bucket_[c]};
        set(c, bucket);
    }

    // Columns that change are rare and scattered: they are found 64 at a time without a branch,
    // then visited bit by bit.
    void step_sorted(int64_t time, const PanelRange& range, bool note) {
        for (int64_t begin = range.first; begin < range.last; begin += 64) {
            const int64_t columns = std::min<int64_t>(64, range.last - begin);
            uint64_t due = 0;
            for (int64_t c = 0; c < columns; c += 8) due |= static_cast<uint64_t>(due_columns(leaves_ + begin + c, time)) << c;
            for (; due; due &= due - 1) {
                const int64_t i = begin + __builtin_ctzll(due);
                change(i, tables_->buckets.of(static_cast<uint64_t>(time) - static_cast<uint64_t>(key_time_[i])), note);
            }
        }
    }

    // Which of eight columns change their bucket by `time`, as bits.
    static unsigned due_columns(const int64_t* leaves, int64_t time) {
#if defined(__AVX2__)
        const __m256i now = _mm256_set1_epi64x(time);
        const __m256i a = _mm256_cmpgt_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(leaves)), now);
        const __m256i b = _mm256_cmpgt_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(leaves + 4)), now);
        return 0xFFu ^ (_mm256_movemask_pd(_mm256_castsi256_pd(a)) | _mm256_movemask_pd(_mm256_castsi256_pd(b)) << 4);
#else
        unsigned due = 0;
        for (int i = 0; i < 8; ++i) due |= static_cast<unsigned>(time >= leaves[i]) << i;
        return due;
#endif
    }

    void step_any(int64_t r, int64_t time, const PanelRange& range, bool note) {
        const int64_t end = std::min(range.end, block_->high[r] - tile_);
        for (int64_t c = std::max<int64_t>(0, block_->low[r] - tile_); c < end; ++c) {
            const int bucket = tables_->buckets.of(time_apart(time, key_time_[c]));
            if (bucket != bucket_[c]) change(c, bucket, note);
        }
    }

    // The position bias along row r, or null.
    const float* position_row(int64_t r, bool wanted) const {
        return wanted && tables_->position.present() ? tables_->position.at(block_->position[r]) + tile_ : nullptr;
    }

    template <bool NOTE>
    void write_decay(int64_t r, const PanelRange& range, bool with_position) {
        alignas(64) float apart[KEYS];
        gaps_.row(r, range, apart);
        const float* along = position_row(r, with_position);
        int64_t c = range.first;
        for (; c + W2 <= range.last; c += W2) decay_columns<2, NOTE>(apart + c, along ? along + c : nullptr, r * LD + c);
        if (c < range.last) decay_columns<1, NOTE>(apart + c, along ? along + c : nullptr, r * LD + c);
    }

    // N vectors of the time bias, and with NOTE of its slopes.
    template <int N, bool NOTE>
    inline __attribute__((always_inline)) void decay_columns(const float* from, const float* along, int64_t at) {
        const float amplitude = tables_->decay.amplitude();
        vf apart[N], decay[N], power[N], log[N];
        SLIPSTREAM_EACH apart[i] = load(from + i * W);
        tables_->decay.parts(apart, decay, power, log);
        if (along)
            SLIPSTREAM_EACH store(values + at + i * W, decay[i] * amplitude + load(along + i * W));
        else
            SLIPSTREAM_EACH store(values + at + i * W, decay[i] * amplitude);
        if (!NOTE) return;
        SLIPSTREAM_EACH power[i] *= decay[i];
        SLIPSTREAM_EACH store(slopes_[0] + at + i * W, decay[i]);
        SLIPSTREAM_EACH store(slopes_[1] + at + i * W, power[i]);
        SLIPSTREAM_EACH store(slopes_[2] + at + i * W, power[i] * log[i]);
    }

    void write_row(int64_t r, const PanelRange& range, bool with_position) {
        float* to = values + r * LD;
        const float* along = position_row(r, with_position);
        for (int64_t c = range.first; c < range.last; c += W) {
            vf v = tables_->time ? load(value_ + c) : vf{};
            if (along) v += load(along + c);
            store(to + c, v);
        }
    }

    const BiasTables* tables_;
    const RowBlock* block_;
    int64_t tile_;
    TimeGaps gaps_;
    alignas(64) float slopes_[3][ROWS * LD];
    int64_t key_time_[KEYS], leaves_[KEYS];
    int16_t bucket_[KEYS];
    float value_[KEYS];
    size_t row_begin_[ROWS + 1];
    size_t num_changes_;
    Change changes_[ROWS * KEYS];
};

}  // namespace slipstream
