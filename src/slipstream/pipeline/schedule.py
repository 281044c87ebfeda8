"""Schedules as data: which stage runs on which lane, how many steps ahead of the update, and after what.

A step's stages, in the order data passes them:

    load         the next batch, cut into micro-batches (clustered by key); its keys
    route        keys to their owners; the step's global token count; ranks agree whether there is another step
    retrieve     the owners' rows with their optimiser state, out of the tables into the step's prefetch buffer
    synchronise  rows an earlier step has just moved, copied over from its buffer, so that the buffer is current
    answer       a micro-batch's rows to those who asked
    compute      forward and backward of a micro-batch
    collect      a micro-batch's row gradients back to the owners
    reduce       gradients summed over ranks: rows over replicas, dense ones over everybody
    refresh      (stale schedules only) rows moved since they were lent, copied before they are moved again
    update       one optimiser step: dense parameters, and rows inside the buffer
    write        the buffer's rows and state back into the tables

A stage with `ahead=a` may work on step t once step t-a-1 has been updated. A lane is a thread (and a stream on an accelerator):
round k runs the lane's stages in their order here, each for step k + ahead, so the lane's order is the same on every rank.
`staleness` is a promise: the rows of step t have seen every update through step t-1-staleness, and no later one.
`slipstream.pipeline.hazards` proves it from the listed order alone; the engine refuses a schedule that cannot keep its word.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from slipstream.errors import SlipstreamError, did_you_mean


class Lane(StrEnum):
    """A resource that does one thing at a time."""

    LOADER = "loader"
    NETWORK = "network"  # keys
    TABLE = "table"  # the only lane that touches a tier
    BUFFER = "buffer"  # copies between buffers
    ROWS = "rows"  # the exchange of rows
    GRADIENTS = "gradients"  # the exchange of gradients
    COMPUTE = "compute"  # the caller's own thread


KINDS = {
    Lane.LOADER: "input",
    Lane.NETWORK: "comm",
    Lane.TABLE: "lookup",
    Lane.BUFFER: "lookup",
    Lane.ROWS: "comm",
    Lane.GRADIENTS: "comm",
    Lane.COMPUTE: "compute",
}
PACE = "update"  # the stage that ends a step


@dataclass(frozen=True)
class After:
    """What must have ended before: `stage` of `back` steps ago; of the micro-batch `micro` places earlier, or of all (None)."""

    stage: str
    back: int = 0
    micro: int | None = None


@dataclass(frozen=True)
class Stage:
    """One kind of work of a step."""

    name: str
    lane: Lane
    after: tuple[After, ...] = ()
    ahead: int = 0
    each: bool = False  # once per micro-batch
    drains: bool = False  # still finishes, after a stop or an error, what is ready


@dataclass(frozen=True)
class Schedule:
    """Stages and what they promise."""

    name: str
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    staleness: int = 0
    serial: bool = False  # every stage in the caller's thread, one after the other

    def __getitem__(self, stage: str) -> Stage:
        return next(each for each in self.stages if each.name == stage)

    def __contains__(self, stage: str) -> bool:
        return any(each.name == stage for each in self.stages)

    @property
    def buffers_ahead(self) -> int:
        """How many steps before its own update a step's rows may be retrieved."""
        return self["retrieve"].ahead

    @property
    def cuts_batches(self) -> bool:
        return self.micro_batches > 1

    def after(self, stage: Stage) -> tuple[After, ...]:
        """All a stage waits for: what it lists, and the pace its `ahead` sets."""
        return (*stage.after, After(PACE, back=stage.ahead + 1))


def _stages(*, load: int, route: int, retrieve: int, lend: int = 0, micro_ahead: int = 2) -> tuple[Stage, ...]:
    """The stages of every buffered schedule; the numbers say how many steps ahead each group works, `lend` is the staleness."""
    copies = retrieve > lend
    lent = After("synchronise") if copies else After("retrieve")
    stages = [
        Stage("load", Lane.LOADER, ahead=load),
        Stage("route", Lane.NETWORK, (After("load"),), ahead=route),
        Stage("retrieve", Lane.TABLE, (After("route"), After("write", back=retrieve + 1)), ahead=retrieve),
    ]
    if copies:
        stages.append(Stage("synchronise", Lane.BUFFER, (After("retrieve"), After(PACE, back=lend + 1)), ahead=lend))
    stages += [
        Stage("answer", Lane.ROWS, (lent, After("compute", micro=micro_ahead)), ahead=lend, each=True),
        Stage("compute", Lane.COMPUTE, (After("answer", micro=0),), each=True),
        Stage("collect", Lane.GRADIENTS, (After("compute", micro=0),), each=True),
        Stage("reduce", Lane.GRADIENTS, (After("compute"), After("collect"))),
    ]
    ready: tuple[After, ...] = (After("collect"), After("reduce"))
    if lend:
        stages.append(Stage("refresh", Lane.BUFFER, (After("answer"), After(PACE, back=1))))
        ready = (*ready, After("refresh"))
    stages.append(Stage("update", Lane.COMPUTE, ready))
    stages.append(Stage("write", Lane.TABLE, (After("update"),), drains=True))
    return tuple(stages)


SYNCHRONOUS = Schedule("synchronous", _stages(load=0, route=0, retrieve=0), serial=True)
DUAL_BUFFER = Schedule("dual_buffer", _stages(load=3, route=2, retrieve=1))
FROZEN_WINDOW = Schedule("frozen_window", _stages(load=1, route=0, retrieve=0), micro_batches=8)
NESTED = Schedule("nested", _stages(load=3, route=2, retrieve=1), micro_batches=8)
SEMI_ASYNC = Schedule("semi_async", _stages(load=4, route=3, retrieve=2, lend=1), staleness=1)
SCHEDULES = {each.name: each for each in (SYNCHRONOUS, DUAL_BUFFER, FROZEN_WINDOW, NESTED, SEMI_ASYNC)}


def make_schedule(
    name: str, *, micro_batches: int | None = None, buffers_ahead: int | None = None, staleness: int | None = None
) -> Schedule:
    """A named schedule, perhaps with other numbers of micro-batches, of buffers filled ahead, or (semi_async) of staleness."""
    if name not in SCHEDULES:
        raise SlipstreamError(f"unknown schedule '{name}'{did_you_mean(name, SCHEDULES)}")
    schedule = SCHEDULES[name]
    if micro_batches is not None:
        if micro_batches < 1:
            raise SlipstreamError(f"a step needs at least one micro-batch, got {micro_batches}")
        schedule = replace(schedule, micro_batches=micro_batches)
    if buffers_ahead is not None or staleness is not None:
        lend = schedule.staleness if staleness is None else staleness
        ahead = (schedule.buffers_ahead if staleness is None else lend + 1) if buffers_ahead is None else buffers_ahead
        if schedule.serial or schedule.buffers_ahead == 0 or lend < 0 or ahead <= lend or (lend and not schedule.staleness):
            raise SlipstreamError(
                f"schedule '{name}' cannot work {ahead} buffers ahead with staleness {lend}; "
                "nested and dual_buffer take buffers ahead >= 1, semi_async more buffers than staleness"
            )
        stages = _stages(load=ahead + 2, route=ahead + 1, retrieve=ahead, lend=lend)
        schedule = replace(schedule, stages=stages, staleness=lend)
    return schedule
