"""Actions are numbers, true/false or text; text becomes an action per value, or given numbers."""

import polars as pl
import pytest

from slipstream.data.choices import Choices
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import refuse, run_cli

WHAT = ["view", "buy", None, "view", "cart"]


def log(values):
    rows = len(values)
    return pl.DataFrame(
        {"user_id": [1] * rows, "item_id": range(rows), "timestamp": range(rows), "what": values},
        strict=False,
    )


def actions(values, tmp_path, **choices):
    columns = Columns("user_id", "item_id", "timestamp", ("what",))
    store = prepare(log(values), tmp_path / "out", Choices(columns=columns, **choices))
    return {name: array.tolist() for name, array in store.actions.items()}


def test_a_text_column_becomes_one_action_per_value(tmp_path, monkeypatch, capsys):
    log(WHAT).write_csv(tmp_path / "log.csv")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    assert run_cli([*arguments, "--action-columns", "what"], monkeypatch) == 0
    assert "actions: what=buy, what=cart, what=view" in capsys.readouterr().out
    store = SequenceStore.open(tmp_path / "out")
    assert {name: values.tolist() for name, values in store.actions.items()} == {
        "what=buy": [0, 1, 0, 0, 0],
        "what=cart": [0, 0, 0, 0, 1],
        "what=view": [1, 0, 0, 1, 0],
    }


def test_given_values_make_one_column(tmp_path, monkeypatch):
    log(WHAT).write_csv(tmp_path / "log.csv")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    arguments += ["--action-columns", "what", "--action-values", "view=1, cart=2,buy=3"]
    assert run_cli(arguments, monkeypatch) == 0
    store = SequenceStore.open(tmp_path / "out")
    assert store.meta["actions"] == ["what"]
    assert store.actions["what"].tolist() == [1, 3, 0, 1, 2]


def test_values_that_were_not_given_are_refused(tmp_path, monkeypatch, capsys):
    log(WHAT).write_csv(tmp_path / "log.csv")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    arguments += ["--action-columns", "what", "--action-values"]
    message = refuse([*arguments, "view=1,buy=3"], tmp_path, monkeypatch, capsys)
    assert "not among view=1,buy=3 ('cart' in row 5)" in message
    for bad in ("view", "view=much", "view=inf", "=1x"):
        message = refuse([*arguments, bad], tmp_path, monkeypatch, capsys)
        assert "as in view=1,cart=2,buy=3" in message
    message = refuse([*arguments[:-3], "--action-values", "view=1"], tmp_path, monkeypatch, capsys)
    assert "no action column holds text" in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([True, False, None], [1, 0, 0]),
        ([1, None, 5], [1, 0, 5]),
        ([0.5, float("nan"), None], [0.5, 0, 0]),
        (["1", "", "2.5"], [1, 0, 2.5]),
        (["True", "false", " 1 "], [1, 0, 1]),
        (["1", "nan", "0"], [1, 0, 0]),
        ([None, None, None], [0, 0, 0]),
    ],
)
def test_missing_values_count_as_zero(values, expected, tmp_path):
    assert actions(values, tmp_path) == {"what": expected}


def test_too_many_texts_are_refused(tmp_path):
    assert len(actions([f"v{n:02d}" for n in range(32)], tmp_path)) == 32
    with pytest.raises(SlipstreamError, match="more than 32 different texts"):
        actions([f"v{n:02d}" for n in range(33)], tmp_path / "more")


def test_lists_are_no_actions_and_names_are_kept_apart(tmp_path):
    with pytest.raises(SlipstreamError, match="must hold numbers, true/false or text"):
        actions([[1], [2]], tmp_path)
    frame = log(["x", "y"]).with_columns(pl.lit(1).alias("what=x"))
    columns = Columns("user_id", "item_id", "timestamp", ("what", "what=x"))
    with pytest.raises(SlipstreamError, match="two actions would be called 'what=x'"):
        prepare(frame, tmp_path / "out", Choices(columns=columns))
