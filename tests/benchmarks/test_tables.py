"""The tables benchmark measures every variant it claims about and reports a missing peer."""

import importlib.util
import json

import pytest
import torch

from benchmarks.tables import bench as tables
from benchmarks.tables import peers as table_peers
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.row_optimizers import RowwiseAdagrad, RowwiseAdam


def test_every_variant_of_a_claim_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables, "QUICK", (3_000, 200, 2))
    monkeypatch.setattr(tables, "DISK_QUICK", (2_000, 100, 2))
    tables.run(quick=True, json_path=tmp_path / "tables.json")
    result = json.loads((tmp_path / "tables.json").read_text())
    claims = result["claims"]
    assert {"gather_vs_index_select", "update_speedup"} <= claims.keys()
    assert 0 < claims["update_speedup"] <= claims["update_vs_indexing"]
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


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        (RowwiseAdagrad(table_peers.EPS), table_peers.PlainIndexing.adagrad),
        (RowwiseAdam(table_peers.BETAS, table_peers.EPS), table_peers.PlainIndexing.adam),
    ],
    ids=["adagrad", "adam"],
)
def test_plain_indexing_updates_rows_as_we_do(optimizer, step):
    """Tokens repeat, so both sides deduplicate first."""
    table = MemoryTable("item", 50, 8, optimizer)
    plain = table_peers.PlainIndexing(table.all_rows().clone())
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        keys_T = torch.randint(50, (120,), generator=generator)
        grads_TD = torch.randn(120, 8, generator=generator)
        tables._from_tokens(table, keys_T, grads_TD)
        step(plain, *plain.deduplicated(keys_T, grads_TD))
    torch.testing.assert_close(plain.weights_ND, table.all_rows(), rtol=1e-4, atol=1e-5)


def test_every_update_is_compared_with_plain_indexing(tmp_path, monkeypatch):
    monkeypatch.setattr(table_peers, "make_fbgemm", lambda *shape: None)
    table, batches = MemoryTable("item", 60, tables.DIM, RowwiseAdagrad()), tables.Batches(60, 9, 1)
    groups = tables._adagrad(table, table.all_rows().clone(), batches)
    groups |= tables._adam(table, table.all_rows().clone(), batches, 1)
    assert len(groups) == 4
    assert all({"slipstream", tables.INDEXING} <= set(group) for group in groups.values())
    assert tables.update_claims({tables.INDEXING: [3.0, 2.0], "other": [1.5]}) == {
        "update_speedup": 1.5,
        "update_vs_indexing": 2.0,
    }


def test_a_missing_peer_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(table_peers.importlib.util, "find_spec", lambda name: None)
    assert table_peers.make_fbgemm(10, 4) is None
    assert "FBGEMM is not installed" in capsys.readouterr().out
