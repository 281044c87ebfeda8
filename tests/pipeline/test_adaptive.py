"""The choice of micro-batches and buffers from the times of a run's first steps."""

from slipstream.pipeline import adaptive
from slipstream.pipeline.schedule import make_schedule


def probe(micro_batches, step, compute, exchange, table=0.01, longest=0.01):
    return adaptive.Probe(micro_batches, step, compute, exchange, 0.001, table, longest)


def test_where_cutting_does_not_help_nothing_is_cut():
    chosen, why = adaptive.choose(
        make_schedule("nested"), probe(1, 0.100, 0.09, 0.01), probe(8, 0.101, 0.1, 0.01)
    )
    assert chosen.micro_batches == 1 and "nothing to hide" in why


def test_a_long_exchange_is_cut_into_more_parts_than_a_short_one():
    slow = adaptive.choose(
        make_schedule("nested"), probe(1, 0.2, 0.1, 0.1), probe(8, 0.12, 0.102, 0.11)
    )[0]
    dear = adaptive.choose(
        make_schedule("nested"), probe(1, 0.12, 0.1, 0.02), probe(8, 0.115, 0.112, 0.022)
    )[0]
    assert slow.micro_batches >= 8 > dear.micro_batches


def test_retrievals_that_are_sometimes_long_get_a_second_buffer():
    cut = probe(8, 0.12, 0.102, 0.11, table=0.05, longest=0.5)
    chosen, why = adaptive.choose(
        make_schedule("nested"), probe(1, 0.2, 0.1, 0.1, table=0.05, longest=0.5), cut
    )
    assert chosen.buffers_ahead == 2 and "2 buffers ahead" in why
    assert (
        adaptive.choose(make_schedule("frozen_window"), probe(1, 0.2, 0.1, 0.1), cut)[
            0
        ].buffers_ahead
        == 0
    )
