"""`slipstream data prepare` and `inspect` through the command line."""

import json

import polars as pl
import pytest

from slipstream.cli.app import run_command
from slipstream.cli.data_commands import Ticker, split_list, split_values
from tests.support.tiny_runs import prepare_store, write_log


def test_prepare_reports_what_it_wrote(tmp_path, capsys):
    write_log(tmp_path / "log.csv", users=6)
    prepare_store(tmp_path)
    assert "6 users" in capsys.readouterr().out
    assert (tmp_path / "store" / "store.json").is_file()


def test_prepare_replaces_a_store_only_with_force(tmp_path, capsys):
    write_log(tmp_path / "log.csv", users=6)
    prepare_store(tmp_path)
    words = ["data", "prepare", str(tmp_path / "log.csv"), "--out", str(tmp_path / "store")]
    assert run_command(words) == 1
    assert "--force" in capsys.readouterr().err
    assert run_command([*words, "--force"]) == 0


def test_columns_must_differ(tmp_path, capsys):
    write_log(tmp_path / "log.csv")
    words = ["data", "prepare", str(tmp_path / "log.csv"), "--out", str(tmp_path / "store")]
    assert run_command([*words, "--item-column", "user_id"]) == 1
    assert "must be different columns" in capsys.readouterr().err


def test_inspect_prints_statistics_and_draws_them(tmp_path, capsys):
    write_log(tmp_path / "log.csv", users=6)
    store = prepare_store(tmp_path)
    assert run_command(["data", "inspect", str(store), "--plots", str(tmp_path / "x.png")]) == 0
    assert "users" in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 0


def test_a_ticker_off_a_terminal_prints_nothing(capsys):
    with Ticker(patience=0.0) as ticker:
        ticker("reading", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_ticker_lets_failures_through():
    with pytest.raises(ZeroDivisionError), Ticker():
        raise ZeroDivisionError


def test_prepare_and_inspect_print_json(tmp_path, capsys):
    write_log(tmp_path / "log.csv", users=6)
    out = str(tmp_path / "store")
    assert run_command(["data", "prepare", str(tmp_path / "log.csv"), "--out", out, "--json"]) == 0
    prepared = json.loads(capsys.readouterr().out)
    assert (prepared["store"], prepared["users"]) == (out, 6)
    assert prepared["source"]["nulls"] == 0 and prepared["source"]["separator"] == ","
    assert run_command(["data", "inspect", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["digest"] == prepared["digest"] and 0 <= found["repeats"] < 1
    assert found["plots"].endswith("inspect.png")


def test_a_category_with_bars_gets_a_hint(tmp_path, capsys):
    write_log(tmp_path / "log.csv", users=3)
    log = pl.read_csv(tmp_path / "log.csv")
    items = pl.DataFrame({"item_id": log["item_id"].unique()}).with_columns(tags=pl.lit("a|b"))
    items.write_csv(tmp_path / "items.csv")
    words = ["data", "prepare", str(tmp_path / "log.csv"), "--out", str(tmp_path / "store")]
    words += ["--items", str(tmp_path / "items.csv"), "--item-features", "tags"]
    assert run_command(words) == 0
    assert "give --multi-separator '|'" in capsys.readouterr().out


def test_lists_and_values_are_split():
    assert split_list(" a, b,,c ") == ("a", "b", "c")
    assert split_values("") is None
    assert split_values("a=b=1, view=-2.5") == {"a=b": 1.0, "view": -2.5}


def test_a_log_that_grows_is_appended_once(tmp_path, capsys):
    base, more, store = tmp_path / "base.csv", tmp_path / "more.csv", str(tmp_path / "store")
    base.write_text("who,what,when\n1,5,10\n1,6,20\n2,5,30\n")
    more.write_text("who,what,when\n2,9,40\n0,6,41\n1,6,15\n")
    columns = ["--user-column", "who", "--item-column", "what", "--time-column", "when"]
    assert run_command(["data", "prepare", str(base), *columns, "--out", store]) == 0
    capsys.readouterr()
    assert run_command(["data", "append", store, str(more)]) == 1
    assert "1 behaviours that are older" in capsys.readouterr().err.replace("\n", " ")
    assert run_command(["data", "append", store, str(more), "--late", "drop"]) == 0
    words = capsys.readouterr().out
    assert "2 behaviours, 1 new users and 1 new items appended" in words
    assert "left out 1 behaviours older than their user's last one" in words
    assert run_command(["data", "append", store, str(more), "--late", "drop"]) == 0
    assert "was appended before, so nothing has changed" in capsys.readouterr().out
    moved = tmp_path / "moved.csv"
    moved.write_text("customer,what,when\n3,9,50\n")
    words = ["data", "append", store, str(moved), "--user-column", "customer", "--json"]
    assert run_command(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["appended"]["users"] == 1 and found["users"] == 4
