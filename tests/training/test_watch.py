"""The watch names the rank that failed, died or hangs, and leaves a healthy job alone."""

import threading

import pytest
import torch.distributed as dist

from slipstream.errors import SlipstreamError
from slipstream.training import watch as watching
from slipstream.training.watch import Watch

pytestmark = pytest.mark.system


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("BEAT", 0.05), ("NAMING", 0.6), ("GRACE", 0.2)):
        monkeypatch.setattr(watching, name, seconds)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


def start(store, world, silence=60.0):
    ended = [threading.Event() for _ in range(world)]
    said = {}

    def end(rank):
        def note(sentence):
            said[rank] = sentence
            ended[rank].set()

        return note

    return (
        [Watch(store, rank, world, silence=silence, end=end(rank)) for rank in range(world)],
        ended,
        said,
    )


def silence(watch):
    """What SIGKILL or SIGSTOP does to a sign of life."""
    watch._closed.set()
    watch._thread.join()


def test_a_healthy_job_is_left_alone_and_leaving_is_not_dying(quick, store):
    watches, ended, _ = start(store, 3)
    watches[1].close()
    assert watches[0].who_is_lost(patience=1.0) is None
    assert not any(event.wait(0.3) for event in ended)
    for watch in watches:
        watch.close()


def test_a_dead_rank_is_named_after_a_failed_collective(quick, store):
    watches, _, _ = start(store, 3)
    silence(watches[2])
    assert watches[0].who_is_lost(patience=5.0).startswith("rank 2 (process ")
    for watch in watches[:2]:
        watch.close()


def test_a_rank_that_failed_is_named_with_its_reason(quick, store):
    watches, _, _ = start(store, 2)
    watches[1].report(SlipstreamError("the disk is full"))
    assert watches[0].who_is_lost() == "rank 1 failed: the disk is full"
    for watch in watches:
        watch.close()


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7")


def test_a_rank_that_only_lost_its_connection_is_not_blamed_for_one_that_failed(quick, store):
    watches, _, _ = start(store, 3)
    watches[1].report(CLOSED)  # because rank 2 closed its connections before it could say why
    asked, answers = threading.Event(), []

    def ask():
        asked.set()
        answers.append(watches[0].who_is_lost(patience=60))

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(60)
    watches[2].report(ArithmeticError("the loss failed"))
    asking.join(60)
    assert answers == ["rank 2 failed: ArithmeticError: the loss failed"]
    for watch in watches:
        watch.close()


def test_a_lost_connection_is_named_where_nothing_else_is_known(quick, store):
    watches, _, _ = start(store, 2)
    watches[1].report(CLOSED)
    assert (
        watches[0]
        .who_is_lost(patience=0.5)
        .startswith("rank 1 lost its connection to the others: RuntimeError: [gloo")
    )
    for watch in watches:
        watch.close()


def test_a_hanging_rank_ends_those_that_wait_for_it(quick, store):
    watches, ended, said = start(store, 3, silence=1.0)
    silence(watches[1])
    assert ended[0].wait(10) and ended[2].wait(10)
    assert said[0].startswith("rank 1 (process ") and said[2] == said[0]
