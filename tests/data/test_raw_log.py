"""Bad values are one sentence with the row; dates, numbers and text are read as they are meant."""

import polars as pl
import pytest

from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns, RawLog
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import GOOD, csv, refuse, sequences

BAD_CSV = {
    "text in the time column": (
        csv(["1,5,1,0", "1,6,soon,1"]),
        ["'timestamp' has values that are no usable times ('soon' in row 2)"],
    ),
    "text in an action column": (
        csv(["1,5,1,0", "1,6,2,perhaps"]),
        ["'click' has values that are no usable numbers ('perhaps' in row 2)"],
    ),
    "a date among dates that is none": (
        csv(["1,5,2024-01-01,0", "1,6,2024-13-01,1"]),
        ["'2024-13-01' in row 2"],
    ),
    "an infinite action": (csv(["1,5,1,inf"]), ["'inf' in row 1"]),
    "negative time": (csv(["1,5,1,0", "1,6,-3,1"]), ["is negative", "'-3' in row 2"]),
    "an id beyond 2^63-1": (
        csv(["1,5,1,0", "1,9223372036854775808,1,0"]),
        ["9223372036854775808", "64 signed bits"],
    ),
    "an empty file": ("", ["is empty"]),
    "a header alone": (csv([])[:-1], ["is empty"]),
    "too few fields to have the columns": ("a;b\n1;2\n", ["no column 'user_id'"]),
    "a column that is nearly there": (
        "userid,item_id,timestamp,click\n1,2,3,1\n",
        ["no column 'user_id'", "did you mean 'userid'?"],
    ),
    "ragged rows": (csv(["1,5,1,0", "1,6,2,1,9,9,9"]), ["could not be read"]),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_a_bad_csv_value_is_named_with_its_row(case, tmp_path, monkeypatch, capsys):
    text, expected = BAD_CSV[case]
    (tmp_path / "log.csv").write_text(text)
    arguments = [
        "data",
        "prepare",
        tmp_path / "log.csv",
        "--out",
        tmp_path / "out",
        "--action-columns",
        "click",
    ]
    message = refuse(arguments, tmp_path, monkeypatch, capsys)
    for words in expected:
        assert words in message


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"item_id": pl.Series([1, 2, 3, 2**64 - 1], dtype=pl.UInt64)},
            "'18446744073709551615' in row 4",
        ),
        ({"item_id": [1.0, 2.0, 3.0, 4.5]}, "has decimals, which cannot be ids ('4.5' in row 4)"),
        ({"timestamp": [[1], [2], [3], [4]]}, "must hold numbers or dates"),
        ({"click": [float("inf"), 1, 1, 1]}, "no usable numbers ('inf' in row 1)"),
        ({"user_id": ["a", "b", None, "c"]}, "'user_id' is empty (row 3)"),
    ],
)
def test_a_bad_parquet_column_is_named(columns, expected, tmp_path, monkeypatch, capsys):
    pl.DataFrame(GOOD | columns, strict=False).write_parquet(tmp_path / "log.parquet")
    arguments = [
        "data",
        "prepare",
        tmp_path / "log.parquet",
        "--out",
        tmp_path / "out",
        "--action-columns",
        "click",
        "--nulls",
        "error",
    ]
    assert expected in refuse(arguments, tmp_path, monkeypatch, capsys)


def test_dates_in_csv_are_read_as_utc_with_fractions_in_the_order(tmp_path):
    times = [
        "2020-01-01T00:00:01.9Z",
        "2020-01-01 00:00:01.1",
        "2020-01-01",
        "2020-01-01 00:01",
        "2020-01-01 00:00:01",
    ]
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,timestamp\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times))
    )
    new_year = 1577836800
    expected = [
        (2, new_year),
        (4, new_year + 1),
        (1, new_year + 1),
        (0, new_year + 1),
        (3, new_year + 60),
    ]
    assert sequences(prepare(tmp_path / "log.csv", tmp_path / "out")) == {1: expected}


def test_numbers_in_csv_become_numbers_and_leading_zeros_stay_text(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n10,007,1\n9,7,2\n10,8,1.5\n")
    store = prepare(tmp_path / "log.csv", tmp_path / "out")
    assert sequences(store) == {9: [("7", 2)], 10: [("007", 1), ("8", 1)]}


def test_milliseconds_read_as_seconds_are_beyond_the_year_9999(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.csv").write_text(csv(["1,5,1650615878629,0"]))
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    message = refuse([*arguments, "--time-unit", "s"], tmp_path, monkeypatch, capsys)
    assert "beyond the year 9999" in message and "--time-unit" in message


def test_a_role_needs_its_own_column():
    with pytest.raises(SlipstreamError, match="must be different columns"):
        Columns("user", "item", "time", ("item",))
    columns = Columns("user", "item", None)
    assert columns.roles() == {"user": "user", "item": "item"}


def test_a_known_reader_refuses_nulls_and_keeps_duplicates():
    frame = pl.LazyFrame(GOOD)
    log = RawLog(frame, Columns("user_id", "item_id", "timestamp"))
    assert (log.nulls, log.duplicates, log.time.unit, log.time.detected) == (
        "error",
        "keep",
        "s",
        False,
    )
    with pytest.raises(SlipstreamError, match="no column 'x' for the user"):
        RawLog(frame, Columns("x", "item_id", "timestamp"))
