"""Original ids become rows and come back, int64 and text alike; titles and features are shown."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.request_errors import BadRequest

INT64_MAX = 2**63 - 1


def catalogue(path, ids, **columns):
    batch = pa.record_batch({"id": pa.array(ids), **columns})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return ItemIds(path)


def test_text_ids_take_whole_numbers_as_their_decimal_text(tmp_path):
    ids = catalogue(tmp_path / "items.arrow", ["12", "a/b", "ü"])
    assert ids.rows(["ü", "a/b"]).tolist() == [2, 1]
    assert ids.rows([12]).tolist() == ids.rows(np.array([12])).tolist() == [0]
    assert ids.originals(torch.tensor([1])) == ["a/b"]
    assert ids.contains(np.array(["ü", "c"], dtype=object)).tolist() == [True, False]
    assert ids.canonical([12, "new"]).tolist() == ["12", "new"]
    with pytest.raises(BadRequest, match="'c'"):
        ids.rows(["ü", "c"])


def test_ids_from_the_smallest_to_the_largest_int64_are_exact(tmp_path):
    smallest = -(2**63)
    ids = catalogue(tmp_path / "items.arrow", [smallest, -5, 5, 2**53 + 1, INT64_MAX])
    assert ids.rows([INT64_MAX, 2**53 + 1, smallest, -5]).tolist() == [4, 3, 0, 1]
    assert ids.originals(torch.tensor([0, 4])) == [smallest, INT64_MAX]
    with pytest.raises(BadRequest, match=str(2**53)):
        ids.rows([2**53])
    sent = np.array([INT64_MAX, 6, 5, INT64_MAX - 1])
    assert ids.contains(sent).tolist() == [True, False, True, False]


def test_a_catalogue_of_numbers_takes_their_text(tmp_path):
    ids = catalogue(tmp_path / "items.arrow", [-5, 0, 12])
    assert ids.find(["12", 0, "-5", "007", "SKU", 13]).tolist() == [2, 1, 0, -1, -1, -1]
    assert ids.canonical(["12", 99]).tolist() == [12, 99]
    assert ids.canonical(["12"]).dtype == np.int64
    with pytest.raises(BadRequest, match="'SKU' is no whole number"):
        ids.canonical([1, "SKU"])


@pytest.mark.parametrize("grown", [False, True])
def test_every_id_is_found_as_a_dictionary_finds_it(tmp_path, grown):
    generator = np.random.default_rng(5)
    held = generator.choice(400, 150, replace=False)
    held = held if grown else np.sort(held)
    ids, row_of = catalogue(tmp_path / "items.arrow", held), {n: r for r, n in enumerate(held)}
    for asked in (range(-2, 402), held, [held.max()], [held.max() + 1], []):
        expected = [row_of.get(number, -1) for number in asked]
        for form in (list(map(int, asked)), np.array(asked, np.int64), list(map(str, asked))):
            found = ids.find(form)
            assert found.tolist() == expected and found.dtype == np.int64
    only = catalogue(tmp_path / "one.arrow", [7])
    assert only.find([6, 7, 8]).tolist() == [-1, 0, -1]


def test_titles_are_null_where_there_are_none(tmp_path):
    titles = pa.array(["Lamp", None, "Rug"])
    ids = catalogue(tmp_path / "items.arrow", [1, 2, 3], title=titles)
    assert ids.titles([3, 2, 1, 9]) == ["Rug", None, "Lamp", None]
    plain = catalogue(tmp_path / "plain.arrow", ["a", "b"])
    assert plain.titles(["b", "a"]) == [None, None]


def test_features_are_shown_as_labels_lists_or_numbers(tmp_path):
    labels = pa.array(["", "lamps", "rugs"])
    category = pa.DictionaryArray.from_arrays(pa.array([2, 0, 1]), labels)
    colours = pa.LargeListArray.from_arrays(
        pa.array([0, 2, 2, 3], type=pa.int64()),
        pa.DictionaryArray.from_arrays(pa.array([1, 2, 1]), pa.array(["", "oak", "red"])),
    )
    price = pa.array([1.5, float("nan"), None], type=pa.float32())
    columns = {"feature:category": category, "feature:colours": colours, "feature:price": price}
    ids = catalogue(tmp_path / "items.arrow", ["x", "y", "z"], **columns)
    assert ids.features == ("category", "colours", "price")
    assert ids.shown(["colours", "category", "price"], ["z", "y", "x"]) == {
        "colours": [["oak"], [], ["oak", "red"]],
        "category": ["lamps", None, "rugs"],
        "price": [None, None, 1.5],
    }
    with pytest.raises(BadRequest, match=r"'brand' is no item feature .*category, colours, price"):
        ids.shown(["brand"], [])


def test_a_vocabulary_that_cannot_be_read_says_what_to_do(tmp_path):
    (tmp_path / "items.arrow").write_bytes(b"not arrow")
    with pytest.raises(SlipstreamError, match="export the bundle again"):
        ItemIds(tmp_path / "items.arrow")
