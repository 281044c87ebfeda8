"""Features of own items and users have the kind that their values or the user say."""

import math

import numpy as np
import polars as pl
import pytest

from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.feature_columns import first_values, split_kind, vocabulary_table
from slipstream.data.preparation import prepare
from slipstream.data.raw_log import Columns
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import refuse, run_cli
from tests.support.shop_log import write_shop

LOG = pl.DataFrame({"user_id": [1, 1, 2], "item_id": [7, 8, 9], "timestamp": [1, 2, 3]})


def labels(feature, row):
    """The labels of a row, whatever the kind of the feature."""
    if feature.offsets_V1 is None:
        codes = [feature.codes[row]]
    else:
        codes = feature.codes[feature.offsets_V1[row] : feature.offsets_V1[row + 1]]
    return [feature.labels[int(code)].as_py() for code in codes]


def features(items, tmp_path, *names, separator=None, log=LOG):
    chosen = FeatureFile(items, "item_id", names, separator=separator)
    return prepare(log, tmp_path / "out", Choices(items=chosen)).item_features


def test_a_shop_brings_its_features_and_titles(tmp_path, monkeypatch, capsys):
    shop = write_shop(tmp_path / "shop", customers=40, products=30)
    arguments = ["data", "prepare", shop.events, "--out", tmp_path / "out"]
    arguments += ["--user-column", "customer", "--item-column", "sku", "--time-column", "when"]
    arguments += ["--action-columns", "what", "--items", shop.items, "--item-title", "name"]
    arguments += ["--item-features", "category,colours,price", "--multi-separator", "|"]
    assert run_cli(arguments, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "item feature colours: 5 categories, several a row" in said
    assert f"dropped {shop.nulls} rows" in said and f"dropped {shop.duplicates} exact" in said
    store = SequenceStore.open(tmp_path / "out")
    rows = {row["sku"]: row for row in pl.read_csv(shop.items).to_dicts()}
    category, colours, price = (store.item_features[n] for n in ("category", "colours", "price"))
    assert [each.kind for each in (category, colours, price)] == [
        "category",
        "categories",
        "number",
    ]
    for item in range(store.num_items):
        row = rows[store.items.id(item)]
        assert store.items.title(item) == row["name"]
        assert labels(category, item) == [row["category"]]
        assert labels(colours, item) == row["colours"].split("|")
        assert price.values[item] == np.float32(row["price"])
    assert price.cardinality == 0 and price.codes.size == 0 and len(price.labels) == 0
    assert store.num_behaviours == shop.rows - shop.nulls - shop.duplicates
    assert "features category, colours, price" in repr(store)


@pytest.mark.parametrize("form", ["frame", "csv", "parquet", "jsonl"])
def test_kinds_follow_from_the_values_in_every_format(form, tmp_path):
    columns = {
        "item_id": [9, 7, 8],
        "word": ["b", "a", None],
        "flag": [True, False, True],
        "few": [3, 3, 4],
        "weight": [1.5, None, 2.0],
    }
    frame, path = pl.DataFrame(columns), tmp_path / f"items.{form}"
    writers = {"csv": frame.write_csv, "parquet": frame.write_parquet, "jsonl": frame.write_ndjson}
    if form != "frame":
        writers[form](path)
    found = features(frame if form == "frame" else path, tmp_path, "word", "flag", "few", "weight")
    kinds = {name: feature.kind for name, feature in found.items()}
    assert kinds == {"word": "category", "flag": "category", "few": "category", "weight": "number"}
    assert [labels(found["word"], row) for row in range(3)] == [["a"], [""], ["b"]]
    assert [labels(found["few"], row) for row in range(3)] == [["3"], ["4"], ["3"]]
    assert math.isnan(found["weight"].values[0])
    assert found["weight"].values[1:].tolist() == [2.0, 1.5]


def test_whole_numbers_of_many_values_are_numbers_unless_said_otherwise(tmp_path):
    log = pl.DataFrame({"user_id": 1, "item_id": range(300), "timestamp": range(300)})
    items = pl.DataFrame({"item_id": range(300), "size": range(300)})
    assert features(items, tmp_path / "a", "size", log=log)["size"].kind == "number"
    forced = features(items, tmp_path / "b", "size:category", log=log)["size"]
    assert forced.kind == "category" and forced.cardinality == 301
    items = items.with_columns(pl.col("size").cast(pl.String))
    assert features(items, tmp_path / "c", "size", log=log)["size"].kind == "category"
    assert features(items, tmp_path / "d", "size:number", log=log)["size"].values[299] == 299


def test_lists_and_separated_texts_are_several_categories(tmp_path):
    items = pl.DataFrame(
        {
            "item_id": [7, 8, 9],
            "tags": [["b", "a", "b"], [], None],
            "text": ["x; y", "y", None],
            "codes": [[3, 10], [3], []],
        }
    )
    found = features(items, tmp_path, "tags", "text", "codes", separator=";")
    assert {feature.kind for feature in found.values()} == {"categories"}
    assert [labels(found["tags"], row) for row in range(3)] == [["b", "a"], [], []]
    assert [labels(found["text"], row) for row in range(3)] == [["x", "y"], ["y"], []]
    assert [labels(found["codes"], row) for row in range(3)] == [["3", "10"], ["3"], []]
    assert found["tags"].known_V.tolist() == [True, False, False]


def test_rows_of_no_item_and_repeated_rows_are_left_out_and_counted(tmp_path, monkeypatch, capsys):
    LOG.write_csv(tmp_path / "log.csv")
    text = "sku,colour\n8.0,blue\n8,red\n99,green\nnone,grey\n7,red\n"
    (tmp_path / "items.csv").write_text(text)
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    arguments += [
        "--items",
        tmp_path / "items.csv",
        "--item-id",
        "sku",
        "--item-features",
        "colour",
    ]
    assert run_cli(arguments, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "left out 2 items that are not in the log, and 1 rows that repeat one" in said
    store = SequenceStore.open(tmp_path / "out")
    assert [labels(store.item_features["colour"], row) for row in range(3)] == [
        ["red"],
        ["blue"],
        [""],
    ]
    assert store.meta["source"]["item_rows"]["without_a_row"] == 1


def test_users_have_features_too(tmp_path, monkeypatch):
    LOG.write_csv(tmp_path / "log.csv")
    (tmp_path / "users.csv").write_text("who,age,plan\n2,41.5,free\n")
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    arguments += ["--users", tmp_path / "users.csv", "--user-id", "who"]
    assert run_cli([*arguments, "--user-features", "age,plan"], monkeypatch) == 0
    store = SequenceStore.open(tmp_path / "out")
    age, plan = store.user_features["age"], store.user_features["plan"]
    assert math.isnan(age.values[0]) and age.values[1] == 41.5
    assert plan.codes.tolist() == [0, 1]


@pytest.mark.parametrize("batch_rows", [1, 100])
def test_features_may_be_columns_of_the_log(batch_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.data.own_log.BATCH_ROWS", batch_rows)
    text = (
        "user_id,item_id,timestamp,price,name,plan\n1,7,1,,Soap,free\n1,8,2,3.5,Tea,free\n"
        "2,7,3,2.5,Soap!,paid\n2,7,4,9.5,,free\n"
    )
    (tmp_path / "log.csv").write_text(text)
    arguments = ["data", "prepare", tmp_path / "log.csv", "--out", tmp_path / "out"]
    arguments += ["--item-features", "price", "--item-title", "name", "--user-features", "plan"]
    assert run_cli(arguments, monkeypatch) == 0
    store = SequenceStore.open(tmp_path / "out")
    assert store.item_features["price"].values.tolist() == [2.5, 3.5]
    assert [store.items.title(row) for row in range(2)] == ["Soap", "Tea"]
    assert [labels(store.user_features["plan"], row) for row in range(2)] == [["free"], ["paid"]]


def test_a_feature_may_be_called_id_or_title(tmp_path):
    items = pl.DataFrame({"item_id": [7, 8, 9], "id": ["a", "b", "c"], "title": ["x", "y", "z"]})
    chosen = FeatureFile(items, "item_id", ("id", "title"), title="id")
    store = prepare(LOG, tmp_path / "out", Choices(items=chosen))
    assert labels(store.item_features["title"], 2) == ["z"] and store.items.title(0) == "a"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("colr",), "items.csv has no column 'colr' for the item feature; did you mean 'colour'"),
        (("colour:text",), "unknown kind 'text' of feature 'colour'"),
        (("colour:number",), "2 values are none \\('red', 'blue'\\)"),
        (("colour:categories",), "give --multi-separator"),
        (("colour", "colour:category"), "'colour' is named twice"),
        ((), "name some with --item-features or --item-title"),
    ],
)
def test_bad_choices_of_features_are_one_sentence(names, expected, tmp_path):
    (tmp_path / "items.csv").write_text("item_id,colour\n7,red\n8,blue\n")
    with pytest.raises(SlipstreamError, match=expected):
        features(tmp_path / "items.csv", tmp_path, *names)
    assert [path.name for path in tmp_path.iterdir()] == ["items.csv"]


