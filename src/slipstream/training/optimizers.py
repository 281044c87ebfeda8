"""The dense optimiser and the learning-rate schedule.

The schedule is a pure function of the step, so there is nothing of it to save. AdamW runs torch's
fused CPU kernel; its state is saved by parameter name and restored exactly.
"""

import math
from typing import Any

import torch
from torch import nn

from slipstream.ops.uncompiled import uncompiled
from slipstream.training.recipe_sections import OptimizerConfig


def schedule_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """What the learning rates are multiplied by at step 0, 1, 2 … of `total_steps`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.final_fraction + (1.0 - config.final_fraction) * 0.5 * (
        1.0 + math.cos(math.pi * min(1.0, done))
    )


class _AdamW(torch.optim.AdamW):
    """torch's own, without what loads torch.compile."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        uncompiled(torch.optim.AdamW.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        uncompiled(torch.optim.AdamW.zero_grad)(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        uncompiled(torch.optim.AdamW.step)(self, closure)


def make_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the dense parameters."""
    return _AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def step_dense(
    optimizer: torch.optim.AdamW, model: nn.Module, lr: float, clip_norm: float | None
) -> None:
    """Clip the dense gradients (when asked), step, and forget the gradients."""
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_tensors(optimizer: torch.optim.AdamW, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return AdamW's state, flat: `parameter name/exp_avg` and so on; none before a first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.AdamW, model: nn.Module, saved: dict[str, torch.Tensor]
) -> None:
    """Put saved state back, exactly."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        state = {
            key.rpartition("/")[2]: value.to(parameter.device, copy=True)
            for key, value in saved.items()
            if key.rpartition("/")[0] == name
        }
        if state:
            optimizer.state[parameter] = state
