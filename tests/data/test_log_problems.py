"""All that is wrong with a log stands in one report: counts and the first three rows."""

import os

import polars as pl
import pytest

from slipstream.data.preparation import prepare
from slipstream.data.store import SequenceStore
from tests.support.data_fixtures import refuse, run_cli, sequences

BAD = """user_id,item_id,timestamp,click
1,5,2024-01-01,0
,6,2024-01-02,1
1,7,soon,1
1,,2024-01-04,x
1,8,2024-13-01,1
2,5,,0
2,6,1960-01-01,perhaps
2,7,later,inf
2,8,never,1
2,9,2024-01-01,1
"""


def prepare_bad(tmp_path, monkeypatch, capsys, *options):
    (tmp_path / "log.csv").write_text(BAD)
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out", *options]
    before = sorted(os.listdir(tmp_path))
    assert run_cli([*arguments, "--action-columns", "click"], monkeypatch) == 1
    assert sorted(os.listdir(tmp_path)) == before
    return capsys.readouterr().err


def test_all_problems_stand_in_one_report(tmp_path, monkeypatch, capsys):
    report = prepare_bad(tmp_path, monkeypatch, capsys, "--nulls", "error").splitlines()
    assert report[0] == "error: log.csv has 6 kinds of problem, so nothing was written:"
    assert [line.strip().split(";")[0] for line in report[1:]] == [
        "- user column 'user_id' is empty (row 2)",
        "- item column 'item_id' is empty (row 4)",
        "- time column 'timestamp' is empty (row 6)",
        "- time column 'timestamp' has values that are no usable times ('soon' in row 3, "
        "'2024-13-01' in row 5, 'later' in row 8 and 1 more)",
        "- time column 'timestamp' is negative: times count from 1970 ('1960-01-01' in row 7)",
        "- action column 'click' has values that are no usable numbers ('x' in row 4, 'perhaps' "
        "in row 7, 'inf' in row 8)",
    ]


def test_what_is_wrong_with_a_dropped_row_does_not_matter(tmp_path, monkeypatch, capsys):
    report = prepare_bad(tmp_path, monkeypatch, capsys)
    assert "3 kinds of problem" in report
    assert "is empty" not in report and "'x' in row 4" not in report


def test_rows_that_lack_a_value_are_dropped_and_counted(tmp_path, monkeypatch, capsys):
    text = 'user_id,item_id,timestamp\n1,5,1\n,6,2\n1,,3\n"",,4\n1,7,\n\n1,8,6\n'
    (tmp_path / "log.csv").write_text(text)
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    assert run_cli(arguments, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "dropped 5 rows that lack a value (user_id 3, item_id 3, timestamp 2)" in said
    store = SequenceStore.open(tmp_path / "out")
    assert sequences(store) == {1: [(5, 1), (8, 6)]}
    assert store.meta["source"]["nulls"] == 5 and store.meta["rows_read"] == 7


@pytest.mark.parametrize("kind", ["parquet", "floats", "text"])
def test_nulls_of_typed_columns_are_dropped(kind, tmp_path):
    ids = {"parquet": [1, None, 3], "floats": [1.0, float("nan"), 3.0], "text": ["1", "", "3"]}
    frame = pl.DataFrame({"user_id": [1, 1, 1], "item_id": ids[kind], "timestamp": [1, 2, 3]})
    store = prepare(frame, tmp_path / "out")
    assert store.num_behaviours == 2 and store.meta["source"]["nulls"] == 1


def test_a_log_of_incomplete_rows_only_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,,1\n,6,2\n")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    message = refuse(arguments, tmp_path, monkeypatch, capsys)
    assert "no row of log.csv has all of user_id, item_id, timestamp" in message


def test_a_decimal_id_of_a_dropped_row_does_not_matter(tmp_path):
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2.5,\n1,7,1\n")
    store = prepare(tmp_path / "log.csv", tmp_path / "out")
    assert sequences(store) == {1: [(7, 1)]}


def test_rows_of_several_files_are_named_by_file(tmp_path, monkeypatch, capsys):
    for part, time in enumerate(("1", "soon")):
        text = f"user_id,item_id,timestamp\n1,5,7\n1,6,{time}\n"
        (tmp_path / f"part{part}.csv").write_text(text)
    arguments = ["data", "prepare", tmp_path / "part*.csv", "--out", tmp_path / "out"]
    message = refuse(arguments, tmp_path, monkeypatch, capsys)
    assert "'soon' in row 2 of part1.csv" in message
