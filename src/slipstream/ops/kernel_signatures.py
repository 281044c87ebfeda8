"""The C functions of native/kernels.h as Python calls them: results, arguments and their names.

Change this together with native/kernels.h; tests/ops/test_kernel_signatures.py compares the two.
"""

import re
from dataclasses import dataclass

# As in the header, without `const`, `_t` and namespaces.
DECLARATIONS = """
# native/attention_*.cpp
int32 ss_attention_forward(AttentionCall* call);
int32 ss_attention_backward(AttentionCall* call);

# native/layer_pass.cpp
int32 ss_layer_pass(LayerPass* pass);

# native/pointwise.cpp
void ss_bias_silu(float* z, float* bias, float* out, int64 tokens, int64 width, int threads);
void ss_silu_backward(float* z, float* grad, float* dz, int64 count, int threads);
void ss_dropout(
    float* x, int64* token_ids, int64 seed, float p, float scale, float* out, int64 tokens,
    int64 width, float* masks, int threads);
void ss_norm_gate_forward(
    float* x, float* gate, float* weight, int64* token_ids, int64 seed, float p, float scale,
    int centred, float eps, float* out, float* moments, int64 tokens, int64 width, float* masks,
    int threads);
void ss_norm_gate_backward(
    float* x, float* gate, float* weight, int64* token_ids, int64 seed, float p, float scale,
    int centred, float* moments, float* grad, float* d_x, float* d_gate, float* d_weights,
    int64 tokens, int64 width, float* scratch, int threads);

# native/linear.cpp
int32 ss_linear_forward(
    float* x, float* weight, float* bias, int64* widths, int64 parts, int64 tokens, int64 depth,
    int silu, float* z, int64* out, int threads);
int32 ss_linear_backward(
    float* x, float* weight, int64* widths, int64 parts, int64 tokens, int64 depth, int silu,
    float* z, int64* grad, float* d_x, float* d_weight, float* d_bias, int threads);

# native/losses_*.cpp
void ss_sampled_softmax(
    float* hidden, float* rows, int64* targets, int64* negatives, int64 num_tokens,
    int64 negatives_per_token, int64 width, int64 num_rows, float inverse_temperature,
    float* target_log_q, float* negative_log_q, int want_gradients, float* loss, float* weights,
    float* target_weights, float* unit_gradient, int threads);
void ss_softmax_tile_forward(
    float* logits, int64 tokens, int64 columns, float scale, int32* targets, int32* column_ids,
    float* log_q, float* own_logits, float* loss, float* sums, int threads);
void ss_softmax_tile_backward(
    float* logits, int64 tokens, int64 columns, float scale, int32* targets, int32* column_ids,
    float* log_q, float* sums, float* grad, float* own_grad, int threads);
int32 ss_full_softmax(
    float* hidden, float* rows, int32* targets, int64 tokens, int64 num_rows, int64 width,
    float scale, float* loss, float* grad_hidden, float* grad_rows, int threads);
void ss_grouped_softmax(
    float* hidden, float* targets, int64* same, float* rows, int64* negatives, int64 width,
    int64 num_rows, int64* offsets, int64* sets, int64 groups, int64 per_set,
    float inverse_temperature, float* target_log_q, float* negative_log_q, int want_gradients,
    int block, int64* places, float* loss, float* weights, float* target_weights, float* unit,
    int threads);
void ss_grouped_copies(
    float* out, int64 num_rows, int64 width, float* source, int64* offsets, int64* sets,
    int64 groups, int64 per_set, int64* index, int64* places, float* weights, int block,
    float* copies, int64 stride, int threads);
void ss_bucket_entries(
    int64* keys, int64 count, int64 below, int64 buckets, int32* order, int64* starts,
    int64* counts, int threads);
void ss_grouped_scatter(
    float* out, int64 width, float* source, int64* offsets, int64* sets, int64 per_set,
    int32* group_of_set, int64* places, float* weights, int block, int32* order, int64* starts,
    int64 first, int64 last, int64* rows, int by_position, int threads);

# native/rows_*.cpp, row_gather.cpp
int64 ss_unique_narrow(
    int64* keys, int64 count, int64 low, int64 range, uint8* marks, int64* ranks, int64* unique,
    int64* inverse, int threads);
int64 ss_unique_wide(
    int64* keys, int64 count, int64* scratch_keys, int32* scratch_places, int64* unique,
    int64* inverse, int threads);
void ss_scatter_copies(
    float* out, int64 num_rows, int64 width, float* source, int64 num_tokens, int64 per_token,
    int64* index, float* weights, float* copies, int64 stride, int threads);
void ss_scatter_buckets(
    float* out, int64 num_rows, int64 width, float* source, int64 num_tokens, int64 per_token,
    int64* index, float* weights, int shift, void* entries, int64* starts, int threads);
void ss_rowwise_adagrad(
    float* weights, float* state, int64* rows, float* grads, int64 count, int64 width, float lr,
    float eps, int threads);
void ss_rowwise_adam(
    float* weights, float* first, float* second, int64* steps, int64* rows, float* grads,
    int64 count, int64 width, float lr, double beta1, double beta2, float eps, int threads);
int64 ss_gather_rows(
    char* table, int64 num_rows, uint8* present, int64* rows, int64 count, int64 row_bytes,
    char* out, int threads);

# native/counter_random.cpp, item_draws.cpp
void ss_random_uniform(
    int64 seed, int64* rows, int64 num_rows, int64 columns, float* out, int threads);
void ss_draw_items(
    int64 seed, int64* rows, int64 num_rows, int64 columns, int64 below, int64* threshold,
    int64* alias, int64* out, int threads);

# native/sample_clustering.cpp
void ss_assign_samples(
    int64* places, int64* offsets, int64 samples, int64 keys, int64 parts, int64* low, int64* high,
    int64 budget, int64* part_of, int threads);

# native/hash_index.cpp, disk_records.cpp
void ss_hash_find(
    HashPair* pairs, int64 mask, int64* keys, int64 count, int64* values, int threads);
int64 ss_hash_insert(
    HashPair* pairs, int64 mask, int64* keys, int64* values, int64 count, int threads);
int64 ss_hash_erase(HashPair* pairs, int64 mask, int64* keys, int64 count, int threads);
void ss_hash_refill(HashPair* old, int64 old_size, HashPair* pairs, int64 mask, int threads);
int64 ss_transfer_records(
    int32* files, int64* offsets, int64 count, int64 bytes, char* memory, int64 writes, int64 team,
    int threads);

# native/topk.cpp
void ss_quantize_rows(
    float* rows, int64 count, int64 width, int64 stride, int8* codes, float* scales, float* errors,
    float* norms, int threads);
int64 ss_search_codes(
    int16* query, float query_scale, float query_norm, float query_error, int8* codes,
    float* scales, float* errors, float* norms, float* block_norms, int64 begin, int64 end,
    int64 stride, int64 k, float threshold, int64* excluded, int64 num_excluded, uint8* allowed,
    float* boosts, float most_boost, int64* out, float* out_lowest, float* out_highest, int64 room,
    int threads);

# native/allocator.cpp
int32 ss_keep_freed_memory(int64 trim_above);
"""


@dataclass(frozen=True)
class Signature:
    """One C function: the kind of its result, and (kind, name) of each argument."""

    result: str
    arguments: tuple[tuple[str, str], ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each argument."""
        return tuple(kind for kind, _ in self.arguments)


def parse_declarations(text: str) -> dict[str, Signature]:
    """Read C declarations, one `result name(kind name, ...);` after the other."""
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    found = {}
    for result, name, arguments in re.findall(r"(\w+)\s+(\w+)\s*\(([^)]*)\)\s*;", text):
        pairs = [argument.split() for argument in arguments.split(",")]
        found[name] = Signature(result, tuple((kind, argument) for kind, argument in pairs))
    return found


SIGNATURES = parse_declarations(DECLARATIONS)
