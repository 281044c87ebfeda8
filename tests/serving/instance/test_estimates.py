"""Predicted seconds of requests: what pays, what fits before the deadline, what is refused."""

import numpy as np
import pytest

from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.estimates import RequestEstimates, most_within
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.trigger import TriggerConfig
from slipstream.serving.request_errors import OverloadError
from tests.support.fake_clock import FakeClock
from tests.support.serving_samples import candidates, engine, history

PER_TOKEN = np.array([0.0, 1e-3, 0.0, 0.0])  # a millisecond a token


def estimates(served, coefficients=PER_TOKEN, **settings):
    return RequestEstimates(served, CostModel(coefficients, 1e-9), InstanceConfig(**settings))


def test_most_within_is_the_largest_count_that_fits():
    assert most_within(0.5, 100, lambda n: n * 0.01) == 50
    assert most_within(5.0, 100, lambda n: n * 0.01) == 100
    assert most_within(0.001, 100, lambda n: n * 0.01) == 0


def test_all_fewer_or_a_refusal(tmp_path):
    served = engine(tmp_path, blocks=1)
    known = estimates(served)
    whole = {"queued": 1.0, "prefill": None, "allow_truncate": False}
    needed = 1e-3 * (served.tokens_of(100) + 5)
    assert known.behaviours_in_time(100, 5, needed, **whole) == 100
    with pytest.raises(OverloadError, match="truncation was not allowed"):
        known.behaviours_in_time(100, 5, needed - 1e-6, **whole)
    shorter = known.behaviours_in_time(100, 5, needed / 2, **whole | {"allow_truncate": True})
    assert 0 < shorter < 100
    with pytest.raises(OverloadError):
        known.behaviours_in_time(100, 5, 0.0, **whole | {"allow_truncate": True})


def test_an_idle_instance_tries_what_only_its_correction_forbids(tmp_path):
    served = engine(tmp_path, blocks=1)
    known = estimates(served)
    needed = known.cost.pass_seconds(served.tokens_of(100) + 5, 0)
    known.cost.clock = FakeClock()
    for _ in range(50):
        known.cost.observe("inline", known.cost.pass_seconds(50, 0), 1.0)
    assert known.cost.factor("inline") > 2
    tried = {"prefill": None, "allow_truncate": False}
    assert known.behaviours_in_time(100, 5, needed, queued=0.0, **tried) == 100
    with pytest.raises(OverloadError):
        known.behaviours_in_time(100, 5, needed, queued=0.1, **tried)


def test_a_prefix_pays_where_it_saves_more_than_a_call(tmp_path):
    served = engine(tmp_path, blocks=1)
    calls = estimates(served, np.array([1.0, 1e-3, 0.0, 0.0]))
    assert not calls.prefix_pays(0)
    assert not calls.prefix_pays(999) and calls.prefix_pays(1001)


def test_a_batch_costs_its_parts_but_one_call(tmp_path):
    served = engine(tmp_path, blocks=1)
    query = served.make_query(served.prefill(history(100)), None, candidates(10))
    free = RequestEstimates(served, CostModel(PER_TOKEN, 0.0), InstanceConfig())
    dear = RequestEstimates(served, CostModel(PER_TOKEN, 1.0), InstanceConfig())
    assert free.batch_seconds([query] * 2) == pytest.approx(2 * free.batch_seconds([query]))
    assert dear.batch_seconds([query] * 2) == free.batch_seconds([query] * 2)  # nothing is copied


def test_two_passes_are_compared_with_one_as_if_both_ran_now(tmp_path):
    served = engine(tmp_path, blocks=1)
    known = estimates(served, np.array([0.0, 1e-3, 0.0, 0.0]))
    known.cost.clock = FakeClock()
    tokens = served.cached_tokens(100)
    plain = known.saved_seconds(tokens, 5)
    assert plain == pytest.approx(1e-3 * tokens)  # the tokens that ranking does not compute
    for _ in range(50):  # a busy machine has slowed rankings in line, no prefill has run since
        known.cost.observe("inline", known.cost.pass_seconds(50, 0), 1.0)
    assert known.saved_seconds(tokens, 5) == plain


def test_the_shortest_history_to_announce_saves_the_least_that_the_trigger_asks_for(tmp_path):
    served = engine(tmp_path, blocks=1)
    known = estimates(served)
    enough = known.config.trigger.least_saved * known.config.ranking_budget
    least, many = known.from_behaviours, known.config.expected_candidates

    def saved(behaviours):
        return known.saved_seconds(served.cached_tokens(behaviours), many)

    assert saved(least) >= enough > saved(least - 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"trigger": TriggerConfig(enabled=False)}, 8),  # whatever has a prefix
        ({"preinfer": False}, 2501),  # longer than any
        ({"relay": False}, 2501),
    ],
)
def test_the_shortest_history_to_announce_without_trigger_or_relay(tmp_path, settings, expected):
    served = engine(tmp_path, blocks=1)
    known = estimates(served, **settings)
    assert known.from_behaviours == expected
    if expected < 2501:
        assert served.cached_tokens(expected) and not served.cached_tokens(expected - 1)


def test_no_history_is_worth_announcing_where_no_prefix_saves_anything(tmp_path):
    served = engine(tmp_path, blocks=1)
    assert estimates(served, np.array([1e-3, 0.0, 0.0, 0.0])).from_behaviours == 2501
