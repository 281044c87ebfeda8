"""The cascade as a user starts it: two bundles, rules, cold users, an index, the docs page."""

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.client import Client, RefusalError
from slipstream.serving.http.docs_page import example_command
from slipstream.serving.http.endpoints import openapi
from tests.support.serve_command import ADMIN, KEY, Slipstream, served, slipstream
from tests.support.served_scores import as_message

__all__ = ["slipstream"]

MODEL = {"kind": "hstu", "dim": 32, "blocks": 2, "heads": 2, "max_len": 400, "divisor": 100.0}
ITEMS = 3_000
GENRES = np.array(["war", "love", "noir", "west", ""])
POPULAR = {0: [260, 1210, 480, 7], 7: [2858, 480]}
SMALL = ("--device-mb", "32", "--host-mb", "16", "--no-trigger")  # prefixes of any length are kept


def write(path: Path, task: str, first: int = 0, **more: object) -> Path:
    ids = list(range(first, first + ITEMS))
    about = {
        "title": pa.array([f"film {number}" for number in ids]),
        "feature:genre": pa.array(GENRES[np.array(ids) % 5]).dictionary_encode(),
        "feature:year": pa.array([1950.0 + number % 60 for number in ids], type=pa.float32()),
    }
    settings: dict = {"num_items": ITEMS, "ids": ids, "about_items": about, "noise": 0.05, **more}
    random_bundle(path, MODEL, task=task, **settings)
    return path


def history(count: int, seed: int = 0) -> History:
    rng = np.random.default_rng(seed)
    times = 1_600_000_000 + np.cumsum(rng.integers(1, 5_000, count))
    actions = {name: (rng.random(count) < 0.5).astype(np.float32) for name in ("click", "like")}
    return History(rng.integers(0, ITEMS + 50, count), times, actions)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cascade")
    write(place / "retrieval", "retrieval", popular=POPULAR)
    write(place / "ranking", "ranking", first=50, seed=3, item_features={"genre": 5})
    return place


@pytest.fixture(scope="module")
def two(place: Path) -> Iterator[Client]:
    with (
        served(place / "ranking", "--retrieval", str(place / "retrieval"), *SMALL) as (url, _),
        Client(url, ADMIN) as client,
    ):
        client.url = url  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="module")
def expected(place: Path) -> tuple[History, np.ndarray, dict[str, np.ndarray], Engine]:
    """What two stages find for a history, by full passes: items best first, and their scores."""
    retrieval, ranking = Engine(place / "retrieval"), Engine(place / "ranking")
    whole = history(300)
    for_a, for_b = whole.where(whole.items < ITEMS), whole.where(whole.items >= 50)
    ids = np.arange(50, ITEMS)
    by_a = retrieval.rank(None, for_a, ids)["score"]
    by_a[np.isin(ids, whole.items)] = -np.inf
    retrieved = ids[np.argsort(-by_a, kind="stable")[:200]]
    scores = ranking.rank(None, for_b, retrieved)
    order = np.argsort(-scores["click"], kind="stable")
    return whole, retrieved[order], {task: row[order] for task, row in scores.items()}, ranking


def test_two_bundles_answer_as_two_full_passes_do(two: Client, expected):
    whole, items, scores, _ = expected
    two.events("ann", whole.items.tolist(), whole.timestamps.tolist(), actions={
        name: values.tolist() for name, values in whole.actions.items()
    })  # fmt: skip
    for sent in (as_message(whole), None):
        answer = two.recommend("ann", 10, history=sent)
        assert answer.items == items[:10].tolist()
        assert answer.scores["like"] == scores["like"][:10].tolist()
        assert answer.skipped == int((whole.items < 50).sum())
        assert answer.retrieval is not None and answer.retrieval.items == 200
        assert answer.retrieval.skipped == int((whole.items >= ITEMS).sum())
        assert answer.version.startswith(answer.retrieval.version + "+")
    assert (answer.search, answer.recall, answer.cold) == ("exact", None, None)
    early = two.preinfer("ann")
    again = two.recommend("ann", 10)
    assert again.items == answer.items and again.hit == "device"
    assert again.retrieval is not None and again.retrieval.hit == "device"
    assert early.version == again.version
    assert "slipstream_instance_items_not_ranked_total 50.0" in _instance_metrics(two)


def _instance_metrics(client: Client) -> str:
    """The metrics, in which the router shows those of its instances."""
    return re.sub(r'\{instance="i-0"\}', "", client.metrics()).replace(
        "router_instance", "instance"
    )


