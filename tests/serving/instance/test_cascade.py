"""The cascade computes a history once, follows the rules, and lets short requests pass."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.item_rules import Boost, ItemRules
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.recommend_query import RecommendQuery, RecommendResult
from slipstream.serving.request_errors import BadRequest, DeadlineError, OverloadError
from tests.support.serving_instance import ALWAYS, COST, run, settle, soon
from tests.support.serving_samples import history as sample_history

ITEMS = 900
GENRES = [f"g{row % 5}" if row % 7 else "" for row in range(ITEMS)]
MODEL = {"kind": "hstu", "dim": 32, "blocks": 2, "heads": 2, "max_len": 1000, "divisor": 100.0}
TASKS = ["retrieval", "ranking"]


def write_bundle(path: Path, task: str = "retrieval", **more: Any) -> Path:
    """A bundle of items 0, 1, … with a genre each, whose weights all matter."""
    count = len(more.get("ids", range(ITEMS)))
    settings = {
        "num_items": count,
        "first_id": 0,
        "noise": 0.05,
        "about_items": {"feature:genre": pa.array(GENRES[:count])},
    }
    random_bundle(path, MODEL, task=task, **{**settings, **more})
    return path


def opened(path: Path, *, retrieval: Instance | None = None, **settings: Any) -> Instance:
    threaded = settings.pop("threaded", True)
    given = {"device_bytes": 32 << 20, "host_bytes": 0, "trigger": ALWAYS} | settings
    cost = CostModel(COST.coefficients, COST.copy_seconds_per_byte)
    return Instance(path, InstanceConfig(**given), cost, retrieval=retrieval, threaded=threaded)


def history(count: int, seed: int = 0, items: int = ITEMS) -> History:
    """Behaviours of a user with items 0, 1, …"""
    drawn = sample_history(count, seed)
    chosen = np.random.default_rng(seed).integers(0, items, count)
    return History(chosen, drawn.timestamps, drawn.actions)


def ask(served: Instance, whole: History, user: str = "u", **query: Any) -> RecommendResult:
    given = {"count": 10, "deadline": soon(), **query}
    return run(served.cascade.recommend(user, whole, RecommendQuery(**given)))


def all_scores(engine: Engine, whole: History) -> np.ndarray:
    """The score of every item by the full pass, without any cache."""
    return engine.rank(None, whole, np.arange(len(engine.items)))[engine.tasks[0]]


class LayerTokens:
    """Counts the tokens that enter the layers of a model."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        self._enter = engine.model.backbone.enter
        engine.model.backbone.enter = self._add  # type: ignore[method-assign]

    def _add(self, x_TD: torch.Tensor, *more: Any) -> torch.Tensor:
        self.count += len(x_TD)
        return self._enter(x_TD, *more)

    def since(self) -> int:
        seen, self.count = self.count, 0
        return seen


