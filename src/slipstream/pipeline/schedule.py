"""Schedules as data: which stage runs on which lane, how many steps ahead of the update, and after
what.

A step's stages, in the order data passes them:

    load         the next batch, cut into micro-batches (clustered by key); its keys
    route        keys to their owners; the step's global token count; ranks agree whether there is
                 another step
    place        the owner's distinct keys of the whole step, and where each micro-batch's are among
                 them
    retrieve     the owners' rows with their optimiser state, out of the tables into the step's
                 prefetch buffer
    synchronise  rows an earlier step has just moved, copied over from its buffer, so that the
    buffer is current
    answer       a micro-batch's rows to those who asked
    carry        (with an accelerator only) a micro-batch and its rows to the device, by a stream of
                 their own
    compute      forward and backward of a micro-batch
    collect      a micro-batch's row gradients back to the owners (and summed over replicas)
    reduce       dense gradients summed over all ranks
    update       one optimiser step of the dense parameters; without staleness also of the rows,
                 inside the buffer
    refresh      (stale schedules only) rows moved since they were lent, copied before they are
                 moved again
    move         (stale schedules only) one optimiser step of the rows, while later steps compute
    write        the buffer's rows and state back into the tables

A stage with `ahead=a` may work on step t once step t-a-1 has been updated. A lane is a thread (and
a stream on an accelerator): round k runs the lane's stages in their order here, each for step k +
ahead, so the lane's order is the same on every rank. `staleness` is a promise: the rows of step t
have seen every update through step t-1-staleness, and no later one. `slipstream.pipeline.hazards`
proves it from the listed order alone; the engine refuses a schedule that cannot keep its word.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from slipstream.errors import SlipstreamError, did_you_mean


class Lane(StrEnum):
    """A resource that does one thing at a time."""

    LOADER = "loader"
    NETWORK = "network"  # keys
    TABLE = "table"  # the only lane that touches a tier
    BUFFER = "buffer"  # copies between buffers
    ROWS = "rows"  # the exchange of rows
    GRADIENTS = "gradients"  # the exchange of gradients
    DEVICE = "device"  # host to device
    COMPUTE = "compute"  # the caller's own thread
    HOST = "host"  # keys again, once they have arrived


KINDS = {
    Lane.LOADER: "input",
    Lane.NETWORK: "comm",
    Lane.HOST: "lookup",
    Lane.TABLE: "lookup",
    Lane.BUFFER: "lookup",
    Lane.ROWS: "comm",
    Lane.GRADIENTS: "comm",
    Lane.DEVICE: "input",
    Lane.COMPUTE: "compute",
}
PACE = "update"  # the stage that ends a step


@dataclass(frozen=True)
class After:
    """What must have ended before: `stage` of `back` steps ago; of the micro-batch `micro` places
    earlier, or of all (None).
    """

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
    synchronous_steps: int = 0  # the first steps of a run, which have no staleness yet
    serial: bool = False  # every stage in the caller's thread, one after the other

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    def __getitem__(self, stage: str) -> Stage:
        return self._by_name[stage]

    def __contains__(self, stage: str) -> bool:
        return stage in self._by_name

    @property
    def moves(self) -> str:
        """The stage that moves the rows."""
        return "move" if "move" in self else PACE

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


def _stages(
    *,
    load: int,
    route: int,
    retrieve: int,
    place: int | None = None,
    lend: int = 0,
    micro_ahead: int = 2,
) -> tuple[Stage, ...]:
    """The stages of every buffered schedule; the numbers say how many steps ahead each group works,
    `lend` is the staleness.
    """
    lane = (
        Lane.NETWORK if place is None else Lane.HOST
    )  # where nothing is told of it, keys are placed as soon as they arrive
    stages = [
        Stage("load", Lane.LOADER, ahead=load),
        Stage("route", Lane.NETWORK, (After("load"),), ahead=route),
        Stage("place", lane, (After("route"),), ahead=route if place is None else place),
        Stage(
            "retrieve",
            Lane.TABLE,
            (After("place"), After("write", back=retrieve + 1)),
            ahead=retrieve,
        ),
    ]
    lent = After("retrieve")
    if retrieve > lend:
        moved = After("move" if lend else PACE, back=lend + 1)
        stages.append(Stage("synchronise", Lane.BUFFER, (After("retrieve"), moved), ahead=lend))
        lent = After("synchronise")
    stages.append(
        Stage(
            "answer", Lane.ROWS, (lent, After("compute", micro=micro_ahead)), ahead=lend, each=True
        )
    )
    stages.append(Stage("compute", Lane.COMPUTE, (After("answer", micro=0),), each=True))
    return (*stages, *(_exact_end() if lend == 0 else _stale_end()))


def _exact_end() -> tuple[Stage, ...]:
    """Gradients come home, then everything moves at once."""
    return (
        Stage("collect", Lane.GRADIENTS, (After("compute", micro=0),), each=True),
        Stage("reduce", Lane.GRADIENTS, (After("compute"), After("collect"))),
        Stage("update", Lane.COMPUTE, (After("collect"), After("reduce"))),
        Stage("write", Lane.TABLE, (After("update"),), drains=True),
    )


def _stale_end() -> tuple[Stage, ...]:
    """The dense part moves first, so that the next step can compute while the rows' gradients come
    home and the rows move.
    """
    return (
        Stage("reduce", Lane.GRADIENTS, (After("compute"),)),
        Stage("update", Lane.COMPUTE, (After("reduce"),)),
        Stage("collect", Lane.GRADIENTS, (After("compute", micro=0),), each=True, drains=True),
        Stage("refresh", Lane.BUFFER, (After("answer"), After("move", back=1)), drains=True),
        Stage(
            "move", Lane.BUFFER, (After("update"), After("collect"), After("refresh")), drains=True
        ),
        Stage("write", Lane.TABLE, (After("move"),), drains=True),
    )


SYNCHRONOUS = Schedule("synchronous", _stages(load=0, route=0, retrieve=0), serial=True)
DUAL_BUFFER = Schedule("dual_buffer", _stages(load=3, route=2, retrieve=1))
FROZEN_WINDOW = Schedule("frozen_window", _stages(load=1, route=0, retrieve=0), micro_batches=8)
NESTED = Schedule("nested", _stages(load=3, route=2, retrieve=1), micro_batches=8)
SEMI_ASYNC = Schedule("semi_async", _stages(load=4, route=3, retrieve=2, lend=1), staleness=1)
# One batch in each: load, keys to their owners, their places, rows out, compute, gradients home
# (with `ahead` -1, as it were).
SIX_STAGE = Schedule(
    "six_stage", _stages(load=4, route=3, place=2, retrieve=1, lend=1), staleness=1
)
SCHEDULES = {
    each.name: each
    for each in (SYNCHRONOUS, DUAL_BUFFER, FROZEN_WINDOW, NESTED, SEMI_ASYNC, SIX_STAGE)
}
STALE = tuple(name for name, schedule in SCHEDULES.items() if schedule.staleness)


def with_device(schedule: Schedule) -> Schedule:
    """The same schedule with a host-to-device lane between the rows' arrival and compute; it
    promises what it promised.
    """
    carry = Stage(
        "carry", Lane.DEVICE, (After("answer", micro=0),), ahead=schedule["answer"].ahead, each=True
    )
    stages: list[Stage] = []
    for stage in schedule.stages:
        if stage.name == "compute":
            stages += [carry, replace(stage, after=(*stage.after, After("carry", micro=0)))]
        else:
            stages.append(stage)
    return replace(schedule, stages=tuple(stages))


def make_schedule(
    name: str,
    *,
    micro_batches: int | None = None,
    buffers_ahead: int | None = None,
    staleness: int | None = None,
    synchronous_steps: int = 0,
) -> Schedule:
    """A named schedule, perhaps with other numbers: micro-batches, buffers filled ahead, staleness
    and when it begins.
    """
    if name not in SCHEDULES:
        raise SlipstreamError(f"unknown schedule '{name}'{did_you_mean(name, SCHEDULES)}")
    schedule = SCHEDULES[name]
    if micro_batches is not None:
        if micro_batches < 1:
            raise SlipstreamError(f"a step needs at least one micro-batch, got {micro_batches}")
        schedule = replace(schedule, micro_batches=micro_batches)
    if synchronous_steps:
        if not schedule.staleness or synchronous_steps < 0:
            raise SlipstreamError(
                f"schedule '{name}' takes no {synchronous_steps} synchronous steps; only "
                f"{' and '.join(STALE)} have other ones"
            )
        schedule = replace(schedule, synchronous_steps=synchronous_steps)
    if buffers_ahead is None and staleness is None:
        return schedule
    return _with_numbers(schedule, buffers_ahead, staleness)


def _with_numbers(schedule: Schedule, buffers_ahead: int | None, staleness: int | None) -> Schedule:
    """The same schedule with other numbers of buffers and staleness; six_stage lends what it
    retrieves, so it has only one.
    """
    lend = schedule.staleness if staleness is None else staleness
    spare = schedule.buffers_ahead - schedule.staleness
    ahead = (
        (schedule.buffers_ahead if staleness is None else lend + spare)
        if buffers_ahead is None
        else buffers_ahead
    )
    direct = "synchronise" not in schedule
    if (
        schedule.serial
        or schedule.buffers_ahead == 0
        or lend < 0
        or (lend > 0) != (schedule.staleness > 0)
    ):
        possible = False
    else:
        possible = ahead == lend if direct else ahead > lend
    if not possible:
        raise SlipstreamError(
            f"schedule '{schedule.name}' cannot work {ahead} buffers ahead with staleness {lend}; "
            "nested and dual_buffer take "
            "buffers ahead >= 1, semi_async more buffers than staleness, six_stage as many"
        )
    place = lend + 1 if "place" in schedule and schedule["place"].lane == Lane.HOST else None
    extra = 1 if place is not None else 0
    stages = _stages(
        load=ahead + 2 + extra, route=ahead + 1 + extra, place=place, retrieve=ahead, lend=lend
    )
    return replace(schedule, stages=stages, staleness=lend)