def test_types_that_are_no_features_are_refused(tmp_path):
    items = pl.DataFrame({"item_id": [7], "day": ["2024-01-01"], "tags": [["a"]]})
    items = items.with_columns(pl.col("day").str.to_date())
    for name, expected in (
        ("day", "holds Date"),
        ("tags:number", "no number"),
        ("tags:category", "lists"),
    ):
        with pytest.raises(SlipstreamError, match=expected):
            features(items, tmp_path, name)


def test_known_data_sets_take_no_features_of_others(tmp_path, monkeypatch, capsys):
    arguments = ["data", "prepare", "ml-1m", "--out", tmp_path / "out", "--item-features", "x"]
    assert "known data set" in refuse(arguments, tmp_path, monkeypatch, capsys)


def test_first_values_and_names():
    log = pl.LazyFrame({"i": [1, 2, 1], "a": [None, "x", "y"]})
    found = first_values(log, pl.col("i"), {"new": "a"}, 2).collect().sort("id")
    assert found.rows() == [(1, "y"), (2, "x")]
    assert split_kind("price:number") == ("price", "number") and split_kind("x") == ("x", None)
    table, facts = vocabulary_table(pl.Series([1]), None)
    assert table.column_names == ["id"] and facts == {}


def test_columns_of_the_log_that_are_features_help_to_find_the_separator(tmp_path):
    (tmp_path / "log.csv").write_text("user_id;item_id;timestamp;a,b\n1;2;3;x\n")
    chosen = FeatureFile(features=("a,b",))
    choices = Choices(columns=Columns("user_id", "item_id", "timestamp"), items=chosen)
    store = prepare(tmp_path / "log.csv", tmp_path / "out", choices)
    assert store.item_features["a,b"].kind == "category"
