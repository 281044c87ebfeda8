"""The facts and the plots of a store."""

import pytest

from slipstream.data.preparation import Choices, prepare
from slipstream.data.statistics import statistics, tie_share
from slipstream.data.store import SequenceStore
from tests.support.data_fixtures import movielens_1m, run_cli


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
