"""Numbers become categories: about as many in each bin, and a new value is binned alike."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.number_bins import bin_count, bin_numbers, quantile_edges


def test_bins_hold_about_as_many_values_each():
    values = np.random.default_rng(0).lognormal(2, 2, 1000).astype(np.float32)
    edges = quantile_edges(values, 8)
    counts = np.bincount(bin_numbers(values, edges), minlength=bin_count(edges))
    assert len(edges) == 7 and counts[0] == 0
    assert counts[1:].tolist() == pytest.approx([125] * 8, abs=2)


def test_what_is_not_known_is_code_0_and_does_not_count():
    values = np.array([1, np.nan, 2, np.inf, 3, 4], dtype=np.float32)
    edges = quantile_edges(values, 2)
    assert edges == [3.0] == quantile_edges(values[np.isfinite(values)], 2)
    assert bin_numbers(values, edges).tolist() == [1, 0, 1, 0, 2, 2]
    assert quantile_edges(np.full(3, np.nan, np.float32), 4) == []
    assert bin_numbers(np.array([np.nan, 7.0]), []).tolist() == [0, 1]


def test_equal_values_share_a_bin_and_no_bin_is_without_training():
    values = np.array([5, 5, 5, 5, 5, 9], dtype=np.float32)
    edges = quantile_edges(values, 8)
    assert edges == [9.0] and bin_numbers(values, edges).tolist() == [1, 1, 1, 1, 1, 2]
    assert quantile_edges(np.full(9, 2.5, np.float32), 4) == []


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.integers(2, 9))
def test_codes_are_in_range_ordered_and_the_same_after_a_file(numbers, bins):
    values = np.array(numbers, dtype=np.float32)
    edges = quantile_edges(values, bins)
    codes = bin_numbers(values, edges)
    known = np.isfinite(values)
    assert len(edges) < bins and edges == sorted(set(edges))
    assert ((codes == 0) == ~known).all() and codes.max(initial=0) < bin_count(edges)
    order = np.argsort(values[known], kind="stable")
    assert (np.diff(codes[known][order]) >= 0).all()
    assert set(codes[known]) == set(range(1, bin_count(edges))) if known.any() else not edges
    again = json.loads(json.dumps(edges))
    assert [
        int(bin_numbers(np.array([float(each)]), again)[0]) for each in values
    ] == codes.tolist()
