"""A catalogue larger than memory, the whole way: what each command of a user holds in memory.

A log of 20 M items is prepared, trained with its table on disk, evaluated, exported, served and
asked. Each command runs as a user starts it, and the memory of its processes is sampled. On a
catalogue that fits, tables on disk must answer bit for bit as tables in memory. The protocol is in
protocols/large_catalogue.md. Touch this when another command must stay small.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.command import run_measurement
from slipstream.bench import harness
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.serving.http.client import Client

ITEMS, LOG_LENGTH, STEPS = 20_000_000, 100, 200
QUICK_ITEMS, QUICK_STEPS = 200_000, 20
EQUAL_ITEMS, EQUAL_STEPS = 60_000, 50
REQUESTS, HISTORY = 20, 50
TEST_USERS = 1_000  # but at most a tenth of a small catalogue's
SAMPLE_SECONDS = 0.05
DEADLINE_MS = 60_000  # of a served request: the first ones check every block that they touch
KINDS = ("RssAnon", "RssShmem", "RssFile")


@dataclass
class Usage:
    """What the processes of a command held, in bytes."""

    first: int | None = None
    held: int = 0  # RssAnon + RssShmem at its largest
    mapped: int = 0  # RssFile at its largest
    seconds: float = 0.0

    def add(self, sample: dict[str, int]) -> None:
        """Take a sample into account."""
        held = sample["RssAnon"] + sample["RssShmem"]
        self.first = held if self.first is None else self.first
        self.held, self.mapped = max(self.held, held), max(self.mapped, sample["RssFile"])

    @property
    def above_start(self) -> int:
        return self.held - (self.first or 0)


def sample_tree(root: int) -> dict[str, int]:
    """Return the resident bytes of a process and its children by kind."""
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if name.isdigit():
                stat = Path(f"/proc/{name}/stat").read_text(encoding="utf-8")
                parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    tree = {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    total = dict.fromkeys(KINDS, 0)
    for pid in tree:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            for kind, kilobytes in re.findall(r"^(Rss\w+):\s+(\d+) kB", status, re.MULTILINE):
                total[kind] += 1024 * int(kilobytes)
    return total


@contextlib.contextmanager
def watched(process: "subprocess.Popen[str]", usage: Usage) -> Iterator[None]:
    """Sample the memory of a process and its children while the block runs."""
    ended, start = threading.Event(), time.perf_counter()

    def watch() -> None:
        while not ended.is_set():
            usage.add(sample_tree(process.pid))
            ended.wait(SAMPLE_SECONDS)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        usage.seconds = time.perf_counter() - start


def start(words: list[str], directory: Path) -> "subprocess.Popen[str]":
    """Start a command of slipstream as a user does."""
    places = [os.path.abspath(each) for each in sys.path if each]
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "slipstream", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_words(directory: Path, *words: str) -> tuple[Usage, str]:
    """Run a command to its end; an error of it is one of the benchmark."""
    harness.note(" ".join(("slipstream", *words)))
    usage, process = Usage(), start(list(words), directory)
    with watched(process, usage):
        output, _ = process.communicate()
    if process.returncode:
        raise SlipstreamError(f"'slipstream {words[0]}' failed: {output.strip()[-2_000:]}")
    return usage, output


def write_log(path: Path, items: int) -> None:
    """Write a log in which every item occurs once, in logs of `LOG_LENGTH` behaviours."""
    order_N = np.random.default_rng(0).permutation(items).astype(np.int64)
    schema = pa.schema([(name, pa.int64()) for name in ("user_id", "item_id", "timestamp")])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, items, 1 << 20):
            places = np.arange(begin, min(begin + (1 << 20), items))
            columns = [places // LOG_LENGTH, order_N[places], 1_600_000_000 + places % LOG_LENGTH]
            writer.write_table(pa.table([pa.array(each) for each in columns], schema=schema))


def write_recipe(path: Path, steps: int, tables: dict[str, Any], test: float) -> None:
    """Write the protocol's recipe."""
    recipe = {
        "name": path.stem,
        "data": "store",
        "task": "retrieval",
        "model": {"kind": "hstu", "dim": 64, "blocks": 1, "heads": 2, "max_len": 100},
        "sampler": {"max_len": 100, "batch_size": 64},
        "split": {"by": "users", "validation": 0.005, "test": test},
        "loss": {"kind": "shared_softmax", "negatives": 1_024},
        "tables": {"optimizer": "rowwise_adagrad", **tables},
        "train": {
            "max_steps": steps,
            "evaluate_every": 0,
            "schedule": "synchronous",
            "tensorboard": False,
        },
    }
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")


def prepare(directory: Path, items: int) -> Usage:
    """Make the log and its store."""
    write_log(directory / "log.parquet", items)
    usage, _ = run_words(directory, "data", "prepare", "log.parquet", "--out", "store")
    (directory / "log.parquet").unlink()
    return usage


