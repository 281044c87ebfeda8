"""An instance is an outlier only beside others that do better."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.router.outliers import (
    OutlierConfig,
    RequestRecord,
    find_fault,
    may_be_outlier,
    slow_limit,
)

CONFIG = OutlierConfig(min_requests=5)


def record(requests: int, failures: int = 0, seconds: float = 0.01) -> RequestRecord:
    found = RequestRecord()
    for number in range(requests):
        failed = number < failures
        found.add(failed=failed, seconds=None if failed else seconds)
    return found


@pytest.mark.parametrize(
    ("own", "others", "fault"),
    [
        (record(10, 5), [record(10)], "failing"),
        (record(10, 5), [record(10, 5)], None),  # what all share blames nobody
        (record(10, 2), [record(10)], None),
        (record(4, 4), [record(10)], None),  # too few to judge
        (record(10, 10), [record(4)], None),  # nobody to compare with
        (record(10, 10), [], None),
        (record(10, seconds=0.2), [record(10), record(10)], "slow"),
        (record(10, seconds=0.05), [record(10)], None),  # five times, but only by 40 ms
        (record(10, seconds=0.2), [record(10, seconds=0.1)], None),
        (record(10, 6, seconds=9.0), [record(10, 6)], None),  # four answers tell no speed
    ],
)
def test_failures_and_times_are_compared_with_those_of_the_others(own, others, fault):
    assert find_fault(own, others, CONFIG) == fault


def test_old_outcomes_fade():
    own = record(100, 100)
    own.fade(100.0, CONFIG.horizon)
    assert own.requests < 0.01 and find_fault(own, [record(10)], CONFIG) is None


def test_without_comparison_nothing_is_slow():
    assert slow_limit([record(3)], CONFIG) == float("inf")
    assert slow_limit([record(9, seconds=0.1)], CONFIG) == pytest.approx(0.3)


def test_one_cold_request_makes_no_instance_slow():
    own = record(5)
    own.add(failed=False, seconds=2.0)  # the first of a new process
    assert find_fault(own, [record(6)], CONFIG) is None
    for _ in range(20):
        own.add(failed=False, seconds=2.0)
    assert find_fault(own, [record(6)], CONFIG) == "slow"


RECORDS = st.builds(
    lambda requests, failures, seconds: record(requests, min(requests, failures), seconds),
    st.integers(0, 12),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.01, 0.04, 0.06, 0.2]),
)


@given(RECORDS, st.lists(RECORDS, max_size=3))
def test_what_needs_no_comparison_is_no_outlier_beside_anybody(own, others):
    if not may_be_outlier(own, CONFIG):
        assert find_fault(own, others, CONFIG) is None
