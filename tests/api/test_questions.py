"""Who an answer is for: every form a history can be given in means the same history."""

import datetime

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import slipstream as ss
from slipstream.api.questions import as_frame, questions, stored_history
from slipstream.data.store import Vocabulary
from slipstream.errors import SlipstreamError
from tests.support.training_fixtures import small_store

NUMBERS = Vocabulary(pa.array([10, 20, 30]), None, "item")
TEXTS = Vocabulary(pa.array(["a/1", "b", "ü"]), None, "item")
NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    "given",
    [
        ss.History([10, 30], [5, 6]),
        {"items": [10, 30], "timestamps": [5, 6]},
        pl.DataFrame({"item": [10, 30], "timestamp": [5, 6]}),
        pa.table({"item": [10, 30], "timestamp": [5, 6]}),
        [ss.History(np.array([10, 30]), np.array([5, 6]))],
        {"items": ["10", "30"], "timestamps": np.array([5, 6])},
    ],
)
def test_every_form_is_the_same_history(given):
    (asked,) = questions(None, given, None, NUMBERS)
    assert asked.user == 0
    assert asked.history.items.tolist() == [10, 30] and list(asked.history.timestamps) == [5, 6]


@pytest.mark.parametrize("given", [["a/1", "ü"], [["a/1", "ü"]], np.array(["a/1", "ü"])])
def test_a_list_of_ids_has_no_times(given):
    (asked,) = questions(None, given, None, TEXTS)
    assert asked.history.items.tolist() == ["a/1", "ü"]
    assert list(asked.history.timestamps) == [0, 0]


def test_several_histories_are_numbered_or_named():
    assert [q.user for q in questions(None, [[10], [20, 30]], None, NUMBERS)] == [0, 1]
    assert [q.user for q in questions(None, {"ann": [10], "bob": [20]}, None, NUMBERS)] == [
        "ann",
        "bob",
    ]
    frame = pl.DataFrame({"user": ["ann", "bob", "ann"], "item": [10, 20, 30]})
    found = {q.user: q.history.items.tolist() for q in questions(None, frame, None, NUMBERS)}
    assert found == {"ann": [10, 30], "bob": [20]}


def test_a_frame_keeps_its_actions_and_reads_datetimes():
    frame = pl.DataFrame({"item": [10], "timestamp": [NOON], "liked": [1.0]})
    (asked,) = questions(None, frame, None, NUMBERS)
    assert list(asked.history.timestamps) == [int(NOON.timestamp())]
    assert asked.history.actions["liked"].tolist() == [1.0]


@pytest.mark.parametrize(
    "given, sentence",
    [
        ([], "at least one history"),
        ([[]], "history 0 is empty"),
        ([99], "item '99' is not in this data"),
        ([[10], "x"], "item 'x' is not in this data"),
        (7, "at least one history"),
        ("10", "at least one history"),
        ({"item": [10]}, "no field 'item'; did you mean 'items'"),
        ({"items": [10], "time": [1]}, "no field 'time'; did you mean 'timestamps'"),
        ([1.5], "must be an id or a list"),
        (pl.DataFrame({"sku": [10]}), "needs the columns item and timestamp"),
        (pl.DataFrame({"item": []}, schema={"item": pl.Int64}), "is empty"),
        ([pl.DataFrame({"user": [1, 2], "item": [10, 20]})], "one user's behaviours"),
    ],
)
def test_a_wrong_history_is_one_sentence(given, sentence):
    with pytest.raises(SlipstreamError) as error:
        questions(None, given, None, NUMBERS)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_users_need_a_store_and_exclude_histories():
    with pytest.raises(SlipstreamError, match="a bundle holds no users"):
        questions([1], None, None, NUMBERS)
    with pytest.raises(SlipstreamError, match="users or histories, not both"):
        questions([1], [[10]], None, NUMBERS)


def test_a_stored_history_is_the_log_with_original_ids(tmp_path):
    store = small_store(tmp_path / "store")
    start, end = store.offsets_U1[3:5].tolist()
    history = stored_history(store, 3, store.items, ["age", "unheard"])
    assert history.items.tolist() == [store.items.id(row) for row in store.items_N[start:end]]
    assert history.timestamps.tolist() == store.timestamps_N[start:end].tolist()
    assert history.actions["click"].tolist() == store.actions["click"][start:end].tolist()
    assert history.user_features == {"age": None}  # user 3 has code 3 % 3 = 0, not known
    assert stored_history(store, 4, store.items, ["age"]).user_features == {"age": "label 1"}


def test_items_that_the_catalogue_lacks_are_left_out_of_stored_histories(tmp_path):
    store = small_store(tmp_path / "store")
    fewer = Vocabulary(pa.array([2**62, 2**62 + 1]), None, "item")
    for user in range(store.num_users):
        kept = stored_history(store, user, fewer).items.tolist()
        assert kept == [x for x in stored_history(store, user, store.items).items if x <= 2**62 + 1]


def test_context_is_a_column_of_text_or_a_field_of_a_dict():
    frame = pl.DataFrame({"item": [10, 20], "liked": [1.0, 0.0], "surface": ["home", None]})
    given = {"items": [10, 20], "context": {"surface": ["home", ""]}}
    for sent in (frame, given):
        (asked,) = questions(None, sent, None, NUMBERS)
        assert list(asked.history.context["surface"]) == ["home", ""]
    assert set(questions(None, frame, None, NUMBERS)[0].history.actions) == {"liked"}


def test_what_is_no_frame_is_none():
    assert as_frame([1]) is None and as_frame("item") is None
    assert as_frame(pl.LazyFrame({"item": [1]})).shape == (1, 1)
