"""The tables benchmark measures every variant it claims about and reports a missing peer."""

import importlib.util
import json

from benchmarks.tables import bench as tables
from benchmarks.tables import peers as table_peers


def test_every_variant_of_a_claim_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "QUICK", (3_000, 200, 2))
    monkeypatch.setattr(tables, "DISK_QUICK", (2_000, 100, 2))
    tables.run(quick=True, json_path=tmp_path / "tables.json")
    result = json.loads((tmp_path / "tables.json").read_text())
    assert {"gather_vs_index_select", "update_speedup"} <= result["claims"].keys()
    variants = [row["variant"] for row in result["rows"]]
    assert sum(variant.startswith("gather") for variant in variants) == 6
    assert any("SparseAdam" in variant for variant in variants) and any(
        "mmap" in variant for variant in variants
    )
    assert any("FBGEMM" in variant for variant in variants) == (
        importlib.util.find_spec("fbgemm_gpu") is not None
    )
    assert all(len(row["samples"]) == 2 and row["ns a row"] > 0 for row in result["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["tables.json"]


def test_a_missing_peer_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(table_peers.importlib.util, "find_spec", lambda name: None)
    assert table_peers.make_fbgemm(10, 4) is None
    assert "FBGEMM is not installed" in capsys.readouterr().out
