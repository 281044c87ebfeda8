"""The benchmark of a served hit: users are the same on both sides, claims are ratios of medians."""

import numpy as np
import pytest

from benchmarks import hit
from slipstream.serving.http import messages as m


def test_a_user_has_one_history_and_one_list_of_candidates():
    first, second = hit.history_of("3-512-known", 512), hit.history_of("3-512-known", 512)
    assert (first.items == second.items).all() and (first.timestamps == second.timestamps).all()
    assert (first.timestamps[1:] >= first.timestamps[:-1]).all()
    assert hit.candidates_of("a") == hit.candidates_of("a") != hit.candidates_of("b")


def test_no_user_serves_two_variants_or_rounds():
    users = [user for user, _ in hit.users_of(4)]
    assert len(users) == len(set(users)) == 4 * (1 + 2 * len(hit.LENGTHS))


def test_claims_are_medians_and_their_ratio():
    rows = [{"variant": "in line", "behaviours": 16, "ms": 4.0}]
    for length in hit.LENGTHS:
        rows.append({"variant": "hit", "behaviours": length, "ms": 9.0})
        rows.append({"variant": "engine hit", "behaviours": length, "ms": 6.0})
    claims = hit.claims_of(rows, 0.25)
    assert claims["hit_vs_engine_1024"] == 1.5 and claims["hit_ms_2048"] == 9.0
    assert claims["in_line_ms_16"] == 4.0 and claims["score_diff"] == 0.25


def test_a_wrong_score_is_noted():
    samples = hit.Samples()
    answer = m.RankAnswer(
        {"click": [0.5, 0.25]}, "v", "i-0", "device", truncated=False, behaviours=9
    )
    samples.compare(answer, {"click": np.array([0.5, 0.5], np.float32)})
    assert samples.score_diff == 0.25


@pytest.mark.slow
def test_one_round_runs_through_the_real_server(tmp_path, monkeypatch):
    monkeypatch.setattr(hit, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(hit, "ANNOUNCED_SECONDS", 3.0)  # a busy machine computes late
    result = hit.run(True, tmp_path / "hit.json")
    assert result["claims"]["score_diff"] == 0.0
    assert {row["variant"] for row in result["rows"]} == {
        "in line", "preinfer", "hit", "again", "engine hit", "engine in line",
    }  # fmt: skip
