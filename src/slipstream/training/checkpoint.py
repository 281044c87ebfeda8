"""Checkpoints: whole or absent, no pickle, and enough in them to go on as if nothing had happened.

`checkpoints/step-00000120/` holds `tensors.safetensors` (dense weights, optimiser state, tables' rows with their state, torch's
random state) and `state.json` (step, sampler position, early stopping, digests). A directory appears under its name only when it is
complete, so the newest one is always good. `checkpoints/best-…` is the same thing for the best evaluation so far.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, read_json
from slipstream.training.config import network_digest
from slipstream.training.optimizers import load_optimizer_tensors, optimizer_tensors
from slipstream.training.recommender import Recommender

FORMAT = 1
TENSORS, STATE = "tensors.safetensors", "state.json"
LAST, BEST = "step", "best"


def checkpoint_path(directory: Path, step: int, kind: str = LAST) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"{kind}-{step:08d}"


def list_checkpoints(directory: Path, kind: str = LAST) -> list[Path]:
    """Complete checkpoints, oldest first."""
    pattern = re.compile(rf"{kind}-(\d+)")
    found = [(int(match[1]), path) for path in directory.glob(f"{kind}-*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(directory: Path, kind: str = LAST) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    found = list_checkpoints(directory, kind)
    return found[-1] if found else None


def save_checkpoint(
    directory: Path,
    step: int,
    recommender: Recommender,
    optimizer: torch.optim.AdamW | None,
    state: dict[str, Any],
    *,
    kind: str = LAST,
    keep: int = 1,
) -> Path:
    """Write the checkpoint of `step`, then let all but the newest `keep` of its kind go. A failure leaves the old ones alone."""
    tensors = {f"model/{name}": value for name, value in recommender.model.state_dict().items()}
    tensors |= {f"tables/{name}": value for name, value in recommender.tables.state_dict().items()}
    if optimizer is not None:
        tensors |= {f"optimizer/{name}": value for name, value in optimizer_tensors(optimizer, recommender.model).items()}
        tensors["random/torch"] = torch.get_rng_state()
    scalars = {"format": FORMAT, "step": step, "network": network_digest(recommender.recipe), **state}
    target = checkpoint_path(directory, step, kind)
    with atomic_directory(target) as temporary:
        write_tensors(temporary / TENSORS, tensors)
        # Plain text: the temporary directory itself becomes whole or vanishes.
        (temporary / STATE).write_text(json.dumps(scalars, indent=2) + "\n", encoding="utf-8")
    for old in list_checkpoints(directory, kind)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """safetensors, with its input/output failures raised as what they are."""
    try:
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(None, str(error)) from error


def read_tensors(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with one of `prefixes`."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{path} is not a readable checkpoint: {error}") from error


def read_state(path: Path) -> dict[str, Any]:
    """The scalars of a checkpoint."""
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise SlipstreamError(f"{path} is not a checkpoint of format {FORMAT}")
    return state


def load_weights(path: Path, recommender: Recommender) -> dict[str, Any]:
    """Weights and rows (with their state) into `recommender`; returns the scalars. A checkpoint of another model is refused."""
    state = read_state(path)
    if state["network"] != network_digest(recommender.recipe):
        raise SlipstreamError(f"{path} was written by another model than this recipe describes; use the recipe it was trained with")
    tensors = read_tensors(path / TENSORS, ("model/", "tables/"))
    try:
        recommender.model.load_state_dict(_part(tensors, "model/"))
    except RuntimeError as error:
        raise SlipstreamError(f"{path} does not fit this model: {str(error).splitlines()[-1].strip()}") from error
    recommender.tables.load_state_dict(_part(tensors, "tables/"))
    return state


def load_checkpoint(path: Path, recommender: Recommender, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """Everything back as it was after that step: weights, rows, optimiser, random state; returns the scalars."""
    state = load_weights(path, recommender)
    tensors = read_tensors(path / TENSORS, ("optimizer/", "random/"))
    load_optimizer_tensors(optimizer, recommender.model, _part(tensors, "optimizer/"))
    torch.set_rng_state(tensors["random/torch"])
    return state


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
