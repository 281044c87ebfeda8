"""Every shipped recipe, made small by overrides as a user would type them, and its training."""

import json
import sys
from pathlib import Path

import torch

from slipstream.cli.app import run_command
from slipstream.config import RECIPES, load_recipe
from slipstream.data.store import SequenceStore
from slipstream.training.checkpoint import latest
from slipstream.training.recipe import Recipe
from tests.support.training_fixtures import tensors_of

SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SMALL_MODEL = ("dim=16", "blocks=1", "heads=2", "dqk=8", "dv=8", "model.max_len=24")
SMALL = (
    *SMALL_MODEL,
    "sampler.max_len=24",
    "sampler.token_budget=null",
    "sampler.batch_size=8",
    "epochs=1000",
    "evaluate_every=3 steps",
    "tensorboard=false",
    "log_every=1",
    "threads=1",
)


def shrunk(name: str, store: SequenceStore, rows: Path) -> list[str]:
    """Overrides that make a shipped recipe small, for a synthetic store; tables on disk in `rows`.

    The learning rate does not depend on the length of the run, so that runs can be lengthened. A
    large eps keeps AdamW from following rounding where a gradient is exactly zero, as that of
    SASRec's key bias is.
    """
    recipe, overrides = load_recipe(Recipe, name), [*SMALL, f"data={store.directory}"]
    overrides += ["decay=constant", "warmup_steps=2", "optimizer.eps=1.0e-4"]
    if recipe.task == "ranking":  # the synthetic log has its own actions and features
        columns = sorted(store.actions)
        overrides += [
            f"tasks.{task}.column={columns[place % len(columns)]}"
            for place, task in enumerate(recipe.tasks)
        ]
        overrides += [f"item_features=[{', '.join(store.item_features)}]"]
        overrides += [f"user_features=[{', '.join(store.user_features)}]"]
    if recipe.tables.tier == "disk":
        overrides += [f"tables.directory={rows}", "cache_bytes=65536"]
    return overrides


def trained(run: Path) -> dict[str, torch.Tensor]:
    """Everything that a run has trained, whatever ranks wrote it."""
    newest = latest(run / "checkpoints")
    assert newest is not None
    wanted = ("model/", "optimizer/", "tables/")
    found = tensors_of(newest)
    return {name: value for name, value in found.items() if name.startswith(wanted)}


def main(path: str) -> int:
    """Run the commands of a JSON file, in this process: the first exit code that is not expected.

    A case is (expected exit code, arguments).
    """
    for expected, arguments in json.loads(Path(path).read_text()):
        if (code := run_command(arguments)) != expected:
            print(f"exit code {code}: {arguments}", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
