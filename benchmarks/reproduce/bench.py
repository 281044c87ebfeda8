"""Published tables again: shipped recipes over several seeds, printed with the published rows.

The epoch is chosen on the validation item (second last), the test item is read once for each row,
the whole catalogue is ranked with seen items filtered. A recipe that looks from the time of the
request has three rows: that time known, the same weights with it hidden, and weights that were
trained without it. Finished seeds are kept, so a stopped reproduction resumes. Touch this when
another table should be reproduced; benchmarks/protocols/reproduce.md has the rules.
"""

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reproduce.published import BEST, ML_1M
from slipstream import api
from slipstream.bench.harness import commit, describe
from slipstream.config import load_recipe
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.files import read_json, write_json
from slipstream.training import Callback, TrainingSession
from slipstream.training.recipe import Recipe

RECIPES = {"ml-1m": ("ml-1m-hstu-large",)}
KNOWN, HIDDEN, UNUSED = "known", "hidden", "unused"
FIGURES = ("HR@10", "NDCG@10", "HR@50", "NDCG@50", "HR@200", "NDCG@200")
CHOSEN_BY = "NDCG@10"
Row = dict[str, Any]
Stores = Mapping[str, SequenceStore]


@dataclass(frozen=True)
class Job:
    """One training: a recipe on a catalogue with a seed, with or without the request's time."""

    catalogue: str
    recipe: str
    seed: int
    uses_request_time: bool
    overrides: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The run as progress names it."""
        without = "" if self.uses_request_time else ", trained without the request's time"
        return f"{self.recipe}, catalogue {self.catalogue}{without}, seed {self.seed}"

    def load(self) -> Recipe:
        """Return the recipe as it is trained."""
        time = () if self.uses_request_time else ("model.time_bias=own",)
        return load_recipe(Recipe, self.recipe, [*self.overrides, *time, f"seed={self.seed}"])

    def directory(self, out: Path) -> Path:
        """Return where the run lies."""
        ending = "" if self.uses_request_time else "-own-time"
        return out / self.catalogue / f"{self.recipe}{ending}-seed{self.seed}"


@dataclass(frozen=True)
class SeedResult:
    """One finished run: its figures on the test item by what is known of the request's time."""

    job: Job
    items: int
    tests: dict[str, dict[str, float]]
    validation: dict[str, float]
    seconds: float
    epochs: int
    best_step: int
    commit: str | None = None


class EpochLines(Callback):
    """A callback that prints a line after every validation."""

    def __init__(self, title: str) -> None:
        self.title = title

    def on_evaluation(
        self, session: TrainingSession, figures: dict[str, float], is_best: bool
    ) -> None:
        """Print the epoch with its validation figures."""
        found = ", ".join(f"{name} {figures[name]:.4f}" for name in ("HR@10", CHOSEN_BY))
        print(f"{self.title}: epoch {session.epoch}, validation {found}", flush=True)


def plan_jobs(
    recipes: Sequence[str], catalogues: Sequence[str], seeds: int, overrides: tuple[str, ...]
) -> list[Job]:
    """Return every training, seed by seed, so that a stopped reproduction has whole seeds."""
    jobs = []
    for catalogue in catalogues:
        for seed in range(1, seeds + 1):
            for recipe in recipes:
                job = Job(catalogue, recipe, seed, True, overrides)
                timed = job.load().model.time_bias == "next"
                ways = (True, False) if timed else (False,)
                jobs += [Job(catalogue, recipe, seed, way, overrides) for way in ways]
    return jobs


def run_job(job: Job, store_directory: Path, out: Path) -> SeedResult:
    """Train one run to its end, or resume it, and read the test item once for each row."""
    store = api.open_store(store_directory)
    directory = job.directory(out)
    callbacks = [EpochLines(job.title)]
    run = api.train(job.load(), data=store, out=directory, quiet=True, callbacks=callbacks)
    note = read_json(directory / "run.json")
    test = note.get("test") or dict(run.evaluate("test"))
    tests = {KNOWN if job.uses_request_time else UNUSED: test}
    if job.uses_request_time:
        tests[HIDDEN] = note.get("test_no_request_time") or dict(
            run.evaluate("test", protocol="no_request_time")
        )
    best = best_validation(directory, note["best_step"])
    seconds, epoch, step = note["seconds"], note["epoch"], note["best_step"]
    return SeedResult(job, store.num_items, tests, best, seconds, epoch, step, commit())


