"""A layer's bias tables are those its recipe asks for."""

import pytest

from slipstream.models.backbone import make_view
from slipstream.models.relative import RelativeTables
from tests.support.models_samples import config, given, model


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"time_buckets": 20}, (2 * 16 - 1, 21)),
        ({"time_buckets": 20, "position_bias": False}, (None, 21)),
        ({"time_bias": "none"}, (2 * 16 - 1, None)),
    ],
)
def test_tables_have_an_entry_per_distance_and_per_bucket(settings, sizes):
    bias = RelativeTables(config("hstu", **settings), 16).bias()
    found = [None if table is None else table.numel() for table in (bias.position_P, bias.time_W)]
    assert found == list(sizes)


def test_without_tables_there_is_no_bias_and_no_time():
    tables = RelativeTables(config("hstu", time_bias="none", position_bias=False), 16)
    view = make_view(model("hstu").stream(given([3]), None).layout, None)
    assert tables.bias() is None and tables.times(view) == (None, None)
    timed = RelativeTables(config("hstu"), 16)
    assert timed.times(view) == (view.query_timestamps_T, view.key_timestamps_S)
