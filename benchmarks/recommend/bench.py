"""The recommend benchmark: searches, memory, and the cascade over HTTP.

The protocol is benchmarks/protocols/recommend.md. Touch this when its claims change.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.recommend.catalogues import MODEL, Kind, write_catalogue
from benchmarks.recommend.open_loop import make_trace, replay
from benchmarks.recommend.searches import WARM_UP, count_different, search_near_rows, search_users
from benchmarks.served import child_environment, served
from benchmarks.serving.bundle import random_bundle
from slipstream.bench import harness
from slipstream.errors import SlipstreamError
from slipstream.history.history_store import open_history_store
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine

ROWS, LARGE, USERS, MEMORY_USERS = 1_000_000, 10_000_000, 100, 20
RATE, SECONDS, WARM_SECONDS, LENGTH, CATALOGUE = 10.0, 24.0, 4.0, 1_024, 100_000
LATE_SECONDS = 0.01
Row = dict[str, Any]


def measure_searches(directory: Path, rows: int, users: int) -> tuple[list[Row], int]:
    """Search every catalogue of a million; return the rows of the table and the differences."""
    table, different = [], 0
    for kind in get_args(Kind):
        harness.note(f"{rows:,} items, {kind}")
        searched = write_catalogue(directory / kind, kind, rows)
        engine = Engine(directory / kind)
        for name, measure in (("users", search_users), ("near rows", search_near_rows)):
            found = measure(engine, WARM_UP + users)
            different += count_different(found, searched)
            samples = [1e3 * each for each in found.seconds[WARM_UP:]]
            table.append(
                {
                    "variant": f"{kind}, {name}",
                    "items": rows,
                    "ms": harness.median(samples),
                    "p99 ms": float(np.percentile(samples, 99)),
                    "samples": samples,
                }
            )
    return table, different


def measure_memory(directory: Path, rows: int, users: int) -> Row:
    """Search the large catalogue in a process of its own."""
    harness.note(f"{rows:,} items in a process of its own")
    write_catalogue(directory / "large", "random", rows)
    words = ["-m", "benchmarks.recommend.searches", str(directory / "large"), str(users)]
    done = subprocess.run(
        [sys.executable, *words], env=child_environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise SlipstreamError(f"the search of the large catalogue failed: {done.stderr[-2_000:]}")
    return {"variant": "large, resident", "items": rows, "MB": int(done.stdout) / 1e6}


async def store_users(path: Path, users: Sequence[str]) -> None:
    """Store histories of users."""
    store = open_history_store(f"sqlite:{path}")
    generator = np.random.default_rng(4)
    times = 1_600_000_000 + 60 * np.arange(LENGTH)
    for user in users:
        actions = {name: np.zeros(LENGTH, np.float32) for name in ("click", "like")}
        items = generator.integers(0, CATALOGUE, LENGTH)
        await store.import_histories([(user, History(items, times, actions))])
    await store.close()


def measure_server(directory: Path, seconds: float, most_late: float) -> list[Row]:
    """Replay both traces against both deployments, with the relay and in line.

    A generator that was later than `most_late` seconds is an error.
    """
    model = MODEL | {"max_len": 2 * LENGTH}
    random_bundle(
        directory / "a", model, task="retrieval", num_items=CATALOGUE, first_id=0, timed=True
    )
    random_bundle(directory / "b", model, num_items=CATALOGUE, first_id=0, seed=1)
    table = []
    for trace_kind in ("sessions", "once"):
        trace = make_trace(trace_kind, RATE, seconds)
        for deployment, words in (("one", []), ("two", ["--retrieval", str(directory / "a")])):
            bundle = directory / ("b" if words else "a")
            for variant, more in (("relay", []), ("inline", ["--no-relay"])):
                name = f"{deployment}, {trace_kind}, {variant}"
                harness.note(f"serve: {name}")
                history = directory / f"{deployment}-{trace_kind}-{variant}.db"
                asyncio.run(store_users(history, sorted({page.user for page in trace})))
                options = [*words, *more, "--history", f"sqlite:{history}"]
                with served(bundle, *options, "--deadline-ms", "1000") as url:
                    measured = asyncio.run(
                        replay(
                            url,
                            trace,
                            signals=variant == "relay",
                            warm_up=min(WARM_SECONDS, seconds / 3),
                            items=CATALOGUE,
                        )
                    )
                late = float(np.percentile(measured.late, 99))
                if late > most_late:
                    raise SlipstreamError(f"the generator was late by {1e3 * late:.1f} ms ({name})")
                samples = [1e3 * each for each in measured.seconds]
                table.append(
                    {
                        "variant": name,
                        "items": CATALOGUE,
                        "ms": harness.median(samples),
                        "p99 ms": float(np.percentile(samples, 99)),
                        "failed": measured.failed,
                        "samples": samples,
                    }
                )
    return table


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure exact retrieval from large catalogues, and p99 of /v1/recommend with and without
    the relay."""
    torch.set_num_threads(1)
    rows, large, users = (100_000, 100_000, 10) if quick else (ROWS, LARGE, USERS)
    # In the working directory: the system's temporary one may be in memory.
    with tempfile.TemporaryDirectory(prefix=".slipstream-bench-", dir=os.getcwd()) as temporary:
        directory = Path(temporary)
        table, different = measure_searches(directory, rows, users)
        memory = measure_memory(directory, large, MEMORY_USERS)
        seconds, late = (6.0, np.inf) if quick else (SECONDS, LATE_SECONDS)
        served_rows = measure_server(directory, seconds, late)
    claims = {
        "topk_equal": float(different == 0),
        "ms_1m": max(row["ms"] for row in table),
        "bytes_10m": 1e6 * memory["MB"],
    }
    for row in served_rows:
        claims[f"p99_{row['variant'].replace(', ', '_')}"] = row["p99 ms"]
    return harness.finish("recommend", [*table, memory, *served_rows], claims, json_path)