def serve_and_ask(directory: Path, items: int) -> tuple[Usage, list[float]]:
    """Serve the bundle and ask for recommendations; return the seconds of every request."""
    words = ["serve", "bundle", "--port", "0", "--deadline-ms", str(DEADLINE_MS)]
    harness.note(f"slipstream {' '.join(words)}")
    usage, process = Usage(), start(words, directory)
    assert process.stdout is not None
    generator, seconds = np.random.default_rng(1), []
    try:
        with watched(process, usage):
            text = ""
            while text.count("is ready") < 2:
                line = process.stdout.readline()
                if not line:
                    raise SlipstreamError(f"'slipstream serve' failed: {text.strip()[-2_000:]}")
                text += line
            url = re.search(r"http://[0-9.:]+", text)
            assert url is not None
            with Client(url.group(), deadline_ms=DEADLINE_MS) as client:
                for number in range(REQUESTS):
                    history = {
                        "items": generator.integers(0, items, HISTORY).tolist(),
                        "timestamps": list(range(HISTORY)),
                    }
                    begin = time.perf_counter()
                    answer = client.recommend(f"u{number}", 10, history=history)
                    seconds.append(time.perf_counter() - begin)
                    assert len(answer.items) == 10
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return usage, seconds


def measure(directory: Path, items: int, steps: int) -> list[dict[str, Any]]:
    """Run every command on the large catalogue."""
    rows = []

    def add(variant: str, usage: Usage, **more: Any) -> None:
        rows.append(
            {
                "variant": variant,
                "held MB": usage.above_start / 1e6,
                "first MB": (usage.first or 0) / 1e6,
                "mapped MB": usage.mapped / 1e6,
                "seconds": usage.seconds,
                **more,
            }
        )

    add("prepare", prepare(directory, items))
    tables = {"tier": "disk", "directory": "tables", "cache_bytes": 256 << 20}
    write_recipe(directory / "disk.yaml", steps, tables, min(0.1, TEST_USERS * LOG_LENGTH / items))
    for variant, words in (
        ("train", ["train", "disk.yaml", "--out", "run"]),
        ("evaluate", ["evaluate", "run", "--json"]),
        ("export", ["export", "run", "--out", "bundle"]),
    ):
        add(variant, run_words(directory, *words)[0])
    usage, seconds = serve_and_ask(directory, items)
    add("serve", usage, samples=seconds, **{"ms a request": 1e3 * harness.median(seconds)})
    add("recommend", run_words(directory, "recommend", "run", "--user", "7", "--json")[0])
    return rows


def answers(directory: Path, name: str, tables: dict[str, Any]) -> dict[str, Any]:
    """Train by tables of one kind; return all that the run answers."""
    write_recipe(directory / f"{name}.yaml", EQUAL_STEPS, tables, test=0.1)
    run, out = f"run-{name}", f"{name}.parquet"
    run_words(directory, "train", f"{name}.yaml", "--out", run)
    _, evaluated = run_words(directory, "evaluate", run, "--json")
    run_words(directory, "recommend", run, "--all", "--out", out)
    run_words(directory, "export", run, "--out", f"bundle-{name}")
    return {
        "figures": json.loads(evaluated[evaluated.index("{") :])["figures"],
        "top": pl.read_parquet(directory / out),
        "version": read_json(directory / f"bundle-{name}" / "bundle.json")["version"],
    }


def answers_are_equal(directory: Path) -> bool:
    """Whether tables on disk answer as tables in memory, on a catalogue that fits."""
    directory.mkdir()
    prepare(directory, EQUAL_ITEMS)
    files = {"tier": "disk", "directory": "tables", "cache_bytes": 1 << 20}
    memory, disk = answers(directory, "memory", {}), answers(directory, "disk", files)
    same: dict[str, Callable[[Any, Any], bool]] = {
        "figures": lambda one, two: one == two,
        "top": lambda one, two: one.equals(two),
        "version": lambda one, two: one == two,
    }
    return all(equal(memory[name], disk[name]) for name, equal in same.items())


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Run every command; print what each held in memory, and whether answers are equal."""
    items, steps = (QUICK_ITEMS, QUICK_STEPS) if quick else (ITEMS, STEPS)
    items = int(os.environ.get("SLIPSTREAM_BENCH_ITEMS", items))
    # In the working directory: the system's temporary one may be in memory.
    with tempfile.TemporaryDirectory(prefix=".slipstream-bench-", dir=os.getcwd()) as temporary:
        directory = Path(temporary)
        rows = measure(directory, items, steps)
        equal = answers_are_equal(directory / "equal")
    rows = [{**row, "items": items} for row in rows]
    claims = {
        f"resident_{row['variant']}": 1e6 * row["held MB"]
        for row in rows
        if row["variant"] != "prepare"
    }
    return harness.finish(
        "large_catalogue", rows, {**claims, "topk_equal": float(equal)}, json_path
    )


if __name__ == "__main__":
    run_measurement(run, __doc__)
