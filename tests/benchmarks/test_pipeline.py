"""The pipeline benchmark on an emulated link, its calibration, and the shares of a trace."""

import json
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from benchmarks.pipeline import bench as pipeline
from benchmarks.pipeline import clusters as pipeline_clusters
from benchmarks.pipeline import link as pipeline_link
from benchmarks.pipeline import rank as pipeline_rank
from benchmarks.pipeline import tiers
from benchmarks.pipeline.device import EmulatedRecommender
from benchmarks.pipeline.figures import (
    CORES,
    EMULATED,
    LATENCY,
    OVERLAP,
    PAPER,
    TURBO,
    claims_of,
    rows_of,
)
from benchmarks.pipeline.setting import Setting, make_batch
from benchmarks.pipeline.tiers import SlowDiskTable
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.row_optimizers import RowwiseAdagrad
from slipstream.training.features import ITEM, Features
from slipstream.training.loop import train_step
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


FREE = {
    "step_seconds": 0.35,
    "compute_seconds": 0.28,
    "host_seconds": 0.02,
    "comm_seconds": 0.01,
    "lookup_seconds": 0.02,
    "sent_bytes": 1e6,
    "reads": 500.0,
}


def test_limits_stretch_a_free_step_to_the_wanted_shares():
    in_memory = pipeline.limits(FREE, pipeline.Point(None, 0.2, ()))
    assert 1e6 / in_memory.link_rate + 0.01 == pytest.approx(0.2 * 0.32 / 0.8)
    by_rate = pipeline.limits(FREE, pipeline.Point(0.5, 0.2, ()))
    assert 1e6 / by_rate.link_rate + 0.01 == pytest.approx(0.2)
    assert by_rate.read_rate is not None
    assert 500 / by_rate.read_rate + 0.02 == pytest.approx(0.5) and by_rate.latency == 0
    by_latency = pipeline.limits(FREE, pipeline.Point(0.5, 0.2, (), by_latency=True))
    assert by_latency.latency + 0.02 == pytest.approx(0.5) and by_latency.read_rate is None


def test_a_trial_that_waited_too_long_makes_link_and_tier_faster():
    point = pipeline.Point(0.5, 0.2, (), by_latency=True)
    first = pipeline.Limits(1e6, None, 0.6)
    trial = FREE | {"lookup_seconds": 0.02 + 2 * 0.48, "comm_seconds": 0.01 + 1.5 * 0.19}
    better = pipeline.corrected(first, trial, FREE, point)
    assert better.latency == pytest.approx(0.3) and better.link_rate == pytest.approx(1.5e6)


def plain_step(lookup, comm, compute, cpu=0.5):
    """A synchronous step of one second, in these shares."""
    seconds = {"lookup": lookup, "comm": comm, "compute": compute}
    host = 1 - sum(seconds.values())
    step = {f"{kind}_seconds": value for kind, value in (seconds | {"host": host}).items()}
    return step | {"step_seconds": 1.0, "cpu_seconds": cpu, "sent_bytes": 1.0, "reads": 9.0}


def schedule_step(seconds, **figures):
    """A step of a schedule whose table lane is busy all the time."""
    exposed = {"exposed_lookup": 0.1, "exposed_comm": 0.05, "exposed_sparse_comm": 0.01}
    busy = {"busy_table": 1.0, "busy_compute": 0.9, "compute_utilisation": 0.9}
    step = {"step_seconds": seconds, "cpu_seconds": 0.7, "sent_bytes": 2.0, "reads": 10.0}
    spent = {"cpu_of_compute": 0.25, "cpu_of_load": 0.01, "cpu_of_retrieve": 0.005}
    return exposed | busy | step | spent | figures


def test_a_speedup_stands_beside_the_bound_of_the_busiest_lane():
    samples = {"synchronous 1": [plain_step(0.5, 0.2, 0.25)], "nested 8": [schedule_step(0.55)]}
    plain, nested = rows_of("t", CORES, {"variants": samples}, {})
    assert plain["bound"] == nested["bound"] == pytest.approx(2.0)
    assert nested["speedup"] == pytest.approx(1 / 0.55)
    assert nested["bound_share"] == pytest.approx(0.5 / 0.55)
    assert nested["own_bound"] == pytest.approx(1 / 0.55)
    # Its lanes made the compute lane busy for 0.9 of the step, but only 0.25 s of that is compute.
    assert nested["utilisation"] == pytest.approx(0.25 / 0.55)
    assert nested["lanes_ms"] == pytest.approx(15)  # of the lanes beside compute
    assert nested["compute"] == 0.9 and plain["utilisation"] == pytest.approx(0.25)
    waits = rows_of("t", CORES, {"variants": samples}, {}, tier_is_lane=False)
    assert waits[1]["bound"] == pytest.approx(4.0)  # the busiest lane computes


