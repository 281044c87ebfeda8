"""A log becomes the sequences that plain Python grouping makes, stably in file order."""

from collections import Counter

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.data import ingest as ingest_module
from slipstream.data.ingest import Filters
from slipstream.data.preparation import Choices, prepare
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import sequences, store_of

LARGEST = 2**63 - 1


def plain_grouping(rows, filters=None, drop=False):
    """The oracle: filter by counting, group by user in file order, stable sort by time."""
    filters = filters or Filters()
    rows = list(dict.fromkeys(rows)) if drop else rows
    items = Counter(item for _, item, _ in rows)
    rows = [row for row in rows if items[row[1]] >= filters.min_item_count]
    users = Counter(user for user, _, _ in rows)
    rows = [row for row in rows if users[row[0]] >= filters.min_user_count]
    while True:
        users, items = Counter(row[0] for row in rows), Counter(row[1] for row in rows)
        kept = [
            row
            for row in rows
            if users[row[0]] >= filters.k_core and items[row[1]] >= filters.k_core
        ]
        if len(kept) == len(rows):
            break
        rows = kept
    grouped: dict = {}
    for user, item, time in rows:
        grouped.setdefault(user, []).append((item, time))
    return {user: sorted(grouped[user], key=lambda pair: pair[1]) for user in sorted(grouped)}


def ids(kind):
    if kind == "text":
        return st.text(
            alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=5
        )
    return st.one_of(
        st.integers(0, 6), st.integers(LARGEST - 6, LARGEST), st.integers(-(2**63), -(2**63) + 3)
    )


@st.composite
def logs(draw):
    kind = draw(st.sampled_from(["number", "text"]))
    users, items = (
        draw(st.lists(ids(kind), min_size=1, max_size=5, unique=True)),
        draw(st.lists(ids(kind), min_size=1, max_size=6, unique=True)),
    )
    row = st.tuples(
        st.sampled_from(users), st.sampled_from(items), st.integers(0, 3) | st.integers(0, 2**36)
    )
    return draw(st.lists(row, min_size=1, max_size=60))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=logs(),
    small=st.booleans(),
    drop=st.booleans(),
    k_core=st.integers(1, 3),
    min_item=st.integers(1, 2),
    min_user=st.integers(1, 2),
)
def test_store_equals_plain_grouping(
    tmp_path_factory, rows, small, drop, k_core, min_item, min_user
):
    filters = Filters(min_item_count=min_item, min_user_count=min_user, k_core=k_core)
    expected = plain_grouping(rows, filters, drop)
    duplicates = "drop" if drop else "keep"
    with pytest.MonkeyPatch.context() as patch:
        if small:  # many batches, many blocks, scratch columns in mapped files
            for name, value in (("BATCH_ROWS", 7), ("BLOCK_ROWS", 5), ("IN_MEMORY", 0)):
                patch.setattr(ingest_module, name, value)
        directory = tmp_path_factory.mktemp("log")
        if not expected:
            with pytest.raises(SlipstreamError, match="leave no behaviour"):
                store_of(directory, rows, filters, duplicates)
            return
        store = store_of(directory, rows, filters, duplicates)
    found = sequences(store)
    assert found == expected
    assert list(found) == sorted(found)  # rows ascend by original id
    assert sorted(p.name for p in store.directory.iterdir()) == [
        "items.arrow",
        "sequences.arrow",
        "store.json",
        "users.arrow",
    ]


def test_ties_stay_in_file_order_and_actions_stay_with_their_behaviour(tmp_path):
    rows = [(1, 10, 5), (2, 20, 1), (1, 11, 5), (1, 12, 4), (2, 21, 1), (1, 13, 5)]
    store = store_of(tmp_path, rows, rating=[0, 1, 2, 3, 4, 5])
    assert sequences(store) == {1: [(12, 4), (10, 5), (11, 5), (13, 5)], 2: [(20, 1), (21, 1)]}
    assert store.actions["rating"].tolist() == [3, 0, 2, 5, 1, 4]
    assert store.meta["order"] == "stable"


def test_the_order_uses_the_finest_time_even_where_seconds_tie(tmp_path):
    pl.DataFrame({"u": [1, 1, 1], "i": [1, 2, 3], "t": [1999, 1001, 1500]}).write_csv(
        tmp_path / "log.csv"
    )
    store = prepare(
        tmp_path / "log.csv",
        tmp_path / "out",
        Choices(columns=Columns("u", "i", "t"), time_unit="ms"),
    )
    assert sequences(store) == {1: [(2, 1), (3, 1), (1, 1)]}


def test_a_user_with_100000_behaviours_and_one_with_a_single_one(tmp_path):
    rows = [(7, place % 13, 1_000_000 - place) for place in range(100_000)] + [(8, 3, 5)]
    store = store_of(tmp_path, rows)
    assert store.lengths_U.tolist() == [100_000, 1]
    assert (np.diff(store.timestamps_N[:100_000]) > 0).all()
    assert store.meta["unsplittable_users"] == 1


def test_rows_that_differ_in_an_action_are_no_duplicates(tmp_path):
    rows = [(1, 10, 5), (1, 11, 5), (1, 10, 5), (1, 10, 5), (1, 10, 6), (2, 10, 5)]
    clicks = [0, 0, 1, 0, 0, 0]
    store = store_of(tmp_path, rows, duplicates="drop", click=clicks)
    assert sequences(store) == {1: [(10, 5), (11, 5), (10, 5), (10, 6)], 2: [(10, 5)]}
    assert store.actions["click"].tolist() == [0, 0, 1, 0, 0]
    assert store.meta["source"]["duplicates"] == 1


def test_duplicates_are_found_by_the_log_s_own_time_and_do_not_count_for_filters(tmp_path):
    frame = pl.DataFrame(
        {"user_id": [1, 1, 1, 2], "item_id": [5, 5, 5, 6], "timestamp": [1_001, 1_002, 1_001, 7]}
    )
    chosen = Choices(time_unit="ms", min_item_count=2)
    store = prepare(frame, tmp_path / "out", chosen)
    assert sequences(store) == {1: [(5, 1), (5, 1)]} and store.meta["source"]["duplicates"] == 1
    chosen = Choices(time_unit="ms", min_item_count=3)
    with pytest.raises(SlipstreamError, match="leave no behaviour"):
        prepare(frame, tmp_path / "none", chosen)
    kept = Choices(time_unit="ms", min_item_count=3, duplicates="keep")
    assert prepare(frame, tmp_path / "kept", kept).num_behaviours == 3
