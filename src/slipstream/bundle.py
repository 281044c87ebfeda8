"""A bundle: a trained recommender as plain files, written by training and read by serving.

Touch this when serving needs something more from training.

    bundle.json           format, recipe, sizes, labels and bins of user features, figures;
                          `version` is a digest of everything that decides an answer
    weights.safetensors   dense parameters (`model/…`), table rows (`tables/…`), item feature codes
                          (`codes/…`; with `offsets/…` where an item has several)
    items.arrow           the vocabulary: original id, title and features of every item row

Nothing in it is executable and nothing is pickled, so a bundle from elsewhere can be opened safely.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, check_output, read_json

FORMAT = 2  # 1: without rules of answering, without features that have several values
READABLE = (1, 2)
DESCRIPTION, WEIGHTS, ITEMS = "bundle.json", "weights.safetensors", "items.arrow"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle."""

    directory: Path
    description: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def items_path(self) -> Path:
        return self.directory / ITEMS

    @property
    def version(self) -> str:
        return str(self.description["version"])

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe it was trained with."""
        recipe: dict[str, Any] = self.description["recipe"]
        return recipe

    @property
    def repeat(self) -> str:
        """Whether an item the user has seen may be recommended: "exclude" or "allow"."""
        return str(self.recipe.get("repeat", "exclude"))

    @property
    def window(self) -> str:
        """Which part of a long history the model sees: "latest" or "stepped"."""
        return str(self.recipe.get("window", "stepped"))

    @property
    def max_len(self) -> int:
        """How many behaviours of a history the model sees: as many as in training."""
        longest = int(self.recipe["model"]["max_len"])
        if "window" not in self.recipe:  # an older bundle
            return longest
        return min(longest, int(self.recipe.get("sampler", {}).get("max_len", longest)))

    @property
    def timed(self) -> bool:
        """Whether the log it was trained on had times; without, every time is 0."""
        return bool(self.description["sizes"].get("timed", True))

    def part(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors below `prefix/`, without it."""
        return {
            name.removeprefix(f"{prefix}/"): value
            for name, value in self.tensors.items()
            if name.startswith(f"{prefix}/")
        }


def content_version(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Compute the digest of all that decides a score; equal versions give equal scores."""
    digest = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        value = tensors[name].detach().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def write_bundle(
    directory: str | Path,
    recipe: dict[str, Any],
    sizes: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    items: Path,
    *,
    user_labels: dict[str, list[str]] | None = None,
    number_edges: dict[str, list[float]] | None = None,
    force: bool = False,
    inputs: Iterable[str | os.PathLike[str]] = (),
    **figures: Any,
) -> str:
    """Write a bundle, whole or not at all, and return its version.

    `user_labels` are the texts of a user feature's codes, `number_edges` lie between the bins of a
    table's numbers. `figures` (metrics, step) are recorded but do not change the version. An older
    bundle in `directory` is replaced with `force`; nothing else is ever replaced, least of all
    one of the `inputs`.
    """
    check_output(directory, "bundle", force=force, inputs=inputs)
    features = {"user_labels": user_labels or {}, "number_edges": number_edges or {}}
    deciding = {
        "format": FORMAT,
        "recipe": _deciding_keys(recipe),
        "sizes": sizes,
        **features,
    }
    version = content_version(deciding, tensors)
    with atomic_directory(directory) as temporary:
        save_file(
            {name: value.detach().contiguous() for name, value in tensors.items()},
            temporary / WEIGHTS,
        )
        shutil.copyfile(items, temporary / ITEMS)
        description = {
            "format": FORMAT,
            "version": version,
            "sizes": sizes,
            **figures,
            "recipe": recipe,
            **features,
        }
        (temporary / DESCRIPTION).write_text(
            json.dumps(description, indent=2) + "\n", encoding="utf-8"
        )
        # safetensors makes its file for its owner alone; the others follow the umask
        os.chmod(temporary / WEIGHTS, (temporary / DESCRIPTION).stat().st_mode)
    return version


def _deciding_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a recipe that decides an answer."""
    names = ("task", "tasks", "model", "loss", "repeat", "window")
    kept = {name: recipe[name] for name in names if name in recipe}
    if "max_len" in recipe.get("sampler", {}):
        kept["sampler"] = {"max_len": recipe["sampler"]["max_len"]}
    return kept


def read_bundle(directory: str | Path) -> Bundle:
    """Open a bundle; anything else is a SlipstreamError."""
    directory = Path(directory)
    if not (directory / DESCRIPTION).is_file():
        raise SlipstreamError(
            f"{directory} is not a bundle (no {DESCRIPTION}); make one with `slipstream export "
            f"RUN --out {directory}`"
        )
    description = read_json(directory / DESCRIPTION)
    if not isinstance(description, dict) or description.get("format") not in READABLE:
        raise SlipstreamError(
            f"{directory} is not a bundle of format {' or '.join(map(str, READABLE))}; export it "
            "again"
        )
    try:
        return Bundle(directory, description, load_file(directory / WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(
            f"the weights of bundle {directory} cannot be read ({error}); export it again"
        ) from error
