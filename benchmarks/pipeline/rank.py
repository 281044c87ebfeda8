"""One rank of the pipeline benchmark: an HSTU recommender stepped by every schedule in turn.

Started by `benchmarks.pipeline.bench`, once per setting; rank 0 prints one JSON object. Users have
one topic each and draw items by Zipf's law, some from everywhere, so that batches overlap. All rows
are on disk before anything is timed. Touch this when a schedule needs another set-up.
"""

import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.pipeline.link import EmulatedLink
from benchmarks.pipeline.torchrec_pipeline import TorchRecPipeline
from slipstream.data.batch import JaggedBatch
from slipstream.data.loader import LoadedBatch, Position
from slipstream.ops.allocator import keep_freed_memory
from slipstream.pipeline import adaptive
from slipstream.pipeline.clustering import cluster_samples, key_inflation
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import Trace, shares
from slipstream.tables.collection import TableCollection
from slipstream.tables.disk_table import DiskTable
from slipstream.tables.embedding_table import first_rows
from slipstream.tables.exchange import Exchange
from slipstream.tables.factory import make_table
from slipstream.tables.row_optimizers import make_row_optimizer
from slipstream.tables.slices import Placement
from slipstream.training.features import ITEM, Features
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import Ranks, arrange
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.scheduled import RecommenderWork

SEED = 3
PEER = "TorchRec's sparse-dist pipeline"
START = 1_600_000_000
BEGIN = Position({}, 0, False)  # batches go round in a circle, nothing is resumed


@dataclass(frozen=True)
class Setting:
    """What is run where."""

    world: int = 2
    users: int = 16  # per rank
    length: int = 2048
    items: int = 20_000
    topics: int = 24
    zipf: float = 1.2
    dim: int = 64
    heads: int = 2
    blocks: int = 1
    batches: int = 12  # different ones, in a circle
    tier: str = "disk"
    read_rate: float | None = None
    cache_rows: int = 1024  # of about 4,000 a step asks of an owner
    link_rate: float | None = None  # of the emulated link; None: the network is the link
    steps: int = 2  # timed, after `warm_up`
    warm_up: int = 2
    repeats: int = 5
    check_steps: int = 4
    variants: tuple[tuple[str, int], ...] = (("serial", 1), ("nested", 8))
    adaptive: bool = False  # nested chooses its own numbers
    seconds_allowed: int = 400

    def recipe(self) -> Recipe:
        model = {
            "kind": "hstu",
            "dim": self.dim,
            "heads": self.heads,
            "blocks": self.blocks,
            "max_len": self.length,
        }
        model["position_embedding"] = False
        loss = {"kind": "shared_softmax", "negatives": 32}
        return Recipe.model_validate(
            {
                "name": "pipeline",
                "model": model,
                "loss": loss,
                "sampler": {"max_len": self.length},
                "tables": {"optimizer": "rowwise_adagrad"},
            }
        )


def make_batch(setting: Setting, number: int, rank: int) -> JaggedBatch:
    """Make a batch of one rank: nine items in ten come from the topic of the user."""
    rng = np.random.default_rng([7, number, rank])
    per_topic = setting.items // setting.topics
    weights = (np.arange(per_topic) + 1.0) ** -setting.zipf
    cumulated = np.cumsum(weights) / weights.sum()
    shape = (setting.users, setting.length + 1)
    topics = np.where(
        rng.random(shape) < 0.9,
        rng.integers(0, setting.topics, (setting.users, 1)),
        rng.integers(0, setting.topics, shape),
    )
    ranks_drawn = np.minimum(np.searchsorted(cumulated, rng.random(shape)), per_topic - 1)
    log = torch.from_numpy(topics * per_topic + ranks_drawn)
    times = START + torch.from_numpy(rng.integers(1, 10_000, shape)).cumsum(1)
    tokens = setting.users * setting.length
    return JaggedBatch(
        sample_ids_B=torch.arange(setting.users) + (number * setting.world + rank) * setting.users,
        first_positions_B=torch.zeros(setting.users, dtype=torch.int64),
        offsets_B1=torch.arange(setting.users + 1) * setting.length,
        items_T=log[:, :-1].reshape(-1),
        timestamps_T=times[:, :-1].reshape(-1),
        next_items_T=log[:, 1:].reshape(-1),
        next_timestamps_T=times[:, 1:].reshape(-1),
        supervised_T=torch.ones(tokens, dtype=torch.bool),
    )


