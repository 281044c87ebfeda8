"""With one rank every exchange is the identity; tests/system/test_pipeline_ranks.py has more."""

import torch

from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.tables.exchange import Exchange
from tests.support.pipeline_problem import OPTIMIZERS, Problem, make_tables


def test_alone_nothing_is_sent():
    exchange = Exchange(make_tables(Problem(), OPTIMIZERS["adam"]))
    groups = LaneGroups(exchange)
    assert groups.keys is groups.rows is groups.gradients is exchange
    assert groups.everybody is None and not groups.closers
    gradients = {"item": (torch.arange(2), torch.ones(2, 4))}
    assert groups.sum_replicas(gradients) is gradients
    assert groups.sum_loss(1.5) == 1.5 and groups.mean([1.0, 2.0]) == [1.0, 2.0]
    groups.close()


def test_alone_a_step_takes_place_while_there_is_data_and_nobody_stops():
    groups = LaneGroups(Exchange(make_tables(Problem(), OPTIMIZERS["adam"])))
    assert groups.agree(7, has_data=True, stop=False) == (7, True)
    assert groups.agree(7, has_data=True, stop=True) == (7, False)
    assert groups.agree(0, has_data=False, stop=False) == (0, False)
