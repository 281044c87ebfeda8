"""Ids as arrays: whole numbers stay int64, text stays text, nothing else passes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serving.id_arrays import as_numbers, as_text, id_array, whole_numbers
from slipstream.serving.request_errors import BadRequest

numbers = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(numbers))
def test_whole_numbers_of_any_sign_survive_as_numbers_and_as_text(values: list[int]):
    assert id_array(values).dtype == np.int64 and id_array(values).tolist() == values
    back, valid = as_numbers(np.array(as_text(id_array(values)), dtype=object))
    assert back.tolist() == values and valid.all()


@given(st.lists(st.text(min_size=1), min_size=1))
def test_text_survives_whatever_it_is(values: list[str]):
    assert as_text(id_array(values)) == values
    assert id_array(np.array(values, dtype=object)).tolist() == values


def test_one_text_makes_all_of_them_text():
    assert id_array([12, "RUG/1"]).tolist() == ["12", "RUG/1"]


def test_only_text_that_is_written_as_a_number_counts_as_one():
    sent = ["12", "-12", "0", "007", "-0", "1.0", " 1", "1_0", "٣", "9" * 19, "9" * 30]
    found, valid = as_numbers(id_array(sent))
    assert valid.tolist() == [True, True, True] + [False] * 8
    assert found[:3].tolist() == [12, -12, 0]


@pytest.mark.parametrize("values", [["a", 1.5], ["a", None], ["a", True], ["a", ["b"]], [None]])
def test_what_is_no_id_is_refused(values):
    with pytest.raises(BadRequest, match="item ids must be"):
        id_array(values)


@pytest.mark.parametrize("values", [[1.5], [True], [2**63], np.array([1.0]), [[1]], ["1"]])
def test_what_is_no_whole_number_is_refused(values):
    with pytest.raises(BadRequest, match="times must be"):
        whole_numbers("times", values)


def test_whole_numbers_of_any_kind_become_int64():
    for values in ([1, 2], np.array([1, 2], dtype=np.uint64), torch.tensor([1, 2])):
        assert whole_numbers("ids", values).tolist() == [1, 2]
        assert id_array(values).tolist() == [1, 2]
