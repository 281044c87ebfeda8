"""A store is prepared whole or not at all; what is wrong is one sentence."""

import errno
import os
import zipfile

import polars as pl
import pytest

from slipstream.data import ingest as ingest_module
from slipstream.data import store as store_module
from slipstream.data.choices import Choices
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.data.store import SequenceStore
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import GOOD, csv, movielens_1m, refuse, run_cli, sequences


def test_an_own_log_may_have_titles_dates_and_true_false(tmp_path, monkeypatch, capsys):
    text = (
        "who,what,name,when,bought\nann,x-1,Soap,2020-01-02,True\n"
        "bob,x-2,Tea,2020-01-01,false\nann,x-2,Tea,2020-01-01,true\n"
    )
    frame = pl.read_csv(text.encode(), try_parse_dates=True)
    frame.write_parquet(tmp_path / "log.parquet")
    columns = [
        "--user-column",
        "who",
        "--item-column",
        "what",
        "--time-column",
        "when",
        "--action-columns",
        "bought",
        "--title-column",
        "name",
    ]
    assert (
        run_cli(
            ["data", "prepare", tmp_path / "log.parquet", "--out", tmp_path / "out", *columns],
            monkeypatch,
        )
        == 0
    )
    store = SequenceStore.open(tmp_path / "out")
    assert sequences(store) == {
        "ann": [("x-2", 1577836800), ("x-1", 1577923200)],
        "bob": [("x-2", 1577836800)],
    }
    assert store.actions["bought"].tolist() == [1, 1, 0] and store.items.title(0) == "Soap"
    assert "2 users, 2 items, 3 behaviours" in capsys.readouterr().out


def test_bad_names_and_options_are_one_sentence(tmp_path, monkeypatch, capsys):
    def message(*arguments):
        return refuse(["data", "prepare", *arguments], tmp_path, monkeypatch, capsys)

    out = ["--out", tmp_path / "out"]
    (tmp_path / "log.csv").write_text(csv(["1,5,1,0"]))
    (tmp_path / "log.xlsx").write_text("x")
    (tmp_path / "garbage.parquet").write_text("not parquet at all")
    (tmp_path / "folder").mkdir()
    assert "did you mean 'ml-1m'?" in message("ml1m", *out)
    assert "does not exist" in message("ml-1m", "--source", tmp_path / "nowhere", *out)
    assert "unknown time unit" in message(tmp_path / "log.csv", "--time-unit", "minutes", *out)
    assert "unknown order" in message(tmp_path / "log.csv", "--order", "random", *out)
    assert "different columns" in message(tmp_path / "log.csv", "--user-column", "item_id", *out)
    assert "neither CSV nor Parquet" in message(tmp_path / "log.xlsx", *out)
    assert "could not be read" in message(tmp_path / "garbage.parquet", *out)
    assert "no CSV, Parquet or JSON" in message(tmp_path / "folder", *out)
    assert "unknown choice 'skip'" in message(tmp_path / "log.csv", "--nulls", "skip", *out)
    assert "did you mean 'keep'" in message(tmp_path / "log.csv", "--duplicates", "kep", *out)
    assert "whole number from 1" in message("synthetic", "--items", "many", *out)
    assert "only one of them" in message(*out)
    assert "leave no behaviour" in message(tmp_path / "log.csv", "--k-core", "5", *out)
    assert "no MovieLens ratings" in message("ml-1m", "--source", tmp_path / "folder", *out)
    assert "no KuaiRand log" in message("kuairand-pure", "--source", tmp_path / "folder", *out)
    assert "not an Amazon category" in message("amazon-reviews", "--category", "../x", *out)
    assert "unknown lengths" in message("synthetic", "--lengths", "long", *out)


def test_an_existing_output_is_kept_unless_forced(tmp_path, monkeypatch, capsys):
    pl.DataFrame(GOOD).write_csv(tmp_path / "log.csv")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    assert "is left alone" in refuse(arguments, tmp_path, monkeypatch, capsys)
    assert "is left alone" in refuse([*arguments, "--force"], tmp_path, monkeypatch, capsys)
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    (tmp_path / "out" / "precious").unlink()
    assert run_cli(arguments, monkeypatch) == 0  # an empty directory is as good as none
    capsys.readouterr()
    assert "exists already" in refuse(arguments, tmp_path, monkeypatch, capsys)
    assert run_cli([*arguments, "--force"], monkeypatch) == 0
    assert SequenceStore.open(tmp_path / "out").num_users == 2
    assert "2 users, 3 items, 4 behaviours" in capsys.readouterr().out


def test_a_bad_log_leaves_the_old_output_even_when_forced(tmp_path, monkeypatch, capsys):
    pl.DataFrame(GOOD).write_csv(tmp_path / "log.csv")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    assert run_cli(arguments, monkeypatch) == 0
    capsys.readouterr()
    digest = SequenceStore.open(tmp_path / "out").digest
    (tmp_path / "log.csv").write_text(csv(["1,5,-1,0"]))
    refuse([*arguments, "--force"], tmp_path, monkeypatch, capsys)
    assert SequenceStore.open(tmp_path / "out").digest == digest


