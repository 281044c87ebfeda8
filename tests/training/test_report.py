"""The report of a run is one page: figures, slices, samples, curves, recipe; digests at the end."""

import json

from slipstream.training.report import show_figure, write_comparison, write_report

FIGURES = {
    "HR@10": 0.25,
    "NDCG@10": float("nan"),
    "users": 3000.0,
    "repeats": 0.283,
    "cold_items": 0.0,
    "popularity HR@10": 0.1,
}
SLICES = [
    {"by": "history length", "from": 1, "to": 9, "users": 1500, "HR@10": 0.2, "NDCG@10": 0.1},
    {"by": "history length", "from": 12, "to": 12, "users": 1500, "HR@10": 0.3, "NDCG@10": 0.2},
]
SAMPLES = [
    {
        "user": "a/1",
        "history": ["<Heat>"],
        "recommended": ["Up", "Alien"],
        "truth": "Alien",
        "hit": 2,
    },
    {"user": "a/2", "history": ["Up"], "recommended": ["Heat"], "truth": "Alien", "hit": None},
]


def page_of(directory, **run):
    (directory / "run.json").write_text(json.dumps(run))
    return write_report(directory).read_text()


def test_a_report_shows_figures_curves_and_the_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: <small>\n")
    lines = [{"step": step, "loss": 5.0 - step} for step in (2, 4)]
    lines.append({"step": 4, "validation": {"HR@10": 0.2}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(
        tmp_path,
        name="<small>",
        status="finished",
        step=1234,
        seconds=75.2,
        test=FIGURES,
        test_slices=SLICES,
        test_samples=SAMPLES,
        test_as_served={"HR@10": 0.24, "users": 3000.0},
        recipe={"repeat": "exclude", "window": "latest"},
        store={"directory": "data/shop-2024", "digest": "d1g", "name": "shop.csv"},
        trained_digest="tr4ined",
    )
    assert f"<h1>{tmp_path.name} (&lt;small&gt;) on shop.csv</h1>" in page
    assert "finished, 1,234 steps, 1 min 15 s" in page
    assert "<th>model</th><th>popularity</th><th>as served</th>" in page
    assert "<td>HR@10</td><td>0.2500</td><td>0.1000</td><td>0.2400</td>" in page
    assert "users 3,000; repeats 28.3%; cold items 0.0%; repeat: exclude; window: latest" in page
    assert "<td>1 to 9</td><td>1,500</td><td>0.2000</td><td>0.1000</td>" in page
    assert "<td>&lt;Heat&gt;</td><td>Up</td>" in page and "<td>Alien ✓</td>" in page
    assert "Then came Alien: recommended at place 2." in page
    assert "Then came Alien: not among the best 1." in page
    assert "nan" not in page and "NDCG@10</td>" not in page
    assert "<pre>name: &lt;small&gt;\n</pre>" in page
    assert [
        title for title in ("Loss", "Validation", "Learning rate") if f"<h2>{title}" in page
    ] == [
        "Loss",
        "Validation",
    ]
    assert page.count("data:image/png;base64,") == 2
    assert page.index("Recipe</h2>") < page.index("tr4ined") and page.count("d1g") == 1


def test_a_run_without_metrics_has_a_report_too(tmp_path):
    page = page_of(tmp_path, name=tmp_path.name, status="running")
    assert "<p>running</p>" in page and "<img" not in page and "<table" not in page
    assert f"<h1>{tmp_path.name}</h1>" in page


def test_the_data_set_is_named_after_its_directory_where_it_has_no_name(tmp_path):
    page = page_of(tmp_path, name=tmp_path.name, store={"directory": "data/ml-1m"})
    assert f"<title>{tmp_path.name} on ml-1m</title>" in page


def test_validation_at_the_best_epoch_stands_in_for_an_evaluation_of_its_own(tmp_path):
    page = page_of(tmp_path, name="x", metrics={"HR@10": 0.125, "users": 12345.0})
    assert "<td>HR@10</td><td>0.1250</td>" in page and "users 12,345" in page


def test_counts_are_whole_and_shares_are_percent():
    assert show_figure("users", 3000.0) == "3,000"
    assert show_figure("repeats", 0.2829) == "28.3%"
    assert show_figure("HR@10", 0.12346) == "0.1235"


def test_curves_of_several_runs_are_drawn_over_each_other(tmp_path):
    runs = [tmp_path / name for name in ("<one>", "two")]
    for place, run in enumerate(runs):
        run.mkdir()
        note = {"status": "finished", "step": 4, "metrics": {"HR@10": 0.25 + place}}
        (run / "run.json").write_text(json.dumps(note))
        lines = [{"step": 2, "loss": 5.0, "exposed_lookup": 0.1}]
        lines.append({"step": 4, "validation": {"HR@10": 0.25}})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    assert "<td>&lt;one&gt;</td><td>finished</td><td>4</td><td>0.2500</td>" in page
    assert [
        f'alt="{title}"' in page for title in ("Loss", "Validation HR@10", "Learning rate")
    ] == [
        True,
        True,
        False,
    ]
    alone = write_report(runs[1]).read_text()
    assert 'alt="Exposed share of a step (lookup, exchange)"' in alone
