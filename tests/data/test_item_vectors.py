"""Pretrained vectors of items: read in every form, matched by id, kept with the store."""

import numpy as np
import polars as pl
import pytest

from slipstream import api
from slipstream.cli.app import run_command
from slipstream.data import SequenceStore, append_log
from slipstream.data.item_vectors import vector_words
from slipstream.errors import SlipstreamError

ITEMS = ["b", "c", "a", "d"]


@pytest.fixture
def log():
    users = np.repeat(np.arange(4), 4)
    times = np.arange(16)
    return pl.DataFrame({"user_id": users, "item_id": ITEMS * 4, "timestamp": times})


def vectors(*items, dtype=np.float32):
    """A vector for each item that follows from its id."""
    return np.array([[ord(item), -ord(item), 0.5] for item in items], dtype=dtype)


def table(*items):
    return pl.DataFrame({"item_id": list(items), "embedding": vectors(*items).tolist()})


def test_every_form_gives_the_same_rows_in_the_order_of_the_vocabulary(log, tmp_path):
    given = ["d", "x", "a", "b"]  # nothing of c, and one that nobody saw
    frame = table(*given)
    frame.write_parquet(tmp_path / "lists.parquet")
    fixed = frame.with_columns(pl.col("embedding").cast(pl.Array(pl.Float32, 3)))
    fixed.write_parquet(tmp_path / "fixed.parquet")
    np.save(tmp_path / "text.npy", vectors(*given))
    np.save(tmp_path / "text.ids.npy", np.array(given))
    forms = {
        "lists": tmp_path / "lists.parquet",
        "fixed": str(tmp_path / "fixed.parquet"),
        "numpy": tmp_path / "text.npy",
        "frame": frame,
        "pair": (given, vectors(*given)),
    }
    store = api.prepare(log, tmp_path / "store", item_vectors=forms)
    expected = vectors("a", "b", "c", "d")
    expected[2] = 0
    for name, found in store.item_vectors.items():
        assert found.dtype == np.float32 and np.array_equal(found, expected), name
    facts = store.meta["item_vectors"]["frame"]
    assert (facts["width"], facts["missing"], facts["not_in_the_log"]) == (3, 1, 1)
    assert "1 of 4 items have none (zeros)" in vector_words("frame", facts, 4)
    assert "item vectors lists, fixed" in repr(store)


def test_half_precision_stays_and_the_digest_covers_the_values(log, tmp_path):
    stores = [
        api.prepare(log, tmp_path / str(n), item_vectors=given)
        for n, given in enumerate(
            (
                None,
                {"text": (ITEMS, vectors(*ITEMS))},
                {"text": (ITEMS, vectors(*ITEMS, dtype=np.float16))},
                {"text": (ITEMS, vectors(*ITEMS) + 1)},
            )
        )
    ]
    assert len({store.digest for store in stores}) == 4
    assert stores[2].item_vectors["text"].dtype == np.float16
    again = api.prepare(log, tmp_path / "again", item_vectors={"text": table(*ITEMS)})
    assert again.digest == stores[1].digest


def test_numeric_ids_are_found_whatever_their_type(tmp_path):
    frame = pl.DataFrame({"user_id": [1, 1], "item_id": [30, 7], "timestamp": [1, 2]})
    for n, ids in enumerate(([7, 30], [7.0, 30.0], ["7", "30"])):
        pair = (np.array(ids), np.array([[7.0], [30.0]]))
        store = api.prepare(frame, tmp_path / str(n), item_vectors={"v": pair})
        assert store.item_vectors["v"].ravel().tolist() == [7.0, 30.0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a b": table("a")}, "named by letters"),
        ({"v": pl.DataFrame({"item_id": ["a"], "x": [1.0]})}, "one column of lists"),
        ({"v": pl.DataFrame({"id": ["a", "b"], "x": [[1.0], [1.0, 2.0]]})}, "same length"),
        ({"v": (["a"], np.array([[np.nan]]))}, "not finite"),
        ({"v": (["a", "a"], np.ones((2, 1)))}, "more than one vector"),
        ({"v": (["a"], np.ones((2, 1)))}, "a row per id"),
        ({"v": "nowhere.npy"}, "x.ids.npy"),
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_is_written(log, tmp_path, given, said):
    with pytest.raises(SlipstreamError, match=said):
        api.prepare(log, tmp_path / "store", item_vectors=given)
    assert not (tmp_path / "store").exists()


def test_a_store_grows_with_the_vectors_of_new_items(log, tmp_path, capsys):
    log.write_csv(tmp_path / "log.csv")
    table(*ITEMS).write_parquet(tmp_path / "text.parquet")
    text = ["--item-vectors", f"text={tmp_path / 'text.parquet'}"]
    store = str(tmp_path / "store")
    assert run_command(["data", "prepare", str(tmp_path / "log.csv"), *text, "--out", store]) == 0
    assert "item vectors text: 3 wide, float32" in capsys.readouterr().out
    later = pl.DataFrame({"user_id": [1, 9], "item_id": ["e", "f"], "timestamp": [50, 51]})
    later.write_csv(tmp_path / "later.csv")
    table("e", "a").write_parquet(tmp_path / "new.parquet")
    new = ["--item-vectors", f"text={tmp_path / 'new.parquet'}"]
    assert run_command(["data", "append", store, str(tmp_path / "later.csv"), *new]) == 0
    assert "1 of the new items have no vector 'text' (zeros)" in capsys.readouterr().out
    grown = SequenceStore.open(store)
    expected = vectors("a", "b", "c", "d", "e", "f")
    expected[5] = 0
    assert np.array_equal(grown.item_vectors["text"], expected)
    for given, said in (
        ({"image": table("g")}, "no item vectors 'image'"),
        ({"text": (["g"], np.ones((1, 2)))}, "are 3 wide, but the new ones 2"),
    ):
        more = pl.DataFrame({"user_id": [1], "item_id": ["g"], "timestamp": [60]})
        with pytest.raises(SlipstreamError, match=said):
            append_log(store, more, item_vectors=given)
    assert SequenceStore.open(store).digest == grown.digest


@pytest.mark.parametrize("words", ["text", "=x.parquet", "text="])
def test_a_flag_without_name_or_file_is_refused(log, tmp_path, words):
    log.write_csv(tmp_path / "log.csv")
    out = ["--out", str(tmp_path / "store"), "--item-vectors", words]
    assert run_command(["data", "prepare", str(tmp_path / "log.csv"), *out]) == 1
