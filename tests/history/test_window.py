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