def results_of(
    result: Mapping[str, Any], digests: Mapping[str, str], overrides: tuple[str, ...]
) -> list[SeedResult]:
    """Return the runs that a result holds, of the same stores and keys as today's."""
    words = [word for word in result["command"].split() if "=" in word]  # of older results
    if list(overrides) != result.get("overrides", words):
        raise SlipstreamError("the recorded runs were made with other keys of the recipe")
    found: dict[Job, SeedResult] = {}
    for row in result["rows"]:
        catalogue = row["catalogue"]
        if catalogue not in digests:
            continue
        if result["stores"][catalogue] != digests[catalogue]:
            raise SlipstreamError(f"the recorded runs are of another store of '{catalogue}'")
        for sample in row["samples"]:
            way = row["request_time"] != UNUSED
            job = Job(catalogue, row["recipe"], sample["seed"], way, overrides)
            known = found.setdefault(
                job,
                SeedResult(
                    job,
                    row["items"],
                    {},
                    sample["validation"],
                    sample["seconds"],
                    sample["epochs"],
                    sample["best_step"],
                    sample.get("commit", result.get("commit")),
                ),
            )
            known.tests[row["request_time"]] = sample["test"]
    return list(found.values())


def best_validation(directory: Path, step: int) -> dict[str, float]:
    """Return the validation figures of the weights that a run keeps."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if '"validation"' in line]
    kept: dict[str, float] = next(each["validation"] for each in found if each["step"] == step)
    return kept


@contextlib.contextmanager
def runner(jobs: int) -> Iterator[Callable[..., Iterator[SeedResult]]]:
    """Run trainings one after the other, or several at a time in processes of their own."""
    if jobs == 1:
        yield lambda tasks: (run_job(*task) for task in tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield lambda tasks: (
                future.result()
                for future in as_completed([pool.submit(run_job, *task) for task in tasks])
            )
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def summarise(results: Sequence[SeedResult]) -> list[Row]:
    """Return the rows: mean and sample standard deviation over seeds."""
    groups: dict[tuple[str, str, str], list[SeedResult]] = {}
    for result in sorted(results, key=lambda each: each.job.seed):
        for request_time in result.tests:
            place = result.job.catalogue, result.job.recipe, request_time
            groups.setdefault(place, []).append(result)
    order = {name: number for number, name in enumerate((KNOWN, HIDDEN, UNUSED))}
    places = sorted(groups, key=lambda place: (place[0], place[1], order[place[2]]))
    return [_row(place, groups[place]) for place in places]


def _row(place: tuple[str, str, str], mine: Sequence[SeedResult]) -> Row:
    catalogue, recipe, request_time = place
    row: Row = {
        "variant": f"{recipe}, {mine[0].items:,} items, request time {request_time}",
        "recipe": recipe,
        "catalogue": catalogue,
        "items": mine[0].items,
        "request_time": request_time,
        "seeds": [result.job.seed for result in mine],
    }
    for figure in FIGURES:
        values = [result.tests[request_time][figure] for result in mine]
        row[figure] = statistics.fmean(values)
        row[f"{figure} spread"] = statistics.stdev(values) if len(values) > 1 else 0.0
    row[f"validation {CHOSEN_BY}"] = statistics.fmean(r.validation[CHOSEN_BY] for r in mine)
    row["seconds"] = statistics.fmean(result.seconds for result in mine)
    row["samples"] = [
        {
            "seed": result.job.seed,
            "test": result.tests[request_time],
            "validation": result.validation,
            "seconds": result.seconds,
            "epochs": result.epochs,
            "best_step": result.best_step,
            "commit": result.commit,
        }
        for result in mine
    ]
    return row


def claims(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of the recipe that is best on validation, with the time and without it.

    `deviations_…` says by how many deviations of ours the smaller lead over the best published row
    is more than nothing.
    """
    found: dict[str, float] = {}
    for catalogue, request_time in dict.fromkeys((r["catalogue"], r["request_time"]) for r in rows):
        if request_time == HIDDEN:
            continue
        mine = [r for r in rows if (r["catalogue"], r["request_time"]) == (catalogue, request_time)]
        best = max(mine, key=lambda row: row[f"validation {CHOSEN_BY}"])
        ending = "_no_time" if request_time == UNUSED else ""
        ending += "" if catalogue == "all" else "_3416"
        leads = []
        for figure, name in (("HR@10", "hr10_ml1m"), ("NDCG@10", "ndcg10_ml1m")):
            found[f"{name}{ending}"] = best[figure]
            found[f"sd_{name}{ending}"] = best[f"{figure} spread"]
            lead = best[figure] - BEST[request_time][figure]
            leads.append(lead / (best[f"{figure} spread"] or 1.0))
        found[f"deviations_ml1m{ending}"] = min(leads)
    return found


