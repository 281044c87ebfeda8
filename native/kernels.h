// Every function that Python calls: plain C names, no exceptions across the border.
//
// slipstream/ops/kernel_signatures.py repeats these declarations for ctypes; a test compares the
// two lists. The compiler compares them with the definitions, which repeat SLIPSTREAM_API.
#pragma once
#include <cstdint>

#define SLIPSTREAM_API extern "C" __attribute__((visibility("default")))

namespace slipstream {
struct AttentionCall;
struct HashPair;
struct LayerPass;
}  // namespace slipstream

// attention_*.cpp
SLIPSTREAM_API int32_t ss_attention_forward(const slipstream::AttentionCall* call);
SLIPSTREAM_API int32_t ss_attention_backward(const slipstream::AttentionCall* call);

// layer_pass.cpp
SLIPSTREAM_API int32_t ss_layer_pass(const slipstream::LayerPass* pass);

// pointwise.cpp
SLIPSTREAM_API void ss_bias_silu(
    float* z, const float* bias, float* out, int64_t tokens, int64_t width, int threads);
SLIPSTREAM_API void ss_silu_backward(
    const float* z, const float* grad, float* dz, int64_t count, int threads);
SLIPSTREAM_API void ss_dropout(
    const float* x, const int64_t* token_ids, int64_t seed, float p, float scale, float* out,
    int64_t tokens, int64_t width, float* masks, int threads);
SLIPSTREAM_API void ss_norm_gate_forward(
    const float* x, const float* gate, const float* weight, const int64_t* token_ids, int64_t seed,
    float p, float scale, int centred, float eps, float* out, float* moments, int64_t tokens,
    int64_t width, float* masks, int threads);
SLIPSTREAM_API void ss_norm_gate_backward(
    const float* x, const float* gate, const float* weight, const int64_t* token_ids, int64_t seed,
    float p, float scale, int centred, const float* moments, const float* grad, float* d_x,
    float* d_gate, float* d_weights, int64_t tokens, int64_t width, float* scratch, int threads);

// linear.cpp
SLIPSTREAM_API int32_t ss_linear_forward(
    const float* x, const float* weight, const float* bias, const int64_t* widths, int64_t parts,
    int64_t tokens, int64_t depth, int silu, float* z, const int64_t* out, int threads);
SLIPSTREAM_API int32_t ss_linear_backward(
    const float* x, const float* weight, const int64_t* widths, int64_t parts, int64_t tokens,
    int64_t depth, int silu, const float* z, const int64_t* grad, float* d_x, float* d_weight,
    float* d_bias, int threads);

// losses_*.cpp
SLIPSTREAM_API void ss_sampled_softmax(
    const float* hidden, const float* rows, const int64_t* targets, const int64_t* negatives,
    int64_t num_tokens, int64_t negatives_per_token, int64_t width, int64_t num_rows,
    float inverse_temperature, const float* target_log_q, const float* negative_log_q,
    int want_gradients, float* loss, float* weights, float* target_weights, float* unit_gradient,
    int threads);
SLIPSTREAM_API void ss_softmax_tile_forward(
    float* logits, int64_t tokens, int64_t columns, float scale, const int32_t* targets,
    const int32_t* column_ids, const float* log_q, const float* own_logits, float* loss,
    float* sums, int threads);
SLIPSTREAM_API void ss_softmax_tile_backward(
    float* logits, int64_t tokens, int64_t columns, float scale, const int32_t* targets,
    const int32_t* column_ids, const float* log_q, const float* sums, const float* grad,
    float* own_grad, int threads);
SLIPSTREAM_API int32_t ss_full_softmax(
    const float* hidden, const float* rows, const int32_t* targets, int64_t tokens,
    int64_t num_rows, int64_t width, float scale, float* loss, float* grad_hidden,
    float* grad_rows, int threads);
SLIPSTREAM_API void ss_grouped_softmax(
    const float* hidden, const float* targets, const int64_t* same, const float* rows,
    const int64_t* negatives, int64_t width, int64_t num_rows, const int64_t* offsets,
    const int64_t* sets, int64_t groups, int64_t per_set, float inverse_temperature,
    const float* target_log_q, const float* negative_log_q, int want_gradients, int block,
    const int64_t* places, float* loss, float* weights, float* target_weights, float* unit,
    int threads);
SLIPSTREAM_API void ss_grouped_copies(
    float* out, int64_t num_rows, int64_t width, const float* source, const int64_t* offsets,
    const int64_t* sets, int64_t groups, int64_t per_set, const int64_t* index,
    const int64_t* places, const float* weights, int block, float* copies, int64_t stride,
    int threads);
