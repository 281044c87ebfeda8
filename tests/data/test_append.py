"""Appending: what a grown store holds, by original ids; existing rows never move."""

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data import Choices, Columns, FeatureFile, SequenceStore, append_log, prepare
from slipstream.errors import SlipstreamError


def frame(rows, ids=lambda value: value):
    users, items, times, clicks = zip(*rows, strict=True)
    return pl.DataFrame(
        {
            "user_id": [ids(user) for user in users],
            "item_id": [ids(item) for item in items],
            "timestamp": times,
            "click": clicks,
        }
    )


def sequences(store):
    """Every user's (item, time, click …) by original ids."""
    found = {}
    for user in range(store.num_users):
        part = slice(int(store.offsets_U1[user]), int(store.offsets_U1[user + 1]))
        items = [store.items.id(row) for row in store.items_N[part].tolist()]
        actions = [store.actions[name][part].tolist() for name in sorted(store.actions)]
        times = store.timestamps_N[part].tolist()
        found[store.users.id(user)] = list(zip(items, times, *actions, strict=True))
    return found


def vocabulary(store):
    return [[v.id(row) for row in range(len(v))] for v in (store.users, store.items)]


CHOICES = Choices(columns=Columns("user_id", "item_id", "timestamp", actions=("click",)))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 12), st.integers(0, 1)),
        min_size=2,
        max_size=60,
    ),
    cuts=st.tuples(st.floats(0.1, 0.9), st.floats(0, 1)),
    text=st.booleans(),
    duplicates=st.sampled_from(["drop", "keep"]),
)
def test_a_part_and_its_rest_are_the_whole_log(rows, cuts, text, duplicates, tmp_path_factory):
    place = tmp_path_factory.mktemp("append")
    rows = sorted(rows, key=lambda row: row[2])
    first = max(1, int(len(rows) * cuts[0]))
    second = first + int((len(rows) - first) * cuts[1])
    ids = (lambda value: f"id/{value}") if text else (lambda value: value * 7 - 20)
    choices = Choices(columns=CHOICES.columns, duplicates=duplicates)
    whole = prepare(frame(rows, ids), place / "whole", choices)
    grown = prepare(frame(rows[:first], ids), place / "store", choices)
    before = vocabulary(grown)
    for part in (rows[first:second], rows[second:]):
        if part:
            done = append_log(place / "store", frame(part, ids))
            if done.already:  # the same log again, which is never taken twice
                return
            grown = done.store
            after = vocabulary(grown)
            for old, new in zip(before, after, strict=True):
                assert new[: len(old)] == old and new[len(old) :] == sorted(new[len(old) :])
            before = after
    assert sequences(grown) == sequences(whole)
    for name, row in ((name, row) for v in (grown.items, grown.users) for name, row in finds(v)):
        assert row is not None, name
    assert grown.items.find("nothing") is None and grown.users.find(10**18) is None


def finds(vocabulary):
    for row in range(len(vocabulary)):
        found = vocabulary.find(vocabulary.id(row))
        yield vocabulary.id(row), found if found == row else None


BASE = [(1, 5, 10, 0), (1, 6, 20, 1), (2, 5, 30, 0), (2, 7, 40, 1)]
MORE = [(1, 3, 50, 1), (0, 7, 60, 0), (0, 4, 61, 0), (2, 5, 70, 1)]


def written(path, rows):
    frame(rows).write_csv(path)
    return path


@pytest.fixture
def store(tmp_path):
    prepare(written(tmp_path / "base.csv", BASE), tmp_path / "store", CHOICES)
    return tmp_path / "store"


def test_appending_the_same_log_again_changes_nothing(store, tmp_path):
    done = append_log(store, written(tmp_path / "more.csv", MORE))
    assert (done.behaviours, done.users, done.items, done.already) == (4, 1, 2, False)
    assert vocabulary(done.store) == [[1, 2, 0], [5, 6, 7, 3, 4]]
    text = (store / "store.json").read_text()
    again = append_log(store, written(tmp_path / "other name.csv", MORE))
    assert again.already and again.store.digest == done.store.digest
    assert append_log(store, tmp_path / "base.csv").already
    assert (store / "store.json").read_text() == text
    meta = json.loads(text)
    assert meta["format"] == 3 and meta["item_parts"] == [3, 2] and meta["user_parts"] == [2, 1]
    assert [step["behaviours"] for step in meta["lineage"]] == [4]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_another_directory_leaves_the_store_alone(store, tmp_path):
    digest = SequenceStore.open(store).digest
    grown = append_log(store, written(tmp_path / "more.csv", MORE), out=tmp_path / "grown").store
    assert SequenceStore.open(store).digest == digest and grown.ancestors == [digest]
    with pytest.raises(SlipstreamError, match="exists already"):
        append_log(store, tmp_path / "more.csv", out=tmp_path / "grown")


