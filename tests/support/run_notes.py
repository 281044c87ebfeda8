"""Runs that consist of their run.json only, for what reads nothing else of them."""

import json
from pathlib import Path
from typing import Any


def write_note(directory: Path, digest: str = "d1", **changes: Any) -> Path:
    """Write a run.json such as training and evaluation leave it."""
    note = {
        "name": directory.name,
        "store": {"directory": "/data/ml-1m", "digest": digest},
        "status": "finished",
        "step": 1200,
        "epoch": 4,
        "best_step": 900,
        "seconds": 33.5,
        "metrics": {"HR@10": 0.25, "NDCG@10": 0.125, "users": 6040.0},
        "test": {"HR@10": 0.24, "popularity HR@10": 0.1},
        "recipe": {"name": directory.name, "seed": 1, "model": {"kind": "hstu", "dim": 64}},
    }
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(note | changes))
    return directory
