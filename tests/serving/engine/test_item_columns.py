"""A feature of items is read alike from every form a vocabulary has it in."""

import numpy as np
import pyarrow as pa
import pytest

from slipstream.serving.engine.item_columns import ItemColumn

LABELS = ["war", None, "", "love", "war"]
SEVERAL = [["war", "love"], [], None, ["", "noir"], ["love"]]


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_one_label_an_item(type_):
    column = ItemColumn.of(pa.array(LABELS, type=type_))
    assert column.has_one_of(["war", "peace"]).tolist() == [True, False, False, False, True]
    assert not column.has_one_of([""]).any()
    assert column.labels_by_item() == [("war",), (), (), ("love",), ("war",)]
    assert column.take(np.array([4, 1])).labels_by_item() == [("war",), ()]


@pytest.mark.parametrize("coded", [False, True])
def test_several_labels_an_item(coded):
    column = pa.array(SEVERAL, type=pa.large_list(pa.string()))
    if coded:
        column = pa.LargeListArray.from_arrays(column.offsets, column.values.dictionary_encode())
    read = ItemColumn.of(column)
    assert read.has_one_of(["love"]).tolist() == [True, False, False, False, True]
    assert read.has_one_of(["noir", "war"]).tolist() == [True, False, False, True, False]
    assert read.labels_by_item() == [("war", "love"), (), (), ("noir",), ("love",)]
    part = read.take(np.array([3, 0, 1]))
    assert part.labels_by_item() == [("noir",), ("war", "love"), ()]
    assert part.has_one_of(["war"]).tolist() == [False, True, False]


def test_numbers():
    column = ItemColumn.of(pa.array([1990.0, None, float("nan"), 2001.5], type=pa.float32()))
    assert column.within(1990, None).tolist() == [True, False, False, True]
    assert column.within(None, 2000).tolist() == [True, False, False, False]
    assert column.within(None, None).tolist() == [True, False, False, True]
    assert column.labels_by_item() == [(1990.0,), (), (), (2001.5,)]
    assert column.take(np.array([3])).within(2000, 2002).tolist() == [True]
