"""A served hit and the engine's own time: what `slipstream serve` adds to ranking from a prefix.

Stored users, 100 candidates, histories of 16 to 2,048 behaviours, over HTTP through the router of
the real server and in this process by the engine alone, all variants in turns on an idle machine.
The protocol is in protocols/hit.md. Touch this when another way of ranking is compared.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.command import run_measurement
from benchmarks.served import Connection, served
from benchmarks.serving.bundle import random_bundle
from slipstream.bench import harness
from slipstream.errors import SlipstreamError
from slipstream.history.history_store import open_history_store
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.passes import Scores
from slipstream.serving.http import messages as m

MODEL: dict[str, Any] = {
    "kind": "hstu",
    "dim": 64,
    "blocks": 2,
    "heads": 2,
    "max_len": 4096,
    "time_buckets": 64,
}
NUM_ITEMS, FIRST_ID, CANDIDATES, TASKS = 5_000, 1 << 40, 100, ("click", "like")
SHORT, LENGTHS = 16, (512, 1_024, 2_048)  # no prefix pays for the short one
ROUNDS, WARM_UP = 25, 3
QUICK_ROUNDS, QUICK_WARM_UP = 5, 1
PAUSE_SECONDS, ANNOUNCED_SECONDS = 0.05, 0.4
NEWEST = 1_700_000_000  # when the last behaviour of every user happened


@dataclass
class Samples:
    """The seconds of every timed call by (variant, behaviours), and the largest difference."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    score_diff: float = 0.0
    counting: bool = False  # False while rounds warm up

    def time(self, variant: str, length: int, call: Callable[[], Any]) -> Any:
        """Time one call after a pause."""
        time.sleep(PAUSE_SECONDS)
        begin = time.perf_counter()
        result = call()
        taken = time.perf_counter() - begin
        if self.counting:
            self.seconds.setdefault((variant, length), []).append(taken)
        return result

    def compare(self, answer: m.RankAnswer, expected: Scores) -> None:
        """Note how far an answer's scores lie from the full pass."""
        for task, scores in expected.items():
            differences = np.abs(np.array(answer.scores[task], np.float32) - scores)
            self.score_diff = max(self.score_diff, float(differences.max()))


def history_of(user: str, length: int) -> History:
    """Make up what a user did: random items, sessions over some months, random actions."""
    generator = np.random.default_rng([ord(letter) for letter in user])
    gaps = generator.lognormal(5.0, 2.5, length).astype(np.int64)
    return History(
        generator.integers(FIRST_ID, FIRST_ID + NUM_ITEMS, length),
        NEWEST - np.cumsum(gaps)[::-1],
        {task: generator.integers(0, 2, length).astype(np.float32) for task in TASKS},
    )


def candidates_of(user: str) -> list[m.Identity]:
    """Draw the items that are ranked for a user."""
    generator = np.random.default_rng([1, *(ord(letter) for letter in user)])
    rows_C = generator.choice(NUM_ITEMS, CANDIDATES, replace=False)
    return list((FIRST_ID + rows_C).tolist())


def users_of(rounds: int) -> Iterator[tuple[str, int]]:
    """Give every user and the length of their history: two for each round and length."""
    for number in range(rounds):
        for length in (SHORT, *LENGTHS):
            yield f"{number}-{length}-fresh", length
            if length != SHORT:
                yield f"{number}-{length}-known", length


def store_users(path: Path, rounds: int) -> None:
    """Write the histories of all users to a store."""

    async def write() -> None:
        store = open_history_store(f"sqlite:{path}")
        await store.import_histories([(user, history_of(user, n)) for user, n in users_of(rounds)])
        await store.close()

    asyncio.run(write())


