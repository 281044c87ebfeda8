"""A bundle: a trained recommender as plain files, written by training and read by serving.

Touch this when serving needs something more from training.

    bundle.json           format, recipe, sizes, figures; `version` is a digest of everything that
                          decides a score
    weights.safetensors   dense parameters (`model/…`), table rows (`tables/…`), item feature codes
                          (`codes/…`)
    items.arrow           the vocabulary: original id and title of every item row

Nothing in it is executable and nothing is pickled, so a bundle from elsewhere can be opened safely.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, read_json

FORMAT = 1
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
    **figures: Any,
) -> str:
    """Write a bundle, whole or not at all, and return its version.

    `figures` (metrics, step) are recorded but do not change the version.
    """
    deciding = {
        "format": FORMAT,
        "recipe": {k: recipe[k] for k in ("task", "tasks", "model", "loss") if k in recipe},
        "sizes": sizes,
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
        }
        (temporary / DESCRIPTION).write_text(
            json.dumps(description, indent=2) + "\n", encoding="utf-8"
        )
    return version


def read_bundle(directory: str | Path) -> Bundle:
    """Open a bundle; anything else is a SlipstreamError."""
    directory = Path(directory)
    if not (directory / DESCRIPTION).is_file():
        raise SlipstreamError(
            f"{directory} is not a bundle (no {DESCRIPTION}); make one with `slipstream export "
            f"RUN --out {directory}`"
        )
    description = read_json(directory / DESCRIPTION)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise SlipstreamError(f"{directory} is not a bundle of format {FORMAT}; export it again")
    try:
        return Bundle(directory, description, load_file(directory / WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(
            f"the weights of bundle {directory} cannot be read ({error}); export it again"
        ) from error
