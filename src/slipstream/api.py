"""The commands as Python functions: `prepare`, `train`, and a `Run` with its methods.

    import slipstream as ss

    store = ss.prepare("ml-1m", out="data/ml-1m")
    run = ss.train("ml-1m-hstu", data=store, max_steps=2_000)
    print(run.evaluate())
    engine = ss.Engine(run.export("bundles/ml-1m"))

Touch this when a command and its Python function should do more; the work is in the rooms.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slipstream.config import load_recipe
from slipstream.data.preparation import Choices, Progress
from slipstream.data.preparation import prepare as prepare_store
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import check_output, read_json
from slipstream.training.export import export_recommender
from slipstream.training.recipe import Recipe
from slipstream.training.recommendation import Recommendation, recommend_user
from slipstream.training.recommender import Recommender
from slipstream.training.report import write_report
from slipstream.training.run import open_run
from slipstream.training.run import train as train_run
from slipstream.training.run_evaluation import evaluate_run
from slipstream.training.telemetry import is_first_rank


@dataclass(frozen=True)
class Run:
    """A trained run on disk."""

    directory: Path

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "directory", Path(directory))

    @cached_property
    def _opened(self) -> tuple[Recipe, SequenceStore, Recommender]:
        return open_run(self.directory)

    @property
    def recipe(self) -> Recipe:
        """The recipe the run was trained with."""
        return self._opened[0]

    @property
    def store(self) -> SequenceStore:
        """The data the run was trained on."""
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
        repeat: Literal["exclude", "allow"] | None = None,
    ) -> dict[str, float]:
        """Compute metrics on a held-out split and write them to run.json.

        Two more protocols compare retrieval runs: `sampled` is SASRec's old one, `no_request_time`
        hides the time of the request from the model. `repeat` is another rule than the recipe's.
        """
        return evaluate_run(
            self.directory, *self._opened, split, protocol=protocol, repeat=repeat
        ).figures

    def recommend(self, user: int | str, count: int = 10) -> Recommendation:
        """Recommend the best unseen items to a user, who is given by original id."""
        return recommend_user(self.recommender, self.store, self.store.users.row(user), count)

    def export(self, out: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the bundle that serving opens, and return its path.

        `force` replaces an older bundle in `out`; nothing else is ever replaced.
        """
        check_output(out, "bundle", force=force, inputs=[self.directory])
        note = read_json(self.directory / "run.json")
        figures = {name: note[name] for name in ("test", "validation", "step") if name in note}
        export_recommender(
            self.recommender, self.store, out, force=force, inputs=[self.directory], **figures
        )
        return Path(out)

    def report(self) -> Path:
        """Write report.html again and return its path."""
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
    """Prepare a known data set, or a log of your own, as a sequence store.

    The choices are the fields of `data.prepare.Choices`.
    """
    chosen = Choices(source=None if source is None else Path(source), **choices)
    return prepare_store(name, out, chosen, force=force, progress=progress)


def open_store(data: str | os.PathLike[str] | SequenceStore | None) -> SequenceStore:
    """Open a store that is given as itself or as its directory."""
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
    """Train a recipe into `out` (default runs/<name>), resuming what is there.

    The recipe is a path, the name of a shipped one, or a `Recipe`. Settings change keys of it:
    `max_steps=200`, or `model__dim=64` for a full path.
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