SLIPSTREAM_API void ss_bucket_entries(
    const int64_t* keys, int64_t count, int64_t below, int64_t buckets, int32_t* order,
    int64_t* starts, int64_t* counts, int threads);
SLIPSTREAM_API void ss_grouped_scatter(
    float* out, int64_t width, const float* source, const int64_t* offsets, const int64_t* sets,
    int64_t per_set, const int32_t* group_of_set, const int64_t* places, const float* weights,
    int block, const int32_t* order, const int64_t* starts, int64_t first, int64_t last,
    const int64_t* rows, int by_position, int threads);

// rows_*.cpp, row_gather.cpp
SLIPSTREAM_API int64_t ss_unique_narrow(
    const int64_t* keys, int64_t count, int64_t low, int64_t range, uint8_t* marks, int64_t* ranks,
    int64_t* unique, int64_t* inverse, int threads);
SLIPSTREAM_API int64_t ss_unique_wide(
    const int64_t* keys, int64_t count, int64_t* scratch_keys, int32_t* scratch_places,
    int64_t* unique, int64_t* inverse, int threads);
SLIPSTREAM_API void ss_scatter_copies(
    float* out, int64_t num_rows, int64_t width, const float* source, int64_t num_tokens,
    int64_t per_token, const int64_t* index, const float* weights, float* copies, int64_t stride,
    int threads);
SLIPSTREAM_API void ss_scatter_buckets(
    float* out, int64_t num_rows, int64_t width, const float* source, int64_t num_tokens,
    int64_t per_token, const int64_t* index, const float* weights, int shift, void* entries,
    int64_t* starts, int threads);
SLIPSTREAM_API void ss_rowwise_adagrad(
    float* weights, float* state, const int64_t* rows, const float* grads, int64_t count,
    int64_t width, float lr, float eps, int threads);
SLIPSTREAM_API void ss_rowwise_adam(
    float* weights, float* first, float* second, int64_t* steps, const int64_t* rows,
    const float* grads, int64_t count, int64_t width, float lr, double beta1, double beta2,
    float eps, int threads);
SLIPSTREAM_API int64_t ss_gather_rows(
    const char* table, int64_t num_rows, const uint8_t* present, const int64_t* rows,
    int64_t count, int64_t row_bytes, char* out, int threads);

// counter_random.cpp, item_draws.cpp
SLIPSTREAM_API void ss_random_uniform(
    int64_t seed, const int64_t* rows, int64_t num_rows, int64_t columns, float* out, int threads);
SLIPSTREAM_API void ss_draw_items(
    int64_t seed, const int64_t* rows, int64_t num_rows, int64_t columns, int64_t below,
    const int64_t* threshold, const int64_t* alias, int64_t* out, int threads);

// sample_clustering.cpp
SLIPSTREAM_API void ss_assign_samples(
    const int64_t* places, const int64_t* offsets, int64_t samples, int64_t keys, int64_t parts,
    const int64_t* low, const int64_t* high, int64_t budget, int64_t* part_of, int threads);

// hash_index.cpp, disk_records.cpp
SLIPSTREAM_API void ss_hash_find(
    const slipstream::HashPair* pairs, int64_t mask, const int64_t* keys, int64_t count,
    int64_t* values, int threads);
SLIPSTREAM_API int64_t ss_hash_insert(
    slipstream::HashPair* pairs, int64_t mask, const int64_t* keys, const int64_t* values,
    int64_t count, int threads);
SLIPSTREAM_API int64_t ss_hash_erase(
    slipstream::HashPair* pairs, int64_t mask, const int64_t* keys, int64_t count, int threads);
SLIPSTREAM_API void ss_hash_refill(
    const slipstream::HashPair* old, int64_t old_size, slipstream::HashPair* pairs, int64_t mask,
    int threads);
SLIPSTREAM_API int64_t ss_transfer_records(
    const int32_t* files, const int64_t* offsets, int64_t count, int64_t bytes, char* memory,
    int64_t writes, int64_t team, int threads);

// topk.cpp
SLIPSTREAM_API void ss_quantize_rows(
    const float* rows, int64_t count, int64_t width, int64_t stride, int8_t* codes, float* scales,
    float* errors, float* norms, int threads);
SLIPSTREAM_API int64_t ss_search_codes(
    const int16_t* query, float query_scale, float query_norm, float query_error,
    const int8_t* codes, const float* scales, const float* errors, const float* norms,
    const float* block_norms, int64_t begin, int64_t end, int64_t stride, int64_t k,
    float threshold, const int64_t* excluded, int64_t num_excluded, const uint8_t* allowed,
    const float* boosts, float most_boost, int64_t* out, float* out_lowest, float* out_highest,
    int64_t room, int threads);

// allocator.cpp
SLIPSTREAM_API int32_t ss_keep_freed_memory(int64_t trim_above);
