"""Which rankings a client announces."""

from slipstream.serving.http import messages as m
from slipstream.serving.http.announcements import REFRESH_SECONDS, Announcements
from tests.support.fake_clock import FakeClock


def answer(from_behaviours: int) -> m.PreinferAnswer:
    return m.PreinferAnswer("t", False, "gains_little", "i-0", "v", 10, from_behaviours)


def test_every_history_is_announced_until_the_server_has_answered():
    known = Announcements(FakeClock())
    assert known.worth(1)
    known.note(answer(600))
    assert not known.worth(599) and known.worth(600)


def test_one_short_history_is_announced_now_and_then_to_hear_what_holds():
    clock = FakeClock()
    known = Announcements(clock)
    known.note(answer(600))
    clock.moment = REFRESH_SECONDS - 0.1
    assert not known.worth(10)
    clock.moment = REFRESH_SECONDS
    assert [known.worth(10) for _ in range(3)] == [True, False, False]
    known.note(answer(5))  # the server was restarted and measured anew
    assert known.worth(10)