def test_one_user_is_enough_for_a_store(tmp_path, monkeypatch):
    (tmp_path / "log.csv").write_text(csv(["1,5,1,0", "1,6,2,0", "1,7,3,1"]))
    assert (
        run_cli(["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"], monkeypatch)
        == 0
    )
    assert SequenceStore.open(tmp_path / "out").lengths_U.tolist() == [3]


def test_a_full_disk_while_a_synthetic_log_is_made_leaves_nothing(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise pl.exceptions.ComputeError("parquet: No space left on device (os error 28)\nplan: …")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    assert "No space left" in refuse(
        ["data", "prepare", "synthetic", "--out", tmp_path / "out"], tmp_path, monkeypatch, capsys
    )


@pytest.mark.parametrize("place", ["scratch", "final"])
def test_a_full_disk_leaves_nothing(place, tmp_path, monkeypatch, capsys):
    pl.DataFrame(GOOD).write_csv(tmp_path / "log.csv")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "scratch":
        monkeypatch.setattr(ingest_module, "IN_MEMORY", 0)
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(store_module, "_write_batch", full)
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    assert "No space left" in refuse(arguments, tmp_path, monkeypatch, capsys)


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch, capsys):
    pl.DataFrame(GOOD).write_csv(tmp_path / "log.csv")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ingest_module, "_sort_and_compact", interrupt)
    assert (
        run_cli(["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"], monkeypatch)
        == 130
    )
    assert "Traceback" not in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["log.csv"]


def test_truncated_and_wrong_archives_are_refused(tmp_path, monkeypatch, capsys):
    whole = tmp_path / "ml-1m.zip"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "1::2::5::978300760\n" * 500)
    arguments = ["data", "prepare", "ml-1m", "--out", tmp_path / "out", "--source"]
    assert "md5" in refuse([*arguments, whole], tmp_path, monkeypatch, capsys)
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    assert "not a whole archive" in refuse([*arguments, whole], tmp_path, monkeypatch, capsys)
    whole.write_bytes(data[:40] + b"\xff" * 20 + data[60:])
    assert "damaged" in refuse([*arguments, whole], tmp_path, monkeypatch, capsys)


def test_inspect_refuses_what_is_no_store(tmp_path, monkeypatch, capsys):
    assert "holds no prepared data" in refuse(
        ["data", "inspect", tmp_path], tmp_path, monkeypatch, capsys
    )


def test_no_run_no_bundle_and_no_input_is_replaced_even_when_forced(tmp_path, monkeypatch, capsys):
    logs = tmp_path / "logs"
    logs.mkdir()
    pl.DataFrame(GOOD).write_csv(logs / "log.csv")
    pl.DataFrame({"item_id": [5], "x": ["a"]}).write_csv(tmp_path / "items.csv")
    start = ["data", "prepare", logs / "log.csv", "--force", "--out"]
    for kind in ("run", "bundle"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{kind}.json").write_text("{}")
        message = refuse([*start, tmp_path / kind], tmp_path, monkeypatch, capsys)
        assert f"holds a {kind}" in message
    assert "its own input" in refuse([*start, logs], tmp_path, monkeypatch, capsys)
    features = ["--items", tmp_path / "items.csv", "--item-features", "x"]
    assert "its own input" in refuse([*start, tmp_path, *features], tmp_path, monkeypatch, capsys)
    assert sorted(path.name for path in logs.iterdir()) == ["log.csv"]


def test_a_refused_log_leaves_no_folder_behind(tmp_path):
    with pytest.raises(SlipstreamError, match="no column"):
        prepare(pl.DataFrame({"a": [1]}), tmp_path / "new" / "deep" / "out")
    assert not list(tmp_path.iterdir())


def test_digests_of_earlier_versions_still_hold(tmp_path):
    known = Choices(source=movielens_1m(tmp_path / "ml-1m"), min_item_count=1)
    assert prepare("ml-1m", tmp_path / "a", known).digest == "3a4e15331277c743da86a5019feeefb1"
    shape = Choices(synthetic=Synthetic(users=30, items=40, topics=5, seed=3))
    assert prepare("synthetic", tmp_path / "b", shape).digest == "6eb3d6c2ce6d2a76aaf5e7164b132de3"
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,timestamp,click,name\n10,007,2020-01-01T00:00:01.9Z,1,Soap\n"
        "9,7,2020-01-02,0,Tea\n10,8,2020-01-01 00:01,true,Mug\n9,7,2020-01-01 00:00:01,0,Tea\n"
    )
    columns = Columns("user_id", "item_id", "timestamp", ("click",), "name")
    own = prepare(tmp_path / "log.csv", tmp_path / "c", Choices(columns=columns))
    assert own.digest == "4d5eecd1573bba54378c3cbd2df8ec81"


def test_known_data_sets_keep_every_row(tmp_path):
    source = movielens_1m(tmp_path / "ml-1m")
    ratings = source / "ratings.dat"
    ratings.write_text(ratings.read_text() * 2)
    kept = prepare("ml-1m", tmp_path / "a", Choices(source=source, min_item_count=1))
    dropped = Choices(source=source, min_item_count=1, duplicates="drop")
    assert kept.num_behaviours == 10
    assert prepare("ml-1m", tmp_path / "b", dropped).num_behaviours == 5
