"""Schedules as data: which stage runs on which lane, how many steps ahead, and after what.

The stages of a step, in the order data passes them:

    load         the next batch, cut into micro-batches (clustered by key), and its keys
    route        keys to their owners; the step's global token count; all ranks agree whether there
                 is another step
    place        the owner's distinct keys of the step, and each micro-batch's places among them
    retrieve     the owner's rows with their optimiser state, from the tables into the step's buffer
    synchronise  rows that an earlier step has just updated, copied over from its buffer
    answer       a micro-batch's rows, sent to the ranks that asked for them
    transfer     (with an accelerator only) a micro-batch and its rows, copied to the device
    compute      forward and backward of a micro-batch
    collect      a micro-batch's row gradients, sent back to the owners and summed over replicas
    reduce       dense gradients, summed over all ranks
    update       one optimiser step of the dense parameters; without staleness also of the rows
    refresh      (stale schedules only) rows updated since they were read, copied before the update
    update_rows  (stale schedules only) one optimiser step of the rows, while later steps compute
    write        the buffer's rows and state back into the tables

A stage with `ahead=a` may work on step t once step t-a-1 has been updated. A lane is a thread (and
a stream on an accelerator): round k runs the lane's stages in the order listed, each for step
k + ahead, so a lane's order is the same on every rank. A stage with several `threads` has threads
of its own, which take its steps in turns: retrievals that wait for a far tier wait together.
`staleness` is a promise: the rows of step t have seen every update through step t-1-staleness and
no later one. `hazards.py` proves it from the listed order alone, and the executor refuses a
schedule that does not keep it.

Touch this to add a schedule or a stage. The plain loop (`training/loop.py`) is what users call
`train.schedule=synchronous`; SERIAL runs these stages one after the other, without threads.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from slipstream.errors import SlipstreamError, did_you_mean


class Lane(StrEnum):
    """A resource that does one thing at a time."""

    LOADER = "loader"
    NETWORK = "network"  # exchange of keys
    TABLE = "table"  # reads of the tables, with all its threads; stale schedules also write there
    BUFFER = "buffer"  # copies between buffers
    ROWS = "rows"  # exchange of rows
    GRADIENTS = "gradients"  # exchange of gradients
    DEVICE = "device"  # host to device
    COMPUTE = "compute"  # the caller's own thread
    HOST = "host"  # work on keys after their exchange
    WRITER = "writer"  # write-back of exact schedules, beside the next retrieval


KINDS = {
    Lane.LOADER: "input",
    Lane.NETWORK: "comm",
    Lane.HOST: "lookup",
    Lane.TABLE: "lookup",
    Lane.WRITER: "lookup",
    Lane.BUFFER: "lookup",
    Lane.ROWS: "comm",
    Lane.GRADIENTS: "comm",
    Lane.DEVICE: "input",
    Lane.COMPUTE: "compute",
}
TABLES = (Lane.TABLE, Lane.WRITER)  # the lanes that touch the tables
PACE = "update"  # the stage that ends a step


@dataclass(frozen=True)
class After:
    """A stage that must have ended first, `back` steps ago.

    `micro` is how many micro-batches earlier; None means all micro-batches of that step.
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
    each: bool = False  # runs once per micro-batch
    drains: bool = False  # what is ready is still finished after a stop or an error
    threads: int = 1  # more: threads of its own beside its lane's, which take its steps in turns


@dataclass(frozen=True)
class Schedule:
    """Stages and what they promise."""

    name: str
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    staleness: int = 0
    synchronous_steps: int = 0  # the first steps of a run, which have no staleness yet
    serial: bool = False  # every stage runs in the caller's thread, one after the other

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    def __getitem__(self, stage: str) -> Stage:
        return self._by_name[stage]

    def __contains__(self, stage: str) -> bool:
        return stage in self._by_name

    @property
    def row_update(self) -> str:
        """The stage that updates the rows."""
        return "update_rows" if "update_rows" in self else PACE

    @property
    def buffers_ahead(self) -> int:
        """How many steps before its own update a step's rows may be retrieved."""
        return self["retrieve"].ahead

    @property
    def cuts_batches(self) -> bool:
        return self.micro_batches > 1

    def after(self, stage: Stage) -> tuple[After, ...]:
        """Everything a stage waits for: what it lists, and the pace its `ahead` sets."""
        return (*stage.after, After(PACE, back=stage.ahead + 1))