class Measurement:
    """One server, one engine, and the variants that are timed on them."""

    def __init__(self, connection: Connection, engine: Engine, samples: Samples) -> None:
        self.connection, self.engine, self.samples = connection, engine, samples

    def run_round(self, number: int) -> None:
        """Time every variant once for every length."""
        for length in (SHORT, *LENGTHS):
            self._time_unknown(f"{number}-{length}-fresh", length)
            if length != SHORT:
                self._time_known(f"{number}-{length}-known", length)

    def _time_unknown(self, user: str, length: int) -> None:
        answer = self._rank("in line", user, length)
        history, items = history_of(user, length), candidates_of(user)
        scores = self.samples.time(
            "engine in line", length, lambda: self.engine.rank(None, history, items)
        )
        self.samples.compare(answer, scores)

    def _time_known(self, user: str, length: int) -> None:
        asked = msgspec.json.encode(m.PreinferRequest(user))
        content = self.samples.time(
            "preinfer", length, lambda: self.connection.post("/v1/preinfer", asked)
        )
        announced = msgspec.json.decode(content, type=m.PreinferAnswer)
        time.sleep(ANNOUNCED_SECONDS - PAUSE_SECONDS)
        if not announced.admitted:
            self._rank(None, user, length)
            time.sleep(ANNOUNCED_SECONDS - PAUSE_SECONDS)
        answers = [
            self._rank(variant, user, length, announced.ticket) for variant in ("hit", "again")
        ]
        history, items = history_of(user, length), candidates_of(user)
        prefix = self.engine.prefill(history)
        scores = self.samples.time(
            "engine hit", length, lambda: self.engine.rank(prefix, None, items)
        )
        full = self.engine.rank(None, history, items)
        for answer in answers:
            self.samples.compare(answer, full)
        for task, expected in full.items():
            difference = float(np.abs(scores[task] - expected).max())
            self.samples.score_diff = max(self.samples.score_diff, difference)

    def _rank(
        self, variant: str | None, user: str, length: int, ticket: str | None = None
    ) -> m.RankAnswer:
        body = msgspec.json.encode(m.RankRequest(user, candidates_of(user), ticket=ticket))
        if variant is None:
            content = self.connection.post("/v1/rank", body)
        else:
            content = self.samples.time(
                variant, length, lambda: self.connection.post("/v1/rank", body)
            )
        answer = msgspec.json.decode(content, type=m.RankAnswer)
        wanted = "device" if variant in ("hit", "again") else "inline"
        if self.samples.counting and answer.hit != wanted:
            raise SlipstreamError(
                f"a request of {length} behaviours should have been ranked by '{wanted}', but was "
                f"by '{answer.hit}'; is the machine busy?"
            )
        return answer


def claims_of(rows: list[dict[str, Any]], score_diff: float) -> dict[str, float]:
    """Compute the claims from the rows."""
    found = {(row["variant"], row["behaviours"]): row["ms"] for row in rows}
    claims: dict[str, float] = {}
    for length in LENGTHS:
        hit, engine = found["hit", length], found["engine hit", length]
        claims |= {
            f"hit_ms_{length}": hit,
            f"engine_ms_{length}": engine,
            f"hit_vs_engine_{length}": hit / engine,
        }
    return claims | {"in_line_ms_16": found["in line", SHORT], "score_diff": score_diff}


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure all variants in turns, print a table, write the JSON if a path is given."""
    rounds, warm_up = (QUICK_ROUNDS, QUICK_WARM_UP) if quick else (ROUNDS, WARM_UP)
    torch.set_num_threads(1)
    samples = Samples()
    with tempfile.TemporaryDirectory() as folder:
        bundle, history = Path(folder) / "bundle", Path(folder) / "history.db"
        harness.note("a bundle, its users, and `slipstream serve`")
        random_bundle(
            bundle, MODEL, tasks=TASKS, num_items=NUM_ITEMS, first_id=FIRST_ID, noise=0.05
        )
        store_users(history, rounds + warm_up)
        engine = Engine(bundle)
        # Where ranking in line is fast, the trigger keeps no short prefix; here a hit is measured.
        with served(bundle, "--history", f"sqlite:{history}", "--no-trigger") as url:
            connection = Connection(url)
            measurement = Measurement(connection, engine, samples)
            for number in range(rounds + warm_up):
                samples.counting = number >= warm_up
                if number % 5 == 0:
                    harness.note(f"round {number + 1} of {rounds + warm_up}")
                measurement.run_round(number)
            connection.close()
    rows = [
        {
            "variant": variant,
            "behaviours": length,
            "ms": 1e3 * harness.median(taken),
            "spread": harness.spread(taken),
            "samples": taken,
        }
        for (variant, length), taken in sorted(samples.seconds.items(), key=lambda each: each[0][1])
    ]
    return harness.finish("hit", rows, claims_of(rows, samples.score_diff), json_path)


if __name__ == "__main__":
    run_measurement(run, __doc__)
