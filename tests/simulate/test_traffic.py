"""Arrivals are Poisson at the asked rate, sessions return, histories grow."""

import numpy as np
import pytest

from slipstream.simulate.traffic import Traffic, draw_arrivals


def arrivals(**values):
    return draw_arrivals(Traffic.model_validate({"rate": 50, "requests": 4000} | values), 1)


def test_arrivals_come_at_the_rate_and_in_order():
    found = arrivals()
    gaps = np.diff(found.at_R)
    assert found.at_R.size == 4000 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert found.before_R.mean() == pytest.approx(0.12, rel=0.05)


def test_users_come_back_and_their_histories_grow():
    found = arrivals(gap_seconds=5.0, behaviours=6)
    users, counts = np.unique(found.user_R, return_counts=True)
    assert users.size < 2000 and counts.max() > 3
    busiest = found.user_R == users[counts.argmax()]
    assert (np.diff(found.length_R[busiest]) > 0).all()
    assert (np.diff(found.length_R[busiest]) % 6 == 0).all()


def test_without_sessions_every_request_is_another_user():
    found = arrivals(pages=1)
    assert np.unique(found.user_R).size == 4000


def test_the_same_seed_gives_the_same_arrivals():
    first, again = arrivals(), arrivals()
    assert (first.at_R == again.at_R).all() and (first.user_R == again.user_R).all()
    other = draw_arrivals(Traffic(rate=50, requests=4000), 2)
    assert (first.at_R != other.at_R).any()
