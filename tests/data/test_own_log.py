"""An own log: what it takes from the choices, and what it says about names that are not there."""

import polars as pl
import pytest

from slipstream.data.choices import Choices, FeatureFile
from slipstream.data.log_files import open_frame
from slipstream.data.own_log import (
    log_columns,
    open_own_log,
    open_table,
    paths_of,
    with_time_or_without,
)
from slipstream.data.raw_log import Columns
from slipstream.errors import SlipstreamError
from tests.support.data_fixtures import GOOD

USUAL = Columns("user_id", "item_id", "timestamp", time_optional=True)


def test_incomplete_and_equal_rows_are_dropped_unless_chosen_otherwise():
    table = open_frame(pl.DataFrame(GOOD))
    log = open_own_log(table, Choices())
    assert (log.nulls, log.duplicates, log.time.detected) == ("drop", "drop", True)
    log = open_own_log(table, Choices(nulls="error", duplicates="keep", time_unit="ms"))
    assert (log.nulls, log.duplicates, log.time.unit) == ("error", "keep", "ms")
    untimed = open_own_log(table, Choices(columns=Columns("user_id", "item_id", None)))
    assert untimed.duplicates == "keep" and untimed.time.format == "none"


def test_a_log_that_lacks_its_time_has_none_unless_a_column_looks_like_one():
    schema = pl.Schema({"user_id": pl.Int64, "item_id": pl.Int64})
    assert with_time_or_without(USUAL, schema).time is None
    for likely in ({"created_at": pl.String}, {"x": pl.Datetime("us")}, {"ts": pl.Int64}):
        with pytest.raises(SlipstreamError, match=f"'{next(iter(likely))}' looks like a time"):
            with_time_or_without(USUAL, pl.Schema(schema | likely))


def test_the_columns_that_the_choices_name():
    items = FeatureFile(features=("price:number", "brand"), title="name")
    assert log_columns(Choices(items=items)) == [
        "user_id",
        "item_id",
        "timestamp",
        "price",
        "brand",
        "name",
    ]
    elsewhere = FeatureFile("items.csv", features=("price",))
    assert "price" not in log_columns(Choices(items=elsewhere))


def test_sources_are_paths_or_frames():
    frame = pl.DataFrame(GOOD)
    assert paths_of(frame) == [] and paths_of("a.csv") == ["a.csv"]
    assert open_table(frame).label == "the data frame"
    for wrong in (5, [], {"a": 1}):
        with pytest.raises(SlipstreamError, match="a path, several paths or a data frame"):
            paths_of(wrong)


def test_titles_of_a_log_and_of_its_items_do_not_mix(tmp_path):
    table = open_frame(pl.DataFrame(GOOD))
    items = FeatureFile(pl.DataFrame({"item_id": [5], "name": ["x"]}), features=("name",))
    choices = Choices(columns=Columns("user_id", "item_id", "timestamp", (), "click"), items=items)
    with pytest.raises(SlipstreamError, match="with --item-title, not --title-column"):
        open_own_log(table, choices)
