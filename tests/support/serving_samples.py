"""Random bundles and histories for the serving tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.ops.kv_precision import KVPrecision
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import Prefix

FIRST_ID, ITEMS = (1 << 62) + 5, 300
CASES = [(kind, bias) for kind in ("hstu", "fuxi") for bias in ("own", "next", "none")] + [
    ("sasrec", "none")
]


def engine(
    directory: Path,
    kind: str = "hstu",
    task: str = "ranking",
    time_bias: str = "own",
    kv_precision: KVPrecision = "fp32",
    **settings: Any,
) -> Engine:
    """An engine whose weights are large enough that every part of a history is felt."""
    model = {
        "kind": kind,
        "dim": 32,
        "blocks": 2,
        "heads": 2,
        "max_len": 2500,
        "time_bias": time_bias,
        "divisor": 100.0,
    } | settings
    if time_bias != "none":
        model["time_buckets"] = 64
    if kind == "sasrec":
        model.pop("divisor")
    sizes = f"{model['max_len']}-{model['blocks']}-{model.get('time_encoding')}"
    path = directory / f"{kind}-{task}-{time_bias}-{sizes}"
    features = {"item_features": {"genre": 7}, "user_features": {"age": 4}}
    random_bundle(
        path, model, task=task, num_items=ITEMS, first_id=FIRST_ID, noise=0.05, **features
    )
    return Engine(path, kv_precision)


def history(count: int, seed: int = 0, age: int = 2) -> History:
    rng = np.random.default_rng(seed)
    actions = {
        name: (rng.random(count) < share).astype(np.float32)
        for name, share in (("click", 0.5), ("like", 0.2))
    }
    times = 1_600_000_000 + np.cumsum(rng.integers(1, 5000, count) ** 2 // 100)
    return History(FIRST_ID + rng.integers(0, ITEMS, count), times, actions, {"age": age})


def cut(whole: History, begin: int, end: int | None = None) -> History:
    """Behaviours `begin` to `end` as a history of its own."""
    return replace(whole.part(begin, len(whole) if end is None else end), first=0)


def candidates(count: int, seed: int = 9) -> np.ndarray:
    return FIRST_ID + np.random.default_rng(seed).permutation(ITEMS)[:count]


def same_tokens(one: Prefix, other: Prefix) -> bool:
    """Whether two prefixes cache the same tokens, bit for bit."""
    pairs = zip(one.buffer.tensors, other.buffer.tensors, strict=True)
    return one.tokens == other.tokens and all(
        torch.equal(ours[: one.tokens], theirs[: one.tokens]) for ours, theirs in pairs
    )


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[task] - other[task]).max()) for task in one)
