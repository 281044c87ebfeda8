"""Bytes of the exchange equal the formula, and TorchRec's rows equal ours."""

import importlib.util

import pytest

from benchmarks.exchange.bench import launch, peer_rows, replica_rows
from benchmarks.exchange.ranks import Setting

SMALL = Setting(rows=5_000, dim=16, tokens=600, repeats=3, seconds_allowed=250)


def test_replicas_save_what_their_groups_predict():
    rows, claims = replica_rows(launch(SMALL, 4, "replicas"))
    assert claims["hsp_formula_error"] == 0 and claims["hsp_bytes_ratio"] == pytest.approx(
        2 / 3, abs=0.05
    )
    assert rows[0]["replica_bytes_per_rank"] == 0 < rows[1]["replica_bytes_per_rank"]


@pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="the peer is not installed"
)
def test_torchrec_trains_the_same_rows_with_more_bytes():
    _, claims = peer_rows(launch(SMALL, 2, "torchrec"))
    assert (
        claims["max_diff"] < 1e-4
        and claims["formula_error"] == 0
        and claims["bytes_vs_torchrec"] < 1
    )
