"""What a caller sends is checked, looked up and digested, or refused with a sentence."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.serving.bundle import random_bundle
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_samples import (
    FIRST_ID,
    candidates,
    cut,
    engine,
    history,
    largest_difference,
)

MODEL = {"kind": "hstu", "dim": 16, "blocks": 1, "heads": 2, "max_len": 64, "time_buckets": 32}


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
        ({"user_features": {"age": "young"}}, "'young' is no value .*no labels, only codes"),
        ({"user_features": {"agee": 1}}, r"'agee' is no user feature .*known: age"),
    ],
)
def test_the_error_of_a_bad_history_says_what_to_send(tmp_path, broken, message):
    served = engine(tmp_path)
    good = History([FIRST_ID], [5], {"click": [1], "like": [0]}, {"age": 1})
    served.prefill(good)
    with pytest.raises(BadRequest, match=message):
        served.prefill(replace(good, **broken))


def test_a_user_feature_is_sent_as_its_label_or_its_code(tmp_path):
    labels = {"age": ["", "18", "25", "56"]}
    random_bundle(
        tmp_path / "b", MODEL, num_items=9, first_id=1, user_features={"age": 4}, user_labels=labels
    )
    served = Engine(tmp_path / "b")
    codes = [served.encode(History([], [], {}, {"age": age})) for age in ("25", 2)]
    assert [found.user_features for found in codes] == [{"age": 2}, {"age": 2}]
    for wrong in ("", "24"):
        with pytest.raises(BadRequest, match="known: 18, 25, 56"):
            served.encode(History([], [], {}, {"age": wrong}))


def test_a_model_of_a_log_without_times_sees_none(tmp_path):
    random_bundle(
        tmp_path / "b", MODEL, task="retrieval", num_items=9, first_id=1, timed=False, noise=0.05
    )
    served = Engine(tmp_path / "b")
    whole = History([1, 2, 3], [5, 600, 70_000])
    assert served.encode(whole).timestamps_T.tolist() == [0, 0, 0]
    assert served.encode(replace(whole, timestamps=None)).digest() == served.encode(whole).digest()
    scores = [
        served.rank(None, given, [4, 5], request_time=at)["score"].tolist()
        for given, at in ((whole, None), (replace(whole, timestamps=[9, 9, 9]), 10**9))
    ]
    assert scores[0] == scores[1]
