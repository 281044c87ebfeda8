"""The share of the training time that checkpoints of a 10 GB table take, and the bytes they write.

Steps with a checkpoint being written beside them take turns with steps without one. The protocol
is benchmarks/protocols/checkpoint.md. Touch this together with it.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import run_measurement
from slipstream.bench.harness import Row, finish, median, note
from slipstream.data.loader import PrefetchingLoader
from slipstream.data.preparation import Choices, prepare
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import CHUNK
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdagrad
from slipstream.training import checkpoint
from slipstream.training.checkpoint import list_checkpoints, row_files
from slipstream.training.checkpoint_writer import CheckpointWriter
from slipstream.training.loop import train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import ALONE
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.row_files import live_rows
from slipstream.training.run import make_sampler

NAME = "large"  # the table
UNIFORM, POPULAR = "uniform", "popular"
_SCATTER = 999_999_937  # a prime: it has no factor in common with the rows


@dataclass(frozen=True)
class Sizes:
    """What is measured; the protocol's numbers."""

    rows: int = 38_500_000
    dim: int = 64
    rows_a_step: int = 10_000
    interval: float = 300.0  # seconds between checkpoints
    phase: float = 15.0  # seconds of steps at least
    turns: int = 5
    popular_turns: int = 3
    warm_up: int = 30  # steps
    length: int = 256
    users: int = 32


QUICK = Sizes(100_000, 16, 500, 2.0, 0.5, 2, 2, 5, 24, 4)


class LargeRun:
    """A recommender that trains, with the large table beside its own."""

    def __init__(self, sizes: Sizes, work: Path) -> None:
        self.sizes, self.step, self.popular = sizes, 0, False
        shape = Synthetic(users=200, items=200) if sizes is QUICK else Synthetic(2_000, 2_000)
        store = prepare("synthetic", work / "store", Choices(synthetic=shape))
        recipe = self._recipe()
        self.recommender = Recommender.build(recipe, store)
        self.table = MemoryTable(NAME, sizes.rows, sizes.dim, RowwiseAdagrad())
        self.recommender.tables.tables[NAME] = self.table
        self.optimizer = make_adamw(self.recommender.model, recipe.optimizer)
        self.loader = PrefetchingLoader(make_sampler(recipe, store, ALONE))
        self.writer = CheckpointWriter(work / "checkpoints", self.recommender)
        self._dice = torch.Generator().manual_seed(0)

    def _recipe(self) -> Recipe:
        dim, length = self.sizes.dim, self.sizes.length
        model = {"kind": "hstu", "dim": dim, "blocks": 4, "heads": 2, "max_len": length}
        return Recipe.model_validate(
            {
                "name": "checkpoint",
                "model": model,
                "sampler": {"max_len": length, "batch_size": self.sizes.users},
                "tables": {"optimizer": "rowwise_adagrad"},
            }
        )

    def update_rows(self) -> None:
        """Read and update the large table's rows of one step."""
        draws = self._draw(2 * self.sizes.rows_a_step)
        while len(draws) < self.sizes.rows_a_step:
            draws = torch.cat([draws, self._draw(self.sizes.rows_a_step)]).unique()
        chosen = torch.randperm(draws.numel(), generator=self._dice)[: self.sizes.rows_a_step]
        keys_U = draws[chosen].sort().values
        self.table.apply(keys_U, self.table.gather(keys_U).mul_(1e-2), 1e-2)

    def _draw(self, count: int) -> torch.Tensor:
        """Draw distinct rows: uniformly, or with a probability of 1 / rank, ranks scattered."""
        rows = self.sizes.rows
        if not self.popular:
            return torch.randint(rows, (count,), generator=self._dice).unique()
        u_C = torch.rand(count, generator=self._dice, dtype=torch.float64)
        ranks_C = (float(rows) ** u_C).long().clamp_(max=rows) - 1
        return (ranks_C * _SCATTER % rows).unique()

    def touch_all(self) -> None:
        """Train every row once."""
        for begin in range(0, self.sizes.rows, CHUNK):
            keys_U = torch.arange(begin, min(begin + CHUNK, self.sizes.rows))
            self.table.apply(keys_U, self.table.gather(keys_U).mul_(1e-2), 1e-2)

    def make_step(self) -> None:
        """Make one step: the shipped one, and that of the large table."""
        batch = self.loader.next_batch()
        train_step(self.recommender, self.optimizer, batch, self.step, 1 << 30)
        self.update_rows()
        self.step += 1

    def steps_for(self, seconds: float, also: CheckpointWriter | None = None) -> tuple[int, float]:
        """Make steps for so long, and until `also` has written; return how many, and the time."""
        started, first = time.perf_counter(), self.step
        while time.perf_counter() - started < seconds or (also is not None and also.is_writing):
            self.make_step()
        return self.step - first, time.perf_counter() - started

    def save(self) -> None:
        """Save as a run does."""
        state = {"progress": {"step": self.step}, "sampler": self.loader.state_dict()}
        self.writer.save(self.step, self.optimizer, state, keep=2)

    def new_bytes(self, earlier: set[int]) -> int:
        """Return the bytes of the newest checkpoint in files that no earlier one has."""
        files = list(list_checkpoints(self.writer.directory)[-1].iterdir())
        return sum(f.stat().st_size for f in files if f.stat().st_ino not in earlier)

    def known_files(self) -> set[int]:
        """Return the files of all checkpoints, by inode."""
        return {f.stat().st_ino for f in self.writer.directory.glob("*/*")}


