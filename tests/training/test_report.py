"""The report of a run is one page with its figures, curves and recipe."""

import json

from slipstream.training.report import write_report


def test_a_report_shows_figures_curves_and_the_recipe(tmp_path):
    run = {"name": "<small>", "step": 4, "test": {"HR@10": 0.25}, "versions": {"torch": "x"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "recipe.yaml").write_text("name: <small>\n")
    lines = [{"step": step, "loss": 5.0 - step} for step in (2, 4)]
    lines.append({"step": 4, "validation": {"HR@10": 0.2}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(tmp_path).read_text()
    assert "<h1>&lt;small&gt;</h1>" in page and "<pre>name: &lt;small&gt;\n</pre>" in page
    assert "<td>HR@10</td><td>0.2500</td>" in page
    assert [
        title for title in ("Loss", "Validation", "Learning rate") if f"<h2>{title}" in page
    ] == [
        "Loss",
        "Validation",
    ]
    assert page.count("data:image/png;base64,") == 2


def test_a_run_without_metrics_has_a_report_too(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"name": "young", "status": "running"}))
    page = write_report(tmp_path).read_text()
    assert "<td>status</td><td>running</td>" in page and "<img" not in page
