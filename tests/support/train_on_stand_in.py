"""Trains small recipes on the host and on the stand-in device; prints how they differ (JSON).

python train_on_stand_in.py SCRATCH
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.training import checkpoint
from slipstream.training.device import find_device
from slipstream.training.recipe import Recipe
from slipstream.training.run import train
from tests.support import stand_in_device
from tests.support.training_fixtures import RICH, small_recipe, small_store

RANKING = {
    "task": "ranking",
    "loss": {"kind": "bce"},
    "tasks": {"click": {"column": "click"}, "like": {"column": "like"}},
}
FEATURES = {"item_features": ("genre",), "user_features": ("age",)}
CASES = {
    "hstu": {},
    "hstu, popularity, features": {
        "loss": {"sampling": "popularity", "kind": "shared_softmax"},
        **FEATURES,
    },
    "fuxi, ranking": {"model": {"kind": "fuxi", "dropout": 0.2}, **RANKING, **RICH},
    "sasrec": {
        "model": {"kind": "sasrec", "heads": 1, "dropout": 0.2},
        "loss": {"kind": "bce", "negatives": 5},
    },
    "hstu, shared by 2, fp16": {"loss": {"negatives": 4, "share": 2, "precision": "fp16"}},
    "hstu, nested": {"train": {"schedule": "nested", "micro_batches": 2}},
    "hstu, segments": {"loss": {"fetch": "segmented", "segment_bytes": 4096, "precision": "fp16"}},
    "hstu, segments, nested": {
        "loss": {"fetch": "segmented", "segment_bytes": 4096, "share": 2, "sampling": "popularity"},
        "train": {"schedule": "nested", "micro_batches": 2},
    },
    "hstu, semi_async": {"train": {"schedule": "semi_async"}},
}
SESSIONS: tuple[dict[str, int], ...] = ({"max_steps": 2}, {})
PLAIN = {
    "epochs": 4,
    "evaluate_every": 4,
    "log_every": 2,
    "threads": 1,
    "tensorboard": False,
    "checkpoint_every": 2,
}


def recipe_of(case: dict, device: str, **options: object) -> Recipe:
    return small_recipe(
        **{**case, "train": {**PLAIN, **case.get("train", {}), "device": device, **options}}
    )


def trained(directory: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(directory / "checkpoints")
    assert newest is not None
    return {
        name: value
        for name, value in load_file(newest / checkpoint.TENSORS).items()
        if not name.startswith("random/")
    }


def compare(store: SequenceStore, scratch: Path, case: dict) -> dict[str, object]:
    """Train a recipe on both, in two sessions; in double precision, where rounding stays small."""
    host, device = (
        [
            train(
                recipe_of(case, kind, **limit),
                store,
                scratch / kind,
                quiet=True,
                dtype=torch.float64,
            )
            for limit in SESSIONS
        ][-1]
        for kind in ("cpu", stand_in_device.NAME)
    )
    one, other = trained(scratch / "cpu"), trained(scratch / stand_in_device.NAME)
    assert one.keys() == other.keys()
    difference = max(
        float((value.double() - other[name].double()).abs().max()) for name, value in one.items()
    )
    return {
        "difference": difference,
        "steps": [host.step, device.step],
        "metrics": [host.metrics, device.metrics],
    }


def main(scratch: Path) -> None:
    store = small_store(scratch / "store", users=8, mean_length=5, rich=True)
    found: dict[str, object] = {
        name: compare(store, scratch / str(number), case)
        for number, (name, case) in enumerate(CASES.items())
    }
    found["auto"] = str(find_device("auto"))
    for name in ("cuda", f"{stand_in_device.NAME}:7"):
        try:
            find_device(name)
        except SlipstreamError as error:
            found[name] = str(error)
    try:
        torch.ones(2).to(stand_in_device.DEVICE) + torch.ones(2)
    except RuntimeError as error:
        found["mixed"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
