"""What a caller sends is checked, looked up and digested, or refused with a sentence."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.history.user_history import History
from slipstream.serving.engine.encoding import HistoryEncoder, UserFeature
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
    assert empty is served.encode(None), "no behaviours are encoded once"
    assert (empty.digest(), len(empty)) == (served.encode(History([], [])).digest(), 0)
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
        ({"user_features": {"age": True}}, "code from 0 to 3, got True"),
        ({"user_features": {"age": "old"}}, "code from 0 to 3, got 'old'"),
        ({"user_features": {"aeg": 1}}, "no user feature 'aeg'; it reads age"),
    ],
)
def test_the_error_of_a_bad_history_says_what_to_send(tmp_path, broken, message):
    served = engine(tmp_path)
    good = History([FIRST_ID], [5], {"click": [1], "like": [0]}, {"age": 1})
    served.prefill(good)
    with pytest.raises(BadRequest, match=message):
        served.prefill(replace(good, **broken))


FEATURES = {
    "city": UserFeature(3, labels={"": 0, "Rome": 1, "Oslo": 2}),
    "hobbies": UserFeature(4, "categories", {"": 0, "chess": 1, "golf": 2, "ski": 3}),
    "income": UserFeature(5, "number", edges=(10.0, 20.0, 30.0)),
}


def codes_of(served, **values):
    encoder = HistoryEncoder(served.items, {}, FEATURES)
    return encoder.encode(History([], [], {}, values)).user_features


def test_user_features_are_labels_codes_lists_or_numbers(tmp_path):
    served = engine(tmp_path, blocks=1)
    unknown = {"city": 0, "hobbies": (0,), "income": 0}
    assert codes_of(served) == unknown
    assert codes_of(served, city=None, hobbies=None, income=None) == unknown
    assert codes_of(served, city="Paris", hobbies=[], income=float("nan")) == unknown
    told = codes_of(served, city="Oslo", hobbies=["golf", "chess"], income=20)
    assert told == {"city": 2, "hobbies": (1, 2), "income": 3}
    assert told == codes_of(served, city=2, hobbies=(2, "chess"), income=np.float32(29.5))
    assert codes_of(served, hobbies="ski")["hobbies"] == (3,)
    assert codes_of(served, hobbies=["ski", "tennis", "ski", "golf"])["hobbies"] == (2, 3)
    assert codes_of(served, hobbies=["tennis", 0, None])["hobbies"] == (0,)
    bins = [codes_of(served, income=value)["income"] for value in (-5, 9.99, 10, 19, 30, 1e9)]
    assert bins == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"city": 3}, "one of its labels as text, or a code from 0 to 2, got 3"),
        ({"city": ["Rome"]}, "user feature 'city' must be"),
        ({"city": 1.5}, "user feature 'city' must be"),
        ({"hobbies": [["ski"]]}, "user feature 'hobbies' must be"),
        ({"hobbies": [1] * 1001}, "send at most 1000"),
        ({"income": "much"}, "user feature 'income' must be a number, got 'much'"),
        ({"income": True}, "must be a number"),
        ({"income": 10**400}, "must be a number"),
        ({"town": "Rome"}, "no user feature 'town'; it reads city, hobbies, income"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_to_send(tmp_path, values, message):
    with pytest.raises(BadRequest, match=message):
        codes_of(engine(tmp_path, blocks=1), **values)


def test_a_bundle_without_user_features_refuses_them(tmp_path):
    encoder = HistoryEncoder(engine(tmp_path, blocks=1).items, {}, {})
    with pytest.raises(BadRequest, match="leave features out"):
        encoder.encode(History([], [], {}, {"age": 1}))


def test_features_with_several_values_are_part_of_the_digest(tmp_path):
    served = engine(tmp_path, blocks=1)
    encoder = HistoryEncoder(served.items, {}, FEATURES)
    given = [{}, {"hobbies": [1]}, {"hobbies": [1, 2]}, {"hobbies": [2, 3]}, {"income": 15}]
    digests = {encoder.encode(History([], [], {}, values)).digest() for values in given}
    assert len(digests) == len(given)


def test_context_is_looked_up_by_label_and_part_of_the_digest(tmp_path):
    served = engine(tmp_path)
    encoder = HistoryEncoder(served.items, {}, {}, {"surface": {"": 0, "home": 1, "cart": 2}})
    sent = History([FIRST_ID] * 3, [1, 2, 3], context={"surface": ["cart", None, "new"]})
    found = encoder.encode(sent)
    assert found.context["surface"].tolist() == [2, 0, 0]
    none = encoder.encode(replace(sent, context={"device": ["web"] * 3}))  # which it does not read
    assert none.context["surface"].tolist() == [0, 0, 0]
    assert found.digest() != none.digest() and found.part(1).digest() == none.part(1).digest()
    assert found.part(0, 1).then(found.part(1)).digest() == found.digest()
    with pytest.raises(BadRequest, match="3 items but 1 labels of context 'surface'"):
        encoder.encode(replace(sent, context={"surface": ["home"]}))
    assert encoder.encode_request({"surface": "home"}) == {"surface": 1}
    assert encoder.encode_request({"surface": None}) == encoder.encode_request(None)
    with pytest.raises(BadRequest, match="no context 'surfaces'; it reads surface"):
        encoder.encode_request({"surfaces": "home"})


def test_times_count_only_where_the_log_had_them(tmp_path):
    served = engine(tmp_path, blocks=1)
    encoder = HistoryEncoder(served.items, {}, {}, timed=False)
    assert encoder.encode(History([FIRST_ID] * 2, [5, 9])).timestamps_T.tolist() == [0, 0]


def test_a_stored_history_is_encoded_once_while_it_stays_the_same(tmp_path):
    served = engine(tmp_path, blocks=1, task="retrieval")
    stored = replace(history(30), user_features={}, source=object())
    encoded = served.encode(stored)
    assert served.encode(replace(stored)) is encoded and served.items.has_seen(stored)
    other = replace(history(30, seed=1), user_features={}, source=object())
    assert not served.items.has_seen(other) and served.encode(other) is not encoded
    part = stored.part(10, 30)
    assert len(served.encode(part)) == 20 and served.encode(part) is served.encode(part)
    told = served.encode(replace(stored, user_features={"age": 3}))
    assert told.user_features != encoded.user_features
    unstored = replace(stored, source=None)
    assert served.encode(unstored) is not served.encode(unstored)
