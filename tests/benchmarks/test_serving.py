"""Parts of the serving benchmark: traces, users, ideal queues, search, claims, the journal."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.serving.bench import QUICK, ServingBench
from benchmarks.serving.claims import compute_claims, group_rows
from benchmarks.serving.command import with_percentiles
from benchmarks.serving.ideal_queue import RelayTimes, inline_rate, relay_rate
from benchmarks.serving.load import Outcome, open_loop
from benchmarks.serving.runs import Journal, RunPlan, is_calm, outcome_row, served_history
from benchmarks.serving.search import (
    LOWEST_LEVEL,
    LengthSearch,
    Question,
    RateSearch,
    largest_held,
    level_of,
    rate_of,
    take_turns,
)
from benchmarks.serving.server import RELAY, ROLES, VARIANTS
from benchmarks.serving.trace import (
    Log,
    cut_sessions,
    poisson_times,
    rotating_window,
    session_window,
    single_window,
    stage_times,
    synthetic_log,
)
from benchmarks.serving.truncation import find_figure
from benchmarks.serving.users import Population
from slipstream.errors import SlipstreamError
from slipstream.training.run_directory import sole_user


def test_sessions_are_cut_at_users_and_long_gaps():
    users = np.array([2, 1, 1, 1, 2] + [3] * 4)
    times = np.array([50.0, 0.0, 10.0, 5000.0, 60.0, 100.0, 110.0, 120.0, 130.0])
    found = [pages.tolist() for pages in cut_sessions(users, times, 3)]
    assert found == [[0.0], [0.0], [0.0], [0.0, 30.0]]
    every_row = cut_sessions(users, times, 1)
    assert [pages.tolist() for pages in every_row[:2]] == [[0.0, 10.0], [0.0]]


def test_a_window_is_stationary_traffic_of_both_logs():
    pages = (np.array([0.0, 40.0, 80.0]),) * 50
    logs = [Log("three", pages), Log("one", (np.array([0.0]),) * 50)]
    window = session_window(logs, 20.0, 4_000, kept=1e9, seed=3)
    assert len(window.requests) == 4_000
    # Half of the sessions have three pages, so half of all requests are second or third ones.
    assert np.mean([request.again for request in window.requests]) == pytest.approx(0.5, abs=0.04)
    seen = set(window.before)
    for request in window.requests:
        assert request.again == (request.user in seen)
        seen.add(request.user)


def test_what_would_have_left_memory_is_not_warmed_up():
    logs = [Log("gaps", (np.array([0.0, 5.0]), np.array([0.0, 500.0])))]
    for kept, some in ((1e9, True), (20.0 * 100, True), (20.0, False)):
        window = session_window(logs, 20.0, 200, kept=kept, seed=1)
        assert bool(window.before) == some
    near = session_window(logs, 20.0, 200, kept=20.0 * 100, seed=1)
    far = session_window(logs, 20.0, 200, kept=1e9, seed=1)
    assert len(near.before) < len(far.before)


def test_other_windows():
    assert not any(request.again for request in single_window(5).requests)
    circle = rotating_window(7, 3)
    assert [request.user for request in circle.requests] == [0, 1, 2, 0, 1, 2, 0]
    assert circle.before == 3 * (0, 1, 2) and circle.users == 3


def test_arrivals_and_stages_have_their_means():
    assert poisson_times(50.0, 5_000, 0)[-1] == pytest.approx(100.0, rel=0.05)
    stages = stage_times(0.12, 0.3, 0.4, 20_000, 0)
    assert stages.mean() == pytest.approx(0.12, rel=0.02) and stages.max() <= 0.4
    assert stages.std() / stages.mean() == pytest.approx(0.3, rel=0.05)


def test_a_users_history_grows_by_what_was_appended():
    population = Population("mix", 100, 50, 40, sigma=0.5, longest=100)
    lengths = [population.length_of(user) for user in range(100)]
    assert min(lengths) >= 16 and max(lengths) <= 100 and len(set(lengths)) > 20
    grown = served_history(population, 7, 2)
    assert grown.total == population.length_of(7) + 12
    assert (np.diff(grown.timestamps) >= 0).all()
    assert population.candidates_of(7, 1, 5) != population.candidates_of(7, 2, 5)


def test_misses_count_for_the_percentile():
    outcome = Outcome(10.0, 0.08, latencies=[0.01] * 99 + [float("inf")])
    assert outcome.percentile(0.99) == 10.0 and outcome.within_slo == 0.99
    assert outcome.holds
    outcome.latencies[0] = 0.09
    assert not outcome.holds
    assert not Outcome(10.0, 0.08, latencies=[0.01], cut_short=True).holds
    row = outcome_row(outcome, {}, dict.fromkeys(ROLES, 0))
    assert row["misses"] == 2 and row["p99_ms"] == pytest.approx(90.0)
    json.dumps(row, allow_nan=False)


def test_a_run_that_has_missed_too_often_ends_there():
    class Slow:
        outcome = Outcome(1000.0, 0.08)

        async def run(self, place: int, arrival: float) -> float:
            self.outcome.latencies.append(float("inf"))
            return float("inf")

        recommend = run

    outcome = asyncio.run(open_loop(Slow(), range(400), give_up=True, seed=0))  # type: ignore[arg-type]
    assert outcome.cut_short and 4 < len(outcome.latencies) < 400


def test_a_run_ends_when_the_machine_pauses():
    class Served:
        outcome = Outcome(1000.0, 0.08)

        async def run(self, place: int, arrival: float) -> float:
            self.outcome.latencies.append(0.01)
            return 0.01

        recommend = run

    cascade = Served()
    loop = open_loop(
        cascade,  # type: ignore[arg-type]
        range(400),
        give_up=False,
        seed=0,
        disturbed=lambda: len(cascade.outcome.latencies) > 20,
    )
    outcome = asyncio.run(loop)
    assert outcome.cut_short and len(outcome.latencies) < 400


@pytest.mark.parametrize(
    ("change", "rate", "calm"),
    [
        ({}, 100.0, True),
        ({"others_share": 0.06}, 100.0, False),
        ({"stolen_share": 0.02}, 100.0, False),
        ({"paused_beyond_ms": 50.0}, 100.0, True),  # five requests of ten that may miss
        ({"paused_beyond_ms": 51.0}, 100.0, False),
        ({"paused_beyond_ms": 51.0}, 10.0, True),
        ({"paused_beyond_ms": 1.0}, 0.0, False),  # service times
    ],
)
def test_a_run_is_calm_where_nothing_else_had_a_part_in_it(
    change: dict[str, float], rate: float, calm: bool
):
    row = {"others_share": 0.05, "stolen_share": 0.01, "paused_beyond_ms": 0.0}
    assert is_calm(row | change, rate, 1_000) == calm


def test_the_ideal_queue_in_line_is_that_of_queueing_theory():
    # M/M/1: the 99th percentile of the time in system is ln(100) / (mu - lambda).
    rng = np.random.default_rng(0)
    service = rng.exponential(0.01, 20_000)
    expected = 100.0 - np.log(100) / 0.2
    assert inline_rate(service, 1, 0.2) == pytest.approx(expected, rel=0.06)
    assert inline_rate([0.041], 2, 0.08) == pytest.approx(16.8, rel=0.05)  # M/D/2
    assert inline_rate([0.1], 2, 0.08) == 0.0


def test_the_ideal_relay_does_the_same_work_earlier():
    inline = inline_rate([0.041], 2, 0.08)
    times = RelayTimes([0.008], [0.033], [0.041])
    same_work = relay_rate(times, 2, 0.08)
    assert 1.2 * inline < same_work < 2 / 0.041
    reused = relay_rate(replace(times, computed=0.5), 2, 0.08)
    assert same_work < reused < 2 / 0.008
    nobody_announced = relay_rate(replace(times, computed=0.0, inline=1.0), 2, 0.08)
    assert nobody_announced == pytest.approx(inline, rel=0.05)


def test_what_the_relay_ranks_in_line_takes_as_long_as_on_a_server_in_line():
    """Its own first rankings are announced, which takes longer than ranking alone."""
    taken = {
        "relay": {"rank_s": [0.041], "hit_s": [0.008]},
        "W1": {"rank_s": [0.03]},
    }

    class Measured:
        slo = 0.08

        def run(self, plan: RunPlan) -> dict:
            return {"samples": taken[plan.variant.name]}

    def ideal(names: tuple[str, ...], *shares: float) -> float:
        question = Question(Population("64", 10, 50, 64), "S")
        variants = [VARIANTS[name] for name in names]
        search = RateSearch(Measured(), question, variants)  # type: ignore[arg-type]
        return search.ideal_rate(RELAY, *shares)

    assert ideal(("relay", "W1"), 0.0, 1.0) == pytest.approx(inline_rate([0.03], 2, 0.08), rel=0.05)
    assert ideal(("relay",), 0.0, 1.0) == pytest.approx(inline_rate([0.041], 2, 0.08), rel=0.05)
    assert ideal(("relay", "W1")) == ideal(("relay",))  # all are announced


def test_a_result_keeps_percentiles_of_a_run_in_place_of_every_latency():
    run = {"key": "probe", "samples": {"latencies_ms": [*range(1, 100), None], "hits": {}}}
    kept = with_percentiles(run)["samples"]
    assert "latencies_ms" not in kept and kept["hits"] == {}
    percentiles = kept["latency_percentiles_ms"]
    assert (percentiles["0"], percentiles["100"]) == (1, None)
    assert percentiles["50"] == pytest.approx(50, abs=1)


def ask(level: int):
    """Ask whether a level holds; here a run is named by its level."""
    return (yield level)


@pytest.mark.parametrize("edge", [12, 13, 17, 18, 25, 40])
@pytest.mark.parametrize("begin", [12, 20, 26])
def test_the_search_finds_the_edge(edge, begin):
    asked = []

    def run(level: int) -> bool:
        asked.append(level)
        return level <= edge

    assert take_turns(run, [largest_held(ask, begin, 12, 60)]) == [edge]  # type: ignore[arg-type,list-item]
    assert len(asked) <= abs(begin - edge) // 2 + 4


def test_where_nothing_holds_the_search_says_so():
    for holds, found in ((False, None), (True, 25)):
        search = largest_held(ask, 20, 12, 25)
        assert take_turns(lambda level: holds, [search]) == [found]  # type: ignore[arg-type,list-item]  # noqa: B023


def test_searches_take_turns_until_each_has_ended():
    asked = []

    def run(level: int) -> bool:
        asked.append(level)
        return level <= 22

    def first(begin: int):
        for level in range(begin, 0, -1):
            if (yield level):
                return level

    assert take_turns(run, [first(24), first(23), first(32)]) == [22, 22, 22]  # type: ignore[list-item]
    assert asked[:6] == [24, 23, 32, 23, 22, 31] and asked[-1] == 22


def test_rates_lie_on_the_grid_and_not_below_five():
    assert rate_of(level_of(30.0)) <= 30.0 < rate_of(level_of(30.0) + 1)
    assert rate_of(LOWEST_LEVEL) >= 5.0 > rate_of(LOWEST_LEVEL - 1)


def test_lengths_lie_on_a_grid_within_the_model():
    search = LengthSearch(None, 10.0, 100, 50, 256, 6_080)  # type: ignore[arg-type]
    lengths = [search.length_of(level) for level in range(search.highest + 1)]
    assert lengths[0] == 256 and lengths[-1] <= 6_080 < search.length_of(search.highest + 1)
    assert all(length % 16 == 0 for length in lengths)


def test_the_journal_survives_a_torn_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    journal = Journal(path)
    journal.add({"key": "a", "holds": True})
    with path.open("a") as file:
        file.write('{"key": "b", "hol')
    assert Journal(path).rows == {"a": {"key": "a", "holds": True}}


def test_runs_of_a_result_count_as_made_and_those_of_the_journal_come_first(tmp_path: Path):
    result, work = tmp_path / "serving.json", tmp_path / "work"
    made = [{"key": "a", "rate": 1.0}, {"key": "b", "rate": 2.0}]
    samples = {"runs": made, "figures": {"truncation": {"256": 0.7}}}
    result.write_text(json.dumps({"commit": "abc", "rows": [{"samples": samples}]}))
    Journal(work / "runs.jsonl").add({"key": "a", "rate": 9.0})
    bench = ServingBench(QUICK, work, Console(quiet=True))
    bench.take_over(result)
    rows = Journal(work / "runs.jsonl").rows.values()
    assert [row["rate"] for row in rows] == [9.0, 2.0]
    assert [row.get("commit") for row in rows] == [None, "abc"]
    bench.truncation()
    assert bench.figures["truncation"] == {"256": 0.7}
    result.write_text('{"rows": []}')
    with pytest.raises(SlipstreamError, match="is no result of"):
        bench.take_over(result)


def test_two_benchmarks_do_not_share_a_directory(tmp_path: Path):
    first, second = (ServingBench(QUICK, tmp_path, Console(quiet=True)) for _ in range(2))
    with sole_user(first.work), pytest.raises(SlipstreamError, match="another process works in"):
        second.run_parts([])
    assert second.run_parts([])


def test_a_runs_key_tells_runs_apart():
    population = Population("64", 10, 50, 64)
    plan = RunPlan(RELAY, population, "S", 10.0, "probe")
    others = [
        RunPlan(RELAY, population, "N", 10.0, "probe"),
        RunPlan(RELAY, population, "S", 11.5, "probe"),
        RunPlan(RELAY, population, "S", 10.0, "verdict"),
        RunPlan(RELAY, population, "S", 10.0, "probe", 2),
        RunPlan(RELAY, population, "S", 10.0, "probe", candidates=500),
        RunPlan(RELAY, population, "S", 10.0, "probe", label="without trigger"),
    ]
    assert len({plan.key, *(other.key for other in others)}) == 7


def figures() -> dict:
    def group(relay, w1, **more):
        rates = {"relay": relay, "W1": w1, **more}
        return {"rates": rates, "ideal": {"relay": 100.0, "W1": 50.0}}

    return {
        "groups": {
            "S 512": group(80.0, 40.0, W3=50.0),
            "S 1024": group(45.0, 10.0, W2=15.0, W3=20.0),
            "S mix": group(60.0, None),
            "N 512": group(44.0, 40.0),
            "N 1024": group(28.0, 20.0),
        },
        "once": {
            "S wide": {"relay": 30.0, "W1": 30.0},
            "S 3072": {"relay": 18.0, "W1": None},
        },
        "longest": {"relay": 2048, "W1": 1024},
        "ablations": {
            "trigger": {"with": [{"within_slo": 0.9}], "without": [{"within_slo": 0.6}]},
        },
    }


def test_claims_follow_the_protocol():
    claims = compute_claims(figures(), [{"score_diff": 0.0}, {"score_diff": 1e-7}], 1024)
    assert claims["slo_qps_ratio"] == pytest.approx((2.0 * 3.0) ** 0.5)  # W2 is better than W1
    assert claims["slo_qps_ratio_max"] == 3.0 and claims["slo_qps_ratio_max_length"] == 1024
    assert claims["slo_qps_ratio_keep"] == pytest.approx((1.6 * 2.25) ** 0.5)
    assert claims["slo_qps_ratio_no_reuse"] == pytest.approx(1.4)
    assert claims["slo_qps_ratio_no_reuse_min"] == pytest.approx(1.1)
    assert claims["baseline_vs_ideal"] == pytest.approx(0.2)
    assert claims["relay_vs_ideal"] == pytest.approx(0.45)
    assert claims["max_prefix_ratio"] == 2.0 and claims["trigger_gain"] == pytest.approx(1.5)
    assert claims["loadgen_valid"] == 1.0 and claims["score_diff"] == 1e-7


def test_rates_of_long_histories_are_claimed_side_by_side():
    claims = compute_claims(figures(), [], 1024)
    assert (claims["slo_qps_long_3072"], claims["slo_qps_long_3072_inline"]) == (18.0, 0.0)
    assert not any("wide" in name for name in claims)


def test_a_baseline_below_five_a_second_enters_no_ratio_but_is_told():
    found = figures()
    found["groups"]["S 512"]["rates"]["W1"] = 4.9
    assert compute_claims(found, [], 1024)["slo_qps_ratio"] == pytest.approx(3.0)
    told = [row for row in group_rows(found) if row["length"] == "mix"]
    assert [(row["variant"], row["slo_qps"]) for row in told] == [("relay", 60.0), ("W1", None)]


def test_a_part_that_was_not_measured_claims_nothing():
    assert compute_claims({}, [], 1024) == {}


def test_a_figure_is_found_wherever_it_stands():
    told = {"run": {"x": 1}, "test": {"metrics": {"AUC/liked": 0.7}}}
    assert find_figure(told, "AUC/liked") == 0.7
    with pytest.raises(LookupError):
        find_figure(told, "AUC/other")


def test_sessions_are_drawn_where_no_log_is_at_hand():
    log = synthetic_log(100)
    assert log.mean_pages > 2 and all(pages[0] == 0.0 for pages in log.sessions)
