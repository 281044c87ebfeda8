"""The dense optimiser is torch's AdamW, bit for bit, and training starts without the compiler."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.training.optimizers import make_adamw, step_dense
from slipstream.training.recipe_sections import OptimizerConfig
from tests.support.ranks_fixtures import environment

START = """
import sys, torch
from pathlib import Path
from slipstream.data.store import SequenceStore
from tests.system.test_ranks import Session, recipe_of
from tests.support.training_fixtures import small_store
small_store(Path(sys.argv[1]))
for dtype in (torch.float32, torch.float64):
    Session(SequenceStore.open(Path(sys.argv[1])), recipe_of("retrieval adam"), dtype).train(2)
import slipstream.training.run
loaded = {"torch._dynamo", "sympy", "torch.distributed.checkpoint"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_steps_have_the_bits_of_torch_adamw(clip_norm):
    config = OptimizerConfig(lr=3e-3, weight_decay=0.1, clip_norm=clip_norm)
    torch.manual_seed(1)
    models = [torch.nn.Linear(17, 5)]
    models.append(torch.nn.Linear(17, 5))
    models[1].load_state_dict(models[0].state_dict())
    ours = make_adamw(models[0], config)
    plain = torch.optim.AdamW(
        models[1].parameters(),
        lr=3e-3,
        betas=config.betas,
        eps=config.eps,
        weight_decay=0.1,
        fused=True,
    )
    for step in range(20):
        x_BD, lr = torch.randn(8, 17), 3e-3 / (1 + step)
        for model in models:
            model(x_BD).square().sum().backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), clip_norm)
        plain.param_groups[0]["lr"] = lr
        plain.step()
        plain.zero_grad()
        step_dense(ours, models[0], lr, clip_norm)
        assert all(
            torch.equal(a, b)
            for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
        )
        assert all(parameter.grad is None for parameter in models[0].parameters())


@pytest.mark.system
def test_training_starts_without_the_compiler(tmp_path: Path):
    command = [sys.executable, "-c", START, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
