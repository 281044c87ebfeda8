"""A message becomes a history of arrays, or is refused with what to send."""

import numpy as np
import pytest

from slipstream.history.user_history import History
from slipstream.serving.http import messages as m
from slipstream.serving.http.request_history import (
    append_recent,
    check_times,
    read_history,
    refuse_long,
    select_actions,
    write_history,
)
from slipstream.serving.request_errors import BadRequest

NOW = 1_700_000_000


def test_a_message_becomes_a_history_of_arrays():
    message = m.HistoryMessage([2**63 - 1, -7], [1, 1], {"click": [0.5, 1]})
    history = read_history(message, {"age": 3})
    assert history.items.tolist() == [2**63 - 1, -7] and history.timestamps.tolist() == [1, 1]
    assert history.actions["click"].dtype == "float32" and history.user_features == {"age": 3}
    assert (history.first, history.total) == (0, 2)
    assert read_history(m.HistoryMessage(["a/b", 5], [1, 2])).items.tolist() == ["a/b", "5"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (m.HistoryMessage([1], []), "1 items but 0 timestamps"),
        (m.HistoryMessage([1]), "no timestamps; send one per item"),
        (m.HistoryMessage([1, 2], [2, 1]), "oldest first"),
        (m.HistoryMessage([1], [1], {"click": [1, 2]}), "'click' has 2 values for 1"),
        (m.HistoryMessage([1], [1], {}, {"surface": []}), "'surface' has 0 labels for 1"),
    ],
)
def test_a_message_that_contradicts_itself_is_refused(message: m.HistoryMessage, says: str):
    with pytest.raises(BadRequest, match=says):
        read_history(message)


def test_context_comes_as_labels_and_goes_as_it_came():
    message = m.HistoryMessage([1, 2], [1, 2], {"click": [0, 1]}, {"surface": ["home", None]})
    history = read_history(message)
    assert history.context["surface"].tolist() == ["home", ""]
    assert write_history(history) == message


def test_a_model_without_times_needs_none():
    history = read_history(m.HistoryMessage(["a", "b"]), timed=False)
    assert history.timestamps.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("latest", "says"),
    [(NOW * 1_000, "milliseconds"), (NOW + 90_000, "more than a day after now")],
)
def test_times_ahead_of_now_are_refused(latest: int, says: str):
    check_times([NOW - 5, NOW + 80_000], NOW)  # a clock may be wrong by hours
    with pytest.raises(BadRequest, match=says):
        check_times([NOW, latest], NOW)


def test_a_long_history_is_cut_only_where_that_is_allowed():
    history = read_history(m.HistoryMessage([1, 2, 3], [1, 2, 3]))
    refuse_long(history, 3, allow_truncate=False)
    refuse_long(history, 2, allow_truncate=True)
    with pytest.raises(BadRequest, match="3 behaviours is longer than the 2 this model reads"):
        refuse_long(history, 2, allow_truncate=False)


def test_only_the_actions_a_model_reads_are_kept_and_absent_ones_are_0():
    stored = History(np.array([1, 2]), np.array([1, 2]), {"buy": np.ones(2, dtype=np.float32)})
    chosen = select_actions(stored, ("click",))
    assert {name: values.tolist() for name, values in chosen.actions.items()} == {"click": [0, 0]}
    assert append_recent(chosen, chosen.part(2, 2)).actions.keys() == {"click"}


def test_a_history_with_the_very_actions_is_not_copied():
    stored = History(np.array([1, 2]), np.array([1, 2]), {"buy": np.ones(2, dtype=np.float32)})
    assert select_actions(stored, ("buy",)) is stored
    assert select_actions(stored, ()).actions == {}
