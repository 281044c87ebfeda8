"""Keys and values at half and at a quarter of their size: what scores lose, what memory gains.

Two small models are trained and exported through the commands, then ranked from prefixes in fp32,
fp16 and int8; a device cache is filled in each; hits are timed in turns. The protocol is in
protocols/kv_precision.md. Touch this when prefixes are stored in another form.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.command import run_measurement
from benchmarks.hit import FIRST_ID, MODEL, NUM_ITEMS, TASKS, candidates_of, history_of
from benchmarks.large_catalogue import run_words
from benchmarks.serving.bundle import random_bundle
from slipstream.bench import harness
from slipstream.data.store import SequenceStore
from slipstream.history.user_history import History
from slipstream.ops.kv_precision import PRECISIONS, KVPrecision
from slipstream.serving.cache.prefix_cache import Busy, PrefixCache
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.passes import Scores
from slipstream.serving.engine.prefix import PrefixKey

STEPS, USERS = 600, 100
QUICK_STEPS, QUICK_USERS = 60, 10
SHORTEST, LONGEST, LATER, CANDIDATES = 100, 512, 20, 100
CACHE_BYTES, BEHAVIOURS = 64 << 20, 1_024
ROUNDS, WARM_UP, BEST = 21, 3, 10


def recipe_of(task: str, steps: int) -> dict[str, Any]:
    """Return the protocol's recipe of a task."""
    ranking = task == "ranking"
    actions = {name: {"column": name, "threshold": 1} for name in ("click", "like")}
    return {
        "name": task,
        "data": "store",
        "task": task,
        **({"tasks": actions} if ranking else {}),
        "seed": 1,
        "model": {"kind": "hstu", "dim": 64, "blocks": 2, "heads": 2, "max_len": LONGEST},
        "sampler": {"max_len": LONGEST, "batch_size": 32},
        "loss": {"kind": "bce"} if ranking else {"kind": "shared_softmax", "negatives": 512},
        "tables": {"optimizer": "rowwise_adagrad", "lr": 0.02},
        "train": {"max_steps": steps, "evaluate_every": 0, "tensorboard": False},
    }


def train_bundle(directory: Path, task: str, steps: int) -> Path:
    """Train and export one model as a user does."""
    recipe = directory / f"{task}.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(task, steps)), encoding="utf-8")
    run_words(directory, "train", str(recipe), "--out", f"run-{task}")
    run_words(directory, "export", f"run-{task}", "--out", f"bundle-{task}")
    return directory / f"bundle-{task}"


def histories_of(store: SequenceStore, users: int) -> list[History]:
    """Return the histories of the first users that are long enough."""
    ids_N = np.array([store.items.id(row) for row in range(store.num_items)])
    found = []
    for user in np.flatnonzero(store.lengths_U >= SHORTEST)[:users]:
        end = int(store.offsets_U1[user + 1])
        span = slice(max(int(store.offsets_U1[user]), end - LONGEST), end)
        actions = {name: values[span] for name, values in store.actions.items()}
        found.append(History(ids_N[store.items_N[span]], store.timestamps_N[span], actions))
    return found


def largest(one: Scores, other: Scores) -> float:
    """Return the largest difference of any score."""
    return max(float(np.abs(one[task] - other[task]).max()) for task in one)


def rank_user(engine: Engine, history: History, items: list[int]) -> tuple[Scores, bool]:
    """Rank from a prefix; return whether an extended prefix and no prefix give the same bits."""
    scores = engine.rank(engine.prefill(history), None, items)
    earlier = engine.prefill(history.part(0, len(history) - LATER))
    extended = engine.rank(engine.prefill(history, past=earlier), None, items)
    full = engine.rank(None, history, items)
    return scores, largest(scores, extended) == 0 and largest(scores, full) == 0