def test_claims_come_from_the_rows_they_name():
    def measured(nested, **others):
        steps = {"synchronous 1": [plain_step(0.5, 0.2, 0.25)], "nested 8": [schedule_step(nested)]}
        return {"variants": steps | {name: [schedule_step(s)] for name, s in others.items()}}

    stale = {"semi_async 1": 0.4, "six_stage 1": 0.5}
    rows = rows_of(PAPER, CORES, measured(0.6), {})
    rows += rows_of(PAPER, EMULATED, measured(0.52), {})
    rows += rows_of(LATENCY, CORES, measured(0.6, **{"nested, 2 ahead 8": 0.4}), {})
    rows += rows_of(LATENCY, EMULATED, measured(0.5, **{"nested, 2 ahead 8": 0.6}), {})
    rows += rows_of(OVERLAP, CORES, measured(0.8), {})
    rows += rows_of(TURBO, CORES, measured(0.9, **stale), {})
    rows += rows_of(TURBO, EMULATED, measured(0.9, **(stale | {"six_stage 1": 0.26})), {})
    differences = {
        "nested 8 same_cut": 0.0,
        "nested 8 synchronous": 1e-7,
        "dual_buffer 1 same_cut": 0.0,
        "dual_buffer 1 synchronous": 0.0,
    }
    inflation = {"overlap": 0.1, "clustered": 1.2, "random": 1.4}
    claims = claims_of(rows, differences, inflation)
    assert claims["nested_bound_share"] == pytest.approx(0.5 / 0.6)
    assert claims["nested_bound_share_overlap"] == pytest.approx(0.5 / 0.8)
    assert claims["nested_bound_share_emulated"] == pytest.approx(0.5 / 0.52)
    assert claims["nested_speedup_latency"] == pytest.approx(1 / 0.4)
    assert claims["nested_speedup_latency_emulated"] == pytest.approx(2.0)
    assert claims["compute_utilisation"] == pytest.approx(0.5)
    assert claims["compute_utilisation_emulated"] == pytest.approx(0.25 / 0.26)
    assert claims["max_diff"] == 1e-7 and claims["bitwise"] == 0
    assert claims["max_diff_uncut"] == claims["max_diff_same_cut"] == 0
    assert claims["nested_speedup_min"] == pytest.approx(1 / 0.9)
    assert claims["lane_cpu_ms"] == pytest.approx(200)
    assert claims["lanes_ms"] == pytest.approx(15) and "lanes_ms_compute" not in claims
    assert (claims["lanes_ms_load"], claims["lanes_ms_retrieve"]) == pytest.approx((10, 5))


def test_two_ranks_report_their_steps_and_equal_weights():
    found = pipeline.launch(replace(SMALL, variants=pipeline.PAIR), "check time", None)
    differences = found["max_diff"]
    assert {v for name, v in differences.items() if name.endswith("same_cut")} == {0.0}
    assert 0 < differences["nested 8 synchronous"] < 1e-4  # micro-batches round differently
    rows = rows_of("free", CORES, found, differences)
    assert [row["variant"] for row in rows] == ["free: synchronous 1", "free: nested 8"]
    assert all(row["step_ms"] > 0 and len(row["samples"]) == SMALL.repeats for row in rows)
    shares = [rows[0][kind] for kind in ("lookup", "comm", "host", "compute")]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0


def memory_of_both(rank, world, scratch):
    """Return the rows that the caches of a schedule and of the plain loop hold."""
    setting = replace(SMALL, cache_rows=100)
    ranks = pipeline_rank.arrange("auto", timedelta(seconds=60))
    me = pipeline_rank.Rank(setting, ranks, Path(scratch))
    trained, plain = me.fresh(), me.plain_loop()
    tables = [each.tables[ITEM] for each in (trained[0], plain.recommender)]
    counts = [keys.numel() for keys in me.owned_keys()]
    me.fill_cache(plain.recommender)
    reads = tables[1].counters["reads"]
    tables[1].read(me.owned_keys()[me.start - 1])  # of the batch before: in the cache
    return [
        [table.cache_rows for table in tables],
        counts,
        me.buffer_rows(),
        tables[1].counters["reads"] - reads,
    ]


