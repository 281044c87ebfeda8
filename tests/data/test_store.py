"""A store holds what was written, without a copy, and says when it is damaged."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.feature_columns import FeatureTable, encode_feature
from slipstream.data.preparation import prepare
from slipstream.data.store import SequenceStore, Vocabulary, write_store
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import store_of, store_with_lengths

LARGEST = 2**63 - 1


def test_the_largest_ids_survive(tmp_path):
    rows = [(LARGEST, LARGEST - 1, 1), (LARGEST - 1, LARGEST, 2), (2**53 + 1, 2**53, 3)]
    store = store_of(tmp_path, rows)
    assert store.users.row(LARGEST) == 2 and store.users.id(2) == LARGEST
    assert store.items.id(store.items.row(str(LARGEST))) == LARGEST
    assert store.items.find(2**53 + 1) is None
    with pytest.raises(SlipstreamError, match="not in this data"):
        store.users.row(2**70)


def test_columns_are_views_of_the_mapped_file(tmp_path):
    store = store_with_lengths(tmp_path, [5, 3, 100])
    with pa.memory_map(str(store.directory / "sequences.arrow")) as source:
        size = source.size()
    arrays = [store.offsets_U1, store.items_N, store.timestamps_N, *store.actions.values()]
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)
    maps = (
        Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    )
    spans = [
        line.split()[0].split("-")
        for line in maps
        if line.endswith("sequences.arrow") and str(store.directory) in line
    ]
    for array in arrays if spans else []:
        address = array.__array_interface__["data"][0]
        assert any(
            int(low, 16) <= address and address + array.nbytes <= int(high, 16)
            for low, high in spans
        )
    assert sum(array.nbytes for array in arrays) < size


def test_the_digest_says_what_the_store_holds(tmp_path):
    rows = [(1, 10, 5), (2, 20, 1), (1, 11, 6)]
    one, same, other = (
        store_of(tmp_path / name, log)
        for name, log in (("a", rows), ("b", rows), ("c", [*rows[:2], (1, 11, 7)]))
    )
    assert one.digest == same.digest != other.digest
    assert (
        store_of(tmp_path / "d", rows, click=[0, 1, 1]).digest
        != store_of(tmp_path / "e", rows, click=[0, 1, 0]).digest
    )


def test_a_damaged_store_is_one_sentence(tmp_path):
    store = store_with_lengths(tmp_path, [4, 4])
    with pytest.raises(SlipstreamError, match="holds no prepared data"):
        SequenceStore.open(tmp_path)
    items = store.directory / "items.arrow"
    items.write_bytes(items.read_bytes()[:40])
    with pytest.raises(SlipstreamError, match="damaged"):
        SequenceStore.open(store.directory)
    items.unlink()
    with pytest.raises(SlipstreamError, match="missing"):
        SequenceStore.open(store.directory)
    meta = json.loads((store.directory / "store.json").read_text())
    (store.directory / "store.json").write_text(json.dumps(meta | {"format": 99}))
    with pytest.raises(SlipstreamError, match="format"):
        SequenceStore.open(store.directory)


def test_a_store_of_format_1_still_opens(tmp_path):
    store = store_with_lengths(tmp_path, [4, 4])
    meta = json.loads((store.directory / "store.json").read_text())
    assert meta.pop("timed") is True
    (store.directory / "store.json").write_text(json.dumps(meta | {"format": 1}))
    again = SequenceStore.open(store.directory)
    assert again.timed and again.digest == store.digest


def test_a_store_says_what_it_holds(tmp_path):
    store = store_with_lengths(tmp_path, [4, 4], items=3)
    assert repr(store) == f"store {store.directory}: 2 users, 3 items, 8 behaviours, actions click"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["b", None, "a"], "category"),
        ([["b", "a"], [], ["a"]], "categories"),
        ([1.5, None, 2.0], "number"),
    ],
)
def test_features_of_each_kind_are_written_mapped_and_count_in_the_digest(values, kind, tmp_path):
    def write(name, rows):
        (tmp_path / name).mkdir()
        ids, whole = pa.table({"id": pa.array(range(3))}), np.arange(3)
        column = encode_feature(pl.Series(rows), "x", FeatureTable(pl.LazyFrame()))
        items, users = ids.append_column("feature:x", column), ids.slice(0, 1)
        write_store(tmp_path / name, np.array([0, 3]), whole, whole, {}, items, users, {})
        return SequenceStore.open(tmp_path / name)

    one, same, other = write("one", values), write("same", values), write("other", values[::-1])
    assert one.digest == same.digest != other.digest
    feature = one.item_features["x"]
    assert feature.kind == kind and feature.known_V.tolist() == [True, False, True]
    arrays = [feature.codes, feature.offsets_V1, feature.values]
    assert not any(a.flags.writeable for a in arrays if a is not None and a.size)
    assert (feature.offsets_V1 is not None) == (kind == "categories")
    assert (feature.values is not None) == (kind == "number")
    at = {"category": [2, 0, 1], "categories": [[2, 1], [], [1]], "number": [1.5, None, 2.0]}
    assert [feature.at(row) for row in range(3)] == at[kind]


def test_the_digest_says_which_row_has_which_categories(tmp_path):
    log = pl.DataFrame({"user_id": 1, "item_id": [7, 8], "timestamp": [1, 2]})
    digests = set()
    for name, tags in (("apart", [["a"], ["b"]]), ("first", [["a", "b"], []])):
        items = pl.DataFrame({"item_id": [7, 8], "tags": tags})
        choices = Choices(items=FeatureFile(items, features=("tags",)))
        digests.add(prepare(log, tmp_path / name, choices).digest)
    assert len(digests) == 2


def test_several_ids_are_looked_up_as_one_by_one():
    ids = [-(2**40), 3, 2**62, 5, 7, 11, 4, 2**63 - 1]  # three parts, each ascending
    numbers = Vocabulary(pa.array(ids), None, "item", parts=(3, 3, 2))
    asked = [ids[place] for place in (7, 0, 3, 3, 6, 2)]
    assert numbers.rows(asked).tolist() == [numbers.row(each) for each in asked]
    assert numbers.rows(["3", 5]).tolist() == [1, 3] and numbers.rows([]).tolist() == []
    for unknown in (6, 2**63, "x"):
        with pytest.raises(SlipstreamError, match=f"item '{unknown}' is not in this data"):
            numbers.rows([3, unknown])
    texts = Vocabulary(pa.array(["a", "b"]), None, "item")
    assert texts.rows(["b", "a", "b"]).tolist() == [1, 0, 1]
