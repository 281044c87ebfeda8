"""Every schedule of staleness 0 gives the bits of the plain loop; stale ones those of the hand-written stale loop."""

import pytest
from pipeline_problem import RULES, Problem, SmallWork, differences, make_tables, outcome, plain_loop, stale_loop

from slipstream.pipeline.peers import Peers
from slipstream.pipeline.pipeline import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.tables.exchange import Exchange


def pipelined(schedule, problem, rule, tables=None, **options):
    work, tables = SmallWork(problem), tables or make_tables(problem, rule)
    with Pipeline(schedule, work, tables, Peers(Exchange(tables)), **options) as pipeline:
        steps = [done.step for done in pipeline.steps()]
    assert steps == list(range(problem.steps))
    return outcome(work, tables)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("micro_batches", (1, 2, 4, 8))
@pytest.mark.parametrize("name", ("synchronous", "dual_buffer", "frozen_window", "nested"))
def test_a_schedule_without_staleness_equals_the_plain_loop_bit_for_bit(name, micro_batches, rule):
    problem = Problem(steps=200)
    expected = plain_loop(problem, RULES[rule], micro_batches)
    found = pipelined(make_schedule(name, micro_batches=micro_batches), problem, RULES[rule])
    assert not differences(found, expected)
    assert differences(found, plain_loop(Problem(steps=199), RULES[rule], micro_batches)), "the comparison cannot fail"


@pytest.mark.parametrize("buffers_ahead", (2, 3))
def test_more_prefetch_buffers_change_nothing(buffers_ahead):
    problem = Problem(steps=60)
    schedule = make_schedule("nested", micro_batches=2, buffers_ahead=buffers_ahead)
    assert not differences(pipelined(schedule, problem, RULES["adam"]), plain_loop(problem, RULES["adam"], 2))


@pytest.mark.parametrize("staleness", (1, 2, 4))
def test_a_stale_schedule_equals_the_stale_loop_bit_for_bit(staleness):
    problem = Problem(steps=60)
    found = pipelined(make_schedule("semi_async", staleness=staleness, micro_batches=2), problem, RULES["adagrad"])
    assert not differences(found, stale_loop(problem, RULES["adagrad"], staleness, 2))
    assert differences(found, stale_loop(problem, RULES["adagrad"], staleness - 1, 2)), "staleness makes no difference here"
