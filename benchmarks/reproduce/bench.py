"""Published tables again: each shipped recipe over several seeds, printed with the published rows.

The epoch is chosen on the validation item (second last), the test item is read once for each row,
the whole catalogue is ranked with seen items filtered. Each recipe has two rows from the same
weights: queries that know the time of the request, as a server does, and queries that do not.
Finished seeds are kept, so a stopped reproduction resumes. Touch this when another table should be
reproduced.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reproduce.published import ML_1M
from slipstream import api
from slipstream.bench.harness import describe
from slipstream.config import load_recipe
from slipstream.data.store import SequenceStore
from slipstream.files import read_json, write_json
from slipstream.training.recipe import Recipe

RECIPES = {"ml-1m": ("ml-1m-sasrec", "ml-1m-hstu", "ml-1m-fuxi", "ml-1m-hstu-full")}
KNOWN, HIDDEN = "known", "hidden"
REQUEST_TIME = (KNOWN, HIDDEN)
FIGURES = ("HR@10", "NDCG@10", "HR@50", "NDCG@50", "HR@200", "NDCG@200")


@dataclass(frozen=True)
class SeedResult:
    """One finished run."""

    recipe: str
    seed: int
    test: dict[str, float]
    test_no_time: dict[str, float]  # the time of the request hidden
    seconds: float
    epochs: int
    best_step: int


def run_seed(
    recipe_name: str, seed: int, store: SequenceStore, out: Path, overrides: tuple[str, ...] = ()
) -> SeedResult:
    """Train one seed to its end, or resume it, and read the test item once."""
    recipe = load_recipe(Recipe, recipe_name, [*overrides, f"seed={seed}"])
    run = api.train(recipe, data=store, out=out / f"{recipe_name}-seed{seed}")
    note = read_json(run.directory / "run.json")
    test = note.get("test") or dict(run.evaluate("test"))
    no_time = note.get("test_no_request_time") or dict(
        run.evaluate("test", protocol="no_request_time")
    )
    return SeedResult(
        recipe_name, seed, test, no_time, note["seconds"], note["epoch"], note["best_step"]
    )


def summarise(results: list[SeedResult]) -> list[dict[str, Any]]:
    """Return two rows for each recipe: mean and sample standard deviation over its seeds."""
    rows = []
    for name in dict.fromkeys(result.recipe for result in results):
        mine = [result for result in results if result.recipe == name]
        for request_time in REQUEST_TIME:
            tests = [r.test if request_time == KNOWN else r.test_no_time for r in mine]
            row: dict[str, Any] = {
                "variant": f"{name}, request time {request_time}",
                "recipe": name,
                "request_time": request_time,
                "seeds": [result.seed for result in mine],
            }
            for figure in FIGURES:
                values = [test[figure] for test in tests]
                row[figure] = statistics.fmean(values)
                row[f"{figure} spread"] = statistics.stdev(values) if len(values) > 1 else 0.0
            row["seconds"] = statistics.fmean(result.seconds for result in mine)
            row["samples"] = [
                {"seed": r.seed, "test": test, "seconds": r.seconds, "epochs": r.epochs}
                for r, test in zip(mine, tests, strict=True)
            ]
            rows.append(row)
    return rows


def claims(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of the best recipe by HR@10, with and without the request's time."""
    best = max((row for row in rows if row["request_time"] == KNOWN), key=lambda row: row["HR@10"])
    found = {}
    for row in rows:
        if row["recipe"] == best["recipe"]:
            ending = "" if row["request_time"] == KNOWN else "_no_time"
            for figure, name in (("HR@10", "hr10_ml1m"), ("NDCG@10", "ndcg10_ml1m")):
                found[f"{name}{ending}"] = row[figure]
                found[f"sd_{name}{ending}"] = row[f"{figure} spread"]
    return found


def show(rows: list[dict[str, Any]], console: Console) -> None:
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
    for ours in (row for row in rows if row["request_time"] == KNOWN):
        console.print(
            f"{ours['recipe']}: {len(ours['seeds'])} seeds, mean ± deviation, "
            f"{ours['seconds'] / 60:.1f} min a seed"
        )


def reproduce(
    store: SequenceStore,
    recipes: list[str],
    seeds: int,
    out: Path,
    console: Console,
    overrides: tuple[str, ...] = (),
    json_path: Path | None = None,
) -> list[dict[str, Any]]:
    """Train, evaluate and print; results also go to `out`/results.json, and whole to a file."""
    results = []
    for name in recipes:
        for seed in range(1, seeds + 1):
            console.print(f"[bold]{name}[/bold], seed {seed} of {seeds}")
            results.append(run_seed(name, seed, store, out, overrides))
            write_json(
                out / "results.json",
                {"dataset": "ml-1m", "store": store.digest, "rows": summarise(results)},
            )
    rows = summarise(results)
    show(rows, console)
    if json_path is not None:
        about = {"dataset": "ml-1m", "store": store.digest, "rows": rows, "claims": claims(rows)}
        write_json(json_path, describe("reproduce") | about)
    return rows
