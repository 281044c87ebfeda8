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
from slipstream.files import check_output, read_json, write_json
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
    """A trained run on disk.

    `data` says where its data are, if they were moved since training.
    """

    directory: Path
    data: str | os.PathLike[str] | SequenceStore | None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        data: str | os.PathLike[str] | SequenceStore | None = None,
    ) -> None:
        object.__setattr__(self, "directory", Path(directory))
        object.__setattr__(self, "data", data)

    @cached_property
    def _opened(self) -> tuple[Recipe, SequenceStore, Recommender]:
        return open_run(self.directory, self.data)

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
    ) -> dict[str, float]:
        """Compute metrics on a held-out split and write them to run.json.

        Two more protocols compare retrieval runs: `sampled` is SASRec's old one, `no_request_time`
        hides the time of the request from the model.
        """
        recipe, store, recommender = self._opened
        if protocol != "full" and recipe.task != "retrieval":
            raise SlipstreamError(
                f"protocol '{protocol}' ranks items, so it needs a retrieval run; leave it out"
            )
        protocols: dict[str, Evaluate] = {
            "full": evaluate,
            "sampled": evaluate_sampled,
            "no_request_time": evaluate_without_request_time,
        }
        figures = protocols[protocol](recommender, store, recipe, split)
        note = read_json(self.directory / "run.json")
        note[split if protocol == "full" else f"{split}_{protocol}"] = figures
        write_json(self.directory / "run.json", note)
        self.report()
        return figures

    def recommend(self, user: int | str, count: int = 10) -> Recommendation:
        """Recommend the best unseen items to a user, who is given by original id."""
        return recommend(self.recommender, self.store, self.store.users.row(user), count)

    def export(self, out: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the bundle that serving opens, and return its path; `force` replaces a bundle."""
        check_output(out, "bundle", force=force, inputs=[self.directory, self.store.directory])
        note = read_json(self.directory / "run.json")
        figures = {name: note[name] for name in ("test", "validation", "step") if name in note}
        export_recommender(self.recommender, self.store, out, **figures)
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
    force: bool = False,
    **settings: Any,
) -> Run:
    """Train a recipe into `out` (default runs/<name>), resuming what is there.

    A run of another recipe or of other data is replaced only by `force`. The recipe is a path, the
    name of a shipped one, or a `Recipe`. Settings change keys of it: `max_steps=200`,
    `model__dim=64` for a full path, or `model={"dim": 64}` for a section.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(Recipe, Path(recipe), overrides, **settings)
    elif overrides or settings:
        raise SlipstreamError(
            "overrides change a recipe file; change the Recipe object itself with model_copy "
            "instead"
        )
    store = open_store(data if data is not None else recipe.data)
    run_dir = Path(out) if out is not None else Path("runs") / recipe.name
    result = train_run(recipe, store, run_dir, quiet=quiet, force=force)
    if is_first_rank():
        write_report(result.directory)
    return Run(result.directory)
