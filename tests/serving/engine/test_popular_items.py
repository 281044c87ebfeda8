"""Popular items by window of days: the shortest that is long enough, then longer ones."""

from pathlib import Path

import numpy as np

from benchmarks.serving.bundle import random_bundle
from slipstream.bundle import read_bundle
from slipstream.serving.engine.popular_items import PopularItems

MODEL = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 8}
WINDOWS = {0: [5, 4, 3, 2], 7: [9, 4], 1: [8]}


def opened(tmp_path: Path, popular: dict[int, list[int]] | None) -> PopularItems:
    random_bundle(tmp_path / "b", MODEL, num_items=10, popular=popular)
    return PopularItems.of(read_bundle(tmp_path / "b"))


def every(rows: np.ndarray) -> np.ndarray:
    return np.ones(len(rows), dtype=bool)


def test_a_window_is_filled_from_longer_ones(tmp_path: Path):
    popular = opened(tmp_path, WINDOWS)
    assert popular.best(9, None, every).tolist() == [5, 4, 3, 2]
    assert popular.best(9, 1, every).tolist() == [8, 9, 4, 5, 3, 2]
    assert popular.best(3, 2, every).tolist() == [9, 4, 5]
    assert popular.best(9, 30, every).tolist() == [5, 4, 3, 2]
    assert popular.best(9, 7, lambda rows: rows % 2 == 1).tolist() == [9, 5, 3]


def test_counts_are_those_of_the_window(tmp_path: Path):
    popular = opened(tmp_path, WINDOWS)
    assert popular.counts_of(np.array([4, 9, 7]), None).tolist() == [3, 0, 0]
    assert popular.counts_of(np.array([4, 9, 7]), 7).tolist() == [1, 2, 0]


def test_the_same_items_in_another_catalogue(tmp_path: Path):
    rows_N = np.array([-1, -1, 0, 1, -1, 3, 4, 5, 6, 7])
    assert opened(tmp_path, WINDOWS).mapped(rows_N).best(9, None, every).tolist() == [3, 1, 0]


def test_an_older_bundle_has_none(tmp_path: Path):
    popular = opened(tmp_path, None)
    assert not popular and not popular.counts_of(np.array([1]), None).any()
    assert not len(popular.best(3, None, every))
