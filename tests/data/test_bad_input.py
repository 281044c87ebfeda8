"""Whatever is wrong with the input: one sentence, exit 1, nothing left behind, never a traceback."""

import errno
import os
import zipfile

import polars as pl
import pytest

from slipstream.data import ingest as ingest_module
from slipstream.data import store as store_module
from slipstream.data.store import SequenceStore
from tests.support.data_fixtures import run_cli

GOOD = {
    "user_id": [1, 1, 2, 2],
    "item_id": [5, 6, 5, 7],
    "timestamp": [1, 2, 3, 4],
    "click": [0, 1, 1, 0],
}


def csv(rows: list[str]) -> str:
    return "user_id,item_id,timestamp,click\n" + "\n".join(rows) + "\n"


BAD_CSV = {
    "text in the time column": (
        csv(["1,5,1,0", "1,6,soon,1"]),
        ["'timestamp' has 'soon' in row 2"],
    ),
    "text in an action column": (
        csv(["1,5,1,0", "1,6,2,perhaps"]),
        ["'click' has 'perhaps' in row 2"],
    ),
    "a date among dates that is none": (
        csv(["1,5,2024-01-01,0", "1,6,2024-13-01,1"]),
        ["'timestamp' has '2024-13-01' in row 2"],
    ),
    "an infinite action": (csv(["1,5,1,inf"]), ["'click' has 'inf' in row 1"]),
    "negative time": (csv(["1,5,1,0", "1,6,-3,1"]), ["negative in row 2 (-3)"]),
    "milliseconds read as seconds": (csv(["1,5,1650615878629,0"]), ["--time-unit"]),
    "missing user": (csv([",5,1,0"]), ["user column 'user_id' is empty in row 1"]),
    "missing item": (csv(["1,5,1,0", "2,,1,0"]), ["item column 'item_id' is empty in row 2"]),
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


def refuse(arguments, tmp_path, monkeypatch, capsys) -> str:
    """Run, expect exit 1 with a single `error:` line, and nothing new on the disk."""
    before = sorted(os.listdir(tmp_path))
    assert run_cli(arguments, monkeypatch) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in message
    assert sorted(os.listdir(tmp_path)) == before
    return message


@pytest.mark.parametrize("case", BAD_CSV)
def test_bad_csv(case, tmp_path, monkeypatch, capsys):
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
            "18446744073709551615 in row 4",
        ),
        ({"item_id": [1.0, 2.0, 3.0, 4.0]}, "whole numbers or text"),
        ({"timestamp": [[1], [2], [3], [4]]}, "must hold numbers or dates"),
        ({"click": [None, 1, 1, 1]}, "'click' is empty in row 1"),
        ({"user_id": ["a", "b", None, "c"]}, "'user_id' is empty in row 3"),
    ],
)
def test_bad_parquet(columns, expected, tmp_path, monkeypatch, capsys):
    pl.DataFrame(GOOD | columns, strict=False).write_parquet(tmp_path / "log.parquet")
    arguments = [
        "data",
        "prepare",
        tmp_path / "log.parquet",
        "--out",
        tmp_path / "out",
        "--action-columns",
        "click",
    ]
    assert expected in refuse(arguments, tmp_path, monkeypatch, capsys)


def test_bad_names_and_options(tmp_path, monkeypatch, capsys):
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
    assert "no CSV or Parquet" in message(tmp_path / "folder", *out)
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
    assert "exists already" in refuse(arguments, tmp_path, monkeypatch, capsys)
    assert "'precious'" in refuse([*arguments, "--force"], tmp_path, monkeypatch, capsys)
    assert (tmp_path / "out" / "precious").read_text() == "mine"
    (tmp_path / "out" / "precious").unlink()
    assert run_cli(arguments, monkeypatch) == 0  # an empty directory is as good as none
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


def test_one_user_is_enough(tmp_path, monkeypatch):
    (tmp_path / "log.csv").write_text(csv(["1,5,1,0", "1,6,2,0", "1,7,3,1"]))
    assert (
        run_cli(["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"], monkeypatch)
        == 0
    )
    assert SequenceStore.open(tmp_path / "out").lengths_U.tolist() == [3]


def test_a_full_disk_while_making_a_synthetic_log(tmp_path, monkeypatch, capsys):
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


def test_truncated_and_wrong_archives(tmp_path, monkeypatch, capsys):
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
