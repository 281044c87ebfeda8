"""The facts and the plots of a store."""

import json

import polars as pl
import pytest

from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.preparation import prepare
from slipstream.data.statistics import figures, repeat_shares, statistics, tie_share
from slipstream.data.store import SequenceStore
from tests.support.data_fixtures import (
    GOOD,
    movielens_1m,
    run_cli,
    sequences,
    store_with_lengths,
)


def test_inspect_prints_statistics_and_draws(tmp_path, monkeypatch, capsys):
    prepare(
        "ml-1m",
        tmp_path / "out",
        Choices(source=movielens_1m(tmp_path / "ml-1m"), min_item_count=1),
    )
    assert run_cli(["data", "inspect", tmp_path / "out"], monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "inspect.png" in printed and "density" in printed
    assert (tmp_path / "out" / "inspect.png").read_bytes().startswith(b"\x89PNG")
    store = SequenceStore.open(tmp_path / "out")
    assert tie_share(store) == pytest.approx(2 / 5)
    assert (
        statistics(store)["density"] == "83.3333%" and statistics(store)["digest"] == store.digest
    )


@pytest.mark.parametrize("block_rows", [2, 1_000])
def test_repeats_are_counted_as_plain_python_counts_them(block_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.data.statistics.BLOCK_ROWS", block_rows)
    store = store_with_lengths(tmp_path, [5, 1, 9, 30], items=6)
    repeats, last = 0, 0
    for found in sequences(store).values():
        items = [item for item, _ in found]
        seen = [item in items[:place] for place, item in enumerate(items)]
        repeats, last = repeats + sum(seen), last + seen[-1]
    assert repeat_shares(store) == (repeats / 45, last / 4) and 0 < repeats < 45


def test_figures_are_plain_json_and_say_what_statistics_say(tmp_path):
    items = pl.DataFrame({"item_id": [5, 6], "size": [1.5, None], "tags": [["a"], ["b", "c"]]})
    choices = Choices(items=FeatureFile(items, features=("size", "tags", "item_id")))
    store = prepare(pl.DataFrame(GOOD), tmp_path / "out", choices)
    found = json.loads(json.dumps(figures(store)))
    assert found["item_features"]["size"] == {
        "kind": "number",
        "known": pytest.approx(1 / 3),
        "min": 1.5,
        "max": 1.5,
    }
    assert (found["users"], found["repeats"], found["timed"]) == (2, 0.0, True)
    facts = statistics(store)
    assert facts["item feature tags"] == "3 categories, several a row, known for 66.7%"
    assert facts["item feature size"] == "a number from 1.5 to 1.5, known for 33.3%"
