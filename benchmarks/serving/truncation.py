"""What cutting histories costs in quality: the AUC of two ranking models, long and short.

They are trained and measured by commands, over MovieLens latest-small. Touch this when W4 is
judged by other data.
"""

import contextlib
import json
import os
from pathlib import Path

from benchmarks.serving.users import run_slipstream

RECIPE = """name: truncation
task: ranking
tasks:
  liked: {column: rating, threshold: 4}
seed: 1
model: {kind: hstu, dim: 64, blocks: 2, heads: 2, dropout: 0.1, input_dropout: 0.1, time_bias: own}
sampler: {batch_size: 8}
split: {validation: 10, test: 10}
loss: {kind: bce}
optimizer: {lr: 1.0e-3, clip_norm: 1.0, warmup_steps: 50}
tables: {optimizer: rowwise_adagrad, lr: 2.0e-2}
"""
LONGEST = 2_698  # ratings of one user; windows cover all of them whatever their length


def find_ratings() -> Path | None:
    """Return the folder of MovieLens latest-small in `$SLIPSTREAM_DATA`, None where it is not."""
    folders = os.environ.get("SLIPSTREAM_DATA", "data").split(os.pathsep)
    found = (Path(folder) / "ml-latest-small" for folder in folders)
    return next((path for path in found if (path / "ratings.csv.gz").is_file()), None)


def measure_auc(
    work: Path, source: Path, lengths: tuple[int, ...], epochs: int
) -> dict[str, float]:
    """Train a model of each length and return its AUC on the test split."""
    work.mkdir(parents=True, exist_ok=True)
    data, recipe = work / "data", work / "truncation.yaml"
    recipe.write_text(RECIPE)
    words = ("data", "prepare", "ml-latest-small", "--source", str(source))
    run_slipstream(*words, "--out", str(data), "--force")
    found = {}
    for length in lengths:
        run = work / f"run-{length}"
        windows = -(-LONGEST // length)
        keys = {
            "data": data,
            "model.max_len": length,
            "sampler.max_len": length,
            "sampler.windows": windows,
            "train.epochs": epochs,
        }
        given = [f"{key}={value}" for key, value in keys.items()]
        run_slipstream("train", str(recipe), *given, "--out", str(run))
        told = json.loads(run_slipstream("evaluate", str(run), "--json"))
        found[str(length)] = find_figure(told, "AUC/liked")
    return found


def find_figure(told: object, name: str) -> float:
    """Return a figure of an evaluation by its name, wherever it stands."""
    if isinstance(told, dict):
        if name in told:
            return float(told[name])
        for value in told.values():
            with contextlib.suppress(LookupError):
                return find_figure(value, name)
    raise LookupError(f"the evaluation has no figure '{name}'")
