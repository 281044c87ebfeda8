"""The Python face of the commands: `train` returns a `Run`, and a run can evaluate, recommend and
export itself.

import slipstream as ss

store = ss.prepare("ml-1m", out="data/ml-1m")
run = ss.train("ml-1m-hstu", data=store, max_steps=2_000)
print(run.evaluate())
run.export("bundles/ml-1m")
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slipstream.config import load_recipe
from slipstream.data.prepare import Choices, Progress
from slipstream.data.prepare import prepare as prepare_store
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.training.evaluation import evaluate, evaluate_sampled, evaluate_without_request_time
from slipstream.training.export import export_recommender
from slipstream.training.recipe import Recipe
from slipstream.training.recommendation import Recommendation, recommend
from slipstream.training.recommender import Recommender
from slipstream.training.report import write_report
from slipstream.training.run import Evaluate, open_run
from slipstream.training.run import train as train_run
from slipstream.training.telemetry import is_first_rank


@dataclass(frozen=True)
class Run:
    """A trained run on disk."""

    directory: Path

    @cached_property
    def _opened(self) -> tuple[Recipe, SequenceStore, Recommender]:
        return open_run(self.directory)

    @property
    def recipe(self) -> Recipe:
        return self._opened[0]

    @property
    def store(self) -> SequenceStore:
        return self._opened[1]

    @property
    def recommender(self) -> Recommender:
        """The weights of the best validation epoch (the newest where nothing was evaluated)."""
        return self._opened[2]

    def evaluate(
        self,
        split: Literal["validation", "test"] = "test",
        *,
        protocol: Literal["full", "sampled", "no_request_time"] = "full",
    ) -> dict[str, float]:
        """Metrics on a held-out split, noted in run.json.

        `sampled` is SASRec's old protocol, `no_request_time` hides the moment of the request: for
        comparing retrieval runs.
        """
        recipe, store, recommender = self._opened
        if protocol != "full" and recipe.task != "retrieval":
            raise SlipstreamError(
                f"protocol '{protocol}' ranks items, so it needs a retrieval run; leave it away"
            )
        judges: dict[str, Evaluate] = {
            "full": evaluate,
            "sampled": evaluate_sampled,
            "no_request_time": evaluate_without_request_time,
        }
        figures = judges[protocol](recommender, store, recipe, split)
        note = read_json(self.directory / "run.json")
        note[split if protocol == "full" else f"{split}_{protocol}"] = figures
        write_json(self.directory / "run.json", note)
        self.report()
        return figures

    def recommend(self, user: int | str, count: int = 10) -> Recommendation:
        """The best unseen items for a user, by original id."""
        return recommend(self.recommender, self.store, self.store.users.row(user), count)

    def export(self, out: str | os.PathLike[str]) -> str:
        """Write the bundle that serving opens; returns its version."""
        note = read_json(self.directory / "run.json")
        figures = {name: note[name] for name in ("test", "validation", "step") if name in note}
        return export_recommender(self.recommender, self.store, out, **figures)

    def report(self) -> Path:
        """Draw report.html anew."""
        return write_report(self.directory)


def prepare(
    name: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **choices: Any,
) -> SequenceStore:
    """Prepare a known data set or a log of one's own into a sequence store; the choices are those
    of `data.prepare.Choices`.
    """
    chosen = Choices(source=None if source is None else Path(source), **choices)
    return prepare_store(name, out, chosen, force=force, progress=progress)


def open_store(data: str | os.PathLike[str] | SequenceStore | None) -> SequenceStore:
    """A store given as itself or as its directory."""
    if isinstance(data, SequenceStore):
        return data
    if data is None:
        raise SlipstreamError(
            "the recipe names no data; add data=DIR with the directory made by `slipstream data "
            "prepare`"
        )
    return SequenceStore.open(Path(data))


def train(
    recipe: str | os.PathLike[str] | Recipe,
    *overrides: str,
    data: str | os.PathLike[str] | SequenceStore | None = None,
    out: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Train a recipe (by path, by shipped name, or as an object) into `out` (default runs/<name>),
    resuming what is there.

    Settings change keys of the recipe: `max_steps=200`, or `model__dim=64` for a full path.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(Recipe, Path(recipe), overrides, **settings)
    elif overrides or settings:
        raise SlipstreamError(
            "overrides change a recipe file; change the Recipe object itself with model_copy "
            "instead"
        )
    store = open_store(data if data is not None else recipe.data)
    result = train_run(
        recipe, store, Path(out) if out is not None else Path("runs") / recipe.name, quiet=quiet
    )
    if is_first_rank():
        write_report(result.directory)
    return Run(result.directory)
