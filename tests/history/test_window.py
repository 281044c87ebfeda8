"""One rule cuts long histories: at most the model's length, and the cut stays put."""

import pytest

from slipstream.history.window import window_start


def test_the_cut_lies_at_multiples_of_an_eighth():
    starts = [window_start(n, 80) for n in (0, 1, 80, 81, 90, 91, 1000)]
    assert starts == [0, 0, 0, 10, 10, 20, 920]


@pytest.mark.parametrize("max_len", [1, 7, 8, 64, 80, 100])
def test_the_model_sees_at_least_seven_eighths_and_at_most_all_of_its_length(max_len):
    block = max(1, max_len // 8)
    for count in range(max_len + 1, 6 * max_len):
        seen = count - window_start(count, max_len)
        assert max_len - block < seen <= max_len


def test_a_history_whose_oldest_are_gone_begins_at_a_multiple_too():
    assert window_start(100, 64, oldest=33) == 40
    assert window_start(100, 64, oldest=40) == 40
    assert window_start(50, 64, oldest=3) == 8
    assert window_start(5, 64, oldest=4) == 5  # nothing is left of it


def test_the_window_of_a_stored_history_stays_put_while_it_grows():
    starts = {window_start(total, 64, oldest=0) for total in range(89, 97)}
    assert starts == {32}


@pytest.mark.parametrize("max_len", [1, 7, 64])
@pytest.mark.parametrize("oldest", [0, 5])
def test_the_latest_rule_leaves_exactly_the_models_length(max_len, oldest):
    for count in range(oldest, 6 * max_len + oldest):
        start = window_start(count, max_len, oldest, rule="latest")
        assert list(range(start, count)) == list(range(oldest, count))[-max_len:]


def test_a_rule_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="latest, stepped"):
        window_start(10, 5, rule="newest")
