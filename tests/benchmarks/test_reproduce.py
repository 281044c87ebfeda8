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
    path = tmp_path / "reproduce.json"
    rows = bench.reproduce(store, ["ml-1m-hstu"], 2, tmp_path / "runs", console, QUICK, path)
    shown = console.export_text()
    assert "SASRec, 3,000 negatives" in shown and "ml-1m-hstu" in shown and "±" in shown
    samples = [sample["test"]["HR@10"] for sample in rows[0]["samples"]]
    assert rows[0]["HR@10"] == pytest.approx(statistics.fmean(samples))
    assert rows[0]["HR@10 spread"] == pytest.approx(statistics.stdev(samples))
    assert [row["request_time"] for row in rows] == ["known", "hidden"]
    assert "request time known" in shown and "request time hidden" in shown
    written = read_json(path)
    assert written["claims"]["hr10_ml1m"] == rows[0]["HR@10"]
    assert written["claims"]["hr10_ml1m_no_time"] == rows[1]["HR@10"]
    assert written["command"] and written["rows"][1]["samples"] == rows[1]["samples"]
    assert read_json(tmp_path / "runs" / "results.json")["rows"][0]["seeds"] == [1, 2]
    before = read_json(tmp_path / "runs" / "ml-1m-hstu-seed1" / "run.json")["step"]
    again = bench.reproduce(store, ["ml-1m-hstu"], 2, tmp_path / "runs", console, QUICK)
    assert again[0]["HR@10"] == rows[0]["HR@10"]
    assert read_json(tmp_path / "runs" / "ml-1m-hstu-seed1" / "run.json")["step"] == before == 4


def test_claims_are_those_of_the_best_recipe_in_both_rows():
    def row(recipe: str, request_time: str, figure: float) -> dict[str, object]:
        figures = dict.fromkeys(("HR@10", "NDCG@10"), figure)
        spreads = dict.fromkeys(("HR@10 spread", "NDCG@10 spread"), 0.01)
        return {"recipe": recipe, "request_time": request_time, **figures, **spreads}

    rows = [row("a", "known", 0.3), row("a", "hidden", 0.29)]
    rows += [row("b", "known", 0.4), row("b", "hidden", 0.2)]
    claims = bench.claims(rows)
    assert (claims["hr10_ml1m"], claims["ndcg10_ml1m_no_time"]) == (0.4, 0.2)
    assert claims["sd_hr10_ml1m_no_time"] == 0.01


def test_every_recipe_of_a_table_ships():
    assert {name for names in bench.RECIPES.values() for name in names} <= {
        path.stem for path in RECIPES.glob("*.yaml")
    }