def measure_turn(run: LargeRun, turn: int, interval_steps: int) -> Row:
    """Measure steps without and with a checkpoint beside them."""
    run.popular = turn >= run.sizes.turns
    for _ in range(interval_steps):
        run.update_rows()
    draws = POPULAR if run.popular else UNIFORM
    found: Row = {"variant": f"turn {turn + 1}", "draws": draws}

    def without() -> None:
        steps, seconds = run.steps_for(run.sizes.phase)
        found["step_s"] = seconds / steps

    def with_checkpoint() -> None:
        known, started = run.known_files(), time.perf_counter()
        run.save()
        found["blocked_s"] = time.perf_counter() - started
        steps, seconds = run.steps_for(run.sizes.phase, run.writer)
        run.writer.wait()
        found["steps"], found["with_s"] = steps, seconds + found["blocked_s"]
        found["bytes"] = run.new_bytes(known)
        numbers = {file.number for file in row_files(_newest(run), [NAME])}
        found["all rows"] = len(numbers) == 1

    phases = (without, with_checkpoint) if turn % 2 == 0 else (with_checkpoint, without)
    for phase in phases:
        phase()
    found["cost_s"] = found["with_s"] - found["steps"] * found["step_s"]
    found["slowed_s"] = found["cost_s"] - found["blocked_s"]
    return found


def _newest(run: LargeRun) -> Path:
    return list_checkpoints(run.writer.directory)[-1]


def check_rows(run: LargeRun) -> None:
    """Raise unless the last checkpoint, saved now, holds the table's rows."""
    run.save()
    run.writer.wait()
    count = 0
    files = row_files(_newest(run), [NAME])
    for piece in live_rows(files, run.sizes.rows, lambda keys_U: torch.ones_like(keys_U).bool()):
        rows = run.table.read(piece.keys_U)
        assert piece.rows is not None
        count += piece.keys_U.numel()
        if not torch.equal(rows.weights_UD, piece.rows.weights_UD) or not torch.equal(
            rows.state["sum"], piece.rows.state["sum"]
        ):
            raise SlipstreamError("the newest checkpoint holds other rows than the table")
    if count != run.sizes.rows:
        raise SlipstreamError(f"the newest checkpoint holds {count} of {run.sizes.rows} rows")


def claims_of(rows: list[Row], whole_bytes: int, interval: float) -> dict[str, float]:
    """Return the headline figures of the turns."""
    costs = {
        draws: [row["cost_s"] / interval for row in rows if row["draws"] == draws]
        for draws in (UNIFORM, POPULAR)
    }
    added = [row["bytes"] for row in rows if row["draws"] == POPULAR and not row["all rows"]]
    claims = {
        "cost_share": sum(costs[UNIFORM]) / len(costs[UNIFORM]),
        "cost_share_popular": sum(costs[POPULAR]) / len(costs[POPULAR]),
    }
    return claims | ({"bytes_incremental_ratio": median(added) / whole_bytes} if added else {})


def run(quick: bool = False, json_path: Path | None = None) -> dict[str, Any]:
    """Measure, print a table and the claims, write the JSON if a path is given."""
    sizes = QUICK if quick else Sizes()
    if quick:
        checkpoint.WHOLE_BYTES = 0  # the small table counts as large
    with tempfile.TemporaryDirectory(prefix="slipstream-checkpoint-") as work:
        large = LargeRun(sizes, Path(work))
        note("training every row once, and a checkpoint of all")
        large.touch_all()
        started = time.perf_counter()
        large.save()
        large.writer.wait()
        whole: Row = {"variant": "whole", "cost_s": time.perf_counter() - started}
        whole["bytes"] = large.new_bytes(set())
        for _ in range(sizes.warm_up):
            large.make_step()
        taken = [_timed_step(large) for _ in range(sizes.warm_up)]
        interval_steps = max(1, round(sizes.interval / median(taken)))
        rows = []
        turns = sizes.turns + sizes.popular_turns
        for turn in range(turns):
            note(f"turn {turn + 1} of {turns}: an interval of {interval_steps} steps")
            rows.append(measure_turn(large, turn, interval_steps))
        check_rows(large)
        large.writer.close()
        large.loader.close()
    claims = claims_of(rows, whole["bytes"], sizes.interval)
    return finish("checkpoint", [whole, *rows], claims, json_path)


def _timed_step(large: LargeRun) -> float:
    started = time.perf_counter()
    large.make_step()
    return time.perf_counter() - started


if __name__ == "__main__":
    run_measurement(run, __doc__)
