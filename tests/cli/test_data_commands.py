"""`slipstream data prepare` and `inspect` through the command line."""

import pytest

from slipstream.cli.app import run_command
from slipstream.cli.data_commands import Ticker
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
