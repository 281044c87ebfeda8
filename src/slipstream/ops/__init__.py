"""Jagged operators: one Python signature each, with the back-ends reference, native and triton.

`x.py` is operator x as callers see it: it checks the operands and chooses the back-end.
`x_reference.py` is plain PyTorch, and every other back-end is tested against it. `x_native.py`
calls the kernels of `native/x*.cpp` through kernel_call.py. `x_triton.py` holds Triton kernels.
`x_types.py` holds what all back-ends of x receive. Operators whose back-ends are a few lines hold
them in `x.py`: causal_attention, counter_random, item_draws, row_gather, topk.

Touch this when an operator becomes public.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.ops.allocator import keep_freed_memory as keep_freed_memory
    from slipstream.ops.attention import RelativeBias as RelativeBias
    from slipstream.ops.attention import fuxi_attention as fuxi_attention
    from slipstream.ops.attention import hstu_attention as hstu_attention
    from slipstream.ops.attention import time_bucket_borders as time_bucket_borders
    from slipstream.ops.causal_attention import softmax_attention as softmax_attention
    from slipstream.ops.counter_random import derive_seed as derive_seed
    from slipstream.ops.counter_random import random_bits as random_bits
    from slipstream.ops.counter_random import random_integers as random_integers
    from slipstream.ops.counter_random import random_uniform as random_uniform
    from slipstream.ops.grouped_losses import GroupedSoftmaxInputs as GroupedSoftmaxInputs
    from slipstream.ops.grouped_losses import TokenGroups as TokenGroups
    from slipstream.ops.grouped_losses import grouped_softmax_loss as grouped_softmax_loss
    from slipstream.ops.grouped_losses import one_token_groups as one_token_groups
    from slipstream.ops.item_draws import draw_items as draw_items
    from slipstream.ops.losses import full_softmax_loss as full_softmax_loss
    from slipstream.ops.losses import sampled_softmax_loss as sampled_softmax_loss
    from slipstream.ops.losses import shared_softmax_loss as shared_softmax_loss
    from slipstream.ops.pointwise import dropout as dropout
    from slipstream.ops.pointwise import layer_norm as layer_norm
    from slipstream.ops.pointwise import linear_silu as linear_silu
    from slipstream.ops.pointwise import norm_gate_dropout as norm_gate_dropout
    from slipstream.ops.pointwise import rms_norm as rms_norm
    from slipstream.ops.row_gather import gather_present as gather_present
    from slipstream.ops.row_gather import gather_rows as gather_rows
    from slipstream.ops.rows import coalesce as coalesce
    from slipstream.ops.rows import rowwise_adagrad_ as rowwise_adagrad_
    from slipstream.ops.rows import rowwise_adam_ as rowwise_adam_
    from slipstream.ops.rows import take_rows as take_rows
    from slipstream.ops.rows import unique_keys as unique_keys
    from slipstream.ops.sample_clustering import assign_samples as assign_samples
    from slipstream.ops.tiled_search import count_rivals as count_rivals
    from slipstream.ops.tiled_search import top_k_of_tiles as top_k_of_tiles
    from slipstream.ops.topk import QuantizedRows as QuantizedRows
    from slipstream.ops.topk import quantize_rows as quantize_rows
    from slipstream.ops.topk import top_k as top_k

__all__ = [
    "GroupedSoftmaxInputs",
    "QuantizedRows",
    "RelativeBias",
    "TokenGroups",
    "assign_samples",
    "coalesce",
    "count_rivals",
    "derive_seed",
    "draw_items",
    "dropout",
    "full_softmax_loss",
    "fuxi_attention",
    "gather_present",
    "gather_rows",
    "grouped_softmax_loss",
    "hstu_attention",
    "keep_freed_memory",
    "layer_norm",
    "linear_silu",
    "norm_gate_dropout",
    "one_token_groups",
    "quantize_rows",
    "random_bits",
    "random_integers",
    "random_uniform",
    "rms_norm",
    "rowwise_adagrad_",
    "rowwise_adam_",
    "sampled_softmax_loss",
    "shared_softmax_loss",
    "softmax_attention",
    "take_rows",
    "time_bucket_borders",
    "top_k",
    "top_k_of_tiles",
    "unique_keys",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "GroupedSoftmaxInputs": "grouped_losses",
        "QuantizedRows": "topk",
        "RelativeBias": "attention",
        "TokenGroups": "grouped_losses",
        "assign_samples": "sample_clustering",
        "coalesce": "rows",
        "count_rivals": "tiled_search",
        "derive_seed": "counter_random",
        "draw_items": "item_draws",
        "dropout": "pointwise",
        "full_softmax_loss": "losses",
        "fuxi_attention": "attention",
        "gather_present": "row_gather",
        "gather_rows": "row_gather",
        "grouped_softmax_loss": "grouped_losses",
        "hstu_attention": "attention",
        "keep_freed_memory": "allocator",
        "layer_norm": "pointwise",
        "linear_silu": "pointwise",
        "norm_gate_dropout": "pointwise",
        "one_token_groups": "grouped_losses",
        "quantize_rows": "topk",
        "random_bits": "counter_random",
        "random_integers": "counter_random",
        "random_uniform": "counter_random",
        "rms_norm": "pointwise",
        "rowwise_adagrad_": "rows",
        "rowwise_adam_": "rows",
        "sampled_softmax_loss": "losses",
        "shared_softmax_loss": "losses",
        "softmax_attention": "causal_attention",
        "take_rows": "rows",
        "time_bucket_borders": "attention",
        "top_k": "topk",
        "top_k_of_tiles": "tiled_search",
        "unique_keys": "rows",
    },
)
