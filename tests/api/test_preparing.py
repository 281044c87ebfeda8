"""`ss.prepare`: files, frames and queries with the names of their columns, and default places."""

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import slipstream as ss
from slipstream.api.arguments import in_python_words
from slipstream.api.preparing import default_name
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError
from tests.support.shop_log import write_shop

SHOP = {"user": "customer", "item": "sku", "time": "when"}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_shop(tmp_path, customers=30)


def test_a_file_a_list_and_frames_give_the_same_store(shop):
    frame = pl.read_csv(shop.events, separator=";", infer_schema=False)
    given = [shop.events, str(shop.events), [shop.events], frame, frame.lazy(), frame.to_arrow()]
    stores = [ss.prepare(data, f"out/{n}", **SHOP) for n, data in enumerate(given)]
    assert len({store.digest for store in stores}) == 1
    assert stores[0].users.id(0).startswith("c/")


def test_a_pandas_frame_is_taken(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"customer": [1, 1, 2], "sku": ["a", "b", "a"], "when": [1, 2, 3]})
    assert ss.prepare(frame, tmp_path / "store", **SHOP).num_behaviours == 3


def test_features_and_titles_come_from_a_frame_or_a_file(shop):
    features = {"category": "category", "colours": "categories", "price": "number"}
    for n, items in enumerate((shop.items, pl.read_csv(shop.items))):
        store = ss.prepare(
            shop.events,
            f"out/{n}",
            **SHOP,
            actions=["what"],
            items=items,
            item_features=features,
            item_title="name",
            separator="|",
        )
        kinds = {name: feature.kind for name, feature in store.item_features.items()}
        assert kinds == features and " No. " in store.items.title(0)
        assert sorted(store.actions) == ["what=buy", "what=cart", "what=view"]


def test_features_may_be_columns_of_the_log(shop):
    store = ss.prepare(shop.events, **SHOP, item_features="price", quiet=True)
    assert list(store.item_features) == ["price"]


@pytest.mark.parametrize(
    "data, name",
    [
        ("ml-1m", "ml-1m"),
        ("logs/events.csv.gz", "events"),
        (Path("logs/events.parquet"), "events"),
        ("logs/*.csv", "logs"),
        (["a.csv", "b.csv"], "a"),
        (pl.DataFrame(), "frame"),
        (pa.table({}), "frame"),
        (None, "query"),
    ],
)
def test_a_store_without_a_place_is_named_after_its_data(data, name):
    assert default_name(data) == name


def test_without_a_place_the_store_goes_to_data(shop):
    assert ss.prepare(shop.events, **SHOP).directory == Path("data/events")
    with pytest.raises(SlipstreamError, match=r"give another out, or force=True to replace"):
        ss.prepare(shop.events, **SHOP)
    assert ss.prepare(shop.events, **SHOP, force=True).num_users == 30


def test_a_query_is_prepared(shop, tmp_path):
    pytest.importorskip("duckdb")
    sql = f"select * from read_csv('{shop.events}', delim=';', all_varchar=true)"
    assert ss.prepare(sql=sql, **SHOP).directory == Path("data/query")


def test_a_log_without_times_is_in_the_order_of_its_rows(tmp_path):
    frame = pl.DataFrame({"user_id": [1, 1, 2, 2], "item_id": [5, 3, 3, 4]})
    store = ss.prepare(frame, tmp_path / "store", time=None)
    assert not store.timed and store.items_N.tolist() == [2, 0, 0, 1]
    assert ss.prepare(frame, tmp_path / "again").digest == store.digest


def test_progress_is_called_where_given(tmp_path):
    told = []
    ss.prepare(
        "synthetic",
        tmp_path / "store",
        synthetic=Synthetic(users=20, items=10),
        progress=lambda what, done, total: told.append(what),
    )
    assert told and all(isinstance(what, str) for what in told)


def test_errors_speak_of_arguments_not_of_flags():
    with pytest.raises(SlipstreamError) as error, in_python_words():
        raise SlipstreamError("give --time-column none, --item-title or --force; a -- b")
    assert str(error.value) == "give time=None, item_title or force=True; a -- b"


def test_a_store_shows_itself_in_a_notebook(shop):
    page = ss.prepare(shop.events, **SHOP, actions="what")._repr_html_()
    assert "<td>users</td><td>30</td>" in page and "what=buy" in page
