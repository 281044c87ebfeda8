"""What a caller sends is checked, looked up and digested, or refused with a sentence."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.history.user_history import History
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_samples import (
    FIRST_ID,
    candidates,
    cut,
    engine,
    history,
    largest_difference,
)


def test_a_digest_stands_for_the_first_behaviours_only(tmp_path):
    served = engine(tmp_path, blocks=1)
    whole, other = served.encode(history(30)), served.encode(history(30, seed=1))
    assert whole.digest(20) == served.encode(cut(history(30), 0, 20)).digest() != whole.digest()
    assert whole.digest() != other.digest()
    assert whole.part(0, 20).then(whole.part(20)).digest() == whole.digest()


def test_an_encoded_history_keeps_its_user_when_it_begins_empty(tmp_path):
    served = engine(tmp_path, blocks=1)
    empty, later = served.encode(None), served.encode(history(3, age=3))
    assert empty.then(later).user_features == {"age": 3}
    assert later.then(empty) is later


def test_user_features_and_actions_count(tmp_path):
    served, whole = engine(tmp_path), history(30)
    base = served.rank(None, whole, candidates(5))
    assert (
        largest_difference(
            base, served.rank(None, replace(whole, user_features={"age": 1}), candidates(5))
        )
        > 0
    )
    clicked = replace(whole, actions=whole.actions | {"click": 1 - whole.actions["click"]})
    assert largest_difference(base, served.rank(None, clicked, candidates(5))) > 0
    assert (
        served.encode(whole).digest()
        != served.encode(replace(whole, user_features={"age": 1})).digest()
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"items": [1]}, "item 1 is not in this bundle's catalogue"),
        ({"items": [FIRST_ID + 0.5]}, "whole numbers"),
        ({"items": [2**63]}, "whole numbers"),
        ({"items": np.array([FIRST_ID], dtype=np.float64)}, "flat list of whole numbers"),
        ({"items": [True]}, "whole numbers"),
        ({"timestamps": [1, 2]}, "1 items but 2 timestamps"),
        ({"timestamps": [1 << 62]}, "within -2"),
        ({"actions": {"click": [1]}}, "send actions.like"),
        ({"actions": {"click": [1], "like": [1, 2]}}, "one value per item"),
        ({"actions": {"click": [float("nan")], "like": [1]}}, "finite"),
        ({"user_features": {"age": 4}}, "code from 0 to 3"),
    ],
)
def test_the_error_of_a_bad_history_says_what_to_send(tmp_path, broken, message):
    served = engine(tmp_path)
    good = History([FIRST_ID], [5], {"click": [1], "like": [0]}, {"age": 1})
    served.prefill(good)
    with pytest.raises(BadRequest, match=message):
        served.prefill(replace(good, **broken))