COMPUTE = Stage("compute", Lane.COMPUTE, (After("answer", micro=0),), each=True)

# Rows read, computed with, updated and written back within one step.
UNBUFFERED = (
    Stage("route", Lane.NETWORK, (After("load"),)),
    Stage("place", Lane.NETWORK, (After("route"),)),
    Stage("retrieve", Lane.TABLE, (After("place"), After("write", back=1))),
    Stage("answer", Lane.ROWS, (After("retrieve"), After("compute", micro=2)), each=True),
    COMPUTE,
)

# Rows of step t+1 are retrieved while step t computes; what t updates is copied over at its end.
DOUBLE_BUFFERED = (
    Stage("load", Lane.LOADER, ahead=3),
    Stage("route", Lane.NETWORK, (After("load"),), ahead=2),
    Stage("place", Lane.NETWORK, (After("route"),), ahead=2),
    Stage("retrieve", Lane.TABLE, (After("place"), After("write", back=2)), ahead=1),
    Stage("synchronise", Lane.BUFFER, (After("retrieve"), After("update", back=1))),
    Stage("answer", Lane.ROWS, (After("synchronise"), After("compute", micro=2)), each=True),
    COMPUTE,
)

# Gradients reach their owners, then dense parameters and rows are updated together. What is written
# back is what no running retrieval reads: its rows are copied between buffers, so neither waits.
UPDATE_TOGETHER = (
    Stage("collect", Lane.GRADIENTS, (After("compute", micro=0),), each=True),
    Stage("reduce", Lane.GRADIENTS, (After("compute"), After("collect"))),
    Stage("update", Lane.COMPUTE, (After("collect"), After("reduce"))),
    Stage("write", Lane.WRITER, (After("update"),), drains=True),
)

# The dense part is updated first: the next step computes while rows get their gradients and update.
UPDATE_ROWS_LATER = (
    Stage("reduce", Lane.GRADIENTS, (After("compute"),)),
    Stage("update", Lane.COMPUTE, (After("reduce"),)),
    Stage("collect", Lane.GRADIENTS, (After("compute", micro=0),), each=True, drains=True),
    Stage("refresh", Lane.BUFFER, (After("answer"), After("update_rows", back=1)), drains=True),
    Stage(
        "update_rows",
        Lane.BUFFER,
        (After("update"), After("collect"), After("refresh")),
        drains=True,
    ),
    Stage("write", Lane.TABLE, (After("update_rows"),), drains=True),
)

SERIAL = Schedule(
    "serial",
    stages=(Stage("load", Lane.LOADER), *UNBUFFERED, *UPDATE_TOGETHER),
    serial=True,
)

FROZEN_WINDOW = Schedule(
    "frozen_window",
    stages=(Stage("load", Lane.LOADER, ahead=1), *UNBUFFERED, *UPDATE_TOGETHER),
    micro_batches=8,
)

DUAL_BUFFER = Schedule("dual_buffer", stages=(*DOUBLE_BUFFERED, *UPDATE_TOGETHER))

NESTED = Schedule("nested", stages=(*DOUBLE_BUFFERED, *UPDATE_TOGETHER), micro_batches=8)

