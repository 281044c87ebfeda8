"""An emulated device: a step's compute waits as long as it would take, and the core is free.

On an accelerator the lanes of a schedule do not share the processor with the compute. Here forward
and backward of a batch sleep for a time per token, and leave gradients of the right shapes. The
losses mean nothing. Touch this when the device should take another time.
"""

import time
from typing import Any

import torch

from slipstream.training.features import ITEM
from slipstream.training.recommender import Recommender
from slipstream.training.step import StepInputs

FORWARD = 1 / 3  # of a training step's compute
GRADIENT = 1e-3


class _TimedCompute(torch.autograd.Function):
    """A loss that takes its time, forward and backward, without the processor."""

    @staticmethod
    def forward(ctx: Any, seconds: float, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.seconds, ctx.leaves = seconds, leaves
        time.sleep(FORWARD * seconds)
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep((1 - FORWARD) * ctx.seconds)
        return None, *(torch.full_like(leaf, GRADIENT) for leaf in ctx.leaves)


class EmulatedRecommender(Recommender):
    """A recommender whose loss and gradients take `seconds_per_token` on a device of its own."""

    seconds_per_token = 0.0

    def loss(self, inputs: StepInputs) -> torch.Tensor:
        seconds = self.seconds_per_token * inputs.batch.num_tokens
        leaves = (inputs.lookups[ITEM].rows_UD, *self.model.parameters())
        loss: torch.Tensor = _TimedCompute.apply(seconds, *leaves)
        return loss
