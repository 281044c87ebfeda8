"""A small reproduction: means and spread over seeds, published rows, resuming after a stop."""

import statistics

import pytest
from rich.console import Console

from benchmarks.reproduce import bench
from slipstream import api
from slipstream.config import RECIPES
from slipstream.data.synthetic import Synthetic
from slipstream.files import read_json

QUICK = (
    "max_steps=4",
    "model.dim=8",
    "heads=1",
    "sampler.batch_size=8",
    "negatives=4",
    "threads=1",
)


def test_our_rows_are_printed_with_the_published_ones(tmp_path):
    store = api.prepare(
        "synthetic", tmp_path / "store", synthetic=Synthetic(users=30, items=50, seed=1)
    )
    console = Console(record=True, width=160)
    rows = bench.reproduce(store, ["ml-1m-hstu"], 2, tmp_path / "runs", console, QUICK)
    shown = console.export_text()
    assert "SASRec, 3,000 negatives" in shown and "ml-1m-hstu" in shown and "±" in shown
    samples = [sample["test"]["HR@10"] for sample in rows[0]["samples"]]
    assert rows[0]["HR@10"] == pytest.approx(statistics.fmean(samples))
    assert rows[0]["HR@10 spread"] == pytest.approx(statistics.stdev(samples))
    assert read_json(tmp_path / "runs" / "results.json")["rows"][0]["seeds"] == [1, 2]
    before = read_json(tmp_path / "runs" / "ml-1m-hstu-seed1" / "run.json")["step"]
    again = bench.reproduce(store, ["ml-1m-hstu"], 2, tmp_path / "runs", console, QUICK)
    assert again[0]["HR@10"] == rows[0]["HR@10"]
    assert read_json(tmp_path / "runs" / "ml-1m-hstu-seed1" / "run.json")["step"] == before == 4


def test_every_recipe_of_a_table_ships():
    assert {name for names in bench.RECIPES.values() for name in names} <= {
        path.stem for path in RECIPES.glob("*.yaml")
    }
