"""The search of `slipstream tune`: trials over recipe keys, chosen by validation only.

    tune.json    what is searched, and each trial: settings, status, its figures
    best.yaml    the recipe of the best trial
    trial-000/   an ordinary run, and so on
    report.html  the curves of the trials side by side

Without halving every trial trains to its end. With it, trials pause after a share of their length;
the best third goes on, as the same runs: a trial that gets to its end is, bit for bit, the run of
its recipe. The same search in the same directory goes on where it stopped. Touch this when trials
are chosen in another way; the ranges are in search_space.py.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from rich.console import Console

from slipstream.config import check, flatten, merge_settings
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import atomic_file, check_output, kind_of_directory, read_json, write_json
from slipstream.training.callbacks import Callback, TrainingSession
from slipstream.training.checkpoint import latest, read_state
from slipstream.training.fitted_recipe import fit_recipe
from slipstream.training.loop import figure_of_merit
from slipstream.training.recipe import Recipe, trained_digest
from slipstream.training.report import write_comparison, write_report
from slipstream.training.run import stop_signals, train
from slipstream.training.run_directory import LOCK, sole_user
from slipstream.training.search_space import Range, draw_settings
from slipstream.training.telemetry import read_metrics

NOTE, BEST_RECIPE = "tune.json", "best.yaml"
PART = 3  # of so many trials one goes on
WAITING, PAUSED, FAILED = "waiting", "paused", "failed"


@dataclass
class TuneTrial:
    """One recipe of a search and what became of it."""

    number: int
    settings: dict[str, Any]
    status: str = WAITING  # then: paused, or how its run ended
    rungs: list[float | None] = field(default_factory=list)  # the figure after each share
    total_steps: int = 0  # of its run; 0 before it has started
    step: int = 0  # of the evaluation up to which it is compared
    best_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of its best validation
    problem: str = ""

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"trial-{self.number:03d}"

    @property
    def value(self) -> float | None:
        """The figure it is chosen by, as far as it got."""
        return self.rungs[-1] if self.rungs else None


@dataclass(frozen=True)
class TuneResult:
    """A search: its trials, the best first."""

    directory: Path
    metric: str
    trials: list[TuneTrial]
    finished: bool

    @property
    def frame(self) -> pl.DataFrame:
        """A row per trial: settings, the figure it is chosen by, where it stands."""
        rows = [
            {
                "trial": one.name,
                **{key: _cell(value) for key, value in one.settings.items()},
                self.metric: one.value,
                "best_step": one.best_step,
                "step": one.step,
                "status": one.status,
            }
            for one in self.trials
        ]
        return pl.DataFrame(rows, infer_schema_length=None, strict=False)

    @property
    def best(self) -> TuneTrial | None:
        """The best trial that got to its end."""
        not_ended = (WAITING, PAUSED, FAILED)
        return next((one for one in self.trials if one.status not in not_ended), None)


class TrialCallback(Callback):
    """Shows a trial's evaluations and pauses it at the first one after a share of its steps."""

    def __init__(self, trial: TuneTrial, share: float, search: "Search") -> None:
        self.trial, self.share, self.search = trial, share, search
        self.paused = False

    def on_start(self, session: TrainingSession) -> None:
        self.trial.total_steps = session.total_steps
        self.search.write()

    def on_evaluation(
        self, session: TrainingSession, figures: dict[str, float], is_best: bool
    ) -> None:
        value = figure_of_merit(session.recipe, figures)
        self.search.say(
            f"  step {session.step:,} of {session.total_steps:,}: {self.search.metric} {value:.4f}"
        )
        if self.share < 1 and session.step >= pause_step(self.share, session.total_steps):
            self.paused = True
            session.stop()


def pause_step(share: float, total_steps: int) -> int:
    """Return the step at or after which the next evaluation ends a share of a run."""
    return math.ceil(share * total_steps)


