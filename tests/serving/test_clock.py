"""One clock for every policy: hours of traffic run through the shipped classes without waiting."""

import re
from pathlib import Path

import numpy as np

import slipstream.serving
from slipstream.serving.cache.prefix_cache import Busy, PrefixCache
from slipstream.serving.clock import SYSTEM_CLOCK
from slipstream.serving.engine.prefix import KVShape, Prefix, PrefixKey
from slipstream.serving.instance.cost_model import CostModel
from slipstream.serving.instance.scheduler import Job, Kind, Scheduler
from slipstream.serving.instance.trigger import Prospect, Trigger, TriggerConfig
from slipstream.serving.router.balancer import InstanceState, LoadBalancer
from tests.support.fake_clock import FakeClock

ROOMS = Path(slipstream.serving.__file__).parent
POLICIES = [*ROOMS.glob("instance/*.py"), *ROOMS.glob("cache/*.py"), *ROOMS.glob("router/*.py")]


def test_the_system_clock_goes_on():
    assert SYSTEM_CLOCK.now() <= SYSTEM_CLOCK.now()
    assert SYSTEM_CLOCK.wall_time() > 1e9


def test_no_policy_asks_the_machine_for_the_time():
    asked = re.compile(r"^import time|^from time|perf_counter|loop\.time\(\)", re.MULTILINE)
    policies = [*POLICIES, ROOMS / "http" / "router_app.py"]
    assert len(policies) > 15
    assert [path.name for path in policies if asked.search(path.read_text())] == []


class SimulatedInstance:
    """The shipped policies of one instance; a pass moves the clock by its predicted seconds."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.cost = CostModel(np.array([1e-3, 2e-5, 0.0, 0.0]), 1e-10, clock=clock)
        self.trigger = Trigger(TriggerConfig(), clock)
        self.shape = KVShape(1, 1, 4, 4)
        self.cache = PrefixCache(self.shape, self.shape.nbytes(20_000), clock=clock)
        self.scheduler = Scheduler(
            self._run, lambda requests: 1.0 * len(requests), max_batch=1, clock=clock
        )
        self.hits = self.ranked = 0

    def _run(self, requests):
        for key, length in requests:
            lease = self.cache.acquire(key)
            self.hits += lease is not None
            self.clock.moment += self.cost.pass_seconds(100 if lease else length + 100, 0)
            if lease is not None:
                lease.release()
        return requests

    def preinfer(self, key: PrefixKey) -> None:
        self.cache.expire()
        seconds, size = self.cost.prefill_seconds(key.behaviours), key.behaviours
        if any(slot.key == key for slot in self.cache.slots()):
            return
        prospect = Prospect(
            inline_tail=2 * seconds,
            waiting=0.0,
            saved=0.02,
            prefill=seconds,
            queued=self.scheduler.backlog(None, Kind.PREINFER),
            nbytes=self.shape.nbytes(size),
            pinned=self.cache.pinned,
            capacity=self.cache.budget,
            rank=0.005,
            rank_in=0.1,
            budget=0.08,
        )
        if self.trigger.decide(prospect) != "admitted":
            return
        slot = self.cache.reserve(key, size)
        if isinstance(slot, Busy):
            return

        def steps():
            self.clock.moment += seconds
            yield

        def done(_, error):
            if error is not None:
                self.cache.abandon(slot)
                return
            prefix = Prefix(key.version, size, key.digest, size, None, slot.buffer)
            self.cache.publish(slot, prefix, self.clock.now() + 1.0)

        deadline = self.clock.now() + 0.1
        self.scheduler.submit(Job(Kind.PREINFER, deadline, seconds, done, steps=steps()))

    def rank(self, key: PrefixKey) -> None:
        def done(_, error):
            self.ranked += error is None

        deadline = self.clock.now() + 1.0
        request = (key, key.behaviours)
        self.scheduler.submit(Job(Kind.RANK, deadline, 0.05, done, request=request))


def test_hours_of_relays_run_under_a_clock_moved_by_hand():
    clock = FakeClock()
    balancer = LoadBalancer([InstanceState(f"i-{n}", "") for n in range(2)], clock=clock)
    fleet = {state.name: SimulatedInstance(clock) for state in balancer.instances}
    random = np.random.default_rng(0)
    requests = 2_000
    for _ in range(requests):
        user = f"u{random.integers(5_000)}"
        key = PrefixKey("v", user, 2_000, user.encode().ljust(16))
        clock.moment += random.exponential(6.0)
        chosen = balancer.choose(user, key.behaviours)
        with balancer.outstanding(chosen, key.behaviours):
            fleet[chosen.name].preinfer(key)
            while fleet[chosen.name].scheduler.step():
                pass
            sent = clock.now()
            fleet[chosen.name].rank(key)
            while fleet[chosen.name].scheduler.step():
                pass
        balancer.note_answer(chosen, seconds=clock.now() - sent)
    assert clock.now() > 3 * 3_600
    assert sum(instance.ranked for instance in fleet.values()) == requests
    assert sum(instance.hits for instance in fleet.values()) > 0.99 * requests
    for instance in fleet.values():
        assert instance.ranked > 0.4 * requests
        assert instance.cache.used <= instance.cache.budget
