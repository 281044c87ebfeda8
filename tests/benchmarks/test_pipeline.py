"""The pipeline benchmark on an emulated link, its calibration, and the shares of a trace."""

import json
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.pipeline import bench as pipeline
from benchmarks.pipeline import clusters as pipeline_clusters
from benchmarks.pipeline import link as pipeline_link
from benchmarks.pipeline import rank as pipeline_rank
from benchmarks.pipeline.rank import Setting
from slipstream.pipeline.schedule import make_schedule
from tests.support.ranks_fixtures import run_ranks

SMALL = Setting(
    users=4,
    length=12,
    items=600,
    topics=4,
    dim=16,
    heads=1,
    blocks=1,
    batches=4,
    cache_rows=32,
    steps=2,
    repeats=1,
    check_steps=2,
)


def test_rates_stretch_a_free_step_to_the_wanted_shares():
    free = {
        "step_seconds": 0.4,
        "compute_utilisation": 0.75,
        "comm_seconds": 0.01,
        "lookup_seconds": 0.02,
        "sent_bytes": 1e6,
        "reads": 500.0,
    }
    assert 1e6 / pipeline.limits(free, None, 0.2)[0] + 0.01 == pytest.approx(0.2 * 0.32 / 0.8)
    link_rate, read_rate = pipeline.limits(free, 0.5, 0.2)
    assert 1e6 / link_rate + 0.01 == pytest.approx(0.2) and 500 / read_rate + 0.02 == pytest.approx(
        0.5
    )


def test_two_ranks_report_their_steps_and_equal_weights():
    found = pipeline.launch(replace(SMALL, variants=pipeline.PAIR), "check time", None)
    differences = found["max_diff"]
    assert {v for name, v in differences.items() if name.endswith("same_cut")} == {0.0}
    rows = pipeline.rows_of("free", found, differences)
    assert [row["variant"] for row in rows] == ["free: serial 1", "free: nested 8"]
    assert all(row["step_ms"] > 0 and len(row["samples"]) == SMALL.repeats for row in rows)


@pytest.mark.slow
def test_the_whole_quick_benchmark_on_an_emulated_link(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipeline, "can_make_namespaces", lambda: False)
    monkeypatch.setattr(pipeline, "Setting", lambda: SMALL)
    monkeypatch.setattr(pipeline, "quick_setting", lambda base: base)
    monkeypatch.setattr(pipeline, "EXACT", pipeline.PAIR)
    points = {
        pipeline.PAPER: (0.496, 0.205, pipeline.PAIR),
        pipeline.TURBO: (None, 0.25, (*pipeline.PAIR[:1], *pipeline.STALE)),
    }
    monkeypatch.setattr(
        pipeline, "SWEEP", {title: pipeline.Point(*numbers) for title, numbers in points.items()}
    )
    # No MovieLens here: Zipf batches alone.
    monkeypatch.setattr(pipeline_clusters, "cache_directory", lambda: tmp_path)
    result = pipeline.run(True, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["claims"] == result["claims"]
    assert result["claims"]["max_diff"] == 0.0
    assert {row["link"] for row in result["rows"] if "link" in row} == {"emulated", "loopback"}
    assert result["claims"]["key_inflation"] < 2 / 3 * result["claims"]["key_inflation_random"]
    paper = [row for row in result["rows"] if row["variant"].startswith(pipeline.PAPER)]
    assert len(paper) == len(pipeline.SWEEP[pipeline.PAPER].variants) and all(
        row["step_ms"] > 0 for row in paper
    )
    assert {"compute_utilisation", "semi_async_exposed"} <= result["claims"].keys()


def test_an_emulated_link_takes_at_least_its_time():
    link, began = pipeline_link.EmulatedLink(1e6), time.monotonic()
    link.carry(20_000)
    link.carry(30_000)
    assert time.monotonic() - began > 0.045


def peer_losses(rank, world, scratch):
    """Take a few steps by the plain schedule and by TorchRec's pipeline, from the same rows."""
    setting = replace(SMALL, tier="memory", variants=((pipeline.PEER, 1),))
    me = pipeline_rank.Rank(
        setting, pipeline_rank.arrange("auto", timedelta(seconds=60)), Path(scratch)
    )
    theirs = me.peer().run(me.batches, 4)[1]
    recommender, optimizer = me.fresh()
    batches = iter(me.batches)
    work = pipeline_rank.RecommenderWork(
        recommender,
        optimizer,
        lambda: pipeline_rank.LoadedBatch(next(batches), pipeline_rank.BEGIN),
        4,
        ranks=me.ranks,
    )
    peers, ours = pipeline_rank.LaneGroups(recommender.tables.exchange, world=world), []
    with pipeline_rank.Pipeline(
        make_schedule("serial"), work, recommender.tables.tables, peers
    ) as steps:
        for done in steps.steps():
            ours.append(done.loss_sum / done.count)
            if len(ours) == 4:
                break
    peers.close()
    return [theirs, ours]


@pytest.mark.skipif(not pipeline.has_torchrec(), reason="TorchRec is not installed")
def test_the_peer_trains_the_same_model(tmp_path):
    answers = run_ranks(2, f"{__name__}:peer_losses", tmp_path, scratch=str(tmp_path))
    theirs = [
        sum(losses) / 2 for losses in zip(*(each[0] for each in answers), strict=True)
    ]  # ranks have as many tokens
    assert theirs == pytest.approx(answers[0][1], abs=2e-5)
    assert len({round(loss, 4) for loss in theirs}) > 1
