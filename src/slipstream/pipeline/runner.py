"""Runs a training as a pipeline: the stages of a schedule, bound to a work, its tables and ranks.

    with Pipeline(make_schedule("nested"), work, tables, LaneGroups(exchange)) as pipeline:
        for result in pipeline.steps():  # StepResult: step, batch, loss_sum, count
            with pipeline.settled():     # rows are in the tables, and no lane touches these
                save()

Every step's rows live in a buffer of its own (`RowBuffer`): retrieved ahead, made current by copies
from earlier buffers, read, updated by the tables' own optimizer, written back. Gradients of
micro-batches are summed at the owner in the micro-batches' order, so the result does not depend on
when anything ran. Touch this when a stage does something else.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slipstream.pipeline import adaptive, hazards
from slipstream.pipeline.buffers import RowBuffer
from slipstream.pipeline.current_rows import CurrentRows
from slipstream.pipeline.executor import Action, Delay, Executor
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.refusals import refuse_unsafe_work
from slipstream.pipeline.schedule import TABLES, Schedule, make_schedule, with_device
from slipstream.pipeline.trace import Trace
from slipstream.pipeline.work import MicroBatch, OnDemandRows, StepResult, Work
from slipstream.tables.embedding_table import EmbeddingTable
from slipstream.tables.exchange import Lookups, Route, distinct

# step -> table -> (keys_U, weights_UD before that step updated them)
StaleRows = dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]
KeysByTable = dict[str, torch.Tensor]  # table -> keys, or places of keys


@dataclass
class _InflightStep:
    """What one step carries from stage to stage."""

    batch: Any
    micros: list[MicroBatch]
    count: int = 0  # supervised tokens of all ranks
    routes: list[Route] = field(default_factory=list)
    # Unique ascending keys that this rank is asked for, and those that it updates: with replicas
    # also what other replicas are asked for.
    own: KeysByTable = field(default_factory=dict)
    keys: KeysByTable = field(default_factory=dict)
    # Per micro-batch: the places of its owned keys in `own`, and in `keys`.
    own_places: list[KeysByTable] = field(default_factory=list)
    places: list[KeysByTable] = field(default_factory=list)
    origins: dict[str, hazards.Sources] = field(default_factory=dict)
    buffers: dict[str, RowBuffer] = field(default_factory=dict)
    lookups: dict[int, Lookups] = field(default_factory=dict)  # by micro-batch
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)  # stale: weights before update
    loss: torch.Tensor | None = None
    loss_sum: float = 0.0  # of all ranks

    def place_own(self) -> None:
        """Find the distinct keys of all micro-batches, and each micro-batch's places among them."""
        self.own_places = [{} for _ in self.routes]
        for name in self.routes[0].owned:
            self.own[name], places = distinct([route.owned[name] for route in self.routes], None)
            for micro_places, places_O in zip(self.own_places, places, strict=True):
                micro_places[name] = places_O


