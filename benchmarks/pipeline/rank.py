"""One rank of the pipeline benchmark: an HSTU recommender stepped by every schedule in turn.

Started by `benchmarks.pipeline.bench`, once per setting; rank 0 prints one JSON object. All rows
are on disk before anything is timed. `synchronous` is the shipped plain loop; its table's cache has
as many rows more as the buffers of `nested` hold. Before each run a cache is filled with the rows
of the batches before it. Touch this when a schedule needs another set-up.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.pipeline.device import EmulatedRecommender
from benchmarks.pipeline.link import EmulatedLink
from benchmarks.pipeline.plain_loop import PlainLoop
from benchmarks.pipeline.setting import Setting, make_batch
from benchmarks.pipeline.tiers import SlowDiskTable, TimedMemoryTable, cache_bytes_of
from benchmarks.pipeline.torchrec_pipeline import TorchRecPipeline
from slipstream.bench.harness import set_training_allocator
from slipstream.data.loader import LoadedBatch, Position
from slipstream.pipeline import adaptive
from slipstream.pipeline.clustering import cluster_samples, key_inflation
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import Trace, processor_seconds, shares
from slipstream.tables.collection import TableCollection
from slipstream.tables.embedding_table import first_rows
from slipstream.tables.exchange import Exchange
from slipstream.tables.row_optimizers import make_row_optimizer
from slipstream.tables.slices import Placement
from slipstream.training.features import ITEM, Features
from slipstream.training.loop import total_steps
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import Ranks, arrange
from slipstream.training.recommender import Recommender
from slipstream.training.scheduled import RecommenderWork

SEED = 3
PEER = "TorchRec's sparse-dist pipeline"
PLAIN = "synchronous"
STAGE_CPU = "cpu_of_"  # before a stage: seconds of its lane's thread for a step
BEGIN = Position({}, 0, False)  # batches go round in a circle, nothing is resumed
Trained = tuple[Recommender, torch.optim.AdamW]

__all__ = ["BEGIN", "PEER", "PLAIN", "Rank", "Setting", "make_batch", "sent_bytes"]


def schedule_of(name: str, micro_batches: int) -> Schedule:
    """Make the schedule of a variant: a name, or one such as "nested, 2 ahead"."""
    base, _, words = name.partition(", ")
    ahead = int(words.split()[0]) if words else None
    return make_schedule(base, micro_batches=micro_batches, buffers_ahead=ahead)


class Rank:
    """One of the processes."""

    pipeline = Pipeline  # a study may run a pipeline of its own

    def __init__(self, setting: Setting, ranks: Ranks, scratch: Path) -> None:
        self.setting, self.ranks, self.scratch = setting, ranks, scratch
        self.batches = [
            make_batch(setting, number, ranks.rank) for number in range(setting.batches)
        ]
        self.made, self.start = 0, 0  # `start`: the batch that the next run begins with
        self.owned: list[torch.Tensor] = []

    def fresh(self, more_cache: int = 0) -> Trained:
        """Make a recommender whose table already has every row it will need.

        The cache of its table holds `more_cache` rows more than the setting says.
        """
        setting, recipe = self.setting, self.setting.recipe()
        kind = Recommender if setting.device_seconds is None else EmulatedRecommender
        recommender = kind(recipe, Features(setting.items), ranks=self.ranks)
        if isinstance(recommender, EmulatedRecommender):
            recommender.seconds_per_token = setting.device_seconds or 0.0
        table = self._table(setting.cache_rows + more_cache)
        recommender.tables = TableCollection([table], Exchange({ITEM: table}, self.group))
        return recommender, make_adamw(recommender.model, recipe.optimizer)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.ranks.shard_group

    def _table(self, cache_rows: int) -> SlowDiskTable | TimedMemoryTable:
        """Make this rank's part of the table, its rows written."""
        setting, placement = self.setting, Placement(self.ranks.shards)
        optimizer = make_row_optimizer("rowwise_adagrad", betas=(0.9, 0.98), eps=1e-8)
        shape = (ITEM, setting.items, setting.dim, optimizer)
        place: dict[str, Any] = {"seed": SEED, "placement": placement, "rank": self.ranks.shard}
        self.made += 1
        keys_N = torch.arange(setting.items)
        owned_N = keys_N[placement.owner_of(keys_N) == self.ranks.shard]
        if setting.tier == "memory":
            memory = TimedMemoryTable(*shape, **place)
            memory.write(owned_N, memory.read(owned_N))
            return memory
        table = SlowDiskTable(
            *shape,
            self.scratch / f"tables-{self.made}-{self.ranks.rank}",
            cache_bytes=cache_bytes_of(cache_rows, setting.dim, optimizer),
            read_rate=setting.read_rate,
            latency=setting.latency,
            **place,
        )
        with table.at_full_speed():
            for keys_U in owned_N.split(4096):
                table.write(keys_U, table.read(keys_U))
            table.flush()
        return table

    def owned_keys(self) -> list[torch.Tensor]:
        """Return the rows that each batch asks of this owner. Collective the first time."""
        if not self.owned:
            recommender, _ = self.fresh()
            for step, batch in enumerate(self.batches):
                lists = recommender.plan_step(batch, step).key_lists()
                self.owned.append(recommender.tables.exchange.route(lists).owned[ITEM].clone())
            recommender.tables.close()
        return self.owned

    def buffer_rows(self) -> int:
        """Return the most rows that the buffers of `nested` hold: those of steps in a row."""
        counts = [keys.numel() for keys in self.owned_keys()]
        held = self.setting.buffers
        return max(sum((counts * held)[first : first + held]) for first in range(len(counts)))

    def plain_loop(self) -> PlainLoop:
        """Make the shipped loop, with the memory of `nested`."""
        trained = self.fresh(self.buffer_rows() if self.setting.tier == "disk" else 0)
        return PlainLoop(*trained, self.ranks, self.setting.link_rate)

    def fill_cache(self, recommender: Recommender) -> None:
        """Leave in the cache what a long run would have there before the batch `start`."""
        table = recommender.tables[ITEM]
        if not isinstance(table, SlowDiskTable):
            return
        owned, before, rows = self.owned_keys(), 0, 0
        while rows < table.cache_rows and before < len(owned):
            before += 1
            rows += owned[(self.start - before) % len(owned)].numel()
        with table.at_full_speed():
            for number in range(self.start - before, self.start):
                keys_U = owned[number % len(owned)]
                table.write(keys_U, table.read(keys_U))

    def run(
        self,
        schedule: Schedule,
        trained: Trained,
        steps: int,
        *,
        adapt: bool = False,
    ) -> tuple[Trace, Schedule, list[str]]:
        """Take steps by a schedule over endless data, so that it works ahead to the end.

        Returns the trace, the schedule (with the numbers it chose itself) and its messages.
        """
        recommender, optimizer = trained
        batches = itertools.islice(itertools.cycle(self.batches), self.start, None)
        work = RecommenderWork(
            recommender,
            optimizer,
            lambda: LoadedBatch(next(batches), BEGIN),
            total_steps(recommender.recipe, len(self.batches)),
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
        setting, peer, trained = self.setting, self.peer(), self.fresh()
        plain = self.plain_loop() if any(name == PLAIN for name, _ in setting.variants) else None
        found: dict[str, list[dict[str, float]]] = {}
        schedules: dict[tuple[str, int], Schedule] = {}
        notes: list[str] = []
        for repeat in range(setting.repeats + 1):
            for name, micro_batches in setting.variants:
                if name == PEER:
                    one = self.peer_step(peer)
                elif name == PLAIN:
                    assert plain is not None
                    one = self.plain_step(plain)
                elif (name, micro_batches) not in schedules:
                    schedule, adapt = (
                        schedule_of(name, micro_batches),
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
            self.start += setting.warm_up + setting.steps
        return {"variants": found, "notes": sorted(set(notes))}

    def plain_step(self, plain: PlainLoop) -> dict[str, float]:
        """Take steps of the plain loop and return the seconds of one."""
        self.fill_cache(plain.recommender)
        return self.counted(
            plain.recommender,
            self.setting.warm_up + self.setting.steps,
            lambda: plain.run(self.batches, self.start, self.setting.warm_up, self.setting.steps),
        )

    def measured(self, schedule: Schedule, trained: Trained) -> dict[str, float]:
        """Take steps of a schedule and return the shares of its trace."""
        self.fill_cache(trained[0])
        warm_up = self.setting.warm_up if schedule.buffers_ahead else 1
        steps = warm_up + self.setting.steps
        retrieved = steps

        def work() -> dict[str, float]:
            nonlocal retrieved
            intervals = self.run(schedule, trained, steps)[0].intervals()
            retrieved = sum(each.stage == "retrieve" for each in intervals)
            spent = processor_seconds(intervals, warm_up - 1, steps - 1)
            found = shares(intervals, warm_up - 1, steps - 1)
            return found | {f"{STAGE_CPU}{stage}": seconds for stage, seconds in spent.items()}

        one = self.counted(trained[0], steps, work)
        return one | {"reads": one["reads"] * steps / retrieved}

    def counted(
        self, recommender: Recommender, steps: int, work: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Do some steps; return what they told, and what each sent, read and spent."""
        table = recommender.tables[ITEM]
        slow = table if isinstance(table, SlowDiskTable) else None
        reads = 0 if slow is None else slow.counters["reads"]
        sent, spent = sent_bytes(), time.process_time()
        one = work()
        return one | {
            "sent_bytes": (sent_bytes() - sent) / steps,
            "cpu_seconds": (time.process_time() - spent) / steps,
            "reads": 0.0 if slow is None else (slow.counters["reads"] - reads) / steps,
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
        """Compare all weights and state with the plain loop, and with `serial` cut alike.

        The state is that of the rows and that of the dense optimizer.
        """
        setting, results = self.setting, {}
        loop = PlainLoop(*self.fresh(), self.ranks, setting.link_rate)
        loop.run(self.batches, self.start, 0, setting.check_steps)
        whole = weights_and_state((loop.recommender, loop.optimizer))
        for name, micro_batches in dict.fromkeys(
            [*setting.variants, *(("serial", micro) for _, micro in setting.variants)]
        ):
            if name != PLAIN:
                trained = self.fresh()
                self.run(schedule_of(name, micro_batches), trained, setting.check_steps)
                results[f"{name} {micro_batches}"] = weights_and_state(trained)
        found = {}
        for name, micro_batches in setting.variants:
            if name == PLAIN:
                continue
            mine = results[f"{name} {micro_batches}"]
            for label, other in (
                ("same_cut", results[f"serial {micro_batches}"]),
                (PLAIN, whole),
            ):
                apart = largest_difference(mine, other)
                found[f"{name} {micro_batches} {label}"] = max(self.everyone(apart))
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


def weights_and_state(trained: Trained) -> list[torch.Tensor]:
    """Return everything that training changes; the table is closed."""
    recommender, optimizer = trained
    table = recommender.tables[ITEM]
    slow = table if isinstance(table, SlowDiskTable) else None
    with nullcontext() if slow is None else slow.at_full_speed():
        rows = [
            part
            for _, touched in table.touched()
            for part in (touched.weights_UD, *touched.state.values())
        ]
    table.close()
    dense = list(recommender.model.parameters())
    moments = [
        value
        for parameter in dense
        for value in optimizer.state[parameter].values()
        if isinstance(value, torch.Tensor)
    ]
    return [*(value.detach() for value in dense), *moments, *rows]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors."""
    return max(
        float((one.double() - two.double()).abs().max())
        for one, two in zip(ours, theirs, strict=True)
        if one.numel()
    )


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
    set_training_allocator()
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
