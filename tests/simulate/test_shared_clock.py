"""Ranks that share cores and cards: closed forms where there are any."""

import pytest

from slipstream.pipeline.schedule import make_schedule
from slipstream.simulate.shared_clock import RankTask, SharedClock

SERIAL = make_schedule("serial")
EACH = {"compute": RankTask(cpu=1.0), "answer": RankTask(sent=10.0, rounds=1)}


def steps_of(schedule, cores, costs, rate=None, steps=4, **options):
    clock = SharedClock(schedule, cores, rate, **options)
    return clock.run(steps, lambda rank, task: costs.get(task.stage, RankTask()))


def test_one_rank_in_series_takes_the_sum():
    ends = steps_of(SERIAL, [0], EACH, rate=20.0)
    assert ends == pytest.approx([1.5, 3.0, 4.5, 6.0])


def test_ranks_on_one_core_take_turns_and_on_two_do_not():
    assert steps_of(SERIAL, [0, 1], EACH)[-1] == pytest.approx(4.0)
    assert steps_of(SERIAL, [0, 0], EACH)[-1] == pytest.approx(8.0)


def test_messages_are_hidden_behind_compute_where_the_schedule_allows():
    costs = {"compute": RankTask(cpu=1.0), "collect": RankTask(sent=10.0, rounds=1)}
    serial = steps_of(SERIAL, [0, 1], costs, rate=20.0, steps=8)
    stale = steps_of(make_schedule("semi_async"), [0, 1], costs, rate=20.0, steps=8)
    assert serial[5] - serial[4] == pytest.approx(1.5)
    assert stale[5] - stale[4] == pytest.approx(1.0)


@pytest.mark.parametrize("queue", [True, False])
def test_lanes_share_a_card_and_its_bytes_take_their_time(queue):
    costs = {
        "answer": RankTask(sent=10.0, rounds=1),
        "collect": RankTask(sent=10.0, rounds=1),
        "route": RankTask(sent=10.0, rounds=2),
    }
    options = {"rate": 10.0, "steps": 12, "queue": queue, "words": False}
    ends = steps_of(make_schedule("semi_async"), [0, 1], costs, **options)
    assert ends[6] - ends[5] == pytest.approx(3.0, rel=0.05)  # the card is never idle


def test_a_card_that_was_idle_sends_its_burst_at_once():
    costs = {"compute": RankTask(cpu=1.0), "answer": RankTask(sent=10.0, rounds=1)}
    for burst, step in ((0.0, 1.5), (4.0, 1.3), (50.0, 1.0)):
        ends = steps_of(SERIAL, [0, 1], costs, rate=20.0, burst=burst)
        assert ends[3] - ends[2] == pytest.approx(step)


def test_a_burst_is_no_help_to_a_card_that_is_never_idle():
    costs = {"answer": RankTask(sent=10.0, rounds=1), "collect": RankTask(sent=10.0, rounds=1)}
    options = {"rate": 10.0, "steps": 12, "burst": 5.0, "words": False}
    ends = steps_of(make_schedule("semi_async"), [0, 1], costs, **options)
    assert ends[6] - ends[5] == pytest.approx(2.0, rel=0.05)


def test_a_rank_waits_for_the_slowest_and_paced_reads_use_no_core():
    def costs(rank, task):
        if task.stage == "retrieve":
            return RankTask(waits=1.0 + rank)
        return RankTask(rounds=1) if task.stage == "answer" else RankTask()

    ends = SharedClock(SERIAL, [0, 0]).run(2, costs)
    assert ends == pytest.approx([2.0, 4.0])


def test_threads_wake_later_on_a_busy_core():
    costs = {
        "load": RankTask(cpu=0.15),
        "answer": RankTask(sent=10.0, rounds=1),
        "compute": RankTask(cpu=0.5),
    }
    schedule, options = make_schedule("dual_buffer"), {"rate": 100.0, "steps": 12}
    plain = steps_of(schedule, [0, 1], costs, **options)[8]
    assert steps_of(schedule, [0, 1], costs, **options, wake_busy=0.2)[8] > plain + 0.5


def test_the_word_that_a_rank_is_ready_waits_in_the_queue():
    costs = {
        "answer": RankTask(sent=10.0, rounds=1),
        "collect": RankTask(sent=10.0, rounds=1),
        "route": RankTask(sent=10.0, rounds=2),
    }
    options = {"rate": 10.0, "steps": 12}
    silent, spoken = (
        steps_of(make_schedule("semi_async"), [0, 1], costs, **options, words=words)[8]
        for words in (False, True)
    )
    assert spoken > silent


def test_a_thread_on_an_idle_core_wakes_at_once():
    costs = {"answer": RankTask(rounds=3)}
    assert steps_of(SERIAL, [0, 1], costs, wake_idle=0.1, wake_busy=9.0)[0] == pytest.approx(0.3)
