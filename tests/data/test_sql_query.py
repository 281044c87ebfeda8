"""A log may be the answer of an SQL query."""

import sys

import duckdb
import polars as pl
import pytest

from slipstream.data.choices import Choices
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import GOOD, refuse, run_cli, sequences

EXPECTED = {1: [(5, 1), (6, 2)], 2: [(5, 3), (7, 4)]}


@pytest.fixture
def database(tmp_path):
    pl.DataFrame(GOOD).write_parquet(tmp_path / "log.parquet")
    path = tmp_path / "shop.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"create table log as select * from '{tmp_path / 'log.parquet'}'")
    return path


def test_a_query_in_a_database_file_is_a_log(database, tmp_path, monkeypatch, capsys):
    sql = "select user_id, item_id, timestamp, click from log order by timestamp"
    arguments = ["data", "prepare", "--sql", sql, "--database", database]
    assert run_cli([*arguments, "--out", tmp_path / "out"], monkeypatch) == 0
    assert "read 4 rows of the SQL query" in capsys.readouterr().out
    assert (
        sequences(prepare(None, tmp_path / "py", Choices(sql=sql, database=database))) == EXPECTED
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.parquet",
        "out",
        "py",
        "shop.duckdb",
    ]


def test_a_query_may_name_files_and_make_columns(database, tmp_path):
    sql = (
        "select user_id * 1.0 as who, item_id::decimal(9, 2) as sku, "
        f"make_timestamp(timestamp * 1000000) as t from '{tmp_path / 'log.parquet'}'"
    )
    store = prepare(None, tmp_path / "out", Choices(sql=sql, columns=Columns("who", "sku", "t")))
    assert sequences(store) == EXPECTED


def test_bad_queries_are_one_sentence(database, tmp_path, monkeypatch, capsys):
    def message(*arguments):
        arguments = ["data", "prepare", *arguments, "--out", tmp_path / "out"]
        return refuse(arguments, tmp_path, monkeypatch, capsys)

    given = ("--database", database)
    assert "the SQL query failed: " in message("--sql", "selec 1", *given)
    assert "the SQL query failed: " in message("--sql", "select * from nowhere", *given)
    assert "the SQL query failed: " in message("--sql", "create table x(a int)", *given)
    assert "gives no rows" in message("--sql", "")
    assert "no column 'user_id'" in message("--sql", "select 1 as a")
    assert "does not exist" in message("--sql", "select 1", "--database", tmp_path / "no.db")
    assert "the SQL query failed" in message("--sql", "x", "--database", tmp_path / "log.parquet")
    assert "--database needs --sql" in message("x.csv", *given)
    assert "only one of them" in message("x.csv", "--sql", "select 1")
    assert "is empty" in message("--sql", "select * from log where false", *given)


def test_without_duckdb_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(SlipstreamError, match=r'pip install "slipstream\[sql\]"'):
        prepare(None, tmp_path / "out", Choices(sql="select 1"))
    assert not list(tmp_path.iterdir())
