"""A history is cut, filtered and continued; its numbers stay those of the store."""

import numpy as np

from slipstream.history.user_history import History


def history(items, first=0, **actions):
    columns = {name: np.array(values, dtype=np.float32) for name, values in actions.items()}
    return History(np.array(items), np.array(items) * 10, columns, {"age": 2}, first)


def test_parts_are_named_by_number_and_keep_the_user():
    whole = history([5, 6, 7, 8], first=100, click=[1, 0, 1, 0])
    assert (len(whole), whole.total) == (4, 104)
    part = whole.part(101, 103)
    assert (part.first, part.total, part.items.tolist()) == (101, 103, [6, 7])
    assert part.actions["click"].tolist() == [0, 1]
    assert part.timestamps.tolist() == [60, 70] and part.user_features == {"age": 2}
    assert len(whole.part(104, 104)) == 0 and whole.part(104, 104).first == 104


def test_a_filter_keeps_the_columns_together():
    whole = history([5, 6, 7], first=3, click=[1, 0, 1])
    some = whole.where(np.array([True, False, True]))
    assert some.items.tolist() == [5, 7] and some.timestamps.tolist() == [50, 70]
    assert some.actions["click"].tolist() == [1, 1] and some.first == 3
    assert whole.where(np.ones(3, dtype=bool)) is whole


def test_later_behaviours_continue_the_numbers_and_absent_actions_count_as_zero():
    both = history([1, 2], first=10, click=[1, 1], like=[0, 1]).then(history([3], click=[1]))
    assert (both.first, both.total, both.items.tolist()) == (10, 13, [1, 2, 3])
    assert both.actions["click"].tolist() == [1, 1, 1]
    assert both.actions["like"].tolist() == [0, 1, 0]


def test_an_empty_history_is_continued_with_all_the_columns_of_the_later_one():
    empty = history([1, 2], first=10).part(12, 12)
    later = empty.then(history([3], click=[1]))
    assert (later.first, later.total, later.actions["click"].tolist()) == (12, 13, [1])


def test_lists_will_do_where_nothing_is_computed():
    assert len(History(["a", "b"], [1, 2])) == 2
