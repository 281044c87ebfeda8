"""What a wrong argument is answered with: one sentence that names the right one."""

import numpy as np
import polars as pl
import pytest
import torch

from slipstream.api.arguments import clear_arguments, ids_of, is_id, one_of, whole_number
from slipstream.errors import SlipstreamError


@clear_arguments({"columns": "name the columns one by one"})
def bake(flour: int, sugar: int = 1, *, oven: int = 180) -> int:
    return flour + sugar + oven


class Baker:
    @clear_arguments()
    def bake(self, flour: int) -> int:
        return flour


@pytest.mark.parametrize(
    "args, kwargs, sentence",
    [
        ((1,), {"suger": 2}, "bake has no argument 'suger'; did you mean 'sugar'?"),
        ((1,), {"columns": {}}, "bake has no argument 'columns'; name the columns one by one"),
        ((), {}, "bake needs 'flour'; give it"),
        ((1, 2, 3), {}, "bake takes flour, sugar in this order, then by name: oven; got 3"),
        ((1,), {"flour": 2}, "bake got 'flour' twice"),
    ],
)
def test_a_wrong_call_is_one_sentence(args, kwargs, sentence):
    with pytest.raises(SlipstreamError) as error:
        bake(*args, **kwargs)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_right_call_goes_through():
    assert bake(1, oven=200) == 202 and Baker().bake(2) == 2


def test_a_method_does_not_count_self():
    with pytest.raises(SlipstreamError, match=r"bake takes flour in this order.*got 2"):
        Baker().bake(1, 2)
    with pytest.raises(SlipstreamError, match=r"bake has no argument 'flower'; did you mean"):
        Baker().bake(flower=1)


def test_a_type_error_inside_the_function_stays_one():
    @clear_arguments()
    def fails() -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        fails()


@pytest.mark.parametrize(
    "given, ids",
    [
        (7, [7]),
        ("c/1", ["c/1"]),
        ([1, 2], [1, 2]),
        (np.array([2**62]), [2**62]),
        (pl.Series(["a"]), ["a"]),
        (torch.tensor([3]), [3]),
        (np.int64(4), [4]),
        ((x for x in "ab"), ["a", "b"]),
    ],
)
def test_ids_come_in_many_forms(given, ids):
    assert ids_of("users", given) == ids


@pytest.mark.parametrize("given", [1.5, None, [1.0], [True], {"a": 1}, [[1]], object()])
def test_what_is_no_id_is_refused(given):
    with pytest.raises(SlipstreamError, match="users must"):
        ids_of("users", given)


def test_a_boolean_is_no_id_and_no_number():
    assert not is_id(True)
    for value in (True, 2.0, "3", None):
        with pytest.raises(SlipstreamError, match="k must be a whole number"):
            whole_number("k", value)
    with pytest.raises(SlipstreamError, match="k must be at least 1, got 0"):
        whole_number("k", 0, least=1)


def test_a_word_is_one_of_the_choices():
    assert one_of("repeat", "allow", ("allow", "exclude")) == "allow"
    with pytest.raises(SlipstreamError, match="unknown repeat 'alow'; did you mean 'allow'"):
        one_of("repeat", "alow", ("allow", "exclude"))