def test_rules_of_a_request(two: Client, expected):
    whole, items, scores, _ = expected
    genre = {number: GENRES[number % 5] for number in items.tolist()}
    sent = as_message(whole)
    war = two.recommend("ann", 10, history=sent, where={"genre": ["war"]}, show=["genre"])
    assert set(war.shown["genre"]) == {"war"} and len(war.items) == 10
    late = two.recommend("ann", 10, history=sent, exclude_where={"year": {"to": 1990}})
    assert all(1950 + item % 60 > 1990 for item in late.items)
    capped = two.recommend("ann", 8, history=sent, most_per={"genre": 2}, titles=True)
    counts = Counter(GENRES[item % 5] for item in capped.items)
    assert all(count <= 2 for label, count in counts.items() if label)
    assert capped.titles == [f"film {item}" for item in capped.items]
    last = int(items[-1])
    lifted = two.recommend("ann", 3, history=sent, boosts=[{"add": 5.0, "items": [last]}])
    assert lifted.items == [last, *items[:2].tolist()] and lifted.boosts == [5.0, 0.0, 0.0]
    assert lifted.scores["click"][0] == scores["click"][-1]
    only = two.recommend("ann", 5, history=sent, allow=items[5:8].tolist())
    assert only.items == items[5:8].tolist()
    seen = int(whole.items[whole.items >= 50][0])
    kept = {"history": sent, "allow": [seen]}
    assert two.recommend("ann", 5, **kept).items == []
    assert two.recommend("ann", 5, **kept, keep_seen=True).items == [seen]
    sent_new = {"candidates": [last, "new-1", "new-2"], "new_items": {"new-1": {"genre": "war"}}}
    mixed = two.recommend("ann", 5, history=sent, **sent_new)
    assert set(mixed.items) == {last, "new-1"} and mixed.unknown == ["new-2"]
    with pytest.raises(RefusalError, match="known: genre, year"):
        two.recommend("ann", 5, history=sent, where={"gerne": ["war"]})
    assert set(genre.values()) >= {"war", "love"}


def test_users_of_whom_nothing_is_known(two: Client):
    answer = two.recommend("nobody", 3)
    assert (answer.items, answer.cold) == ([260, 1210, 480], "popularity")
    recent = two.recommend("nobody", 3, popular_days=7, exclude=[480])
    assert recent.items == [2858, 260, 1210]
    unknown = two.recommend("nobody", 2, history={"items": [10**9], "timestamps": [1]})
    assert (unknown.cold, unknown.skipped) == ("popularity", 1)
    with pytest.raises(RefusalError, match="nothing is stored"):
        two.rank("nobody", [260])


def test_the_docs_page_and_its_examples(two: Client):
    url = two.url  # type: ignore[attr-defined]
    two.delete("ann")  # the example of events begins anew
    _, page = _ask(url, "GET", "/docs", None)
    assert b"curl -s localhost:8000/v1/recommend" in page
    document = openapi("router")
    order = ["events", "preinfer", "rank", "recommend"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    operations.sort(
        key=lambda each: (
            order.index(each[2]["operationId"]) if each[2]["operationId"] in order else 9
        )
    )
    # They take away what the others need, or need a candidate version.
    left_out = {"drain", "kill", "delete", "traffic", "rollback"}
    for method, path, operation in operations:
        if operation["operationId"] in left_out:
            continue
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        example = body.get("example")
        status, _ = _ask(url, method, path.replace("{user}", "ann"), example)
        assert status < 300, (path, status)
        assert path.split("{")[0] in example_command(method, path, operation)


def _ask(url: str, method: str, path: str, body: object) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"x-api-key": ADMIN, "content-type": "application/json"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.read()


def test_both_bundles_are_reloaded(two: Client, place: Path):
    before = two.recommend("nobody-else", 2, history={"items": [5, 60], "timestamps": [1, 2],
        "actions": {"click": [1, 0], "like": [0, 0]}})  # fmt: skip
    write(place / "retrieval", "retrieval", popular=POPULAR, seed=9)
    changed = two.reload()
    a, _, b = changed.after["i-0"].partition("+")
    assert changed.before["i-0"] == before.version and before.version.endswith(f"+{b}")
    assert not before.version.startswith(a)
    assert two.recommend("nobody", 1).version == changed.after["i-0"]
    write(place / "ranking", "ranking", first=50, seed=4, item_features={"genre": 5})
    assert two.reload().after["i-0"].startswith(f"{a}+")
    assert two.recommend("nobody", 1).items == [260]


def test_an_approximate_index_says_its_recall(place: Path, tmp_path: Path):
    kind = "hnsw"
    bundle = write(tmp_path / "bundle", "retrieval")
    engine, whole = Engine(bundle), history(60)
    known = whole.where(whole.items < ITEMS)
    with served(bundle, "--search", kind, *SMALL) as (url, _), Client(url, KEY) as client:
        answer = client.recommend("ann", 20, history=as_message(whole))
        assert answer.search == kind and answer.recall is not None and answer.recall > 0.5
        exact, _ = engine.retrieve(known, 20)
        assert len(set(exact) & set(answer.items)) >= 10
        by_item = dict(zip(*engine.retrieve(known, ITEMS), strict=True))
        assert answer.scores["score"] == [by_item[item] for item in answer.items]  # exact scores
        filtered = client.recommend("ann", 5, history=as_message(whole), where={"genre": ["war"]})
        assert (filtered.search, len(filtered.items)) == ("exact", 5)
        assert "slipstream_instance_search_recall" in _instance_metrics(client)


def test_bundles_that_do_not_go_together_are_refused_before_the_start(
    place: Path, slipstream: Slipstream
):
    ranking, retrieval = str(place / "ranking"), str(place / "retrieval")
    for words, says in (
        ((ranking, "--retrieval", ranking), "is a bundle for ranking"),
        (("--ranking", ranking), "--retrieval A --ranking B"),
        ((ranking, "--ranking", ranking, "--retrieval", retrieval), "name one bundle"),
        ((ranking, "--search", "hsnw"), "did you mean 'hnsw'"),
    ):
        code, said = slipstream("serve", *words)
        assert code == 1 and says in said, said
