"""What the files of runs say: rows of a table, curves, traces, slices, people of a slice.

Only runs below one directory are read, named as they are seen from it. Touch this when the page
should know more of a run.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.serving.request_errors import BadRequest
from slipstream.training.comparison import RunSummary, find_runs
from slipstream.ui import page_messages as pm

if TYPE_CHECKING:
    from slipstream.pipeline.trace import Interval

MOST_POINTS = 1_000  # of a curve
MOST_BLOCKS = 6_000  # of a trace
SPEEDS = ("tokens_per_second", "mfu")
EXPOSED = ("exposed_lookup", "exposed_comm")
LENGTH, POPULARITY = "history length", "target popularity"


class RunRecords:
    """The runs below a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def runs(self) -> pm.RunsAnswer:
        """Return a row for every run, the newest first."""
        rows = [self._row(summary) for summary in find_runs(self.directory)]
        return pm.RunsAnswer(str(self.directory), rows)

    def run(self, name: str) -> pm.RunAnswer:
        """Return one run with its curves and slices."""
        summary = self._find(name)
        place = Path(summary.directory)
        note = read_json(place / "run.json")
        keys = {key: _shown(value) for key, value in summary.recipe.items()}
        return pm.RunAnswer(
            self._row(summary), keys, curves(_metrics(place)), slices(note.get("test_slices") or [])
        )

    def trace(self, name: str, steps: int) -> pm.TraceAnswer:
        """Return the last whole steps of a run's trace."""
        place = Path(self._find(name).directory)
        if not (place / "trace.json").exists():
            raise BadRequest(
                f"run '{name}' left no trace; train with a schedule that has lanes, such as "
                "train.schedule=nested"
            )
        return read_blocks(place / "trace.json", name, steps)

    def people(self, name: str, by: str, least: int, most: int, limit: int) -> pm.PeopleAnswer:
        """Return users whose held-out behaviour is in a slice, those with most behaviours first."""
        from slipstream.training.held_out import held_out_behaviours
        from slipstream.training.popularity import item_counts
        from slipstream.training.run_directory import find_store, read_recipe

        place = Path(self._find(name).directory)
        if by not in (LENGTH, POPULARITY):
            raise BadRequest(f"slices are by '{LENGTH}' or '{POPULARITY}', not by '{by:.80}'")
        store, recipe = find_store(place), read_recipe(place)
        held_out = held_out_behaviours(store, recipe, "test")
        values = held_out.known_S
        if by == POPULARITY:
            values = item_counts(store, recipe)[held_out.items_S]
        inside = ((values >= least) & (values <= most)).nonzero().squeeze(1)
        order = held_out.known_S[inside].argsort(descending=True, stable=True)
        found: dict[str, int] = {}
        for at in inside[order].tolist():
            user = str(store.users.id(int(held_out.users_S[at])))
            found.setdefault(user, int(held_out.known_S[at]))
            if len(found) == limit:
                break
        return pm.PeopleAnswer(list(found), list(found.values()))

    # ---- parts -----------------------------------------------------------------------------------

    def _name(self, summary: RunSummary) -> str:
        return Path(summary.directory).relative_to(self.directory).as_posix()

    def _find(self, name: str) -> RunSummary:
        for summary in find_runs(self.directory):
            if self._name(summary) == name:
                return summary
        raise SlipstreamError(f"no run is called '{name:.200}' in {self.directory}")

    def _row(self, summary: RunSummary) -> pm.RunRow:
        place, recipe = Path(summary.directory), summary.recipe
        records = _metrics(place)
        latest = _latest(records)
        exposed = [latest[figure] for figure in EXPOSED if figure in latest]
        model = " ".join(
            str(recipe[key]) for key in ("model.kind", "model.dim", "model.blocks") if key in recipe
        )
        return pm.RunRow(
            self._name(summary),
            summary.name,
            Path(summary.data).name,
            model,
            str(recipe.get("train.schedule", "")),
            summary.status,
            max(summary.step, *(int(record["step"]) for record in records), 0),
            summary.epoch,
            summary.seconds,
            summary.age_seconds,
            _finite(summary.validation),
            _finite(summary.test),
            tokens_per_second=latest.get("tokens_per_second"),
            mfu=latest.get("mfu"),
            exposed=sum(exposed) if exposed else None,
            trace=(place / "trace.json").exists(),
            slices="test_slices" in read_json(place / "run.json"),
        )


