"""On a small log both variants of the ingest benchmark read the same rows."""

import json

import pytest

from slipstream.bench import ingest_rate as bench


@pytest.mark.system
def test_both_variants_read_every_row_and_the_claims_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "QUICK_ROWS", 20_000)
    monkeypatch.setattr(bench, "QUICK_REPEATS", 1)
    result = bench.run(quick=True, json_path=tmp_path / "ingest.json")
    written = json.loads((tmp_path / "ingest.json").read_text())
    assert written["claims"] == result["claims"] and written["bench"] == "ingest"
    assert written["claims"]["rows_per_second"] > 0 and written["claims"]["peak_bytes"] > 0
    assert [row["variant"] for row in written["rows"]] == ["slipstream", "polars in memory"]
    assert all(sample["rows"] == 20_000 for row in written["rows"] for sample in row["samples"])
    assert "rows/s" in capsys.readouterr().out
