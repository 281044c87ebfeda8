"""A small reproduction: means and spread over seeds, published rows, resuming after a stop."""

import json
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.reproduce import bench
from benchmarks.reproduce.command import CATALOGUES, choose_catalogues
from benchmarks.reproduce.published import BEST, ML_1M
from slipstream import api
from slipstream.config import RECIPES
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from slipstream.files import read_json

QUICK = (
    "max_steps=4",
    "model.dim=8",
    "heads=1",
    "sampler.batch_size=8",
    "negatives=4",
    "threads=1",
)


@pytest.fixture
def stores(tmp_path):
    """A catalogue of made-up data."""
    made_up = Synthetic(users=30, items=50, seed=1)
    return {"all": api.prepare("synthetic", tmp_path / "store", synthetic=made_up)}


def run(stores, out: Path, console: Console, **more):
    return bench.reproduce(stores, ["ml-1m-hstu"], 2, out, console, QUICK, **more)


def test_our_rows_are_printed_with_the_published_ones(stores, tmp_path, capfd):
    console = Console(record=True, width=160)
    path = tmp_path / "reproduce.json"
    rows = run(stores, tmp_path / "runs", console, json_path=path)
    shown = console.export_text()
    assert "SASRec, 3,000 negatives" in shown and "ml-1m-hstu" in shown and "±" in shown
    assert "seed 1: epoch" in capfd.readouterr().out  # progress
    samples = [sample["test"]["HR@10"] for sample in rows[0]["samples"]]
    assert rows[0]["HR@10"] == pytest.approx(statistics.fmean(samples))
    assert rows[0]["HR@10 spread"] == pytest.approx(statistics.stdev(samples))
    assert [row["request_time"] for row in rows] == ["known", "hidden", "unused"]
    assert rows[0]["samples"][0]["validation"] == rows[1]["samples"][0]["validation"]
    written = read_json(path)
    assert written["claims"]["hr10_ml1m"] == rows[0]["HR@10"]
    assert written["claims"]["hr10_ml1m_no_time"] == rows[2]["HR@10"]
    assert written["command"] and written["rows"][1]["samples"] == rows[1]["samples"]
    unused = tmp_path / "runs" / "all" / "ml-1m-hstu-own-time-seed1" / "run.json"
    assert read_json(unused)["recipe"]["model"]["time_bias"] == "own"


def test_finished_seeds_are_kept_and_several_trainings_run_at_a_time(stores, tmp_path):
    console = Console(record=True, width=160)
    rows = run(stores, tmp_path / "runs", console, jobs=2)
    metrics = tmp_path / "runs" / "all" / "ml-1m-hstu-seed1" / "metrics.jsonl"
    before = metrics.read_text()
    again = run(stores, tmp_path / "runs", console)
    assert [row["HR@10"] for row in again] == [row["HR@10"] for row in rows]
    assert metrics.read_text() == before  # nothing was trained again
    assert read_json(tmp_path / "runs" / "results.json")["rows"][0]["seeds"] == [1, 2]


def test_recorded_seeds_are_not_made_again(stores, tmp_path):
    console = Console(record=True, width=160)
    result, more = tmp_path / "reproduce.json", tmp_path / "more"
    run(stores, tmp_path / "runs", console, json_path=result)
    rows = bench.reproduce(stores, ["ml-1m-hstu"], 3, more, console, QUICK, jobs=2, recorded=result)
    assert [row["seeds"] for row in rows] == [[1, 2, 3]] * 3
    trained = sorted(path.name for path in (more / "all").iterdir())
    assert trained == ["ml-1m-hstu-own-time-seed3", "ml-1m-hstu-seed3"]
    recorded = read_json(result)["rows"]
    for old, new in zip(recorded, rows, strict=True):
        assert new["samples"][:2] == old["samples"]
    written = {**read_json(result), "commit": "abc"}
    for sample in [sample for row in written["rows"] for sample in row["samples"]]:
        sample["commit"] = "abc" if sample["seed"] == 1 else "def"
    result.write_text(json.dumps(written))
    run(stores, more, console, recorded=result, json_path=more / "again.json")
    assert read_json(more / "again.json")["commit"] == "abc, def"
    with pytest.raises(SlipstreamError, match="with other keys of the recipe"):
        bench.reproduce(stores, ["ml-1m-hstu"], 3, more, console, (), recorded=result)
    made_up = Synthetic(users=31, items=50, seed=1)
    other = {"all": api.prepare("synthetic", tmp_path / "other", synthetic=made_up)}
    with pytest.raises(SlipstreamError, match="another store of 'all'"):
        run(other, more, console, recorded=result)


def row(recipe: str, request_time: str, figure: float, validation: float) -> dict[str, object]:
    """A row of the whole catalogue with one figure for both measures."""
    figures = dict.fromkeys(("HR@10", "NDCG@10"), figure)
    spreads = dict.fromkeys(("HR@10 spread", "NDCG@10 spread"), 0.01)
    about = {"recipe": recipe, "catalogue": "all", "request_time": request_time}
    return {**about, **figures, **spreads, "validation NDCG@10": validation}


def test_claims_are_those_of_the_recipe_that_is_best_on_validation():
    rows = [row("a", "known", 0.4, 0.1), row("b", "known", 0.3, 0.2)]
    rows += [row("a", "hidden", 0.5, 0.9), row("a", "unused", 0.3364, 0.1)]
    claims = bench.claims([*rows, {**rows[0], "catalogue": "sasrec"}])
    assert (claims["hr10_ml1m"], claims["ndcg10_ml1m_no_time"]) == (0.3, 0.3364)
    assert claims["sd_hr10_ml1m_no_time"] == 0.01 and claims["hr10_ml1m_3416"] == 0.4
    assert claims["deviations_ml1m_no_time"] == pytest.approx(2.0)  # of HR@10, the smaller lead


def test_the_best_published_figures_are_in_the_table():
    same_order = [each for each in ML_1M if each.order == "SASRec"]
    without = [each for each in same_order if "request time" not in each.model]
    for name, rows in (("known", same_order), ("unused", without)):
        assert BEST[name]["HR@10"] == max(each.hr10 for each in rows)
        assert BEST[name]["NDCG@10"] == max(each.ndcg10 for each in rows)


def test_every_recipe_of_a_table_ships():
    assert {name for names in bench.RECIPES.values() for name in names} <= {
        path.stem for path in RECIPES.glob("*.yaml")
    }


def test_a_catalogue_is_known_or_refused_in_one_sentence():
    assert choose_catalogues(["all", "all"]) == ["all"] and len(CATALOGUES) == 2
    with pytest.raises(SlipstreamError, match="no catalogue 'half'; name all or sasrec"):
        choose_catalogues(["half"])
