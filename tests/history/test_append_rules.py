"""What may be appended, and the sentence for what may not."""

import numpy as np
import pytest

from slipstream.history.append_rules import (
    DAY,
    check_histories,
    check_history,
    check_user,
    id_kind,
    is_user,
    refuse_future,
    refuse_many_actions,
    refuse_other_kind,
)
from slipstream.history.history_store import AppendError
from slipstream.history.user_history import History
from tests.support.history_stores import behaviours

NOW = 1_790_000_000


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        ([1, -(2**63)], "numbers"),
        (np.array([1, 2], dtype=np.uint64), "numbers"),
        (np.array([1, 2], dtype=np.int32), "numbers"),
        (["a/b", "ü"], "text"),
        (np.array(["1", "2"]), "text"),
        (np.array(["1", "2"], dtype=object), "text"),
    ],
)
def test_ids_are_whole_numbers_or_text(items, kind):
    checked = check_history(History(items, [0, 1], {"click": [1, 0]}))
    assert id_kind(checked.items) == kind and checked.items.tolist() == list(items)
    assert (checked.timestamps.dtype, checked.actions["click"].dtype) == (np.int64, np.float32)


@pytest.mark.parametrize(
    ("history", "says"),
    [
        (History([1, "a"], [0, 1]), "all of them text"),
        (History([1.5], [0]), "whole numbers"),
        (History([True], [0]), "whole numbers"),
        (History([2**63], [0]), "64 bits"),
        (History(np.array([2**63], dtype=np.uint64), [0]), "64 bits"),
        (History([""], [0]), "an item must be a text of 1 to 256"),
        (History(["x" * 257], [0]), "an item must be a text of 1 to 256"),
        (History(["\ud800"], [0]), "valid Unicode"),
        (History([1], [0.5]), "whole seconds"),
        (History([1], ["now"]), "whole seconds"),
        (History([1], [2**64]), "whole seconds"),
        (History([1, 2], [0]), "'timestamps' has 1 values for 2"),
        (History([1], [0], {"click": [1, 2]}), "'click' has 2 values for 1"),
        (History([1], [0], {"": [1]}), "the name of an action"),
        (History([1], [0], {"click": ["yes"]}), "numbers"),
        (History([1, 2], [5, 4]), "oldest first"),
        (History([1], [0], {f"a{n}": [1] for n in range(65)}), "at most 64 actions"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_a_sentence(history, says):
    with pytest.raises(AppendError, match=says):
        check_history(history)


@pytest.mark.parametrize(
    ("time", "says"),
    [
        (1_710_000_000_000, "1710000000000 looks like milliseconds; send seconds"),
        (1_710_000_000_000_000, "looks like microseconds"),
        (1_710_000_000_000_000_000, "looks like nanoseconds"),
        (NOW + DAY + 1, "more than a day after now"),
        (2**63 - 1, "more than a day after now"),
    ],
)
def test_a_time_more_than_a_day_from_now_is_refused(time, says):
    with pytest.raises(AppendError, match=says):
        refuse_future(time, NOW)


def test_times_up_to_a_day_from_now_pass():
    for time in (-(2**63), 0, NOW, NOW + DAY):
        refuse_future(time, NOW)
    check_history(History([1], [NOW + DAY]), now=NOW)
    with pytest.raises(AppendError):
        check_history(History([1, 2], [0, NOW + DAY + 1]), now=NOW)


def test_an_import_names_the_user_whose_history_is_refused():
    with pytest.raises(AppendError, match=r"user 'b/c': the times"):
        check_histories([("ann", behaviours([1])), ("b/c", behaviours([1, 2], [2, 1]))])


def test_users_are_text_of_at_most_320_characters():
    for user in ("a", "-5", "a/b", "日" * 320, "a\0b"):
        check_user(user)
        assert is_user(user)
    for user in ("", "x" * 321, "\udc80", None, 5):
        assert not is_user(user)


def test_kinds_do_not_mix_and_actions_are_bounded():
    refuse_other_kind("text", check_history(behaviours([])))
    with pytest.raises(AppendError, match="are text"):
        refuse_other_kind("text", check_history(behaviours([1])))
    refuse_many_actions(64)
    with pytest.raises(AppendError, match="64 different"):
        refuse_many_actions(65)
