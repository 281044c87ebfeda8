"""Ids of every type survive; what cannot be an id is refused when data is prepared."""

from decimal import Decimal

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.data.choices import Choices
from slipstream.data.log_ids import order_ids, unusable_ids
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import refuse

WHOLE = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=256
)
# Text that a CSV reader cannot take for a number, without line ends that the file format changes.
WORD = st.text(alphabet=st.sampled_from("aZé/;,|\" '.-0"), min_size=1, max_size=12).map("x".__add__)


def round_trip(directory, frame, suffix):
    """Prepare a log of these ids and see that every id is found and comes back as it was."""
    path = directory / f"log{suffix}"
    frame.write_csv(path) if suffix == ".csv" else frame.write_parquet(path)
    columns = Columns("user", "item", "time")
    return prepare(path, directory / f"out{suffix}", Choices(columns=columns, duplicates="keep"))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("kind", ["whole", "text"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_ids_of_each_type_come_back(data, kind, suffix, tmp_path_factory):
    ids = WHOLE if kind == "whole" else WORD if suffix == ".csv" else TEXT
    users = data.draw(st.lists(ids, min_size=1, max_size=8))
    items = data.draw(st.lists(ids, min_size=len(users), max_size=len(users)))
    frame = pl.DataFrame({"user": users, "item": items, "time": list(range(len(users)))})
    store = round_trip(tmp_path_factory.mktemp("ids"), frame, suffix)
    for vocabulary, given_ids in ((store.users, users), (store.items, items)):
        assert [vocabulary.id(row) for row in range(len(vocabulary))] == sorted(set(given_ids))
        for each in given_ids:
            assert vocabulary.id(vocabulary.row(each)) == each
            assert vocabulary.find(str(each)) == vocabulary.row(each)
    found = [
        (store.users.id(user), store.items.id(int(store.items_N[place])), time)
        for user in range(store.num_users)
        for place in range(store.offsets_U1[user], store.offsets_U1[user + 1])
        for time in [int(store.timestamps_N[place])]
    ]
    assert sorted(found, key=lambda row: row[2]) == frame.rows()


@pytest.mark.parametrize(
    "column",
    [
        pl.Series([12.0, 7.0, 12.0]),
        pl.Series([12.0, 7.0, 12.0], dtype=pl.Float32),
        pl.Series([Decimal("12.00"), Decimal("7.00"), Decimal("12.00")]),
        pl.Series([12, 7, 12], dtype=pl.UInt8),
    ],
)
def test_whole_decimals_are_the_integers_they_are(column, tmp_path):
    frame = pl.DataFrame({"user_id": [1, 1, 2], "item_id": column, "timestamp": [1, 2, 3]})
    store = prepare(frame, tmp_path / "out")
    assert [store.items.id(row) for row in range(2)] == [7, 12]


def test_csv_ids_with_and_without_a_point_are_the_same(tmp_path):
    text = "user_id,item_id,timestamp\n1,12.0,1\n1,12,2\n1.0,-3.00,3\n2,0.0,4\n"
    (tmp_path / "log.csv").write_text(text)
    store = prepare(tmp_path / "log.csv", tmp_path / "out")
    assert [store.items.id(row) for row in range(store.num_items)] == [-3, 0, 12]
    assert store.items_N.tolist() == [2, 2, 0, 1] and store.lengths_U.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("values", "suffix", "expected"),
    [
        (["12", "2.5", "3"], ".csv", ["has decimals", "'2.5' in row 2"]),
        (["12", "1.2E+12", "3"], ".csv", ["has decimals", "'1.2E+12' in row 2"]),
        ([12.0, 2.5, 3.0], ".parquet", ["has decimals", "'2.5' in row 2"]),
        ([1.0, float(2**60), 3.0], ".parquet", ["has decimals", "in row 2"]),
        (["a", "b" * 257, "c"], ".parquet", ["longer than 256 characters", "in row 2"]),
        (["1", "9223372036854775808", "2"], ".csv", ["9223372036854775808", "64 signed bits"]),
    ],
)
def test_what_cannot_be_an_id_is_refused(values, suffix, expected, tmp_path, monkeypatch, capsys):
    frame = pl.DataFrame({"user_id": [1, 1, 2], "item_id": values, "timestamp": [1, 2, 3]})
    path = tmp_path / f"log{suffix}"
    frame.write_csv(path) if suffix == ".csv" else frame.write_parquet(path)
    arguments = ["data", "prepare", path, "--out", tmp_path / "out"]
    message = refuse(arguments, tmp_path, monkeypatch, capsys)
    assert all(words in message for words in expected)


def test_text_among_numbers_makes_all_of_a_csv_column_text(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2.5,1\n1,A/7,2\n1,12,3\n")
    store = prepare(tmp_path / "log.csv", tmp_path / "out")
    assert [store.items.id(row) for row in range(3)] == ["12", "2.5", "A/7"]


def test_a_column_of_another_type_is_refused(tmp_path):
    frame = pl.DataFrame({"user_id": [True], "item_id": [[1]], "timestamp": [1]})
    with pytest.raises(SlipstreamError, match="user column 'user_id' holds Boolean"):
        prepare(frame, tmp_path / "out")


def test_keys_of_one_id_share_its_row():
    counts = pl.DataFrame({"id": ["2", "1.0", "1"], "count": [1, 2, 3]})
    vocabulary, keys = order_ids(counts, untyped=True)
    assert vocabulary.rows() == [(1, 5), (2, 1)]
    assert dict(keys.rows()) == {"1.0": 0, "1": 0, "2": 1}
    vocabulary, keys = order_ids(counts, untyped=False)
    assert vocabulary["id"].to_list() == ["1", "1.0", "2"]
    assert unusable_ids(counts["id"], True, pl.col("x")) == []
