"""`bench ingest` on a small log: both variants read the same rows, and the JSON has what is
claimed.
"""

import json

from slipstream.bench import ingest_rate as bench


def test_bench_ingest(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "QUICK_ROWS", 20_000)
    monkeypatch.setattr(bench, "QUICK_REPEATS", 1)
    result = bench.run(quick=True, json_path=tmp_path / "ingest.json")
    written = json.loads((tmp_path / "ingest.json").read_text())
    assert written["claims"] == result["claims"] and written["bench"] == "ingest"
    assert (
        written["claims"]["rows_per_second"] > 0
        and 2**20 < written["claims"]["peak_bytes"] < 6 * 2**30
    )
    assert [row["variant"] for row in written["rows"]] == ["slipstream", "polars in memory"]
    assert all(sample["rows"] == 20_000 for row in written["rows"] for sample in row["samples"])
    assert "rows/s" in capsys.readouterr().out
