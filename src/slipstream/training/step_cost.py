"""What a step of a recipe costs in FLOPs, before it is computed: for MFU, balance and schedules.

Touch this when a recipe makes a step dearer in another way; the model's own FLOPs are in
`models/flops.py`.
"""

from slipstream.data.balance import Cost
from slipstream.models.flops import StepOptions, training_flops
from slipstream.training.recipe import Recipe


def flop_options(recipe: Recipe, num_items: int) -> StepOptions:
    """Return what the FLOPs of a recipe's step depend on besides the model and the lengths."""
    everything = recipe.loss.kind == "full_softmax"
    return StepOptions(
        task=recipe.task,
        negatives=num_items - 1 if everything else recipe.loss.negatives,
        num_tasks=len(recipe.tasks),
        user_tokens=len(recipe.user_features),
    )


def predicted_cost(recipe: Recipe, num_items: int) -> Cost:
    """Return the training FLOPs of a window as a function of its length n: a + b n + c n^2.

    The model's FLOPs are such a polynomial, so three lengths give it exactly.
    """
    options = flop_options(recipe, num_items)
    none, one, two = (training_flops(recipe.model, [length], **options) for length in (0, 1, 2))
    quadratic = (two - 2 * one + none) / 2
    return Cost(one - none - quadratic, quadratic, float(none))
