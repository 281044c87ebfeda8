"""The disk table benchmark updates more rows than its cache holds and loses none."""

from benchmarks import disk_table


def test_a_table_beyond_its_budget_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk_table, "QUICK", (20_000, 3 << 20))
    result = disk_table.run(quick=True)
    assert result["claims"]["rows_lost"] == 0
    assert result["claims"]["table_bytes"] > 6 * result["claims"]["budget_bytes"]
    row = result["rows"][0]
    assert row["written back"] > 0 and row["rows updated"] > row["cache rows"]
    assert not list(tmp_path.iterdir())
