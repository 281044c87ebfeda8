"""A training run as a pipeline: the stages of `slipstream.pipeline.schedule` bound to a work, its
tables and its exchange.

    with Pipeline(make_schedule("nested"), work, tables, Peers(exchange)) as pipeline:
        for done in pipeline.steps():
            ...                       # done.step, done.loss_sum, done.count
            with pipeline.settled():  # rows are in the tables, and nobody touches these meanwhile
                save()

Every step's rows live in a buffer of its own (`RowBuffer`): retrieved ahead, made current by copies
from the buffers before, lent, moved by the tables' own optimizer, written back. Gradients of
micro-batches are summed at the owner in the micro-batches' order, so the result does not depend on
when anything ran.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from slipstream.pipeline import adaptive, hazards
from slipstream.pipeline.buffers import RowBuffer
from slipstream.pipeline.executor import Action, Delay, Executor
from slipstream.pipeline.peers import Peers
from slipstream.pipeline.refusals import refuse
from slipstream.pipeline.schedule import Lane, Schedule, make_schedule, with_device
from slipstream.pipeline.trace import Trace
from slipstream.pipeline.work import Micro, Work
from slipstream.tables.embedding_table import EmbeddingTable
from slipstream.tables.exchange import Lookups, Route, distinct

Moved = dict[
    int, dict[str, tuple[torch.Tensor, torch.Tensor]]
]  # step -> table -> (keys_U, weights_UD before the step moved them)


@dataclass(frozen=True)
class Done:
    """A finished step, as the caller sees it."""

    step: int
    batch: Any  # what the work's next_batch gave
    loss_sum: float  # over all ranks
    count: int  # supervised tokens, over all ranks


@dataclass
class _Step:
    """What one step carries from stage to stage."""

    batch: Any
    micros: list[Micro]
    count: int = 0
    routes: list[Route] = field(default_factory=list)
    own: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # table -> unique ascending keys this rank is asked for
    keys: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # and those it moves: with replicas also what others are asked for
    own_places: list[dict[str, torch.Tensor]] = field(
        default_factory=list
    )  # per micro-batch: its owned keys' places in `own`
    places: list[dict[str, torch.Tensor]] = field(default_factory=list)  # and in `keys`
    origins: dict[str, hazards.Sources] = field(default_factory=dict)
    buffers: dict[str, RowBuffer] = field(default_factory=dict)
    lookups: dict[int, Lookups] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # of stale schedules: the weights this step moved
    loss: torch.Tensor | None = None
    loss_sum: float = 0.0

    def place_own(self) -> None:
        """The distinct keys of all micro-batches, and each micro-batch's places among them."""
        self.own_places = [{} for _ in self.routes]
        for name in self.routes[0].owned:
            self.own[name], places = distinct([route.owned[name] for route in self.routes], None)
            for micro_places, places_O in zip(self.own_places, places, strict=True):
                micro_places[name] = places_O


