"""Bytes of the exchange equal the formula, and TorchRec's rows equal ours."""

import importlib.util

import pytest

from benchmarks.exchange.bench import launch, peer_rows, replica_rows
from benchmarks.exchange.ranks import REPEATED, Setting

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
def test_torchrec_trains_the_same_rows_from_deduplicated_keys():
    """Whatever it is handed; only repeated keys cost it more bytes than ours."""
    rows, claims = peer_rows(launch(SMALL, 2, "torchrec"))
    assert claims["max_diff"] < 1e-4 and claims["formula_error"] == 0
    sent = {row["variant"]: row["bytes_per_rank"] for row in rows}
    assert sent["torchrec, torch.unique"] == sent["torchrec, our unique_keys"] < sent[REPEATED]
    assert claims["bytes_vs_torchrec"] == pytest.approx(1, abs=0.02)
    assert claims["bytes_vs_torchrec_duplicated"] < 0.8


def test_claims_are_against_the_best_variant_of_torchrec():
    """The rule before stays beside them."""
    figures = {
        "slipstream": (2.0, 10),
        "torchrec, torch.unique": (5.0, 10),
        "torchrec, our unique_keys": (4.0, 10),
        REPEATED: (8.0, 40),
    }
    transport = {"rows": {"relative": 0.1}, "gradients": {"relative": 0.2}}
    rank = {
        "rows": {name: {"seconds": [s, s], "bytes": [b, b]} for name, (s, b) in figures.items()},
        "max_diff": 0.0,
        "formula_error": 0,
        "transport": transport,
    }
    _, claims = peer_rows([rank, rank])
    assert (claims["time_vs_torchrec"], claims["bytes_vs_torchrec"]) == (0.5, 1.0)
    assert claims["time_vs_torchrec_duplicated"] == 0.25
    assert claims["bytes_vs_torchrec_duplicated"] == 0.25
