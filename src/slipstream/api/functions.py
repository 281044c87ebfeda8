"""The functions of `import slipstream as ss` besides `prepare`: train, tune, load, compare.

    store = ss.prepare("events.csv", user="customer", item="sku", time="when")
    run = ss.train(store, model={"dim": 32}, epochs=3)
    ss.load("runs/events").recommend("c/0042")

Touch this when a command and its Python function should do more; the work is in the rooms.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from slipstream.api.arguments import clear_arguments, in_python_words, path_of
from slipstream.api.bundle_model import BundleModel
from slipstream.api.trained_run import Run
from slipstream.config import load_recipe
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import kind_of_directory
from slipstream.training.callbacks import Callback
from slipstream.training.comparison import compare_runs
from slipstream.training.own_functions import (
    NO_FUNCTIONS,
    LossFunction,
    MetricFunction,
    OwnFunctions,
    own_metrics,
)
from slipstream.training.popularity import BASELINE
from slipstream.training.recipe import Recipe
from slipstream.training.report import COUNTS, SHARES, write_comparison, write_report
from slipstream.training.run import train as train_run
from slipstream.training.search_space import parse_space
from slipstream.training.telemetry import is_first_rank
from slipstream.training.tuning import TuneResult, print_progress
from slipstream.training.tuning import tune as tune_recipe

DEFAULT_RECIPE = "retrieval-default"
PathLike = str | os.PathLike[str]


def open_store(data: PathLike | SequenceStore | None) -> SequenceStore:
    """Open a store that is given as itself or as its directory."""
    if isinstance(data, SequenceStore):
        return data
    if data is None:
        raise SlipstreamError(
            "the recipe names no data; add data=DIR with the directory made by `slipstream data "
            "prepare`"
        )
    return SequenceStore.open(path_of("data", data))


@clear_arguments()
def train(
    what: PathLike | SequenceStore | Recipe | None = None,
    *overrides: str,
    recipe: PathLike | Recipe | None = None,
    data: PathLike | SequenceStore | None = None,
    out: PathLike | None = None,
    quiet: bool = False,
    force: bool = False,
    metric: str | MetricFunction | Collection[MetricFunction] | None = None,
    loss: str | LossFunction | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Train a model into `out` (default runs/<name>), resuming what is there.

    A run of another recipe or on other data is replaced only by `force`.

    `what` is a store, which the recipe `retrieval-default` then fits to, or a recipe: a path, the
    name of a shipped one, or a `Recipe`, with `data` as its store. Settings change keys of the
    recipe: `epochs=3`, `model={"dim": 32}` or `model__dim=32`. `metric` and `loss` are such
    settings too, or functions of your own: `MetricFunction`s, whose figures are recorded beside
    the others and may be named by `train__metric`, and a `LossFunction`. `callbacks` are called at
    the events of the run (`ss.training.Callback`).
    """
    own = OwnFunctions(
        {} if isinstance(metric, str) else own_metrics(metric), loss if callable(loss) else None
    )
    settings |= {"metric": metric} if isinstance(metric, str) else {}
    settings |= {"loss": loss} if loss is not None and own.loss is None else {}
    recipe, data = _recipe_and_data(what, recipe, data)
    with in_python_words():
        if recipe is None and "name" not in settings:
            store = data = open_store(data)
            settings["name"] = store.directory.resolve().name
        return train_recipe(
            DEFAULT_RECIPE if recipe is None else recipe,
            *overrides,
            data=data,
            out=out,
            quiet=quiet,
            force=force,
            own=own,
            callbacks=callbacks,
            **settings,
        )


