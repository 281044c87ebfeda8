"""Times of any usual form become seconds; the form is found and said."""

from datetime import UTC, datetime, timedelta, timezone

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data.choices import Choices
from slipstream.data.log_files import LogTable
from slipstream.data.log_times import read_time_column, unit_of
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import refuse, run_cli, sequences

NEW_YEAR = 1_577_836_800


def read(values, unit=None, dtype=None):
    frame = pl.DataFrame({"t": pl.Series(values, dtype=dtype)})
    column = read_time_column(LogTable(frame.lazy(), "the log"), "t", unit)
    return column, frame.select(column.expression(frame.schema["t"])).to_series().to_list()


@settings(max_examples=200, deadline=None)
@given(
    moment=st.datetimes(datetime(1970, 1, 3), datetime(9999, 12, 29)),
    minutes=st.integers(-14 * 60, 14 * 60),
    form=st.sampled_from(["Z", "offset", "naive", "seconds", "space", "date"]),
)
def test_iso_text_means_what_python_reads(moment, minutes, form):
    if form == "offset":
        aware = moment.replace(tzinfo=timezone(timedelta(minutes=minutes)))
        text = aware.isoformat()
    elif form == "date":
        aware = datetime(moment.year, moment.month, moment.day, tzinfo=UTC)
        text = aware.date().isoformat()
    else:
        aware = moment.replace(tzinfo=UTC, microsecond=0 if form == "seconds" else 7_000)
        text = aware.isoformat(sep=" " if form == "space" else "T").removesuffix("+00:00")
        text += "Z" if form == "Z" else ""
    expected = (aware - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert read([text])[1] == [expected]


@pytest.mark.parametrize(
    "text", ["2024-13-01", "2024-02-30", "2024-01-01T25:00", "2024-01-01T10:61", "2024-1-1", "x"]
)
def test_what_is_no_iso_time_is_null(text):
    assert read(["2024-01-01", text])[1][1] is None


@pytest.mark.parametrize(
    ("per_second", "name"),
    [(1, "seconds"), (10**3, "milliseconds"), (10**6, "microseconds"), (10**9, "nanoseconds")],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_the_unit_is_found_from_the_size_and_said(
    per_second, name, as_text, tmp_path, monkeypatch, capsys
):
    rows = {"user_id": [1, 1], "item_id": [5, 6], "timestamp": [NEW_YEAR * per_second] * 2}
    rows["timestamp"][0] += per_second
    path = tmp_path / ("log.csv" if as_text else "log.parquet")
    frame = pl.DataFrame(rows)
    frame.write_csv(path) if as_text else frame.write_parquet(path)
    assert run_cli(["data", "prepare", path, "--out", tmp_path / "out"], monkeypatch) == 0
    assert f"times: {name}" in capsys.readouterr().out
    store = prepare(path, tmp_path / "again")
    assert sequences(store) == {1: [(6, NEW_YEAR), (5, NEW_YEAR + 1)]}
    assert store.meta["source"]["time_format"] == name


def test_small_numbers_are_seconds_and_a_given_unit_is_taken():
    assert [unit_of(size) for size in (0, 5, 1e9, 1e10)] == ["s"] * 4
    assert read([1, 2, 3])[0].unit == "s"
    assert read([NEW_YEAR * 1_000], "s")[0].unit == "s"
    assert read([7_000], "ms")[0].per_second == 1_000
    with pytest.raises(SlipstreamError, match="unknown time unit 'sec'"):
        read([1], "sec")


@pytest.mark.parametrize("dtype", [pl.Float64, pl.String])
def test_fractions_of_seconds_order_behaviours(dtype, tmp_path):
    times = pl.Series([5.9, 5.1, 5.5]).cast(dtype)
    frame = pl.DataFrame({"user_id": [1, 1, 1], "item_id": [1, 2, 3], "timestamp": times})
    assert sequences(prepare(frame, tmp_path / "out")) == {1: [(2, 5), (3, 5), (1, 5)]}


def test_units_that_change_in_the_middle_are_refused(tmp_path, monkeypatch, capsys):
    times = [NEW_YEAR * 1_000 + n for n in range(5)] + [NEW_YEAR]
    frame = {"user_id": [1] * 6, "item_id": list(range(6)), "timestamp": times}
    pl.DataFrame(frame).write_csv(tmp_path / "log.csv")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    message = refuse(arguments, tmp_path, monkeypatch, capsys)
    assert "before 1973 when read in 'ms'" in message and f"'{NEW_YEAR}' in row 6" in message
    assert run_cli([*arguments, "--time-unit", "ms"], monkeypatch) == 0


def test_typed_times_have_zones_and_dates(tmp_path):
    zone = timezone(timedelta(hours=2))
    moments = [datetime(2020, 1, 1, 2, tzinfo=zone), datetime(2020, 1, 1, 1, 59, tzinfo=zone)]
    frame = pl.DataFrame({"user_id": [1, 1], "item_id": [1, 2], "timestamp": moments})
    store = prepare(frame, tmp_path / "out")
    assert sequences(store) == {1: [(2, NEW_YEAR - 60), (1, NEW_YEAR)]}
    assert store.meta["source"]["time_format"] == "date-times"
    dates = frame.with_columns(pl.col("timestamp").dt.date())
    store = prepare(dates, tmp_path / "dates")
    assert store.timestamps_N.tolist() == [NEW_YEAR - 86_400, NEW_YEAR]


@pytest.mark.parametrize("way", ["none", "absent"])
def test_a_log_without_times_keeps_its_order(way, tmp_path, monkeypatch, capsys):
    text = "user_id,item_id,n\n1,9,5\n1,3,4\n2,9,1\n1,9,5\n"
    (tmp_path / "log.csv").write_text(text if way == "absent" else text.replace("n\n", "when\n"))
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    if way == "none":
        assert "'when' looks like a time" in refuse(arguments, tmp_path, monkeypatch, capsys)
        arguments += ["--time-column", "none"]
    assert run_cli(arguments, monkeypatch) == 0
    assert capsys.readouterr().out.count("the order of rows is the order") == 1
    untimed = Choices(columns=Columns("user_id", "item_id", None))
    store = prepare(tmp_path / "log.csv", tmp_path / "py", untimed)
    assert sequences(store) == {1: [(9, 0), (3, 0), (9, 0)], 2: [(9, 0)]}  # a repeat is none
    assert store.meta["timed"] is False and not store.timed
    assert run_cli(["data", "inspect", tmp_path / "out"], monkeypatch) == 0
    assert "ties" not in capsys.readouterr().out


def test_a_named_time_column_must_be_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.csv").write_text("user_id,item_id\n1,9\n")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    message = refuse([*arguments, "--time-column", "ts"], tmp_path, monkeypatch, capsys)
    assert "no column 'ts' for the time" in message
