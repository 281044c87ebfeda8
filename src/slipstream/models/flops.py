"""How many floating-point operations a forward pass needs: the numerator of MFU.

A multiply-add counts two. Only what the model must compute counts: no padding, no recomputation,
and no norms, activations, biases or dropout. With T tokens, n the tokens of each sequence,
width D, H heads, feed-forward width F, per layer:

    HSTU     2 T D (2 H dqk + 2 H dv)  +  sum n(n+1) H (dqk + dv)      +  2 T H dv D
    FuXi     2 T D (2 H dqk + 4 H dv)  +  sum n(n+1) H (dqk + C dv)    +  2 T 3 H dv D  +  6 T D F
    SASRec   2 T D (2 H dqk +   H dv)  +  sum n(n+1) H (dqk + dv)      +  2 T H dv D    +  4 T D F

C is FuXi's number of maps: the semantic one, and the time and position maps where the recipe has
them. The retrieval loss adds 2 T (1 + R) D for R negatives a token; ranking's task networks add
2 T A (D M + M) for A tasks of inner width M at the items. Training is three times a forward pass.
Touch this when a layer gets another product.
"""

from collections.abc import Iterable
from typing import TypedDict, Unpack

from slipstream.models.model_config import ModelConfig, Task

TRAINING_FACTOR = 3


class StepOptions(TypedDict, total=False):
    """What the FLOPs of a step depend on besides the model and the lengths."""

    task: Task  # retrieval unless given
    negatives: int
    num_tasks: int
    user_tokens: int


def forward_flops(
    config: ModelConfig, lengths: Iterable[int], **options: Unpack[StepOptions]
) -> int:
    """FLOPs of one forward pass with its loss, for sequences of so many behaviours each."""
    task, num_tasks = options.get("task", "retrieval"), options.get("num_tasks", 0)
    negatives, user_tokens = options.get("negatives", 0), options.get("user_tokens", 0)
    behaviours = [int(length) for length in lengths]
    per_behaviour = 2 if task == "ranking" else 1
    stream = [user_tokens + per_behaviour * length for length in behaviours]
    if task == "ranking":
        head = 2 * sum(behaviours) * num_tasks * (config.dim * config.head_dim + config.head_dim)
    else:
        head = 2 * sum(behaviours) * (1 + negatives) * config.dim
    return backbone_flops(config, stream) + head


def training_flops(
    config: ModelConfig, lengths: Iterable[int], **options: Unpack[StepOptions]
) -> int:
    """FLOPs of forward and backward."""
    return TRAINING_FACTOR * forward_flops(config, lengths, **options)


def backbone_flops(config: ModelConfig, stream_lengths: Iterable[int]) -> int:
    """FLOPs of all layers for token streams of these lengths."""
    lengths = [int(length) for length in stream_lengths]
    tokens, causal = sum(lengths), sum(n * (n + 1) for n in lengths)
    dim, heads, dqk, dv = config.dim, config.heads, config.dqk, config.dv
    inner = max(1, round(dim * config.ffn_multiplier))
    if config.kind == "hstu":
        projections, maps, outputs, feed_forward = 2 * dqk + 2 * dv, 1, 1, 0
    elif config.kind == "fuxi":
        maps = 1 + (config.time_bias != "none") + config.position_bias
        projections, outputs, feed_forward = 2 * dqk + 4 * dv, 3, 6 * dim * inner
    else:
        projections, maps, outputs, feed_forward = 2 * dqk + dv, 1, 1, 4 * dim * inner
    per_token = 2 * dim * heads * projections + 2 * outputs * heads * dv * dim + feed_forward
    return config.blocks * (tokens * per_token + causal * heads * (dqk + maps * dv))