def train_recipe(
    recipe: PathLike | Recipe,
    *overrides: str,
    data: PathLike | SequenceStore | None = None,
    out: PathLike | None = None,
    quiet: bool = False,
    force: bool = False,
    own: OwnFunctions = NO_FUNCTIONS,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Run:
    """Train a recipe; what `ss.train` and the command `slipstream train` share."""
    for text in overrides:
        if not isinstance(text, str):
            raise SlipstreamError(
                f"train takes one store or recipe, then settings by name, but got {text!r} too"
            )
    chosen = _chosen_recipe(recipe, overrides, settings)
    store = open_store(data if data is not None else chosen.data)
    place = Path("runs") / chosen.name if out is None else path_of("out", out)
    result = train_run(chosen, store, place, quiet=quiet, force=force, own=own, callbacks=callbacks)
    if is_first_rank():
        write_report(result.directory)
    return Run(result.directory)


@clear_arguments()
def tune(
    what: PathLike | SequenceStore | Recipe | None = None,
    *overrides: str,
    over: Mapping[str, Any] | Sequence[str],
    recipe: PathLike | Recipe | None = None,
    data: PathLike | SequenceStore | None = None,
    out: PathLike | None = None,
    trials: int = 16,
    halving: bool = False,
    seed: int = 0,
    quiet: bool = False,
    **settings: Any,
) -> TuneResult:
    """Search the ranges `over` recipe keys, resuming what is in `out` (default tunes/<name>).

    `over` maps keys to ranges: `{"optimizer.lr": "log(1e-4, 1e-2)", "model.dropout": [0.1, 0.2]}`.
    Trials are ordinary runs and are chosen by their validation figures; the test split is never
    looked at. With `halving` only the best third goes on after each share of the length. What
    comes first is as for `train`.
    """
    recipe, data = _recipe_and_data(what, recipe, data)
    space = parse_space(over)
    with in_python_words():
        if recipe is None and "name" not in settings:
            store = data = open_store(data)
            settings["name"] = store.directory.resolve().name
        base = _chosen_recipe(DEFAULT_RECIPE if recipe is None else recipe, overrides, settings)
        place = Path("tunes") / base.name if out is None else path_of("out", out)
        return tune_recipe(
            base,
            open_store(data if data is not None else base.data),
            place,
            space,
            trials=trials,
            halving=halving,
            seed=seed,
            say=(lambda sentence: None) if quiet else print_progress,
        )


def _recipe_and_data(
    what: Any, recipe: Any, data: Any
) -> tuple[PathLike | Recipe | None, PathLike | SequenceStore | None]:
    """Tell a store from a recipe; None for the recipe means the default one."""
    if what is None and recipe is None and data is None:
        raise SlipstreamError("ss.train needs a store or a recipe; give ss.train(STORE)")
    is_store = isinstance(what, SequenceStore) or (
        isinstance(what, str | os.PathLike) and kind_of_directory(Path(what)) == "store"
    )
    if is_store:
        if data is not None:
            raise SlipstreamError("ss.train got two stores, the first value and data; give one")
        return recipe, what
    if what is None:
        return recipe, data
    if recipe is not None:
        raise SlipstreamError("ss.train got two recipes, the first value and recipe; give one")
    if not isinstance(what, str | os.PathLike | Recipe):
        raise SlipstreamError(
            "ss.train takes a store of ss.prepare, a recipe's name or path, or an ss.Recipe, but "
            f"got a {type(what).__name__}"
        )
    return what, data


def _chosen_recipe(
    recipe: PathLike | Recipe, overrides: Sequence[str], settings: dict[str, Any]
) -> Recipe:
    if not isinstance(recipe, Recipe):
        return load_recipe(Recipe, path_of("recipe", recipe), overrides, **settings)
    if overrides or settings:
        raise SlipstreamError(
            "settings change a recipe file; change the Recipe object itself with model_copy instead"
        )
    return recipe


@clear_arguments()
def load(
    path: PathLike, data: PathLike | SequenceStore | None = None
) -> Run | BundleModel | SequenceStore:
    """Open what a directory holds: a run, a bundle or a store.

    `data` is the store whose users a bundle is asked about, or where a run's store lies now.
    """
    directory = path_of("path", path)
    kind = kind_of_directory(directory)
    if kind in ("run", "bundle"):
        store = None if data is None else open_store(data)
        return Run(directory, store) if kind == "run" else BundleModel(directory, store)
    if kind == "store" and data is not None:
        raise SlipstreamError(f"{directory} is a store itself, so data= has no meaning; drop it")
    if kind == "store":
        return SequenceStore.open(directory)
    exists = (
        "holds neither a run nor a bundle nor a store" if directory.exists() else "is not there"
    )
    raise SlipstreamError(f"{directory} {exists}; give a directory of ss.train, export or prepare")


@clear_arguments()
def compare(
    runs: Sequence[PathLike | Run],
    metrics: Sequence[str] | None = None,
    report: PathLike | None = None,
) -> pl.DataFrame:
    """Return a row per run: the recipe keys in which they differ, then their figures.

    `metrics` chooses the figures; unless given, those at 10, the AUCs and a caller's own. A run
    that was not evaluated on the test split has its validation figures only. `report` is a page to
    draw their curves into, over each other.
    """
    if isinstance(runs, str | os.PathLike | Run) or not isinstance(runs, Sequence):
        raise SlipstreamError(f"compare takes a list of runs, got {runs!r}")
    places = [run.directory if isinstance(run, Run) else path_of("each run", run) for run in runs]
    found = compare_runs(places)
    if report is not None:
        write_comparison(places, path_of("report", report))
    columns: dict[str, list[Any]] = {"run": [run.directory for run in found.runs], **found.keys}
    columns["steps"] = [run.step for run in found.runs]
    for split, figures in (("validation", found.validation), ("test", found.test)):
        for name, values in figures.items():
            if _is_shown(name, metrics):
                columns[f"{split} {name}"] = values
    return pl.DataFrame([pl.Series(name, _of_one_type(values)) for name, values in columns.items()])


def _is_shown(name: str, metrics: Sequence[str] | None) -> bool:
    """Whether a figure is among the chosen, or at 10, a mean, or a caller's own."""
    if metrics is not None:
        return name in metrics
    other = "@" in name and not name.endswith("@10")
    return not (other or "/" in name or name in (*COUNTS, *SHARES) or name.startswith(BASELINE))


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return values that one column can hold: as they are, or as text."""
    kinds = {type(value) for value in values if value is not None}
    plain = kinds <= {int, float} or kinds in ({bool}, {str})
    return values if plain else [None if value is None else str(value) for value in values]
