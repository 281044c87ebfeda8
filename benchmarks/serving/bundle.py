"""A bundle of random weights and a stated size, for measurements and tests of serving.

Speed and exactness do not depend on what a model has learnt. Touch this when a bundle holds more.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from slipstream.bundle import write_bundle
from slipstream.models.build import build_model
from slipstream.models.model_config import ModelConfig

_EMBEDDING_STD = 0.1


def random_bundle(
    directory: str | Path,
    model: dict[str, Any],
    *,
    task: Literal["retrieval", "ranking"] = "ranking",
    tasks: Sequence[str] = ("click", "like"),
    num_items: int = 5_000,
    item_features: dict[str, int] | None = None,
    user_features: dict[str, int] | None = None,
    first_id: int = 1 << 40,
    ids: Sequence[int] | Sequence[str] | None = None,
    about_items: Mapping[str, Any] | None = None,
    rules: Mapping[str, Any] | None = None,
    popular: Mapping[int, Sequence[int]] | None = None,
    timed: bool = True,
    seed: int = 0,
    noise: float = 0.0,
) -> str:
    """Write the bundle and return its version.

    Item ids start at `first_id`, or are `ids`; `about_items` are further columns of the vocabulary,
    `rules` further keys of the recipe, `popular` the most popular rows by window of days; `noise`
    is added to all weights, so that each matters.
    """
    config = ModelConfig.model_validate(model)
    item_features, user_features = item_features or {}, user_features or {}
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = build_model(
            config,
            task,
            tasks if task == "ranking" else (),
            tuple(user_features),
            tuple(item_features),
        )
    tensors = {}
    for name, value in net.state_dict().items():
        noisy = value + noise * torch.randn(value.shape, generator=generator) if noise else value
        tensors[f"model/{name}"] = noisy
    sizes = {"item": num_items}
    sizes |= {f"item.{name}": size for name, size in item_features.items()}
    sizes |= {f"user.{name}": size for name, size in user_features.items()}
    for name, rows in sizes.items():
        tensors[f"tables/{name}"] = _EMBEDDING_STD * torch.randn(
            rows, config.dim, generator=generator
        )
    for name, size in item_features.items():
        tensors[f"codes/{name}"] = torch.randint(0, size, (num_items,), generator=generator)
    for days, rows_K in (popular or {}).items():
        tensors[f"popular/{days}/rows"] = torch.tensor(rows_K, dtype=torch.int64)
        tensors[f"popular/{days}/counts"] = torch.arange(len(rows_K), 0, -1)
    recipe: dict[str, Any] = {
        "task": task,
        "model": config.model_dump(mode="json"),
        "loss": {"normalize": True},
        **(rules or {}),
    }
    if task == "ranking":
        recipe["tasks"] = {
            name: {"column": name, "threshold": 0.5, "weight": 1.0} for name in tasks
        }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "items.arrow"
        named = np.arange(num_items, dtype=np.int64) + first_id if ids is None else ids
        batch = pa.record_batch({"id": pa.array(named), **(about_items or {})})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        sizes_told = {
            "num_items": num_items,
            "item_cardinalities": item_features,
            "user_cardinalities": user_features,
            "timed": timed,
        }
        return write_bundle(directory, recipe, sizes_told, tensors, path, force=True)
