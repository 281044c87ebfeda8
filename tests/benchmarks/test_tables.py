"""The table benchmarks run, measure every variant they claim about, and say so where a peer is
missing.
"""

import importlib.util
import json

from benchmarks import disk_table
from benchmarks.tables import bench as tables
from benchmarks.tables import peers as table_peers


def test_bench_tables_names_its_claims(tmp_path, monkeypatch):
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


def test_a_missing_peer_is_said(monkeypatch, capsys):
    monkeypatch.setattr(table_peers.importlib.util, "find_spec", lambda name: None)
    assert table_peers.make_fbgemm(10, 4) is None
    assert "FBGEMM is not installed" in capsys.readouterr().out


def test_bench_disk_table_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk_table, "QUICK", (20_000, 3 << 20))
    result = disk_table.run(quick=True)
    assert result["claims"]["rows_lost"] == 0
    assert result["claims"]["table_bytes"] > 6 * result["claims"]["budget_bytes"]
    assert (
        result["rows"][0]["written back"] > 0
        and result["rows"][0]["rows moved"] > result["rows"][0]["cache rows"]
    )
    assert not list(tmp_path.iterdir())