def show(rows: Sequence[Row], console: Console) -> None:
    """Print our rows and the published ones, the two test sets kept apart."""
    console.print("[bold]MovieLens-1M, whole catalogue ranked, seen items filtered[/bold]")
    table = Table()
    for heading in ("model", "HR@10", "NDCG@10", "test set"):
        table.add_column(heading, justify="right" if "@" in heading else "left")
    sources: dict[str, str] = {}
    for order in ("SASRec", "HSTU"):
        for row in ML_1M:
            if row.order == order:
                mark = sources.setdefault(row.source, chr(ord("a") + len(sources)))
                table.add_row(
                    f"{row.model} ({mark})",
                    f"{row.hr10:.4f}",
                    f"{row.ndcg10:.4f}",
                    f"{order} order",
                )
        table.add_section()
    for ours in rows:
        cells = [
            f"{ours[name]:.4f} ± {ours[f'{name} spread']:.4f}" for name in ("HR@10", "NDCG@10")
        ]
        table.add_row(f"[bold]{ours['variant']}[/bold]", *cells, "SASRec order")
    console.print(table)
    for source, mark in sources.items():
        console.print(f"({mark}) {source}")
    for ours in (row for row in rows if row["request_time"] != HIDDEN):
        console.print(
            f"{ours['variant']}: {len(ours['seeds'])} seeds, mean ± deviation, "
            f"{ours['seconds'] / 60:.1f} min a seed"
        )


def reproduce(
    stores: Stores,
    recipes: Sequence[str],
    seeds: int,
    out: Path,
    console: Console,
    overrides: tuple[str, ...] = (),
    json_path: Path | None = None,
    jobs: int = 1,
    recorded: Path | None = None,
) -> list[Row]:
    """Train, evaluate and print; results also go to `out`/results.json, and whole to a file.

    The runs of a `recorded` result are not made again.
    """
    digests = {name: store.digest for name, store in stores.items()}
    planned = plan_jobs(recipes, list(stores), seeds, overrides)
    results = []
    if recorded is not None:
        made = results_of(read_json(recorded), digests, overrides)
        results = [each for each in made if each.job in planned]
    known = {each.job for each in results}
    tasks = [(job, stores[job.catalogue].directory, out) for job in planned if job not in known]
    with runner(jobs) as run_all:
        for result in run_all(tasks):
            results.append(result)
            console.print(f"[bold]{result.job.title}[/bold]: {len(results)} of {len(planned)} done")
            write_json(out / "results.json", {"dataset": "ml-1m", "rows": summarise(results)})
    rows = summarise(results)
    show(rows, console)
    if json_path is not None:
        about = describe("reproduce") | {"dataset": "ml-1m", "overrides": list(overrides)}
        made_at = sorted({result.commit for result in results if result.commit})
        about |= {"commit": ", ".join(made_at) or None, "stores": digests}
        about |= {"rows": rows, "claims": claims(rows)}
        write_json(json_path, about)
    return rows
