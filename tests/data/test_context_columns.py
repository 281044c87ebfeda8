"""Context of behaviours: from columns of a log to codes, batches and grown stores."""

import itertools

import numpy as np
import polars as pl
import pytest

from slipstream.data import Choices, Columns, SequenceStore, append_log, prepare
from slipstream.data.windows import cut_windows
from slipstream.errors import SlipstreamError


def log(surfaces, users=None, first=0, **more):
    count = len(surfaces)
    columns = {
        "user_id": users or [place % 2 for place in range(count)],
        "item_id": [place % 3 for place in range(count)],
        "timestamp": [first + place for place in range(count)],
        "surface": surfaces,
    }
    return pl.DataFrame(columns | more)


def choices(*context):
    return Choices(columns=Columns("user_id", "item_id", "timestamp", context=context))


def labels_by_user(store, name):
    column = store.context[name]
    labels = column.labels.to_pylist()
    texts = [labels[code] for code in column.codes.tolist()]
    borders = store.offsets_U1.tolist()
    return [texts[begin:end] for begin, end in itertools.pairwise(borders)]


def test_each_behaviour_keeps_its_label_and_what_is_missing_is_unknown(tmp_path):
    frame = log(["home", "search", None, "", "home", "cart"], device=[True, False] * 3)
    store = prepare(frame, tmp_path / "store", choices("surface", "device"))
    assert store.context["surface"].labels.to_pylist() == ["", "cart", "home", "search"]
    assert store.context["surface"].codes.dtype == np.int32
    assert labels_by_user(store, "surface") == [["home", "", "home"], ["search", "", "cart"]]
    assert labels_by_user(store, "device") == [["true"] * 3, ["false"] * 3]


def test_a_csv_gives_the_same_store(tmp_path):
    frame = log(["home", "search", None, "12", "home", "cart"])
    frame.write_csv(tmp_path / "log.csv")
    one = prepare(frame, tmp_path / "one", choices("surface"))
    two = prepare(str(tmp_path / "log.csv"), tmp_path / "two", choices("surface"))
    assert one.digest == two.digest
    other = prepare(
        log(["home", "search", None, "13", "home", "cart"]), tmp_path / "3", choices("surface")
    )
    assert other.digest != one.digest


def test_windows_carry_the_codes_of_their_behaviours(tmp_path):
    store = prepare(log(list("abcabc")), tmp_path / "store", choices("surface"))
    users, begins, ends = np.array([1, 0]), np.array([1, 0]), np.array([3, 3])
    batch = cut_windows(store, users, begins, ends, ends, ends, "ranking")
    assert batch.context["surface"].tolist() == [1, 3, 1, 3, 2]  # user 1: b a c, user 0: a c b
    assert batch.take(batch.sample_ids_B.argsort()).context["surface"].tolist() == [1, 3, 2, 1, 3]


def test_rows_that_differ_in_context_only_are_no_duplicates(tmp_path):
    twice = pl.concat([log(["home"] * 3), log(["home", "cart", "home"])])
    store = prepare(twice, tmp_path / "store", choices("surface"))
    assert store.num_behaviours == 4


def test_an_append_keeps_codes_and_adds_new_labels_at_the_end(tmp_path):
    store = prepare(log(["home", "search", "home", "web"]), tmp_path / "a", choices("surface"))
    before = store.context["surface"].labels.to_pylist()
    later = log(["app", "home", None, "cart"], users=[0, 1, 5, 5], first=100)
    done = append_log(tmp_path / "a", later, out=tmp_path / "b")
    grown = done.store.context["surface"]
    assert grown.labels.to_pylist() == [*before, "app", "cart"]
    assert labels_by_user(done.store, "surface") == [
        ["home", "home", "app"],
        ["search", "web", "home"],
        ["", "cart"],
    ]
    again = append_log(tmp_path / "b", later)
    assert again.already
    # What differs from the last behaviour in context only is new.
    repeated = log(["home", "web"], users=[0, 1], first=100).with_columns(timestamp=100, item_id=0)
    appended = append_log(tmp_path / "b", repeated, late="drop").behaviours
    assert appended == 1 and SequenceStore.open(tmp_path / "b").num_behaviours == 9


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.5, 1.5, 2.0, 3.0], "'surface' holds numbers, but context is a category; bin them"),
        ([[1], [2], [3], [4]], "holds List"),
    ],
)
def test_what_is_no_category_is_refused(tmp_path, values, said):
    with pytest.raises(SlipstreamError, match=said):
        prepare(log(values), tmp_path / "store", choices("surface"))


def test_numbers_of_a_csv_are_refused_and_few_whole_ones_are_categories(tmp_path):
    log([0.5, 1.5, 2.0, 3.0]).write_csv(tmp_path / "log.csv")
    with pytest.raises(SlipstreamError, match="bin them first"):
        prepare(str(tmp_path / "log.csv"), tmp_path / "store", choices("surface"))
    many = log(list(range(300)))
    with pytest.raises(SlipstreamError, match="bin them first"):
        prepare(many, tmp_path / "store", choices("surface"))
    texts = many.with_columns(pl.col("surface").cast(pl.String))
    assert (
        prepare(texts, tmp_path / "text", choices("surface")).context["surface"].cardinality > 300
    )
    store = prepare(log([3, 1, 3, 2]), tmp_path / "few", choices("surface"))
    assert store.context["surface"].labels.to_pylist() == ["", "1", "2", "3"]


def test_columns_must_be_there_and_be_named_once(tmp_path):
    with pytest.raises(SlipstreamError, match=r"no column 'surfaces' for the context.*surface"):
        prepare(log(["a", "b"]), tmp_path / "store", choices("surfaces"))
    with pytest.raises(SlipstreamError, match="named twice"):
        choices("surface", "surface")