@pytest.mark.parametrize("relay", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_a_history_is_computed_once_for_retrieval_and_ranking(tmp_path, task, relay):
    served = opened(write_bundle(tmp_path / "b", task), relay=relay)
    engine, whole = served.engine, history(400)
    tokens = LayerTokens(engine)
    scored = ITEMS if task == "ranking" else 0
    first = ask(served, whole)
    assert tokens.since() == engine.tokens_of(400) + scored
    assert first.hit == "inline"
    again = ask(served, whole)
    held = engine.tokens_per_behaviour * engine.hold if relay else engine.tokens_of(400)
    assert tokens.since() == held + scored
    assert again == RecommendResult(
        first.items, first.scores, "device" if relay else "inline", skipped=0
    )
    served.close()


@pytest.mark.parametrize("task", TASKS)
def test_the_best_are_those_of_the_full_pass(tmp_path, task):
    served = opened(write_bundle(tmp_path / "b", task))
    for count in (3, 60, 400):
        whole = history(count, seed=count)
        scores = all_scores(served.engine, whole)
        best = np.argsort(-scores, kind="stable")[:10]
        found = ask(served, whole, user=f"u{count}")
        assert found.items == best.tolist()
        assert found.scores[served.tasks[0]] == scores[best].tolist()
    served.close()


@pytest.mark.parametrize("candidates", [None, list(range(0, ITEMS, 3))])
@pytest.mark.parametrize("task", TASKS)
def test_rules_choose_among_all_items_exactly(tmp_path, task, candidates):
    served = opened(write_bundle(tmp_path / "b", task))
    whole = history(60)
    rules = ItemRules(
        exclude=[3, 6, 9, 10**12],
        where={"genre": ("g0", "g1", "g3")},
        exclude_where={"genre": ("g3",)},
        boosts=(Boost(0.4, where={"genre": ("g1",)}), Boost(-0.3, items=(0, 5))),
        most_per={"genre": 4},
    )
    scores = all_scores(served.engine, whole)
    boosts = np.array([0.4 if genre == "g1" else 0.0 for genre in GENRES], dtype=np.float32)
    boosts[[0, 5]] += np.float32(-0.3)
    left = [n for n in (candidates or range(ITEMS)) if GENRES[n] in ("g0", "g1")]
    left = [n for n in left if n not in (3, 6, 9)]
    taken: Counter[str] = Counter()
    expected = []
    for row in sorted(left, key=lambda n: -(scores + boosts)[n]):
        taken[GENRES[row]] += 1
        if taken[GENRES[row]] <= 4:
            expected.append(row)
    found = ask(served, whole, rules=rules, candidates=candidates)
    assert found.items == expected[:10] and len(expected) == 8
    assert found.scores[served.tasks[0]] == scores[found.items].tolist()
    assert found.boosts == boosts[found.items].tolist()
    served.close()


def test_caps_make_the_search_go_on_until_the_answer_is_full(tmp_path):
    served = opened(write_bundle(tmp_path / "b"))
    whole = history(60)
    found = ask(served, whole, retrieve=10, rules=ItemRules(most_per={"genre": 2}))
    assert len(found.items) == 10
    genres = Counter(GENRES[item] for item in found.items)
    assert all(count <= 2 for genre, count in genres.items() if genre)
    served.close()


def test_a_task_orders_what_the_first_one_retrieved(tmp_path):
    served = opened(write_bundle(tmp_path / "b", "ranking"))
    whole = history(60)
    clicks = all_scores(served.engine, whole)
    likes = served.engine.rank(None, whole, np.arange(ITEMS))["like"]
    retrieved = np.argsort(-clicks, kind="stable")[:30]
    expected = retrieved[np.argsort(-likes[retrieved], kind="stable")][:10]
    assert ask(served, whole, by="like", retrieve=30).items == expected.tolist()
    with pytest.raises(BadRequest, match="name one of click, like"):
        ask(served, whole, by="purchase")
    with pytest.raises(BadRequest, match="known: genre"):
        ask(served, whole, rules=ItemRules(where={"colour": ("red",)}))
    served.close()


@pytest.mark.parametrize("task", TASKS)
def test_a_short_request_overtakes_a_running_search(tmp_path, task, monkeypatch):
    monkeypatch.setattr("slipstream.ops.row_readers.TILE", 100)  # nine steps of a small catalogue
    served = opened(write_bundle(tmp_path / "b", task), threaded=False)
    whole, short = history(60), history(12, seed=1)
    expected = served.engine.rank(None, short, [1, 2, 3])
    order = []

    async def search() -> None:
        await served.cascade.recommend("long", whole, RecommendQuery(10, soon()))
        order.append("search")

    async def rank() -> None:
        answer = await served.rank("short", short, [1, 2, 3], deadline=soon(30))  # due later
        assert answer.scores[served.tasks[0]].tolist() == expected[served.tasks[0]].tolist()
        order.append("rank")

    async def scenario() -> None:
        searching = asyncio.create_task(search())
        while not any(job.bulk and job.spent for job in served.scheduler._jobs):
            await asyncio.sleep(0)
            served.scheduler.step()
        ranking = asyncio.create_task(rank())
        steps = 0
        while not searching.done():
            await asyncio.sleep(0)
            served.scheduler.step()
            steps += "rank" in order
        await ranking
        assert steps > 3  # the search went on where it was

    run(scenario())
    assert order == ["rank", "search"]
    served.close()


def test_a_search_that_cannot_be_in_time_is_refused_or_given_up(tmp_path):
    slow = CostModel([1e3 * each for each in COST.coefficients], 1e-10)
    path = write_bundle(tmp_path / "b", "ranking")
    served = Instance(path, InstanceConfig(device_bytes=32 << 20, host_bytes=0), slow)
    with pytest.raises(OverloadError, match="serve a retrieval bundle before this one"):
        ask(served, history(3), deadline=soon(2.0))
    with pytest.raises(DeadlineError):
        ask(served, history(3), deadline=soon(0.0))
    assert served.ranking == 0
    served.close()


# ---- two bundles ---------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """A retrieval bundle of items 0 … 899 before a ranking bundle of 100 … 999."""
    retrieval = opened(write_bundle(tmp_path / "a"))
    ranking = opened(
        write_bundle(tmp_path / "b", "ranking", ids=list(range(100, 1000)), seed=5),
        retrieval=retrieval,
    )
    yield ranking, retrieval
    ranking.close()


def test_one_bundle_retrieves_what_the_other_ranks(pair):
    ranking, retrieval = pair
    whole = history(400, items=1000)
    for_a = whole.where(whole.items < 900)
    for_b = whole.where(whole.items >= 100)
    by_a = all_scores(retrieval.engine, for_a)
    by_a[:100] = -np.inf  # the ranking bundle lacks them
    retrieved = np.argsort(-by_a, kind="stable")[:50]
    scores = ranking.engine.rank(None, for_b, retrieved)
    best = np.argsort(-scores["click"], kind="stable")[:10]
    tokens = [LayerTokens(ranking.engine), LayerTokens(retrieval.engine)]
    found = ask(ranking, whole, retrieve=50)
    assert found.items == retrieved[best].tolist()
    assert found.scores["like"] == scores["like"][best].tolist()
    assert found.skipped == len(whole) - len(for_b)
    report = found.retrieval
    assert report is not None
    assert (report.skipped, report.items) == (len(whole) - len(for_a), 50)
    assert (report.hit, found.hit, ranking.cascade.unranked_items) == ("inline", "inline", 100)
    assert tokens[0].since() == ranking.engine.tokens_of(len(for_b)) + 50
    assert tokens[1].since() == retrieval.engine.tokens_of(len(for_a))
    again = ask(ranking, whole, retrieve=50)
    assert again.retrieval is not None
    assert (again.hit, again.retrieval.hit, again.items) == ("device", "device", found.items)


def test_both_prefixes_are_announced_and_forgotten(pair):
    ranking, retrieval = pair
    whole = history(300, seed=3)

    async def scenario() -> RecommendResult:
        admission = await ranking.cascade.preinfer("ann", whole, 0.05)
        assert admission.admitted
        found = await ranking.cascade.recommend("ann", whole, RecommendQuery(5, soon()))
        assert len(retrieval.prefixes.cache) == len(ranking.prefixes.cache) == 1
        await ranking.forget("ann", soon())
        assert not len(retrieval.prefixes.cache) and not len(ranking.prefixes.cache)
        return found

    found = run(scenario())
    assert found.retrieval is not None
    assert found.hit in ("device", "joined") and found.retrieval.hit in ("device", "joined")
    stats = ranking.stats()
    assert stats["items_not_ranked"] == 100 and "retrieval_hit_device" in stats
    assert ranking.version == f"{retrieval.engine.version}+{ranking.engine.version}"


def test_rules_of_two_bundles_are_those_of_the_ranking_one(pair):
    ranking, _ = pair
    whole = history(60, seed=4)
    rules = ItemRules(exclude=[200, 201], where={"genre": ("g2",)}, most_per={"genre": 3})
    found = ask(ranking, whole, rules=rules)
    # A row of the ranking bundle is its id less 100, and genres go by row.
    assert len(found.items) == 3 and not {200, 201} & set(found.items)
    assert {GENRES[item - 100] for item in found.items} == {"g2"}
    assert ask(ranking, whole, rules=ItemRules(allow=[5, 6])).items == []


def test_a_failed_retrieval_leaves_no_prefix_held(pair, monkeypatch):
    ranking, _ = pair
    whole = history(300, seed=6)

    def fail(_rules: ItemRules) -> None:
        raise RuntimeError("on the compute thread")

    async def scenario() -> None:
        query = RecommendQuery(10, soon())
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="compute thread"):
            patched.setattr(ranking.cascade, "_retrieval_limits", fail)
            await ranking.cascade.recommend("u", whole, query)
        await settle(ranking)
        assert (await ranking.cascade.recommend("u", whole, query)).hit == "device"

    run(scenario())
    for each in (ranking, ranking.retrieval):
        assert all(slot.holders == 0 for slot in each.prefixes.cache.slots())