def test_the_plain_loop_caches_as_many_rows_more_as_the_buffers_of_nested_hold(tmp_path):
    for caches, counts, buffered, reads in run_ranks(
        2, f"{__name__}:memory_of_both", tmp_path, scratch=str(tmp_path)
    ):
        pairs = zip(counts, [*counts[1:], counts[0]], strict=True)
        assert buffered == max(one + two for one, two in pairs)
        assert caches[1] - caches[0] == buffered and reads == 0


def steps_of_both(rank, world, scratch):
    """Train by the shipped loop's own step, and by the benchmark's plain loop."""
    ranks = pipeline_rank.arrange("auto", timedelta(seconds=60))
    me = pipeline_rank.Rank(SMALL, ranks, Path(scratch))
    loop = me.plain_loop()
    loop.run(me.batches, 0, 1, 2)
    ours, (recommender, optimizer) = (loop.recommender, loop.optimizer), me.fresh()
    for step in range(3):
        train_step(recommender, optimizer, me.batches[step], step, 1_000, ranks)
    both = [pipeline_rank.weights_and_state(each) for each in (ours, (recommender, optimizer))]
    return pipeline_rank.largest_difference(*both)


def test_synchronous_is_the_shipped_loop(tmp_path):
    apart = run_ranks(2, f"{__name__}:steps_of_both", tmp_path, scratch=str(tmp_path))
    assert apart == [0.0, 0.0]


def test_an_emulated_device_sleeps_and_leaves_gradients():
    setting = replace(SMALL, tier="memory")
    recommender = EmulatedRecommender(setting.recipe(), Features(setting.items))
    recommender.seconds_per_token = 1e-4
    inputs = recommender.read(recommender.plan_step(make_batch(setting, 0, 0), 0))
    spent, began = time.thread_time(), time.monotonic()
    recommender.loss(inputs).backward()
    assert time.monotonic() - began >= 1e-4 * setting.users * setting.length
    assert time.thread_time() - spent < 1.0  # asleep, not computing
    assert inputs.lookups[ITEM].rows_UD.grad is not None
    assert all(each.grad is not None for each in recommender.model.parameters())


def test_a_tier_waits_by_rate_or_once_by_latency(tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(tiers.time, "sleep", waits.append)
    keys_U = torch.arange(40)
    slow = SlowDiskTable(
        "item", 40, 4, RowwiseAdagrad(), tmp_path, latency=3.0, cache_bytes=1 << 14
    )
    with slow.at_full_speed():
        slow.write(keys_U, slow.read(keys_U))
        slow.flush()
    assert not any(waits)  # nothing waits inside
    slow.close()
    again = SlowDiskTable(
        "item", 40, 4, RowwiseAdagrad(), tmp_path, latency=3.0, cache_bytes=1 << 14
    )
    again.read(keys_U)
    again.read(keys_U[:3])
    assert [each for each in waits if each] == [3.0, 3.0] and again.seconds > 0
    again.close()


def test_a_variant_may_look_further_ahead():
    assert pipeline_rank.schedule_of("nested, 2 ahead", 8).buffers_ahead == 2
    assert pipeline_rank.schedule_of("nested", 4).micro_batches == 4


@pytest.mark.slow
def test_the_whole_quick_benchmark_on_an_emulated_link(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipeline, "can_make_namespaces", lambda: False)
    monkeypatch.setattr(pipeline, "quick_setting", lambda base: SMALL)
    monkeypatch.setattr(pipeline, "EXACT", pipeline.PAIR)
    points = {
        title: replace(point, variants=(pipeline.EXACT if title == PAPER else point.variants))
        for title, point in pipeline.SWEEP.items()
    }
    monkeypatch.setattr(pipeline, "SWEEP", points)
    # No MovieLens here: Zipf batches alone.
    monkeypatch.setattr(pipeline_clusters, "cache_directory", lambda: tmp_path)
    result = pipeline.run(True, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["claims"].keys() == (
        result["claims"].keys()
    )
    assert result["claims"]["max_diff_same_cut"] == 0.0
    assert {row["link"] for row in result["rows"] if "link" in row} == {"emulated", "loopback"}
    assert result["claims"]["key_inflation"] < 2 / 3 * result["claims"]["key_inflation_random"]
    devices = {row["device"] for row in result["rows"] if row["variant"].startswith(PAPER)}
    assert devices == {CORES, EMULATED}
    assert all("bound" in row for row in result["rows"] if "speedup" in row)
    wanted = {"compute_utilisation_emulated", "semi_async_exposed", "nested_speedup_latency"}
    assert wanted <= result["claims"].keys()


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
