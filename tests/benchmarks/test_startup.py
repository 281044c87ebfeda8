"""The startup benchmark claims the medians of what it ran."""

import json

from benchmarks import startup


def test_the_claims_are_medians_of_fresh_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "QUICK_REPEATS", 1)
    result = startup.run(True, tmp_path / "startup.json")
    assert json.loads((tmp_path / "startup.json").read_text())["claims"] == result["claims"]
    by_variant = {row["variant"]: row for row in result["rows"]}
    assert set(by_variant) == set(startup.STARTS)
    alone = by_variant["python alone"]["samples"][0]
    assert result["claims"] == {
        "help_s": by_variant["slipstream --help"]["samples"][0],
        "import_s": by_variant["import slipstream"]["samples"][0],
        "help_vs_python": by_variant["slipstream --help"]["samples"][0] / alone,
        "import_vs_python": by_variant["import slipstream"]["samples"][0] / alone,
    }
