"""A quick run of the pointwise benchmark compares operators and writes its JSON."""

import json

from slipstream.bench import pointwise_rate as pointwise


def test_quick_run_writes_every_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(pointwise, "QUICK_TOKENS", 60)
    monkeypatch.setattr(pointwise, "TABLE_ROWS", 1_000)
    target = tmp_path / "pointwise.json"
    result = pointwise.run(quick=True, json_path=target)
    written = json.loads(target.read_text())
    assert written["claims"] == result["claims"] and written["bench"] == "pointwise"
    operators = {row["operator"] for row in written["rows"]}
    assert {f"{name}_speedup" for name in operators} == set(written["claims"]) and len(
        operators
    ) == 9
    assert all(len(row["samples"]) >= 5 and row["seconds"] > 0 for row in written["rows"])