def test_behaviours_older_than_the_last_one_are_refused_or_left_out(store, tmp_path):
    late = written(tmp_path / "late.csv", [(1, 99, 19, 0), (1, 6, 20, 0), (2, 8, 39, 0), *MORE])
    before = (store / "store.json").read_text()
    with pytest.raises(SlipstreamError, match=r"2 behaviours that are older .*--late drop"):
        append_log(store, late)
    assert (store / "store.json").read_text() == before
    done = append_log(store, late, late="drop")
    assert (done.late, done.behaviours) == (2, 5)
    assert 99 not in vocabulary(done.store)[1]  # an item of late behaviours only
    with pytest.raises(SlipstreamError, match="unknown choice 'maybe'"):
        append_log(store, late, late="maybe")


def test_exact_duplicates_of_the_last_second_are_left_out(store, tmp_path):
    log = written(tmp_path / "again.csv", [(1, 6, 20, 1), (1, 6, 20, 0), (2, 7, 40, 1)])
    done = append_log(store, log)
    assert (done.duplicates, done.behaviours) == (2, 1)
    assert not append_log(store, written(tmp_path / "nothing.csv", [(2, 7, 40, 1)])).behaviours


def test_ids_of_another_kind_are_refused_and_text_stays_text(store, tmp_path):
    with pytest.raises(SlipstreamError, match="user ids of the store are whole numbers"):
        append_log(store, frame(MORE, str).with_columns(user_id=pl.lit("x")))
    prepare(frame([("a", "007", 1, 0), ("b", "x", 2, 0)]), tmp_path / "text", CHOICES)
    log = tmp_path / "numbers.csv"
    log.write_text("user_id,item_id,timestamp,click\n12,007,5,0\n12,12,6,0\n")
    grown = append_log(tmp_path / "text", log).store
    assert vocabulary(grown) == [["a", "b", "12"], ["007", "x", "12"]]


def test_features_of_new_items_join_and_codes_stay(tmp_path):
    items = pl.DataFrame(
        {"item_id": [5, 6, 7], "kind": ["b", "c", "b"], "tags": [["x"], [], ["y", "x"]]}
        | {"price": [1.5, 2.5, None], "name": ["five", "six", "seven"]}
    )
    chosen = FeatureFile(items, features=("kind", "tags", "price"), title="name")
    prepare(frame(BASE), tmp_path / "store", Choices(columns=CHOICES.columns, items=chosen))
    more = pl.DataFrame(
        {"item_id": [3, 5], "kind": ["a", "a"], "tags": [["w", "y"], ["w"]]}
        | {"price": [9.0, 9.0], "name": ["three", "other"]}
    )
    store = append_log(tmp_path / "store", frame(MORE), items=more).store
    kind, tags = store.item_features["kind"], store.item_features["tags"]
    assert kind.labels.to_pylist() == ["", "b", "c", "a"]
    assert kind.codes.tolist() == [1, 2, 1, 3, 0]
    names = [tags.labels[code].as_py() for code in tags.codes]
    rows = [names[a:b] for a, b in zip(tags.offsets_V1, tags.offsets_V1[1:], strict=False)]
    assert rows == [["x"], [], ["y", "x"], ["w", "y"], []]
    assert np.allclose(
        store.item_features["price"].values, [1.5, 2.5, np.nan, 9.0, np.nan], equal_nan=True
    )
    titles = [store.items.title(row) for row in range(5)]
    assert titles == ["five", "six", "seven", "three", None]
    again = append_log(
        tmp_path / "store", frame([(9, 11, 99, 0)])
    ).store  # nothing known of item 11
    assert again.item_features["kind"].codes.tolist() == [1, 2, 1, 3, 0, 0]


def test_text_actions_of_a_later_log_may_be_new(tmp_path):
    columns = Columns("user_id", "item_id", "timestamp", actions=("what",))
    log = frame(BASE).drop("click").with_columns(what=pl.lit("view"))
    prepare(log, tmp_path / "store", Choices(columns=columns))
    more = frame(MORE).drop("click").with_columns(what=pl.lit("buy"))
    store = append_log(tmp_path / "store", more).store
    assert sorted(store.actions) == ["what=buy", "what=view"]
    assert store.actions["what=buy"].sum() == 4 and store.actions["what=view"].sum() == 4