# ---- users of whom nothing is known --------------------------------------------------------------

POPULAR = {0: [5, 4, 3, 2, 1], 7: [9, 4], 1: []}


@pytest.mark.parametrize(
    ("days", "expected"),
    [(None, [5, 4, 3, 2, 1]), (7, [9, 4, 5, 3, 2, 1]), (3, [9, 4, 5, 3, 2, 1]), (1, None)],
)
def test_a_user_without_behaviours_gets_what_is_popular(tmp_path, days, expected):
    served = opened(write_bundle(tmp_path / "b", popular=POPULAR))
    found = ask(served, history(0), popular_days=days)
    assert found.items == (expected or [9, 4, 5, 3, 2, 1])
    assert (found.cold, found.hit, list(found.scores)) == ("popularity", "none", ["popularity"])
    rules = ItemRules(exclude=[4], where={"genre": (GENRES[5], GENRES[3])})
    assert ask(served, history(0), popular_days=days, rules=rules).items == [5, 3]
    sent = ask(served, history(0), candidates=[1, 3, 800])
    assert (sent.items, sent.scores["popularity"]) == ([3, 1, 800], [3.0, 1.0, 0.0])
    assert ask(served, history(5)).cold is None
    served.close()


def test_a_ranking_bundle_scores_a_user_by_features_alone(tmp_path):
    path = write_bundle(tmp_path / "b", "ranking", user_features={"age": 4}, popular=POPULAR)
    served = opened(path)
    nobody = History(np.empty(0, np.int64), np.empty(0, np.int64), user_features={"age": 2})
    scores = all_scores(served.engine, nobody)
    found = ask(served, nobody)
    assert found.items == np.argsort(-scores, kind="stable")[:10].tolist()
    assert (found.cold, found.hit) == ("features", "inline")
    assert ask(served, history(0)).cold == "popularity"
    served.close()


def test_popularity_of_the_retrieval_bundle_serves_two(tmp_path):
    retrieval = opened(write_bundle(tmp_path / "a", popular={0: [700, 3, 150]}))
    path = write_bundle(tmp_path / "b", "ranking", ids=list(range(100, 1000)))
    ranking = opened(path, retrieval=retrieval)
    assert ranking.cascade.answers_anybody
    assert ask(ranking, history(0)).items == [700, 150]
    actions = {"click": np.array([0, 1]), "like": np.array([1, 1])}
    unknown_to_a = History(np.array([950, 960]), np.array([1, 2]), actions)
    found = ask(ranking, unknown_to_a)
    assert sorted(found.items) == [150, 700] and found.cold is None
    assert found.retrieval is not None and found.retrieval.skipped == 2
    ranking.close()


def test_without_popularity_an_empty_history_asks_nothing_of_a_retrieval_bundle(tmp_path):
    served = opened(write_bundle(tmp_path / "b"))
    assert not served.cascade.answers_anybody
    with pytest.raises(BadRequest, match="empty history"):
        ask(served, history(0))
    served.close()
