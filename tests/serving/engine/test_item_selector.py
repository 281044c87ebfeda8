"""Lists, filters, boosts and caps of a request, against the plain reading of each rule."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipstream.serving.engine import item_selector
from slipstream.serving.engine.item_rules import Boost, ItemRules, NumberRange
from slipstream.serving.engine.item_selector import ItemSelector
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.request_errors import BadRequest

GENRES = ["war", "love", "", "war", "noir", "love", "war", None]
TAGS = [["a"], ["a", "b"], [], ["b"], ["c"], None, ["a", "c"], ["b"]]
YEARS = [1990.0, 1991, 1992, 1993, 1994, None, 1996, 1997]
IDS = [f"film/{number}" for number in range(8)]
EVERY = np.arange(8)


@pytest.fixture
def selector(tmp_path: Path) -> ItemSelector:
    columns = {
        "id": pa.array(IDS),
        "feature:genre": pa.array(GENRES).dictionary_encode(),
        "feature:tags": pa.array(TAGS, type=pa.large_list(pa.string())),
        "feature:year": pa.array(YEARS, type=pa.float32()),
    }
    batch = pa.record_batch(columns)
    path = tmp_path / "items.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return ItemSelector(ItemIds(path))


CASES = [
    (ItemRules(), [0, 1, 2, 3, 4, 5, 6, 7]),
    (ItemRules(exclude=["film/3", "nowhere"]), [0, 1, 2, 4, 5, 6, 7]),
    (ItemRules(allow=["film/5", "film/1", "nowhere"]), [1, 5]),
    (ItemRules(where={"genre": ("war", "noir")}), [0, 3, 4, 6]),
    (ItemRules(where={"genre": ("war",), "tags": ("a",)}), [0, 6]),
    (ItemRules(where={"year": NumberRange(1992, 1996)}), [2, 3, 4, 6]),
    (ItemRules(exclude_where={"genre": ("war",), "tags": ("b",)}), [2, 4, 5]),
    (ItemRules(exclude=["film/0"], allow=IDS[:4], where={"genre": ("war",)}), [3]),
    (ItemRules(where={"genre": ("none such",)}), []),
]


@pytest.mark.parametrize(("rules", "left"), CASES)
def test_lists_and_filters_of_the_catalogue_and_of_candidates(selector, rules, left):
    selector.check(rules)
    for _ in range(2):  # the second time from what was kept
        limits = selector.limits(rules)
        found = np.ones(8, dtype=bool) if limits.allowed_N is None else limits.allowed_N.numpy()
        found = found & ~np.isin(EVERY, limits.excluded.numpy())
        assert np.flatnonzero(found).tolist() == left
    chosen = np.array([6, 0, 3, 3, 2])
    expected = [row in left for row in chosen.tolist()]
    assert selector.allowed(rules, chosen).tolist() == expected


def test_boosts_add_up(selector):
    rules = ItemRules(
        boosts=(
            Boost(0.5, where={"genre": ("war",)}),
            Boost(-0.25, where={"genre": ("war",), "year": NumberRange(None, 1990)}),
            Boost(2.0, items=("film/7", "nowhere")),
        )
    )
    expected = [0.25, 0, 0, 0.5, 0, 0, 0.5, 2.0]
    limits = selector.limits(rules)
    assert limits.boosts_N is not None and limits.boosts_N.tolist() == expected
    assert selector.boosts(rules, np.array([7, 0])).tolist() == [2.0, 0.25]
    assert selector.boosts(ItemRules(), np.array([7, 0])).tolist() == [0, 0]


def test_caps_take_the_first_of_each_label(selector):
    by_genre = ItemRules(most_per={"genre": 1})
    assert selector.within_caps(by_genre, EVERY.tolist(), 9) == [0, 1, 2, 4, 7]
    assert selector.within_caps(by_genre, [6, 3, 0, 5, 1], 9) == [0, 3]
    by_tags = ItemRules(most_per={"tags": 1, "genre": 2})
    assert selector.within_caps(by_tags, EVERY.tolist(), 9) == [0, 2, 3, 4, 5]
    assert selector.within_caps(by_genre, EVERY.tolist(), 2) == [0, 1]
    assert selector.within_caps(ItemRules(), EVERY.tolist(), 3) == [0, 1, 2]


def test_what_is_no_feature_or_does_not_fit_it_is_refused(selector):
    for rules, says in (
        (ItemRules(where={"gerne": ("war",)}), "known: genre, tags, year"),
        (ItemRules(most_per={"colour": 1}), "no item feature"),
        (ItemRules(boosts=(Boost(1.0, where={"price": NumberRange()}),)), "no item feature"),
        (ItemRules(exclude_where={"year": ("1990",)}), "is a number"),
        (ItemRules(where={"genre": NumberRange(1, 2)}), "is no number"),
    ):
        with pytest.raises(BadRequest, match=says):
            selector.check(rules)


def test_only_so_many_masks_are_kept(selector, monkeypatch):
    monkeypatch.setattr(item_selector, "MASK_BYTES", 16)
    for label in ("war", "love", "noir"):
        selector.limits(ItemRules(where={"genre": (label,)}))
    assert list(selector._masks) == [("genre", ("love",)), ("genre", ("noir",))]