def _metrics(place: Path) -> list[dict[str, Any]]:
    from slipstream.training.telemetry import read_metrics

    return read_metrics(place / "metrics.jsonl")


def _latest(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each speed over the second half of a run, which has no start in it."""
    found = {}
    for name in (*SPEEDS, *EXPOSED):
        values = [record[name] for record in records if isinstance(record.get(name), int | float)]
        later = sorted(values[len(values) // 2 :])
        if later:
            found[name] = float(later[len(later) // 2])
    return found


def curves(records: list[dict[str, Any]]) -> dict[str, pm.Points]:
    """Return each figure of the records over the steps, thinned to `MOST_POINTS`."""
    found: dict[str, pm.Points] = {}
    for record in records:
        evaluated = record.get("validation")
        values = evaluated if isinstance(evaluated, Mapping) else record
        prefix = "validation " if isinstance(evaluated, Mapping) else ""
        for name, value in values.items():
            if name in ("step", "epoch", "best") or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                found.setdefault(prefix + name, []).append([float(record["step"]), float(value)])
    return {name: thinned(points) for name, points in found.items()}


def thinned(points: pm.Points) -> pm.Points:
    """Return at most `MOST_POINTS` points, evenly spread, the last one among them."""
    if len(points) <= MOST_POINTS:
        return points
    step = len(points) / MOST_POINTS
    return [points[int(place * step)] for place in range(MOST_POINTS - 1)] + [points[-1]]


def slices(rows: list[dict[str, Any]]) -> list[pm.SliceRow]:
    """Return the slices of an evaluation."""
    told = {"by", "from", "to", "users"}
    return [
        pm.SliceRow(
            row["by"],
            int(row["from"]),
            int(row["to"]),
            int(row["users"]),
            _finite({name: value for name, value in row.items() if name not in told}),
        )
        for row in rows
    ]


def read_blocks(path: Path, name: str, steps: int) -> pm.TraceAnswer:
    """Return the blocks of a trace's last whole steps, on an axis that begins with them."""
    from slipstream.pipeline.schedule import PACE
    from slipstream.pipeline.trace import read_trace, shares

    intervals, about = read_trace(path)
    ends = {each.step: each.end for each in intervals if each.stage == PACE}
    last = max(ends, default=0)
    first = max(min(ends, default=0), last - steps)
    begin, end = ends.get(first, 0.0), ends.get(last, 0.0)
    lanes, blocks = blocks_between(intervals, begin, end)
    found = shares(intervals)
    return pm.TraceAnswer(
        name,
        str(about.get("schedule", "unknown")),
        lanes,
        blocks,
        1e3 * (end - begin),
        1e3 * found["step_seconds"] if found else None,
        found,
    )


def blocks_between(
    intervals: "Sequence[Interval]", begin: float, end: float
) -> tuple[list[str], list[pm.TraceBlock]]:
    """Return the lanes that work between two moments, and what ran there, from the first on."""
    from slipstream.pipeline.schedule import Lane

    shown = [each for each in intervals if each.end > begin and each.begin < end]
    lanes = [str(lane) for lane in Lane if any(each.lane == lane for each in shown)]
    blocks = [
        pm.TraceBlock(
            str(each.lane),
            each.kind,
            each.stage,
            each.step,
            each.micro,
            max(0.0, 1e3 * (each.begin - begin)),
            1e3 * (min(each.end, end) - begin),
            1e3 * (each.begin - each.ready),
            None if each.cause is None else "{} of step {}, micro-batch {}".format(*each.cause),
        )
        for each in shown
    ]
    return lanes, blocks[-MOST_BLOCKS:]


def _finite(figures: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
