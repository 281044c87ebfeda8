"""The same bits on every tier, and again after the files were closed and opened."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.exchange import Exchange
from slipstream.tables.factory import make_table
from tests.support.pipeline_problem import (
    DIM,
    OPTIMIZERS,
    ROWS,
    Problem,
    SmallWork,
    differences,
    outcome,
    plain_outcome,
)

PROBLEM = Problem(steps=200)


def tables_of(tier, directory, **options):
    common = {
        "seed": 5,
        "init_scale": 0.5,
        "directory": directory,
        "cache_bytes": 1 << 12,
        **options,
    }
    return {
        name: make_table(tier, name, rows, DIM, OPTIMIZERS["adam"], **common)
        for name, rows in ROWS.items()
    }


@pytest.mark.parametrize("tier", ("memory", "disk", "hashed", "hashed on disk"))
@pytest.mark.parametrize("schedule", ("nested", "frozen_window"))
def test_every_tier_ends_with_the_bits_of_the_plain_loop(tier, schedule, tmp_path):
    directory = tmp_path if "disk" in tier else None
    tables, work = tables_of(tier.split()[0], directory), SmallWork(PROBLEM)
    with Pipeline(
        make_schedule(schedule, micro_batches=2), work, tables, LaneGroups(Exchange(tables))
    ) as pipeline:
        assert sum(1 for _ in pipeline.steps()) == PROBLEM.steps
    expected = plain_outcome(PROBLEM, OPTIMIZERS["adam"], 2)
    assert not differences(outcome(work, tables), expected)
    for table in tables.values():
        table.close()
    if tier == "disk":
        opened = tables_of("disk", tmp_path)
        assert not differences(outcome(work, opened), expected)


def test_a_table_that_forgets_is_refused_where_rows_are_read_ahead():
    tables = tables_of("hashed", None, max_rows=8)
    with pytest.raises(SlipstreamError, match="may forget rows"):
        Pipeline(make_schedule("nested"), SmallWork(PROBLEM), tables, LaneGroups(Exchange(tables)))


def test_ids_beyond_any_float_keep_their_rows():
    big = 2**63 - 1
    table = make_table("hashed", "item", None, DIM, OPTIMIZERS["adam"], seed=1)
    before = table.read(torch.tensor([big - 1, big])).weights_UD.clone()
    assert not torch.equal(before[0], before[1])