class Rank:
    """One of the processes."""

    pipeline = Pipeline  # a study may run a pipeline of its own

    def __init__(self, setting: Setting, ranks: Ranks, scratch: Path) -> None:
        self.setting, self.ranks, self.scratch = setting, ranks, scratch
        self.batches = [
            make_batch(setting, number, ranks.rank) for number in range(setting.batches)
        ]
        self.made = 0

    def fresh(self) -> tuple[Recommender, torch.optim.AdamW]:
        """Make a recommender whose table already has every row it will need."""
        setting, recipe = self.setting, self.setting.recipe()
        recommender = Recommender(recipe, Features(setting.items), ranks=self.ranks)
        optimizer = make_row_optimizer("rowwise_adagrad", betas=(0.9, 0.98), eps=1e-8)
        row_bytes = 4 * (setting.dim + 1) + 8
        table = make_table(
            setting.tier,
            ITEM,
            setting.items,
            setting.dim,
            optimizer,
            seed=SEED,
            placement=Placement(self.ranks.shards),
            rank=self.ranks.shard,
            directory=self.scratch / f"tables-{self.made}-{self.ranks.rank}",
            cache_bytes=max(setting.cache_rows * row_bytes, 1 << 14),
            read_rate=setting.read_rate,
        )
        self.made += 1
        keys_N = torch.arange(setting.items)
        owned_N = keys_N[Placement(self.ranks.shards).owner_of(keys_N) == self.ranks.shard]
        for keys_U in owned_N.split(4096):
            table.write(keys_U, table.read(keys_U))
        table.flush()
        tables = {ITEM: table}
        recommender.tables = TableCollection([table], Exchange(tables, self.ranks.shard_group))
        return recommender, make_adamw(recommender.model, recipe.optimizer)

    def run(
        self,
        schedule: Schedule,
        trained: tuple[Recommender, Any],
        steps: int,
        *,
        adapt: bool = False,
    ) -> tuple[Trace, Schedule, list[str]]:
        """Take steps by a schedule over endless data, so that it works ahead to the end.

        Returns the trace, the schedule (with the numbers it chose itself) and its messages.
        """
        recommender, optimizer = trained
        batches = itertools.cycle(self.batches)
        work = RecommenderWork(
            recommender,
            optimizer,
            lambda: LoadedBatch(next(batches), BEGIN),
            steps,
            ranks=self.ranks,
        )
        groups = LaneGroups(
            recommender.tables.exchange,
            world=self.setting.world,
            timeout=timedelta(seconds=self.setting.seconds_allowed),
        )
        if self.setting.link_rate is not None:
            EmulatedLink(self.setting.link_rate).slow_down(groups)
        dist.barrier()
        notes: list[str] = []
        trace = Trace()
        options: dict[str, Any] = {"trace": trace, "adapt": notes.append if adapt else None}
        with self.pipeline(
            schedule, work, recommender.tables.tables, groups, **options
        ) as pipeline:
            for done in pipeline.steps():
                if done.step == steps - 1:
                    break
        groups.close()
        return trace, pipeline.schedule, notes

    def time_variants(self) -> dict[str, Any]:
        """Time every variant in turns; the first round warms up.

        Returns the figures of each repeat, the same on all ranks (means).
        """
        trained, setting, peer = self.fresh(), self.setting, self.peer()
        found: dict[str, list[dict[str, float]]] = {}
        schedules: dict[tuple[str, int], Schedule] = {}
        notes: list[str] = []
        for repeat in range(setting.repeats + 1):
            for name, micro_batches in setting.variants:
                if name == PEER:
                    one = self.peer_step(peer)
                elif (name, micro_batches) not in schedules:
                    schedule, adapt = (
                        make_schedule(name, micro_batches=micro_batches),
                        setting.adaptive and name == "nested",
                    )
                    steps = 1 + (adaptive.PROBES if adapt else 0)
                    schedules[name, micro_batches], words = self.run(
                        schedule, trained, steps, adapt=adapt
                    )[1:]
                    notes += words
                else:
                    one = self.measured(schedules[name, micro_batches], trained)
                if repeat:
                    found.setdefault(f"{name} {micro_batches}", []).append(self.everybody_mean(one))
        return {"variants": found, "notes": sorted(set(notes))}

    def measured(self, schedule: Schedule, trained: tuple[Recommender, Any]) -> dict[str, float]:
        """Take steps of a schedule and return the shares of its trace."""
        table, sent, spent = trained[0].tables[ITEM], sent_bytes(), time.process_time()
        reads = table.counters["reads"] if isinstance(table, DiskTable) else 0
        warm_up = self.setting.warm_up if schedule.buffers_ahead else 1
        steps = warm_up + self.setting.steps
        intervals = self.run(schedule, trained, steps)[0].intervals()
        one = shares(intervals, warm_up - 1, steps - 1)
        one["sent_bytes"], one["cpu_seconds"] = (
            (sent_bytes() - sent) / steps,
            (time.process_time() - spent) / steps,
        )
        retrieved = sum(each.stage == "retrieve" for each in intervals)
        return one | {
            "reads": ((table.counters["reads"] - reads) if isinstance(table, DiskTable) else 0)
            / retrieved
        }

    def peer(self) -> TorchRecPipeline | None:
        """Make TorchRec's pipeline over another recommender like ours, where it takes part."""
        if not any(name == PEER for name, _ in self.setting.variants):
            return None
        recommender = Recommender(
            self.setting.recipe(), Features(self.setting.items), ranks=self.ranks
        )
        return TorchRecPipeline(
            recommender,
            lambda keys_U: first_rows(SEED, ITEM, keys_U, self.setting.dim, 0.035, torch.float32),
        )

    def peer_step(self, peer: TorchRecPipeline | None) -> dict[str, float]:
        assert peer is not None
        sent, spent, steps = (
            sent_bytes(),
            time.process_time(),
            self.setting.warm_up + self.setting.steps,
        )
        ends, _ = peer.run(self.batches, steps)
        one = {"step_seconds": (ends[-1] - ends[self.setting.warm_up - 1]) / self.setting.steps}
        return one | {
            "sent_bytes": (sent_bytes() - sent) / steps,
            "cpu_seconds": (time.process_time() - spent) / steps,
        }

    def everybody_mean(self, values: dict[str, float]) -> dict[str, float]:
        names = sorted(values)  # lanes appear in another order on every rank
        return dict(
            zip(
                names,
                (
                    total / self.setting.world
                    for total in self.ranks.sum([values[name] for name in names])
                ),
                strict=True,
            )
        )

    def check(self) -> dict[str, float]:
        """Compare all weights and state with the serial schedule, whole and cut alike."""
        setting, results = self.setting, {}
        for name, micro_batches in dict.fromkeys(
            [*setting.variants, *(("serial", micro) for _, micro in setting.variants)]
        ):
            trained = self.fresh()
            self.run(make_schedule(name, micro_batches=micro_batches), trained, setting.check_steps)
            touched = [
                part
                for _, rows in trained[0].tables[ITEM].touched()
                for part in (rows.weights_UD, *rows.state.values())
            ]
            results[f"{name} {micro_batches}"] = [
                *(value.detach() for value in trained[0].model.parameters()),
                *touched,
            ]
            trained[0].tables[ITEM].close()
        found = {}
        for name, micro_batches in setting.variants:
            for label, other in (
                ("same_cut", f"serial {micro_batches}"),
                ("whole", "serial 1"),
            ):
                pairs = zip(results[f"{name} {micro_batches}"], results[other], strict=True)
                mine = max(
                    float((one.double() - two.double()).abs().max())
                    for one, two in pairs
                    if one.numel()
                )
                found[f"{name} {micro_batches} {label}"] = max(mine, *self.everyone(mine))
        return found

    def everyone(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.setting.world
        dist.all_gather_object(values, value)
        return values

    def inflation(self) -> dict[str, float]:
        """Compute key inflation at 8 parts, clustered and random, and overlap of neighbours."""
        rng, clustered, random, overlap = torch.Generator().manual_seed(0), [], [], []
        for batch, following in zip(self.batches, self.batches[1:], strict=False):
            clustered.append(
                key_inflation(
                    batch.items_T,
                    batch.offsets_B1,
                    cluster_samples(batch.items_T, batch.offsets_B1, 8),
                )
            )
            cut = list(torch.randperm(batch.num_users, generator=rng).tensor_split(8))
            random.append(key_inflation(batch.items_T, batch.offsets_B1, cut))
            overlap.append(
                float(torch.isin(following.items_T.unique(), batch.items_T).float().mean())
            )
        return {
            "clustered": float(np.mean(clustered)),
            "random": float(np.mean(random)),
            "overlap": float(np.mean(overlap)),
        }


def sent_bytes() -> float:
    """Return the bytes that this process's network card has sent so far."""
    card = (
        Path("/sys/class/net")
        / os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        / "statistics"
        / "tx_bytes"
    )
    lines = Path("/proc/net/dev").read_text().splitlines() if Path("/proc/net/dev").exists() else []
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == card.parent.parent.name:
            return float(numbers.split()[8])
    return 0.0


def main(rank: int, scratch: Path, setting: Setting, parts: str) -> None:
    """Run one rank; rank 0 prints what all ranks found."""
    torch.set_num_threads(1)
    keep_freed_memory()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) > 1:
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    patience = timedelta(seconds=setting.seconds_allowed)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch / 'meeting'}",
        rank=rank,
        world_size=setting.world,
        timeout=patience,
    )
    try:
        began = time.perf_counter()
        me = Rank(setting, arrange("auto", patience), scratch)
        found: dict[str, Any] = {}
        if "time" in parts:
            found |= me.time_variants()
        if "check" in parts:
            found["max_diff"] = me.check()
        if "inflation" in parts:
            found["inflation"] = me.inflation()
        if rank == 0:
            print(json.dumps(found | {"seconds": time.perf_counter() - began}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    content = json.loads(sys.argv[3])
    content["variants"] = tuple((name, int(micro)) for name, micro in content["variants"])
    main(int(sys.argv[1]), Path(sys.argv[2]), Setting(**content), sys.argv[4])