class Pipeline:
    """Runs `work` over `tables` by `schedule`. Steps are counted from `first_step`; leaving the
    context stops all lanes.

    With `adapt` the first steps are probed, and the numbers of micro-batches and buffers chosen
    from them; it is told why. A stale schedule that goes on where another pipeline stopped is given
    what that one's `moved()` said, as `earlier`.
    """

    def __init__(
        self,
        schedule: Schedule,
        work: Work,
        tables: Mapping[str, EmbeddingTable],
        peers: Peers,
        *,
        first_step: int = 0,
        trace: Trace | None = None,
        delay: Delay | None = None,
        adapt: Callable[[str], object] | None = None,
        earlier: Moved | None = None,
    ) -> None:
        refuse(schedule, work, tables)
        self._wanted, self._earlier = schedule, dict(earlier or {})
        self.work, self.tables, self.peers, self.first_step = work, dict(tables), peers, first_step
        self.trace = trace or Trace()
        self._adapt, self._delay = adapt, delay
        self._steps: dict[int, _Step] = {}
        self._loaded: deque[Any] = deque()  # batches loaded for steps of an engine that has stopped
        self._newest, self._stop_asked = -1, False
        self._engine = self._start(schedule)
        self._running: Iterator[int] | None = None

    def _start(self, schedule: Schedule) -> Executor:
        """An engine for the steps from here on."""
        if self.work.has_device and "carry" not in schedule:
            schedule = with_device(schedule)
        self.schedule, self._base = schedule, self._newest + 1
        actions: dict[str, Action] = {
            stage.name: getattr(self, f"_{stage.name}") for stage in schedule.stages
        }
        options: dict[str, Any] = {
            "trace": self.trace,
            "delay": self._delay,
            "give_up": self.peers.give_up,
        }
        return Executor(schedule, actions, first=self._base, **options)

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> Iterator[Done]:
        """Finished steps, until the data of all ranks has ended."""
        warm_up = self._wanted.synchronous_steps - self.first_step
        if warm_up > 0:
            self._engine = self._start(
                make_schedule("dual_buffer", micro_batches=self._wanted.micro_batches)
            )
            yield from self._some_steps(warm_up)
            if self._newest < warm_up - 1:
                return
            self._engine = self._start(self._wanted)
        if self._adapt is not None:
            wanted = self._wanted
            probes = {}
            for micro_batches in (1, wanted.micro_batches):
                self._engine = self._start(replace(wanted, micro_batches=micro_batches))
                begin = self._base
                yield from self._some_steps(adaptive.WARM_UP + adaptive.PROBED)
                if self._newest < begin + adaptive.WARM_UP + adaptive.PROBED - 1:
                    return
                seen = [
                    each
                    for each in self.trace.intervals(begin + adaptive.WARM_UP)
                    if each.step <= self._newest
                ]
                probes[micro_batches] = self.peers.mean(
                    adaptive.probe(seen, micro_batches).values()
                )
            whole, cut = adaptive.agreed(probes).values()
            chosen, sentence = adaptive.choose(wanted, whole, cut)
            self._adapt(sentence)
            self._engine = self._start(chosen)
        yield from self._some_steps(None)

    def _some_steps(self, limit: int | None) -> Iterator[Done]:
        """So many steps of the engine; what it had loaded beyond them is kept for the next one."""
        self._running = self._engine.steps()
        for step in self._running:
            self._newest = step
            now = self._steps[step]
            yield Done(self.first_step + step, now.batch, now.loss_sum, now.count)
            if limit is not None and step + 1 >= self._base + limit:
                self._running.close()  # type: ignore[attr-defined]
                self._loaded.extend(
                    self._steps[each].batch for each in sorted(self._steps) if each > step
                )
                self._steps.clear()
                return

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Inside, the tables hold every update so far, flushed, and no lane touches them."""
        if self._newest >= 0:
            self._engine.settle(self._newest)
        with self._engine.pause(Lane.TABLE):
            for table in self.tables.values():
                table.flush()
            yield

    def moved(self) -> Moved:
        """Inside `settled`: the rows moved by the newest steps that a stale schedule may not have
        seen, as they were before.
        """
        known = dict(self._earlier)
        for step, one in list(self._steps.items()):
            if one.before and step <= self._newest:
                known[self.first_step + step] = {
                    name: (one.buffers[name].keys_U, one.before[name]) for name in one.before
                }
        oldest = self.first_step + self._newest + 1 - self.schedule.staleness
        return {step: rows for step, rows in sorted(known.items()) if step >= oldest}

    def ask_to_stop(self) -> None:
        """End after the next step all ranks agree on (a few steps on: those whose keys are routed
        already are finished).
        """
        self._stop_asked = True

    def close(self) -> None:
        """Stop all lanes; rows are back in the tables, and flushed."""
        running, self._running = self._running, None
        if running is not None:
            running.close()  # type: ignore[attr-defined]
            for table in self.tables.values():
                table.flush()

    # The stages, each called by its lane.

    def _load(self, step: int, micro: int) -> int:
        batch = self._loaded.popleft() if self._loaded else self.work.next_batch()
        if batch is None and self.peers.alone:
            self._engine.end(step)
            return 0
        micros = self.work.cut(batch, self.first_step + step, self.schedule.micro_batches)
        if len(micros) != self.schedule.micro_batches:
            raise ValueError(
                f"the work cut a batch into {len(micros)} parts, not {self.schedule.micro_batches}"
            )
        self._steps[step] = _Step(batch, micros)
        return len(micros)

    def _route(self, step: int, micro: int) -> None:
        now = self._steps[step]
        counted = sum(each.count for each in now.micros)
        now.count, going_on = self.peers.agree(counted, now.batch is not None, self._stop_asked)
        if not going_on:
            self._engine.end(step)
            return
        now.routes = [self.peers.keys.route(each.keys) for each in now.micros]
        if self.peers.replicas > 1:
            now.place_own()
            now.keys = self.peers.union(now.own)

    def _place(self, step: int, micro: int) -> None:
        now = self._steps[step]
        if self.peers.replicas > 1:
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
            rows = self.tables[name].read(keys_U[origin.rest_R] if origin.copies else keys_U)
            now.buffers[name] = RowBuffer.retrieved(keys_U, origin.rest_R, rows)
        for earlier in range(
            self.first_step - 1, self.first_step + step - self.schedule.staleness - 1, -1
        ):
            for name, (keys_U, weights_UD) in self._earlier.get(earlier, {}).items():
                if name in now.buffers:
                    now.buffers[name].lend_older(keys_U, weights_UD)

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
            name: now.buffers[name].lend(places_O) for name, places_O in now.places[micro].items()
        }
        now.lookups[micro] = self.peers.rows.answer(now.routes[micro], rows)

    def _carry(self, step: int, micro: int) -> None:
        now = self._steps[step]
        if now.micros[micro].content is not None:
            now.micros[micro] = self.work.carry(now.micros[micro], now.lookups[micro])

    def _compute(self, step: int, micro: int) -> None:
        now = self._steps[step]
        if now.micros[micro].content is None:
            return
        loss = self.work.loss(now.micros[micro], self.first_step + step, now.lookups[micro])
        (loss / max(now.count, 1)).backward()
        now.loss = loss.detach() if now.loss is None else now.loss + loss.detach()

    def _collect(self, step: int, micro: int) -> None:
        now = self._steps[step]
        collected = self.peers.gradients.collect(now.routes[micro], now.lookups.pop(micro))
        for name, (_, grads_OD) in collected.items():
            places_O, whole = now.own_places[micro][name], now.own[name].numel()
            if name not in now.grads and places_O.numel() == whole:
                now.grads[name] = grads_OD
            else:
                total_UD = now.grads.setdefault(name, grads_OD.new_zeros(whole, grads_OD.shape[1]))
                total_UD.index_add_(0, places_O, grads_OD)
        if micro == len(now.micros) - 1:
            summed = self.peers.sum_replicas(
                {name: (now.own[name], grads_UD) for name, grads_UD in now.grads.items()}
            )
            now.grads = {name: grads_UD for name, (_, grads_UD) in summed.items()}

    def _reduce(self, step: int, micro: int) -> None:
        now = self._steps[step]
        self.work.sum_dense(self.peers.everybody)
        now.loss_sum = self.peers.sum_loss(0.0 if now.loss is None else float(now.loss))

    def _update(self, step: int, micro: int) -> None:
        if self.schedule.moves == "update":
            self._move(step, micro)
        self.work.step_dense(self.first_step + step)

    def _move(self, step: int, micro: int) -> None:
        now = self._steps[step]
        lr = self.work.table_lr(self.first_step + step)
        for name, buffer in now.buffers.items():
            if self.schedule.staleness:
                now.before[name] = buffer.weights_UD.clone()
            buffer.move(self.tables[name].optimizer, now.grads.pop(name), lr)

    def _write(self, step: int, micro: int) -> None:
        for name, buffer in self._steps[step].buffers.items():
            self.tables[name].write(buffer.keys_U, buffer.rows())
        for old in [
            each
            for each in self._steps
            if hazards.kept_until(self.schedule, each) <= step and each < step
        ]:
            del self._steps[old]


def _places(route: Route, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.searchsorted(keys[name], owned_O) for name, owned_O in route.owned.items()}
