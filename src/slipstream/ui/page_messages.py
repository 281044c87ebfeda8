"""The messages of the page's own process: runs, their curves and traces, slices, people.

Touch this when one of them gets a field; the page in static/ reads them by these names.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Points = list[list[float]]  # [step, value]


class RunRow(msgspec.Struct):
    """One run in a table."""

    run: str  # its directory, seen from the directory that is shown
    recipe: str
    data: str
    model: str
    schedule: str
    status: str
    step: int
    epoch: int
    seconds: float
    age_seconds: float
    validation: dict[str, float]  # of the best evaluation
    test: dict[str, float]
    tokens_per_second: float | None = None
    mfu: float | None = None
    exposed: float | None = None  # share of a step that waits for lookups and messages
    trace: bool = False
    slices: bool = False


class RunsAnswer(msgspec.Struct):
    """The runs below the directory that is shown, the newest first."""

    directory: str
    runs: list[RunRow]


class SliceRow(msgspec.Struct):
    """Quality in one group of held-out behaviours."""

    by: str
    least: int
    most: int
    users: int
    figures: dict[str, float]


class RunAnswer(msgspec.Struct):
    """A run: its figures, its recipe with full keys, its curves by name, its slices."""

    row: RunRow
    recipe_keys: dict[str, str]
    curves: dict[str, Points]
    slices: list[SliceRow]


class TraceBlock(msgspec.Struct):
    """One task as it ran: lane, stage, step, micro-batch, when, and what it waited for."""

    lane: str
    kind: str
    stage: str
    step: int
    micro: int
    begin_ms: float
    end_ms: float
    waited_ms: float
    waited_for: str | None = None


class TraceAnswer(msgspec.Struct):
    """The last steps of a run's pipeline, and shares of all its recorded steps."""

    run: str
    schedule: str
    lanes: list[str]
    blocks: list[TraceBlock]
    span_ms: float
    step_ms: float | None
    shares: dict[str, float]


class PeopleAnswer(msgspec.Struct):
    """Users of a slice, and how many behaviours each had when the held-out one came."""

    users: list[str]
    behaviours: list[int]


ScheduleName = Literal[
    "serial", "dual_buffer", "frozen_window", "nested", "semi_async", "six_stage"
]


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A cluster to simulate: its size, its network, the batch of a worker, schedules to compare."""

    workers: Annotated[int, Meta(ge=1, le=2_048)] = 64
    network_gb_per_s: Annotated[float, Meta(ge=0.1, le=400)] = 12.5
    samples: Annotated[int, Meta(ge=1, le=512)] = 64
    schedules: Annotated[list[ScheduleName], Meta(min_length=1, max_length=3)] = msgspec.field(
        default_factory=lambda: ["serial", "nested"]
    )


class ScaleRow(msgspec.Struct):
    """One schedule on the simulated cluster; shares are of a step."""

    schedule: str
    step_ms: float
    samples_per_second: float
    efficiency: float  # per worker, against one node with the same schedule
    compute_utilisation: float
    exposed_lookup: float
    exposed_comm: float
    imbalance: float
    bound: str  # the lane that works longest
    timeline: TraceAnswer


class ScaleAnswer(msgspec.Struct):
    """The schedules side by side, and the command that simulates the cluster."""

    rows: list[ScaleRow]
    global_batch: int
    command: str
