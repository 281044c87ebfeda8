"""Processor sharing: closed forms, a plain oracle, more cores, and threads that do one thing."""

import random

import pytest

from slipstream.simulate.shared_cores import CoreThread, SharedCores
from slipstream.simulate.virtual_time import VirtualLoop


def ends(cores: int, works: list[tuple[float, float]]) -> list[float]:
    """Return when each piece of work ends that begins at a moment and takes seconds of a core."""
    loop, found = VirtualLoop(), [0.0] * len(works)
    shared = SharedCores(loop, cores)

    def begin(place: int, seconds: float) -> None:
        shared.begin(seconds, lambda: found.__setitem__(place, loop.now))

    for place, (at, seconds) in enumerate(works):
        loop.call_at(at, begin, place, seconds)
    loop.run_until_idle()
    return found


def plain_ends(cores: int, works: list[tuple[float, float]]) -> list[float]:
    """The same, from event to event over a list of what is left."""
    now, found, left = 0.0, [0.0] * len(works), dict[int, float]()
    coming = sorted((at, place) for place, (at, _) in enumerate(works))
    while coming or left:
        speed = min(1.0, cores / len(left)) if left else 1.0
        until = min(coming[:1] + [(now + each / speed, place) for place, each in left.items()])[0]
        left = {place: each - (until - now) * speed for place, each in left.items()}
        now = until
        for place in [place for place, each in left.items() if each <= 1e-12]:
            found[place] = now
            del left[place]
        while coming and coming[0][0] <= now:
            left[coming[0][1]] = works[coming[0][1]][1]
            coming.pop(0)
    return found


def drawn(seed: int) -> list[tuple[float, float]]:
    rng, now, works = random.Random(seed), 0.0, []
    for _ in range(60):
        now += rng.choice([0.0, rng.expovariate(400.0)])
        works.append((now, rng.choice([0.0, 2e-3, rng.expovariate(300.0)])))
    return works


def test_work_has_a_core_of_its_own_while_there_are_enough():
    assert ends(2, [(0.0, 1.0), (0.25, 0.5)]) == pytest.approx([1.0, 0.75])


def test_three_share_two_cores_evenly():
    assert ends(2, [(0.0, 1.0)] * 3) == pytest.approx([1.5] * 3)
    assert ends(1, [(0.0, 1.0), (0.5, 0.25)]) == pytest.approx([1.25, 1.0])


@pytest.mark.parametrize("seed", range(8))
def test_random_work_ends_as_the_oracle_says_and_never_later_with_more_cores(seed):
    works, before = drawn(seed), None
    for cores in (1, 2, 3, 64):
        found = ends(cores, works)
        assert found == pytest.approx(plain_ends(cores, works), abs=1e-9)
        if before is not None:
            assert all(new <= old + 1e-9 for new, old in zip(found, before, strict=True))
        before = found
    assert before == pytest.approx([at + seconds for at, seconds in works], abs=1e-9)


def test_a_thread_does_one_thing_after_the_other_while_others_have_their_share():
    loop, found = VirtualLoop(), []
    cores = SharedCores(loop, 2)
    thread = CoreThread(cores)

    async def ask(name: str, seconds: float) -> None:
        await thread.work(seconds)
        found.append((name, round(loop.now, 9)))

    loop.create_task(ask("first", 1.0))
    loop.create_task(ask("second", 0.5))
    loop.create_task(ask("nothing", 0.0))
    cores.begin(0.5, lambda: found.append(("other", loop.now)))
    loop.run_until_idle()
    assert found == [("other", 0.5), ("first", 1.0), ("second", 1.5), ("nothing", 1.5)]
    idle = thread.work(0.0)
    assert idle.done()