def tune(
    recipe: Recipe,
    store: SequenceStore,
    out: Path,
    space: Mapping[str, Range],
    *,
    trials: int,
    halving: bool = False,
    seed: int = 0,
    say: Callable[[str], object] = lambda sentence: None,
) -> TuneResult:
    """Search `space` around a recipe, resuming what is in `out`; `say` takes lines of progress."""
    if not recipe.train.evaluate_every:
        raise SlipstreamError(
            "tune chooses by validation, but train.evaluate_every is 0; give an interval such as "
            "train.evaluate_every=1"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SlipstreamError("tune runs its trials in one process; start it without torchrun")
    if trials < 1:
        raise SlipstreamError(f"a search has at least one trial, got {trials}")
    recipe, _ = fit_recipe(recipe, store, out)
    drawn = draw_settings(space, trials, seed)
    if len(drawn) < trials:
        say(f"the space holds no more than {len(drawn)} settings; each is tried once")
    identity = {
        "recipe": trained_digest(recipe),
        "length": [recipe.train.epochs, recipe.train.max_steps, recipe.train.patience],
        "store": store.digest,
        "space": {key: str(one) for key, one in sorted(space.items())},
        "seed": seed,
        "halving": len(drawn) if halving else 0,  # shares depend on the number of trials
    }
    unfinished = out.is_dir() and [path.name for path in out.iterdir()] == [LOCK]
    if kind_of_directory(out) != "tune" and not unfinished:
        check_output(out, "tune", inputs=[store.directory])
        out.mkdir(parents=True, exist_ok=True)
    with sole_user(out), stop_signals() as stop:
        search = Search(recipe, store, out, identity, drawn, say)
        for rung, (share, keep) in enumerate(rungs(len(drawn), halving=halving)):
            if not search.run_rung(rung, share, keep, stop.is_set):
                return search.result(finished=False)
        return search.finish()


def rungs(trials: int, *, halving: bool) -> list[tuple[float, int]]:
    """Return (share of a run's length, trials that get there), the last share being the whole."""
    counts = [trials]
    while halving and counts[-1] >= PART:
        counts.append(counts[-1] // PART)
    last = len(counts) - 1
    return [(PART ** (place - last), count) for place, count in enumerate(counts)]


class Search:
    """The state of a search, in memory and in tune.json."""

    def __init__(
        self,
        recipe: Recipe,
        store: SequenceStore,
        out: Path,
        identity: dict[str, Any],
        drawn: list[dict[str, Any]],
        say: Callable[[str], object],
    ) -> None:
        self.recipe, self.store, self.out, self.identity = recipe, store, out, identity
        self.say = say
        known = _read_trials(out, identity)
        self.trials = [
            known.get(number, TuneTrial(number, settings)) for number, settings in enumerate(drawn)
        ]
        self.recipes = {trial.number: self._recipe(trial) for trial in self.trials}
        if all(trial.status == FAILED for trial in self.trials):
            raise SlipstreamError(f"no trial can run: {self.trials[0].problem}")
        self.write()

    def _recipe(self, trial: TuneTrial) -> Recipe:
        """Return the recipe of a trial; one that is refused makes it fail."""
        values = self.recipe.model_dump(mode="json")
        settings = {"name": f"{self.recipe.name}-{trial.name}", **trial.settings}
        try:
            return check(Recipe, merge_settings(Recipe, values, settings, trial.name), trial.name)
        except SlipstreamError as error:
            trial.status, trial.problem = FAILED, str(error)
            return self.recipe

    def write(self) -> None:
        """Write tune.json, whole or not at all."""
        trials = [asdict(trial) for trial in self.trials]
        write_json(
            self.out / NOTE,
            {
                "name": self.recipe.name,
                "metric": self.metric,
                "identity": self.identity,
                "trials": trials,
            },
        )

    @property
    def metric(self) -> str:
        """What trials are chosen by, in words."""
        usual = "AUC of all tasks" if self.recipe.task == "ranking" else "HR@10+NDCG@10"
        return self.recipe.train.metric or usual

    def run_rung(self, rung: int, share: float, keep: int, stopped: Callable[[], bool]) -> bool:
        """Let the best `keep` trials run to a share of their length; False when asked to stop.

        The next one is looked for after each: a trial that fails makes room for another.
        """
        while (trial := self._next(rung, keep)) is not None:
            if stopped() or not self._run(trial, share):
                return False
            self.write()
        return True

    def _next(self, rung: int, keep: int) -> TuneTrial | None:
        """Return a trial that must still run in a rung; it is chosen by the rung before."""
        able = [one for one in self.trials if one.status != FAILED and len(one.rungs) >= rung]
        if rung:
            able = sorted(able, key=lambda one: _order(one.rungs[rung - 1], one.number))[:keep]
        left = [one.number for one in able if len(one.rungs) == rung]
        return self.trials[min(left)] if left else None

    def _run(self, trial: TuneTrial, share: float) -> bool:
        """Train one trial up to a share of its length; False when the user stopped it."""
        directory, recipe = self.out / trial.name, self.recipes[trial.number]
        part = "" if share == 1 else f" up to {share:.0%} of its length"
        told = ", ".join(f"{key}={value}" for key, value in trial.settings.items())
        self.say(f"trial {trial.number + 1} of {len(self.trials)}{part}: {told}")

        pause, status = TrialCallback(trial, share, self), self._status_there(trial, share)
        try:
            if status is None:
                done = train(recipe, self.store, directory, quiet=True, callbacks=[pause])
                if done.status == "interrupted" and not pause.paused:
                    return False
                status = PAUSED if pause.paused else done.status
                if not pause.paused:
                    write_report(directory)
        except SlipstreamError as error:
            if error.__cause__ is not None:  # a full disk, a callback: not the trial's fault
                raise
            trial.status, trial.problem = FAILED, str(error)
            self.say(f"  failed: {error}")
            return True
        self._record(trial, share, status)
        return True

    def _status_there(self, trial: TuneTrial, share: float) -> str | None:
        """Return the status of a trial that has got to a share already, by its files; else None."""
        if trial.status not in (WAITING, PAUSED):
            return trial.status
        newest = latest(self.out / trial.name / "checkpoints")
        reached = self._evaluated_at(trial, share)
        if newest is None or reached is None:
            return None
        return PAUSED if read_state(newest)["progress"]["step"] >= reached else None

    def _evaluated_at(self, trial: TuneTrial, share: float) -> int | None:
        """Return the step of the evaluation that ends a share; None before it."""
        if share == 1 or not trial.total_steps:
            return None
        target = pause_step(share, trial.total_steps)
        steps = (line["step"] for line in self._evaluations(trial))
        return next((step for step in steps if step >= target), None)

    def _evaluations(self, trial: TuneTrial) -> list[dict[str, Any]]:
        lines = read_metrics(self.out / trial.name / "metrics.jsonl")
        return [line for line in lines if line.get("validation")]

    def _record(self, trial: TuneTrial, share: float, status: str) -> None:
        """Keep the best figure of a trial up to the evaluation that ends its share."""
        recipe, last = self.recipes[trial.number], self._evaluated_at(trial, share)
        seen = [line for line in self._evaluations(trial) if last is None or line["step"] <= last]
        figures = [(figure_of_merit(recipe, line["validation"]), line) for line in seen]
        known = [one for one in figures if not math.isnan(one[0])]
        value = None
        if known:
            value, best = max(known, key=lambda one: (one[0], -one[1]["step"]))
            trial.best_step, trial.metrics = best["step"], best["validation"]
        trial.rungs.append(value)
        trial.step = seen[-1]["step"] if seen else 0
        trial.status = status

    def result(self, *, finished: bool) -> TuneResult:
        """Return the search as it stands, the best trial first."""
        return TuneResult(self.out, self.metric, rank_trials(self.trials), finished)

    def finish(self) -> TuneResult:
        """Write the recipe of the best trial and the page of all of them."""
        result = self.result(finished=True)
        if result.best is None:
            raise SlipstreamError(
                f"every trial failed, the first one with: {self.trials[0].problem}; search "
                "smaller values"
            )
        recipe = self.recipes[result.best.number]
        tuned = recipe.model_copy(update={"name": f"{self.recipe.name}-tuned"})
        with atomic_file(self.out / BEST_RECIPE) as path:
            content = yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False)
            path.write_text(content, encoding="utf-8")
        runs = [self.out / trial.name for trial in result.trials]
        drawn = [run for run in runs if kind_of_directory(run) == "run"]
        write_comparison(drawn, self.out / "report.html")
        return result


def print_progress(sentence: str) -> None:
    """Print a line of progress where the progress of runs is shown."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(sentence)


def rank_trials(trials: list[TuneTrial]) -> list[TuneTrial]:
    """Return trials, the best first: those that got farther, then by their figure."""
    return sorted(
        trials,
        key=lambda one: (one.status == FAILED, -len(one.rungs), _order(one.value, one.number)),
    )


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else str(value)


def _order(value: float | None, number: int) -> tuple[float, int]:
    """Return what sorts by figure, best first; no figure comes last."""
    return (math.inf if value is None else -value, number)


def _read_trials(out: Path, identity: dict[str, Any]) -> dict[int, TuneTrial]:
    """Return the trials of a search that is there; another search is refused."""
    if not (out / NOTE).exists():
        return {}
    note = read_json(out / NOTE)
    old, new = flatten(note["identity"]), flatten(identity)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        told = changed[0].partition(".")[0]
        raise SlipstreamError(
            f"{out} holds another search (its {told} differs); choose another directory"
        )
    return {one["number"]: TuneTrial(**one) for one in note["trials"]}