SEMI_ASYNC = Schedule(
    "semi_async",
    staleness=1,
    stages=(
        Stage("load", Lane.LOADER, ahead=4),
        Stage("route", Lane.NETWORK, (After("load"),), ahead=3),
        Stage("place", Lane.NETWORK, (After("route"),), ahead=3),
        Stage("retrieve", Lane.TABLE, (After("place"), After("write", back=3)), ahead=2),
        Stage(
            "synchronise",
            Lane.BUFFER,
            (After("retrieve"), After("update_rows", back=2)),
            ahead=1,
        ),
        Stage(
            "answer",
            Lane.ROWS,
            (After("synchronise"), After("compute", micro=2)),
            ahead=1,
            each=True,
        ),
        COMPUTE,
        *UPDATE_ROWS_LATER,
    ),
)

# One batch in each of six stages: load, route, place, retrieve and answer, compute, collect.
SIX_STAGE = Schedule(
    "six_stage",
    staleness=1,
    stages=(
        Stage("load", Lane.LOADER, ahead=4),
        Stage("route", Lane.NETWORK, (After("load"),), ahead=3),
        Stage("place", Lane.HOST, (After("route"),), ahead=2),
        Stage("retrieve", Lane.TABLE, (After("place"), After("write", back=2)), ahead=1),
        Stage(
            "answer",
            Lane.ROWS,
            (After("retrieve"), After("compute", micro=2)),
            ahead=1,
            each=True,
        ),
        COMPUTE,
        *UPDATE_ROWS_LATER,
    ),
)

SCHEDULES = {
    each.name: each for each in (SERIAL, DUAL_BUFFER, FROZEN_WINDOW, NESTED, SEMI_ASYNC, SIX_STAGE)
}
STALE = tuple(name for name, schedule in SCHEDULES.items() if schedule.staleness)


def with_device(schedule: Schedule) -> Schedule:
    """Add the lane that copies rows to an accelerator; the schedule promises what it promised."""
    transfer = Stage(
        "transfer",
        Lane.DEVICE,
        (After("answer", micro=0),),
        ahead=schedule["answer"].ahead,
        each=True,
    )
    stages: list[Stage] = []
    for stage in schedule.stages:
        if stage.name == "compute":
            stages += [transfer, replace(stage, after=(*stage.after, After("transfer", micro=0)))]
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
    """Return the schedule of this name, with other numbers where they are given."""
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
    """Return the same schedule with other numbers of buffers and of steps of staleness."""
    stale = schedule.staleness if staleness is None else staleness
    older = stale - schedule.staleness
    ahead = schedule.buffers_ahead + older if buffers_ahead is None else buffers_ahead
    if not _possible(schedule, ahead, stale):
        raise SlipstreamError(
            f"schedule '{schedule.name}' cannot work {ahead} buffers ahead with staleness {stale}; "
            "nested and dual_buffer take buffers ahead >= 1, semi_async more buffers than "
            "staleness, six_stage as many"
        )
    further = ahead - schedule.buffers_ahead
    shifts = {
        **dict.fromkeys(("load", "route", "place", "retrieve"), further),
        **dict.fromkeys(("synchronise", "answer"), older),
    }
    stages = tuple(
        replace(
            _shift(stage, shifts.get(stage.name, 0)),
            # As many retrievals at a time as buffers are filled. With staleness their order counts.
            threads=ahead if stage.name == "retrieve" and not stale else stage.threads,
        )
        for stage in schedule.stages
    )
    return replace(schedule, stages=stages, staleness=stale)


def _possible(schedule: Schedule, ahead: int, staleness: int) -> bool:
    """Whether a schedule's stages allow these numbers."""
    if schedule.serial or schedule.buffers_ahead == 0 or staleness < 0:
        return False
    if (staleness > 0) != (schedule.staleness > 0):
        return False
    return ahead > staleness if "synchronise" in schedule else ahead == staleness


def _shift(stage: Stage, steps: int) -> Stage:
    """Let a stage work `steps` further ahead, and wait for steps that are as much further back."""
    after = tuple(
        replace(each, back=each.back + steps) if each.back else each for each in stage.after
    )
    return replace(stage, ahead=stage.ahead + steps, after=after)