def compare(bundle: Path, histories: list[History]) -> list[dict[str, Any]]:
    """Compare the scores of every precision with fp32's."""
    engines = {precision: Engine(bundle, precision) for precision in PRECISIONS}
    generator = np.random.default_rng(0)
    ids_N = engines["fp32"].items.ids_N
    found: dict[str, list[tuple[float, bool, bool]]] = {name: [] for name in PRECISIONS}
    for history in histories:
        items = ids_N[generator.choice(len(ids_N), CANDIDATES, replace=False)].tolist()
        exact: Scores | None = None
        for precision, engine in engines.items():
            scores, equal = rank_user(engine, history, items)
            exact = exact or scores
            best = [set(np.argsort(-next(iter(each.values())))[:BEST]) for each in (scores, exact)]
            found[precision].append((largest(scores, exact), best[0] == best[1], equal))
    return [
        {
            "variant": f"{engines['fp32'].task}, {precision}",
            "score_diff": max(each[0] for each in noted),
            "median user": harness.median([each[0] for each in noted]),
            "same ten best": float(np.mean([each[1] for each in noted])),
            "paths equal": float(all(each[2] for each in noted)),
        }
        for precision, noted in found.items()
    ]


def prefixes_per_gb(engine: Engine) -> int:
    """Fill a device cache with prefixes until one must leave."""
    cache = PrefixCache(engine.shape, CACHE_BYTES)
    while True:
        key = PrefixKey(engine.version, "user", BEHAVIOURS, len(cache).to_bytes(4, "big"))
        slot = cache.reserve(key, engine.cached_tokens(BEHAVIOURS))
        if isinstance(slot, Busy):  # nothing filling may leave
            return len(cache) * (1 << 30) // CACHE_BYTES


def memory_and_time(directory: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure how many prefixes fit, and how long a hit takes."""
    bundle = directory / "sizes"
    random_bundle(bundle, MODEL, tasks=TASKS, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05)
    engines: dict[KVPrecision, Engine] = {name: Engine(bundle, name) for name in PRECISIONS}
    history, items = history_of("kv", BEHAVIOURS), candidates_of("kv")
    variants: dict[str, Callable[[], object]] = {
        name: partial(engine.rank, engine.prefill(history), None, items)
        for name, engine in engines.items()
    }
    samples = harness.interleave(variants, repeats=rounds, warm_up=WARM_UP)
    return [
        {
            "variant": name,
            "prefixes per GB": prefixes_per_gb(engines[name]),
            "prefix bytes": engines[name].prefix_bytes(BEHAVIOURS),
            "hit ms": 1e3 * harness.median(samples[name]),
            "spread": harness.spread(samples[name]),
            "samples": samples[name],
        }
        for name in PRECISIONS
    ]


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Train, compare, fill and time; print a table, write the JSON if a path is given."""
    steps, users = (QUICK_STEPS, QUICK_USERS) if quick else (STEPS, USERS)
    torch.set_num_threads(1)
    scored: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        size = ("--users", "2000", "--items", "4000")
        run_words(directory, "data", "prepare", "synthetic", *size, "--out", "store")
        histories = histories_of(SequenceStore.open(directory / "store"), users)
        for task in ("ranking", "retrieval"):
            scored += compare(train_bundle(directory, task, steps), histories)
        sized = memory_and_time(directory, 5 if quick else ROUNDS)
    claims = {"paths_equal": min(row["paths equal"] for row in scored)}
    for name in ("fp16", "int8"):
        rows = [row for row in scored if row["variant"].endswith(name)]
        claims[f"score_diff_{name}"] = max(row["score_diff"] for row in rows)
    for row in sized:
        claims[f"prefixes_per_gb_{row['variant']}"] = float(row["prefixes per GB"])
        claims[f"hit_ms_{row['variant']}"] = row["hit ms"]
    return harness.finish("kv_precision", [*scored, *sized], claims, json_path)


if __name__ == "__main__":
    run_measurement(run, __doc__)
