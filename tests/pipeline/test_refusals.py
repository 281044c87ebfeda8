"""A schedule refuses work whose result it would silently change, and names the way out."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.exchange import Exchange
from slipstream.tables.row_optimizers import DenseAdamW
from tests.support.pipeline_problem import OPTIMIZERS, Problem, SmallWork, make_tables, tables_of

PROBLEM = Problem(steps=30, samples=4)


def test_what_a_schedule_would_change_silently_is_refused():
    tables = make_tables(PROBLEM, OPTIMIZERS["adam"])
    mixing = SmallWork(PROBLEM, mixes_samples="loss 'in_batch'")
    with pytest.raises(
        SlipstreamError, match=r"loss 'in_batch' mixes its samples.*use schedule=dual_buffer"
    ):
        Pipeline(make_schedule("nested"), mixing, tables, LaneGroups(Exchange(tables)))
    Pipeline(make_schedule("dual_buffer"), mixing, tables, LaneGroups(Exchange(tables)))
    dense = make_tables(PROBLEM, DenseAdamW())
    with pytest.raises(
        SlipstreamError,
        match=r"updates rows that no batch touched; use tables.optimizer=rowwise_adam",
    ):
        Pipeline(
            make_schedule("dual_buffer"), SmallWork(PROBLEM), dense, LaneGroups(Exchange(dense))
        )


def test_a_table_that_forgets_is_refused_where_rows_are_read_ahead():
    tables = tables_of("hashed", None, max_rows=8)
    with pytest.raises(SlipstreamError, match="may forget rows"):
        Pipeline(make_schedule("nested"), SmallWork(PROBLEM), tables, LaneGroups(Exchange(tables)))