class Pipeline:
    """Runs `work` over `tables` by `schedule`; leaving the context stops all lanes.

    Steps are counted from `first_step`. With `adapt` the first steps are probed, and the numbers of
    micro-batches and buffers chosen from them; `adapt` is called with the reason. A stale schedule
    that continues where another pipeline stopped takes that one's `stale_rows()`.
    """

    def __init__(
        self,
        schedule: Schedule,
        work: Work,
        tables: Mapping[str, EmbeddingTable],
        groups: LaneGroups,
        *,
        first_step: int = 0,
        trace: Trace | None = None,
        delay: Delay | None = None,
        adapt: Callable[[str], object] | None = None,
        stale_rows: StaleRows | None = None,
    ) -> None:
        refuse_unsafe_work(schedule, work, tables)
        self._wanted, self._stale_rows = schedule, dict(stale_rows or {})
        self.work, self.tables, self.groups = work, dict(tables), groups
        self.first_step, self.trace = first_step, trace or Trace()
        self._adapt, self._delay = adapt, delay
        self._actions: dict[str, Action] = {
            "load": self._load,
            "route": self._route,
            "place": self._place,
            "retrieve": self._retrieve,
            "synchronise": self._synchronise,
            "answer": self._answer,
            "transfer": self._transfer,
            "compute": self._compute,
            "collect": self._collect,
            "reduce": self._reduce,
            "update": self._update,
            "refresh": self._refresh,
            "update_rows": self._update_rows,
            "write": self._write,
        }
        self._steps: dict[int, _InflightStep] = {}
        self._table_lock = threading.Lock()
        self._loaded: deque[Any] = deque()  # batches an earlier executor loaded and did not use
        self._newest, self._stop_asked = -1, False
        self._current = None if work.on_demand is None else self._connect(work.on_demand)
        self._executor = self._start(schedule)
        self._running: Generator[int, None, None] | None = None

    def _start(self, schedule: Schedule) -> Executor:
        """Make an executor for the steps from here on."""
        if self.work.has_device and "transfer" not in schedule:
            schedule = with_device(schedule)
        self.schedule, self._base = schedule, self._newest + 1
        return Executor(
            schedule,
            self._actions,
            trace=self.trace,
            delay=self._delay,
            closers=self.groups.closers,
            first=self._base,
        )

    def _connect(self, on_demand: OnDemandRows) -> CurrentRows:
        """Let the work read and update rows through the buffers."""
        name = on_demand.table

        def buffers() -> dict[int, RowBuffer]:
            inflight = list(self._steps.items())
            return {step: one.buffers[name] for step, one in inflight if name in one.buffers}

        current = CurrentRows(
            self.tables[name],
            buffers,
            lambda: self._executor.pause(*TABLES),
            lambda: self.schedule.buffers_ahead,
        )
        on_demand.connect(current)
        return current

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> Iterator[StepResult]:
        """Yield finished steps until the data of all ranks has ended."""
        warm_up = self._wanted.synchronous_steps - self.first_step
        if warm_up > 0:
            self._executor = self._start(
                make_schedule("dual_buffer", micro_batches=self._wanted.micro_batches)
            )
            yield from self._some_steps(warm_up)
            if self._newest < warm_up - 1:
                return
            self._executor = self._start(self._wanted)
        if self._adapt is not None:
            chosen = yield from self._probe(self._adapt)
            if chosen is None:
                return
            self._executor = self._start(chosen)
        yield from self._some_steps(None)

    def _probe(
        self, adapt: Callable[[str], object]
    ) -> Generator[StepResult, None, Schedule | None]:
        """Run some steps whole and cut, and choose the numbers; None when the data ends first."""
        probes = {}
        for micro_batches in (1, self._wanted.micro_batches):
            self._executor = self._start(replace(self._wanted, micro_batches=micro_batches))
            begin = self._base
            yield from self._some_steps(adaptive.WARM_UP + adaptive.PROBED)
            if self._newest < begin + adaptive.WARM_UP + adaptive.PROBED - 1:
                return None
            seen = [
                each
                for each in self.trace.intervals(begin + adaptive.WARM_UP)
                if each.step <= self._newest
            ]
            probes[micro_batches] = self.groups.mean(adaptive.probe(seen, micro_batches).values())
        whole, cut = adaptive.probes_from_means(probes).values()
        chosen, sentence = adaptive.choose(self._wanted, whole, cut)
        adapt(sentence)
        return chosen

    def _some_steps(self, limit: int | None) -> Iterator[StepResult]:
        """Yield `limit` steps of the executor; keep what it has loaded beyond them."""
        running = self._running = self._executor.steps()
        for step in running:
            self._newest = step
            now = self._steps[step]
            yield StepResult(self.first_step + step, now.batch, now.loss_sum, now.count)
            if limit is not None and step + 1 >= self._base + limit:
                running.close()
                self._loaded.extend(
                    self._steps[each].batch for each in sorted(self._steps) if each > step
                )
                self._steps.clear()
                return

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold all lanes off the tables, which contain every update so far."""
        if self._newest >= 0:
            self._executor.settle(self._newest)
        with self._executor.pause(*TABLES):
            yield

    def stale_rows(self) -> StaleRows:
        """Return, inside `settled`, the weights that the newest steps updated, as before them.

        A stale schedule that continues from here reads these instead of the tables' rows.
        """
        known = dict(self._stale_rows)
        for step, one in list(self._steps.items()):
            if one.before and step <= self._newest:
                known[self.first_step + step] = {
                    name: (one.buffers[name].keys_U, one.before[name]) for name in one.before
                }
        oldest = self.first_step + self._newest + 1 - self.schedule.staleness
        return {step: rows for step, rows in sorted(known.items()) if step >= oldest}

    def ask_to_stop(self) -> None:
        """End after the next step that all ranks agree on; steps already routed are finished."""
        self._stop_asked = True

    def close(self) -> None:
        """Stop all lanes, write rows back into the tables and flush these."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
            for table in self.tables.values():
                table.flush()
        if (on_demand := self.work.on_demand) is not None:
            on_demand.connect(self.tables[on_demand.table])

    def finish(self) -> list[Any]:
        """Close after the newest step; return the batches loaded beyond it, in their order."""
        self.close()
        ahead = [self._steps[each].batch for each in sorted(self._steps) if each > self._newest]
        return [batch for batch in (*ahead, *self._loaded) if batch is not None]

    # The stages, each called by its lane with (step, micro-batch).

    def _load(self, step: int, micro: int) -> int:
        batch = self._loaded.popleft() if self._loaded else self.work.next_batch()
        if batch is None and self.groups.alone:
            self._executor.end(step)
            return 0
        micros = self.work.cut(batch, self.first_step + step, self.schedule.micro_batches)
        if len(micros) != self.schedule.micro_batches:
            raise ValueError(
                f"the work cut a batch into {len(micros)} parts, not {self.schedule.micro_batches}"
            )
        self._steps[step] = _InflightStep(batch, micros)
        return len(micros)

    def _route(self, step: int, micro: int) -> None:
        now = self._steps[step]
        counted = sum(each.count for each in now.micros)
        now.count, takes_place = self.groups.agree(counted, now.batch is not None, self._stop_asked)
        if not takes_place:
            self._executor.end(step)
            return
        now.routes = self.groups.keys.route_parts([each.keys for each in now.micros])
        if self.groups.replicas > 1:
            now.place_own()
            now.keys = self.groups.union(now.own)

    def _place(self, step: int, micro: int) -> None:
        now = self._steps[step]
        if self.groups.replicas > 1:
            now.places = [_places(route, now.keys) for route in now.routes]
        else:
            now.place_own()
            now.keys, now.places = now.own, now.own_places

    def _retrieve(self, step: int, micro: int) -> None:
        now = self._steps[step]
        holders = [each for each in hazards.copied_from(self.schedule, step) if each >= self._base]
        for name, keys_U in now.keys.items():
            held = {
                each: self._steps[each].keys[name]
                for each in holders
                if name in self._steps[each].keys
            }
            origin = now.origins[name] = hazards.sources(keys_U, held)
            wanted_R = keys_U[origin.rest_R] if origin.copies else keys_U
            with self._alone(name):
                rows = self.tables[name].read(wanted_R)
            now.buffers[name] = RowBuffer.from_table(keys_U, origin.rest_R, rows)
        oldest = self.first_step + step - self.schedule.staleness
        for earlier in range(self.first_step - 1, oldest - 1, -1):
            for name, (keys_U, weights_UD) in self._stale_rows.get(earlier, {}).items():
                if name in now.buffers:
                    now.buffers[name].read_older(keys_U, weights_UD)

    def _alone(self, name: str) -> AbstractContextManager[object]:
        """Keep other threads from a table meanwhile, unless it lets them read beside."""
        return nullcontext() if self.tables[name].read_by_several else self._table_lock

    def _synchronise(self, step: int, micro: int) -> None:
        for name, buffer in self._steps[step].buffers.items():
            buffer.copy_from(
                self._steps[step].origins[name],
                self._holders(name, hazards.copied_from(self.schedule, step)),
            )

    def _refresh(self, step: int, micro: int) -> None:
        for name, buffer in self._steps[step].buffers.items():
            holders = self._holders(name, hazards.refreshed_from(self.schedule, step))
            buffer.copy_from(
                hazards.sources(
                    buffer.keys_U, {each: held.keys_U for each, held in holders.items()}
                ),
                holders,
            )

    def _holders(self, name: str, steps: range) -> dict[int, RowBuffer]:
        return {
            each: self._steps[each].buffers[name]
            for each in steps
            if each >= self._base and name in self._steps[each].buffers
        }

    def _answer(self, step: int, micro: int) -> None:
        now = self._steps[step]
        rows = {
            name: now.buffers[name].read(places_O) for name, places_O in now.places[micro].items()
        }
        now.lookups[micro] = self.groups.rows.answer(now.routes[micro], rows)

    def _transfer(self, step: int, micro: int) -> None:
        now = self._steps[step]
        if now.micros[micro].content is not None:
            now.micros[micro] = self.work.transfer(now.micros[micro], now.lookups[micro])

    def _compute(self, step: int, micro: int) -> None:
        now = self._steps[step]
        if self._current is not None:
            self._current.step = step
        if now.micros[micro].content is None:
            if self.work.on_demand is not None:
                self.work.on_demand.take_part()
            return
        loss = self.work.loss(now.micros[micro], self.first_step + step, now.lookups[micro])
        torch.autograd.backward(loss / max(now.count, 1))
        now.loss = loss.detach() if now.loss is None else now.loss + loss.detach()

    def _collect(self, step: int, micro: int) -> None:
        now = self._steps[step]
        collected = self.groups.gradients.collect(now.routes[micro], now.lookups.pop(micro))
        for name, (_, grads_OD) in collected.items():
            places_O, whole = now.own_places[micro][name], now.own[name].numel()
            if name not in now.grads and places_O.numel() == whole:
                now.grads[name] = grads_OD
            else:
                total_UD = now.grads.setdefault(name, grads_OD.new_zeros(whole, grads_OD.shape[1]))
                total_UD.index_add_(0, places_O, grads_OD)
        if micro == len(now.micros) - 1:
            on_demand = self.work.on_demand  # sums over replicas together with its own gradients
            own = {
                name: (now.own[name], grads_UD)
                for name, grads_UD in now.grads.items()
                if on_demand is None or name != on_demand.table
            }
            summed = self.groups.sum_replicas(own) if own else {}
            now.grads |= {name: grads_UD for name, (_, grads_UD) in summed.items()}

    def _reduce(self, step: int, micro: int) -> None:
        now = self._steps[step]
        self.work.sum_dense(self.groups.everybody)
        now.loss_sum = self.groups.sum_loss(0.0 if now.loss is None else float(now.loss))

    def _update(self, step: int, micro: int) -> None:
        if self.schedule.row_update == "update":
            self._update_rows(step, micro)
        self.work.step_dense(self.first_step + step)

    def _update_rows(self, step: int, micro: int) -> None:
        now = self._steps[step]
        lr, on_demand = self.work.table_lr(self.first_step + step), self.work.on_demand
        for name, buffer in now.buffers.items():
            if on_demand is not None and name == on_demand.table:
                on_demand.update({name: (now.own[name], now.grads.pop(name))}, lr)
                continue
            if self.schedule.staleness:
                now.before[name] = buffer.weights_UD.clone()
            buffer.update(self.tables[name].optimizer, now.grads.pop(name), lr)

    def _write(self, step: int, micro: int) -> None:
        for name, buffer in self._steps[step].buffers.items():
            with self._alone(name):
                self.tables[name].write(buffer.keys_U, buffer.rows())
        for old in [
            each
            for each in list(self._steps)
            if hazards.kept_until(self.schedule, each) <= step and each < step
        ]:
            del self._steps[old]


def _places(route: Route, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.searchsorted(keys[name], owned_O) for name, owned_O in route.owned.items()}
