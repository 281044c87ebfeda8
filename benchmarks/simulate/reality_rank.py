"""One rank of the reality check: what each stage of the serial schedule takes, then every schedule.

Started by `benchmarks.simulate.reality`, with the batches, tables and links of
`benchmarks.pipeline`. Touch this when the simulator needs another measured number.
"""

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline.rank import Rank, Setting, sent_bytes
from slipstream.ops.allocator import keep_freed_memory
from slipstream.pipeline.executor import Action, Executor
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import Schedule, make_schedule
from slipstream.pipeline.trace import shares
from slipstream.training.features import ITEM
from slipstream.training.ranks import arrange

_SKIPPED, _METERED = 3, 12  # steps of a metered run: the first ones warm up
EXCHANGED_BYTES = (32_000, 64_000, 128_000, 256_000, 512_000)  # sent by each rank
_IDLE_SECONDS = 0.02  # before an exchange, so that its card may send a burst


class Meter:
    """Seconds, processor seconds and bytes of every call of every stage."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[int, int, float, float, float, float]]] = {}
        self.rounds = 0
        for name in ("all_to_all_single", "all_gather", "all_reduce"):
            setattr(dist, name, self._counted(getattr(dist, name), name == "all_reduce"))

    def _counted(self, exchange: Callable[..., Any], ring: bool) -> Callable[..., Any]:
        """Return an exchange that counts its rounds of messages; a ring has 2 (n - 1)."""

        def counted(*arguments: Any, **options: Any) -> Any:
            self.rounds += 2 * (dist.get_world_size() - 1) if ring else 1
            return exchange(*arguments, **options)

        return counted

    def metered(self, name: str, action: Action) -> Action:
        """Return an action that records what it took; no other may run at the same time."""

        def run(step: int, micro: int) -> int | None:
            sent, self.rounds = sent_bytes(), 0
            cpu, begin = time.process_time(), time.perf_counter()
            result = action(step, micro)
            taken, spent = time.perf_counter() - begin, time.process_time() - cpu
            call = (step, micro, taken, spent, sent_bytes() - sent, float(self.rounds))
            self.calls.setdefault(name, []).append(call)
            return result

        return run


class MeteredPipeline(Pipeline):
    """A pipeline whose stages are metered."""

    meter: Meter

    def _start(self, schedule: Schedule) -> Executor:
        self._actions = {name: self.meter.metered(name, one) for name, one in self._actions.items()}
        return super()._start(schedule)


class MeteredRank(Rank):
    """A rank that runs metered pipelines."""

    pipeline = MeteredPipeline


def meter_serial(me: Rank, micro_batches: int) -> dict[str, list[list[float]]]:
    """Return each stage's and micro-batch's wall and processor seconds, bytes and rounds.

    They are means over serial steps.
    """
    meter = MeteredPipeline.meter
    meter.calls.clear()
    trained = me.fresh()
    me.run(make_schedule("serial", micro_batches=micro_batches), trained, _SKIPPED + _METERED)
    trained[0].tables[ITEM].close()
    found: dict[str, list[list[float]]] = {}
    for name, calls in meter.calls.items():
        kept = [call for call in calls if _SKIPPED <= call[0] < _SKIPPED + _METERED]
        parts = sorted({micro for _, micro, *_ in kept})
        found[name] = [
            torch.tensor(
                [values for _, micro, *values in kept if micro == part], dtype=torch.double
            )
            .mean(0)
            .tolist()
            for part in parts
        ]
    return found


def round_seconds(busy: bool, rounds: int = 60) -> float:
    """Return the median seconds of one round of tiny messages, beside a busy thread or alone."""
    stop, factor = threading.Event(), torch.ones(192, 192)

    def work() -> None:
        while not stop.is_set():
            torch.mm(factor, factor)

    worker = threading.Thread(target=work, daemon=True)
    if busy:
        worker.start()
    sent, received = torch.ones(dist.get_world_size()), torch.empty(dist.get_world_size())
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        dist.all_to_all_single(received, sent)
        taken.append(time.perf_counter() - begin)
    dist.barrier()
    stop.set()
    if busy:
        worker.join()
    dist.barrier()
    return float(torch.tensor(taken).median())


def exchange_seconds(sent: int, repeats: int = 7) -> float:
    """Return the median seconds of one exchange in which every rank sends so many bytes."""
    world = dist.get_world_size()
    mine = torch.ones(world * (sent // 4 // (world - 1)))
    received = torch.empty_like(mine)
    taken = []
    for _ in range(repeats):
        time.sleep(_IDLE_SECONDS)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_to_all_single(received, mine)
        taken.append(time.perf_counter() - begin)
    return float(torch.tensor(taken).median())


class TimedRank(Rank):
    """A rank that warms every schedule up alike before it is timed."""

    def measured(self, schedule: Schedule, trained: tuple[Any, Any]) -> dict[str, float]:
        """Return the seconds of a step after three that do not count."""
        steps = _SKIPPED + self.setting.steps
        intervals = self.run(schedule, trained, steps)[0].intervals()
        return shares(intervals, _SKIPPED - 1, steps - 1)


def key_overlap(me: Rank) -> dict[str, float]:
    """Return keys of a step at this owner, and the share that the step before has too."""
    recommender, _ = me.fresh()
    tables = recommender.tables
    owned = []
    for step, batch in enumerate(me.batches[:4]):
        route = tables.exchange.route(recommender.plan_step(batch, step).key_lists())
        owned.append(route.owned[ITEM].unique())
    shared = [
        float(torch.isin(later, earlier).double().mean())
        for earlier, later in itertools.pairwise(owned)
    ]
    tables[ITEM].close()
    return {
        "keys": float(sum(keys.numel() for keys in owned)) / len(owned),
        "overlap": sum(shared) / len(shared),
    }


def main(rank: int, scratch: Path, setting: Setting, parts: str) -> None:
    """Run one rank; rank 0 prints what all ranks found."""
    torch.set_num_threads(1)
    keep_freed_memory()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    patience = timedelta(seconds=setting.seconds_allowed)
    meeting = f"file://{scratch / 'meeting'}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=setting.world, timeout=patience
    )
    try:
        ranks = arrange("auto", patience)
        found: dict[str, Any] = {}
        if "meter" in parts:
            MeteredPipeline.meter = Meter()
            metered = MeteredRank(setting, ranks, scratch)
            mine: Mapping[str, Any] = {
                "stages": {str(n): meter_serial(metered, n) for n in (1, 8)},
                "keys": key_overlap(metered),
                "core": cpus[rank % len(cpus)],
                "wake_idle": round_seconds(False),
                "wake_busy": round_seconds(True),
            }
            found["ranks"] = Rank(setting, ranks, scratch).everyone(mine)
        if "link" in parts:
            found["exchange_seconds"] = [exchange_seconds(sent) for sent in EXCHANGED_BYTES]
        if "time" in parts:
            found |= TimedRank(setting, ranks, scratch).time_variants()
        if rank == 0:
            print(json.dumps(found))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    content = json.loads(sys.argv[3])
    content["variants"] = tuple((name, int(micro)) for name, micro in content["variants"])
    main(int(sys.argv[1]), Path(sys.argv[2]), Setting(**content), sys.argv[4])
