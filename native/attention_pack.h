// Keys and values on their way into the products: keys transposed in panels, values side by side.
// They come from the rows of a call and, before those, from a past in its stored form.
#pragma once
#include "attention_plan.h"

namespace slipstream {

struct PackedKeys {
    float* room;                   // rows of a past while they are converted
    float *keys_t, *values;        // per head: transposed keys, padded values
    int64_t keys_t_step, values_step, padded;

    static int64_t floats(const Attention& call, int64_t heads, int64_t keys) {
        const int64_t n = round_up(keys, W2), padded = round_up(call.value_width, W);
        return heads * (round_up(n * call.key_width, 16) + round_up(n * padded, 16)) + room_floats(call) + 64;
    }
    PackedKeys(const Attention& call, int64_t heads, int64_t keys, Scratch& scratch) {
        const int64_t n = round_up(keys, W2);
        padded = round_up(call.value_width, W);
        keys_t_step = round_up(n * call.key_width, 16);
        values_step = round_up(n * padded, 16);
        room = scratch.take(room_floats(call));
        keys_t = scratch.take(heads * keys_t_step);
        values = scratch.take(heads * values_step);
    }

  private:
    static int64_t room_floats(const Attention& call) { return call.pasts ? W2 * (call.key_width + call.value_width) : 0; }
};

inline void pack_head(const Attention& call, const PackedKeys& to, int64_t i, int64_t row, int64_t rows, FloatRows k, FloatRows v,
                      float factor) {
    pack_transposed(k.first, k.stride, rows, call.key_width, to.keys_t + i * to.keys_t_step + row * call.key_width);
    pack_rows(v.first, v.stride, rows, call.value_width, factor, to.values + i * to.values_step + row * to.padded, to.padded);
}

// Packs W2 keys and values from `row` on, all of the past, or its last ones and rows of k and v.
inline void pack_past(const Attention& call, const Task& task, const Sequence& s, const PackedKeys& to, int64_t row, float factor) {
    const Past& past = call.pasts[task.sequence];
    const int64_t rows = std::min<int64_t>(W2, s.history - row), fresh = std::max<int64_t>(0, row + rows - s.past);
    const int64_t ahead = std::min<int64_t>(W2, s.past - row - rows);
    for (int64_t head = task.head_begin; head < task.head_end; ++head) {
        const auto rows_of = [&](const void* stored, const uint16_t* scales, const float* more, int64_t width, float* room) {
            const StoredRows from{call.stored, stored, scales, call.heads, width, head};
            from.prefetch(row + rows, ahead);
            if (call.stored == Stored::FLOAT && !fresh) return from.in_place(row);
            from.read(row, rows - fresh, room);
            StoredRows::plain(more + s.k0 * call.heads * width, call.heads, width, head).read(0, fresh, room + (rows - fresh) * width);
            return FloatRows{room, width};
        };
        const FloatRows k = rows_of(past.k, past.k_scales, call.k, call.key_width, to.room);
        const FloatRows v = rows_of(past.v, past.v_scales, call.v, call.value_width, to.room + W2 * call.key_width);
        pack_head(call, to, head - task.head_begin, row, rows, k, v, factor);
    }
}

// Packs keys and values from `row` on until at least `end`, a few of every head at a time, in
// memory order; values are multiplied with `factor`. Returns where it ended.
SLIPSTREAM_NOINLINE static int64_t pack_keys(const Attention& call, const Task& task, const Sequence& s, const PackedKeys& to, int64_t row,
                                             int64_t end, float factor) {
    const int64_t k_stride = call.heads * call.key_width, v_stride = call.heads * call.value_width;
    for (; row < std::min(end, s.past); row += W2) pack_past(call, task, s, to, row, factor);
    for (; row < end; row += W2) {
        const int64_t rows = std::min<int64_t>(W2, s.history - row), ahead = std::min<int64_t>(W2, s.history - row - rows);
        for (int64_t i = 0; i < task.head_end - task.head_begin; ++i) {
            const float* k = call.k + (s.k0 + row - s.past) * k_stride + (task.head_begin + i) * call.key_width;
            const float* v = call.v + (s.k0 + row - s.past) * v_stride + (task.head_begin + i) * call.value_width;
            prefetch_rows(k + rows * k_stride, k_stride, ahead, call.key_width);
            prefetch_rows(v + rows * v_stride, v_stride, ahead, call.value_width);
            pack_head(call, to, i, row, rows, {k, k_stride}, {v, v_stride}, factor);
        }
    }
    return row;
}

}  // namespace slipstream
