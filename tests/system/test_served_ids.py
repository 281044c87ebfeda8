"""Ids as they are, from the catalogue to the answer: SKUs with slashes and negative numbers, served
by `slipstream serve` and asked for with the client and the commands.
"""

import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.client import Client, RefusalError
from slipstream.serving.http.messages import HistoryMessage
from tests.support.serve_command import KEY, LONG, Slipstream, serve_words, served, slipstream
from tests.support.shop_log import CATEGORIES, sku

__all__ = ["slipstream"]

MODEL = {"kind": "hstu", "dim": 16, "blocks": 2, "heads": 2, "max_len": 40, "time_buckets": 32}
ITEMS = 60
SKUS = sorted(sku(number) for number in range(ITEMS))
NUMBERS = [*range(-(2**63), -(2**63) + ITEMS - 1), 2**63 - 1]
TIMES = list(range(1_700_000_000, 1_700_000_000 + 500 * 30, 500))


def write_bundle(directory: Path, ids: list[str] | list[int], **rules: object) -> Engine:
    """A retrieval bundle with titles, categories and prices."""
    labels = pa.array(["", *CATEGORIES])
    codes = pa.array([number % len(labels) for number in range(ITEMS)])
    about = {
        "title": pa.array([None, *(f"Thing No. {number}" for number in range(1, ITEMS))]),
        "feature:category": pa.DictionaryArray.from_arrays(codes, labels),
        "feature:price": pa.array([float(number) for number in range(ITEMS)], type=pa.float32()),
    }
    told = {"repeat": "exclude", "window": "latest", "sampler": {"max_len": 20}, **rules}
    random_bundle(
        directory,
        MODEL,
        task="retrieval",
        num_items=ITEMS,
        ids=ids,
        about_items=about,
        rules=told,
        noise=0.05,
    )
    return Engine(directory)


@pytest.mark.parametrize("ids", [SKUS, NUMBERS], ids=["skus", "numbers"])
def test_every_endpoint_takes_and_returns_the_ids_of_the_log(tmp_path: Path, ids: list):
    engine, user = write_bundle(tmp_path / "bundle", ids), "c/0001 ü"
    seen, wanted = [ids[number % 25] for number in range(30)], ids[20:40]
    window = History(seen[10:], TIMES[10:])  # the latest 20
    expected = engine.rank(None, window, wanted)["score"].tolist()
    best, _ = engine.retrieve(window, 5, exclude=seen)
    with served(tmp_path / "bundle") as (url, _), Client(url, KEY) as client:
        assert client.events(user, seen, TIMES).behaviours == 30
        stored = client.user(user, 3)
        assert (stored.behaviours, stored.recent.items) == (30, seen[-3:])
        answer = client.rank(user, [*wanted, "no such"], titles=True, show=["category", "price"])
        assert (answer.items, answer.unknown, answer.behaviours) == (wanted, ["no such"], 20)
        assert answer.scores["score"] == expected
        assert answer.titles == [f"Thing No. {ids.index(item)}" for item in wanted]
        assert answer.shown is not None
        assert answer.shown["price"] == [float(ids.index(item)) for item in wanted]
        assert answer.shown["category"][:2] == [CATEGORIES[5], None]
        found = client.recommend(user, 5, titles=True)
        assert found.items == best and found.titles is not None
        sent = HistoryMessage(seen, TIMES)
        assert client.recommend("x", 5, history=sent, allow_truncate=True).items == best
        kept = client.recommend(user, ITEMS, keep_seen=True, exclude=wanted[:1])
        assert set(kept.items) == {*ids} - {wanted[0]}
        own = client.recommend(user, 5, candidates=[*seen[:3], wanted[-1]])
        assert own.items == wanted[-1:]
        with pytest.raises(RefusalError, match="no user feature 'colour'") as refused:
            client.rank(user, wanted, features={"colour": "red"})
        assert refused.value.status == 400
        assert client.events(user, ids[:1]).behaviours == 31  # now
        assert client.delete(user).deleted == 31
        with pytest.raises(RefusalError, match="nothing is stored"):
            client.recommend(user)


def test_the_commands_take_any_id_and_show_titles(tmp_path: Path, slipstream: Slipstream):
    engine = write_bundle(tmp_path / "bundle", sorted(["a,b", *SKUS[1:]]), repeat="allow")
    with served(tmp_path / "bundle") as (url, _):
        environment = {"SLIPSTREAM_URL": url, "SLIPSTREAM_API_KEY": KEY}

        def client(*words: str) -> str:
            code, shown = slipstream("client", *words, **environment)
            assert code == 0, shown
            return shown

        assert "2 behaviours of c/1 are stored" in client("events", "c/1", f"{SKUS[7]}, {SKUS[9]}")
        assert "3 behaviours of c/1 are stored" in client("events", "c/1", '["a,b"]')
        user = json.loads(client("user", "c/1", "--json"))
        assert user["recent"]["items"] == [SKUS[7], SKUS[9], "a,b"]
        assert "a,b" in client("user", "c/1")
        ranked = client("rank", "c/1", f"{SKUS[3]},nothing", "--titles", "--show", "category")
        number = engine.items.titles([SKUS[3]])[0]
        assert SKUS[3] in ranked and str(number) in ranked and "unknown: nothing" in ranked
        stored = json.loads(client("recommend", "c/1", "--count", "60", "--json"))
        assert {SKUS[7], SKUS[9], "a,b"} <= set(stored["items"])  # the bundle allows repeats
        dropped = json.loads(client("recommend", "c/1", "--count", "60", "--drop-seen", "--json"))
        assert not {SKUS[7], SKUS[9], "a,b"} & set(dropped["items"])
        history = ("--history", f"{SKUS[7]},{SKUS[9]}", "--timestamps", "5,6")
        sent = json.loads(client("rank", "nobody", SKUS[3], *history, "--json"))
        score = engine.rank(None, History([SKUS[7], SKUS[9]], [5, 6]), [SKUS[3]])["score"]
        assert sent["scores"]["score"] == score.tolist()
        assert json.loads(client("recommend", "nobody", *history, "--json"))["items"]
        assert "3 behaviours of c/1 were deleted" in client("delete", "c/1")


def test_a_history_store_that_is_gone_is_one_sentence_and_sent_histories_are_served(
    tmp_path: Path,
):
    write_bundle(tmp_path / "bundle", SKUS)
    with served(tmp_path / "bundle") as (url, _), Client(url, KEY) as client:
        client.events("ann", SKUS[:3])
        for file in tmp_path.glob("history.db*"):
            file.unlink()
        for call in (
            lambda: client.rank("ann", SKUS[:2]),
            lambda: client.recommend("ann"),
            lambda: client.events("ann", SKUS[:1]),
            lambda: client.user("ann"),
            lambda: client.delete("ann"),
        ):
            with pytest.raises(RefusalError, match="history store does not answer") as refused:
                call()
            assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
            assert str(tmp_path) not in str(refused.value)
        assert client.rank("ann", SKUS[:2], HistoryMessage(SKUS[:1], [1])).items == SKUS[:2]


@pytest.mark.parametrize("history", ["sqlite:/proc/none/h.db", "here.db"])
def test_a_bad_history_store_ends_serve_once_and_before_it_serves(tmp_path: Path, history: str):
    write_bundle(tmp_path / "bundle", SKUS)
    ended = subprocess.run(
        serve_words(tmp_path / "bundle", "--history", history),
        env=dict(os.environ),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LONG,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ") and ended.stderr.count("error") == 1
    assert ended.stdout == ""
