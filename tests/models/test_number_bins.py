"""Numbers become categories: about as many in each bin, and a new value is binned alike."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.number_bins import bin_count, bin_numbers, log_edges, quantile_edges


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


def test_log_bins_are_equally_wide_on_the_log_scale():
    values = np.random.default_rng(0).lognormal(4, 2, 2000).astype(np.float32)
    edges = log_edges(values, 9)
    scaled = np.log1p(values.astype(np.float64))
    widths = np.diff(np.log1p(np.array(edges)))
    assert len(edges) == 8 and widths == pytest.approx([4 * scaled.std() / 7] * 7, rel=1e-4)
    assert np.log1p(edges).mean() == pytest.approx(scaled.mean(), rel=1e-5)
    assert bin_numbers(np.array([-5.0, 1e30, np.nan]), edges).tolist() == [1, 9, 0]
    below_zero = log_edges(-values, 9)
    assert below_zero == [-edge for edge in reversed(edges)]


@pytest.mark.parametrize("values", [[], [np.nan, np.inf], [3.0, 3.0]])
def test_values_without_a_spread_have_one_log_bin(values):
    assert log_edges(np.array(values, dtype=np.float32), 8) == []
    assert len(log_edges(np.array([1.0, 2.0]), 2)) == 1
