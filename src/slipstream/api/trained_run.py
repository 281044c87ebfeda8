"""A run as Python uses it: its answers, its evaluation, its curves, its bundle.

    run = ss.load("runs/shop")
    run.evaluate()
    run.recommend("c/0042", k=5)
    run.export("bundles/shop")

Touch this when a run should do more; what it shares with a bundle is in predictor.py.
"""

import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import polars as pl

from slipstream.api.arguments import clear_arguments, in_python_words, one_of, path_of
from slipstream.api.predictor import REPEAT, Predictor, Repeat
from slipstream.bundle import Bundle
from slipstream.data.store import SequenceStore, Vocabulary
from slipstream.display import card, shown
from slipstream.errors import SlipstreamError
from slipstream.files import check_output, kind_of_directory, read_json
from slipstream.training.export import bundle_in_memory, export_recommender
from slipstream.training.own_functions import MetricFunction, OwnFunctions, own_metrics
from slipstream.training.recipe import Recipe
from slipstream.training.recommender import Recommender
from slipstream.training.report import write_report
from slipstream.training.run import open_run
from slipstream.training.run_directory import read_recipe
from slipstream.training.run_evaluation import EvaluationProtocol, evaluate_run
from slipstream.training.telemetry import read_metrics

SPLITS = ("validation", "test")
PROTOCOLS = ("full", "sampled", "no_request_time")


class Figures(dict[str, float]):
    """The figures of an evaluation, a dict by name; `frame` has them as a table."""

    def __init__(self, figures: dict[str, float], title: str = "evaluation") -> None:
        super().__init__(figures)
        self.title = title

    @property
    def frame(self) -> pl.DataFrame:
        """The figures as columns metric and value."""
        return pl.DataFrame(
            {"metric": list(self.keys()), "value": list(self.values())},
            schema={"metric": pl.String, "value": pl.Float64},
        )

    def __repr__(self) -> str:
        width = max((len(name) for name in self), default=0)
        lines = [f"  {name:<{width}}  {shown(value):>10}" for name, value in self.items()]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        return card(self.title, self)


class Run(Predictor):
    """A trained run on disk.

    `data` is where its store lies now, if it was moved since.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        data: str | os.PathLike[str] | SequenceStore | None = None,
    ) -> None:
        self.directory, self._data = Path(directory), data
        if kind_of_directory(self.directory) != "run":
            raise SlipstreamError(
                f"{self.directory} is not a run (no run.json); train one with ss.train(…, "
                f"out={str(self.directory)!r})"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.directory == other.directory

    def __hash__(self) -> int:
        return hash(self.directory)

    @cached_property
    def _opened(self) -> tuple[Recipe, SequenceStore, Recommender]:
        with in_python_words():
            return open_run(self.directory, self._data)

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

    @cached_property
    def bundle(self) -> Bundle:
        return bundle_in_memory(self.recommender, self.store)

    @property
    def data(self) -> SequenceStore:
        return self.store

    @property
    def items(self) -> Vocabulary:
        return self.store.items

    @property
    def note(self) -> dict[str, Any]:
        """What run.json says: versions, machine, status, timings, figures."""
        note: dict[str, Any] = read_json(self.directory / "run.json")
        return note

    @property
    def metrics(self) -> pl.DataFrame:
        """The curves: a row per logged step and per evaluation, with a column per figure."""
        rows = []
        for record in read_metrics(self.directory / "metrics.jsonl"):
            validation = record.pop("validation", {})
            rows.append(record | {f"validation {name}": v for name, v in validation.items()})
        return pl.DataFrame(rows, infer_schema_length=None)

    @clear_arguments({"which": "did you mean 'split'?", "metrics": "did you mean 'metric'?"})
    def evaluate(
        self,
        split: Literal["validation", "test"] = "test",
        *,
        protocol: EvaluationProtocol = "full",
        repeat: Repeat | None = None,
        metric: MetricFunction | Collection[MetricFunction] | None = None,
    ) -> Figures:
        """Compute metrics on a held-out split and write them to run.json.

        Two more protocols compare retrieval runs: `sampled` is SASRec's old one, `no_request_time`
        hides the time of the request from the model. `repeat` is another rule than the recipe's.
        `metric` is a function of the targets' places, or several, beside the usual figures.
        """
        one_of("split", split, SPLITS)
        one_of("protocol", protocol, PROTOCOLS)
        if repeat is not None:
            one_of("repeat", repeat, REPEAT)
        own = OwnFunctions(own_metrics(metric))
        done = evaluate_run(
            self.directory, *self._opened, split, protocol=protocol, repeat=repeat, own=own
        )
        told = [self.directory.resolve().name, split, *([] if protocol == "full" else [protocol])]
        told += [f"repeat {repeat}"] if repeat else []
        return Figures(done.figures, ", ".join(told))

    @clear_arguments({"directory": "did you mean 'out'?", "path": "did you mean 'out'?"})
    def export(self, out: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the bundle that serving opens, and return its path.

        What is at `out` is replaced only with `force`, and only if it is a bundle.
        """
        with in_python_words():
            place, inputs = path_of("out", out), [self.directory]
            check_output(place, "bundle", force=force, inputs=inputs)
            note = self.note
            figures = {name: note[name] for name in ("test", "validation", "step") if name in note}
            export_recommender(
                self.recommender, self.store, place, force=force, inputs=inputs, **figures
            )
        return place

    @clear_arguments()
    def report(self) -> Path:
        """Write report.html again and return its path."""
        return write_report(self.directory)

    def _facts(self) -> dict[str, Any]:
        note, recipe = self.note, read_recipe(self.directory)
        facts: dict[str, Any] = {
            "model": f"{recipe.model.kind}, width {recipe.model.dim}",
            "task": recipe.task,
            "data": note.get("store", {}).get("directory"),
            "status": note.get("status"),
            "steps": note.get("step"),
        }
        found = note.get("test") or note.get("metrics") or {}
        names = [name for name in ("HR@10", "NDCG@10", "AUC") if name in found]
        split = "test" if note.get("test") else "validation"
        return facts | {f"{split} {name}": float(found[name]) for name in names}

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {shown(value)}" for name, value in self._facts().items())
        return f"Run({str(self.directory)!r}: {facts})"

    def _repr_html_(self) -> str:
        return card(f"Run {self.directory}", self._facts())
