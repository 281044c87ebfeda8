// One pass of whole layers without gradients: what a layer is made of, and what a pass reads and
// writes. Mirrored field by field by slipstream/ops/layer_pass.py.
#pragma once
#include <cstdint>

#include "stored_rows.h"

namespace slipstream {

enum class LayerKind : int32_t { HSTU = 0, FUXI = 1, SASREC = 2 };
enum class Activation : int32_t { RELU = 0, GELU = 1 };

struct LayerWeights {
    const float *norm, *norm_bias;              // [D]; null: a norm without them
    const float *project, *project_bias;        // [F, D]: u, v, q, k one after the other (SASRec: v, q, k)
    const float *output, *output_bias;          // [D, G]
    const float* channels_norm;                 // [G], FuXi's
    const float *inner_norm, *inner_norm_bias;  // [D], of the feed-forward part (FuXi, SASRec)
    const float *gate, *up, *up_bias;           // [I, D]; only FuXi has a gate
    const float *down, *down_bias;              // [D, I]
    const float *position, *time;
    const int64_t* borders;
    const float* decay;
    float *k, *v;                               // [rows, H, K] and [rows, H, V]; null: scratch
    void *stored_k, *stored_v;                  // where the new rows are kept in their stored form, or null
    uint16_t *stored_k_scales, *stored_v_scales;
    int64_t position_entries, time_entries;
};

struct LayerPass {
    const float* x;                             // [T, D]
    float* out;                                 // [T, D], or only the wanted tokens
    const int64_t *q_offsets, *k_offsets;       // of the tokens, and of the rows of k and v
    const int64_t *q_times, *k_times;           // [T] and [rows]; null without a time bias
    const int64_t* candidates;                  // [B] or null
    const int64_t* wanted;                      // [B]: how many last tokens the last layer computes; null: all
    const int64_t *past_tokens, *past_times;    // [B]: how many, and the address of their times; null: no past
    const int64_t* past_rows;                   // [B, model_layers, 4]: addresses of k, v, k_scales, v_scales
    const LayerWeights* layers;                 // [num_layers]
    int64_t first_layer, num_layers, model_layers;
    int64_t sequences, width, heads, key_width, value_width, inner;
    float eps, inverse_divisor, scale, time_unit;
    LayerKind kind;
    Activation activation;
    Stored stored;                              // how pasts and kept rows are stored
    int32_t keys_only;                          // the last layer leaves keys and values, and computes no output
    int32_t threads;
};

}  // namespace slipstream
