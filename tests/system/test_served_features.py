"""Vectors, lists of categories, widths and context, from the log to answers over HTTP."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from slipstream.data.store import SequenceStore
from slipstream.history.user_history import History
from slipstream.serving.http.client import Client
from slipstream.serving.http.messages import HistoryMessage
from slipstream.training.recommendation import GivenHistories, recommend, score
from slipstream.training.run import open_run
from tests.support.serve_command import KEY, Slipstream, served, slipstream

__all__ = ["slipstream"]

SMALL = ("dim=16", "blocks=1", "max_steps=12", "batch_size=16", "evaluate_every=0", "threads=1")


def write_files(place: Path) -> None:
    rng, users, each = np.random.default_rng(2), 30, 12
    items = np.array([f"film/{number}" for number in range(40)])
    columns = {
        "user_id": np.repeat(np.arange(users), each),
        "item_id": rng.choice(items, users * each),
        "timestamp": 978_000_000 + np.arange(users * each),
    }
    pl.DataFrame(columns).write_csv(place / "log.csv")
    tags = ["|".join(rng.choice(["war", "love", "noir", "west"], 2)) for _ in items]
    years = rng.integers(1920, 2000, items.size)
    about = pl.DataFrame({"item_id": items, "tags": tags, "year": years})
    about.write_csv(place / "items.csv")
    vectors = rng.normal(size=(items.size - 3, 24)).astype(np.float16)  # three have none
    np.save(place / "text.npy", vectors)
    np.save(place / "text.ids.npy", items[3:])


def test_features_are_served_as_they_are_recommended_offline(
    tmp_path: Path, slipstream: Slipstream
):
    write_files(tmp_path)
    files = ("--items", str(tmp_path / "items.csv"), "--item-features", "tags,year:number")
    text = ("--item-vectors", f"text={tmp_path / 'text.npy'}", "--multi-separator", "|")
    store, run, bundle = (str(tmp_path / name) for name in ("store", "run", "bundle"))
    code, said = slipstream(
        *("data", "prepare", str(tmp_path / "log.csv"), *files, *text, "--out", store)
    )
    assert code == 0 and "item vectors text: 24 wide, float16; 3 of 40 items have none" in said
    keys = ["item_features=[tags, year]", "item_vectors=[text]", "number_scaling=log"]
    keys.append("tables.by_name={item.tags: {dim: 4, lr: 0.01}}")
    for words in (
        ("train", "retrieval-default", f"data={store}", *SMALL, *keys, "--out", run),
        ("evaluate", run),
        ("recommend", run, "--user", "3"),
        ("export", run, "--out", bundle),
    ):
        code, said = slipstream(*words)
        assert code == 0, said
    _, opened, recommender = open_run(run)
    assert recommender.input_widths == {"item.tags": 4, "vector.text": 24}
    users = [3, 7, 20]
    with served(tmp_path / "bundle") as (url, _), Client(url, KEY) as client:
        for user, expected in zip(users, recommend(recommender, opened, users, 5), strict=True):
            log = slice(int(opened.offsets_U1[user]), int(opened.offsets_U1[user + 1]))
            items = [opened.items.id(row) for row in opened.items_N[log].tolist()]
            sent = HistoryMessage(items, opened.timestamps_N[log].tolist())
            answer = client.recommend(str(user), 5, history=sent)
            assert answer.items == [opened.items.id(row) for row in expected.items]
            assert answer.scores["score"] == pytest.approx(expected.scores, abs=1e-6)


def write_context_log(place: Path) -> None:
    rng, users, each = np.random.default_rng(4), 24, 10
    count = users * each
    columns = {
        "user_id": np.repeat(np.arange(users), each),
        "item_id": rng.integers(0, 30, count),
        "timestamp": 978_000_000 + np.arange(count),
        "like": rng.integers(0, 2, count),
        "surface": rng.choice(["home", "search", "cart", ""], count),
        "device": rng.choice(["app", "web"], count),
    }
    pl.DataFrame(columns).write_csv(place / "log.csv")


def test_context_is_served_as_it_is_scored_offline(tmp_path: Path, slipstream: Slipstream):
    write_context_log(tmp_path)
    store, run, bundle = (str(tmp_path / name) for name in ("store", "run", "bundle"))
    history = ("--history", f"sqlite:{tmp_path / 'history.db'}")
    ranking = ["task=ranking", "tasks.like.column=like", "loss.kind=bce"]
    keys = [*SMALL, *ranking, "context_features=[surface, device]"]
    keys.append("tables.by_name={context.surface: {dim: 4}}")
    columns = ("--action-columns", "like", "--context-columns", "surface,device")
    said = ""
    for words in (
        ("data", "prepare", str(tmp_path / "log.csv"), *columns, "--out", store),
        ("train", "retrieval-default", f"data={store}", *keys, "--out", run),
        ("evaluate", run),
        ("export", run, "--out", bundle),
        ("history", "import", store, *history),
    ):
        code, answered = slipstream(*words)
        assert code == 0, answered
        said += answered
    assert "context surface: 3 categories" in said
    _, opened, ours = open_run(run)
    items = np.arange(opened.num_items)
    labels = {name: each.labels.to_pylist() for name, each in opened.context.items()}
    ids = [opened.items.id(int(row)) for row in items]
    with served(tmp_path / "bundle", *history) as (url, _), Client(url, KEY) as client:

        def compare(user: int, at: dict[str, str], offline: SequenceStore, row: int) -> list[float]:
            codes = {name: labels[name].index(label) for name, label in at.items()}
            expected = score(ours, offline, [row], items, context=codes)["like"][0].tolist()
            ticket = client.preinfer(str(user)).ticket
            answer = client.rank(str(user), ids, context=at, ticket=ticket)
            assert answer.scores["like"] == pytest.approx(expected, abs=1e-6)
            return expected

        one = compare(3, {"surface": "home", "device": "app"}, opened, 3)
        assert one != compare(3, {"surface": "cart"}, opened, 3)
        compare(7, {}, opened, 7)
        new = {"surface": ["cart", None], "device": ["web", "fridge"]}  # a label never seen
        client.events(
            "3", ids[:2], [979_000_000, 979_000_001], actions={"like": [1, 0]}, context=new
        )
        shown = client.user("3", 2).recent
        assert shown.context == new and shown.actions == {"like": [1, 0]}
        log = slice(int(opened.offsets_U1[3]), int(opened.offsets_U1[4]))
        context = {
            name: [labels[name][code] for code in each.codes[log]]
            + [label or "" for label in new[name]]
            for name, each in opened.context.items()
        }
        grown = History(
            [*opened.items_N[log].tolist(), 0, 1],
            [*opened.timestamps_N[log].tolist(), 979_000_000, 979_000_001],
            {"like": [*opened.actions["like"][log].tolist(), 1, 0]},
            context=context,
        )
        compare(3, {"surface": "search"}, GivenHistories(opened, [grown]), 0)
