"""`slipstream simulate` as a user types it."""

import json

import pytest

from slipstream.cli.app import run_command


def test_training_prints_a_table_and_writes_plots_traces_and_json(tmp_path, capsys):
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    flags = ["--workers", "128,1536", "--schedule", "serial,nested", "--steps", "4"]
    files = ["--out", str(out), "--json", str(figures)]
    code = run_command(["simulate", "training", *flags, *files])
    printed = capsys.readouterr().out
    assert code == 0 and "nested" in printed and "1,536" in printed
    content = json.loads(figures.read_text())
    assert [row["variant"] for row in content["rows"]] == [
        f"{name} at {n} workers" for name in ("serial", "nested") for n in (128, 1536)
    ]
    assert 0.9 < content["claims"]["efficiency_1536"] < 1
    assert content["claims"]["speedup_1536"] > 2.5
    names = {path.name for path in out.iterdir()}
    assert {"scaling.png", "nested-1536.png", "nested-1536.json"} <= names


def test_json_to_standard_output_is_json_alone(capsys):
    assert run_command(["simulate", "training", "--schedule", "nested", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["workers"] == 1536 and "intervals" not in rows[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "many"], "whole numbers"),
        (["--workers", "0"], "at least 1"),
        (["--schedule", "nestd"], "did you mean 'nested'"),
        (["--cluster", "nowhere"], "accelerators"),
        (["--workers", "10", "--replicas", "4"], "multiple of the replicas"),
    ],
)
def test_wrong_flags_end_in_one_sentence(flags, words, capsys):
    assert run_command(["simulate", "training", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in " ".join(error.split())


def test_serving_prints_what_became_of_requests(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    flags = ["--instances", "2", "--rate", "20", "--requests", "200", "--length", "800"]
    assert run_command(["simulate", "serving", *flags, "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "within 80 ms" in printed and "hit: device" in printed
    content = json.loads(figures.read_text())
    assert content["claims"]["within_slo"] > 0.9
    assert sum(content["rows"][0]["hits"].values()) <= 200


def test_serving_on_shared_cores_takes_longer_and_says_wrong_numbers(tmp_path, capsys):
    flags = ["--instances", "2", "--rate", "120", "--requests", "200", "--length", "800"]
    found = []
    for number, more in enumerate(
        (["--request-ms", "0"], ["--cores", "2"], ["--cores", "2", "--client-ms", "2"])
    ):
        path = tmp_path / f"{number}.json"
        assert run_command(["simulate", "serving", *flags, *more, "--json", str(path)]) == 0
        found.append(json.loads(path.read_text())["rows"][0]["p50_ms"])
    assert found[0] < found[1] < found[2]
    capsys.readouterr()
    assert run_command(["simulate", "serving", *flags, "--cores", "0"]) != 0
    assert "--cores" in capsys.readouterr().err
