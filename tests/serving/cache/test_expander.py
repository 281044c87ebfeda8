"""The host tier: found again after a restart, empty for another model, never damaged."""

import subprocess
import sys

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.cache.expander import Expander
from tests.support.demoting_process import BYTES, USERS, demote, history_of
from tests.support.serving_samples import cut, engine, history, same_tokens


def found(expander, user, whole):
    lease = expander.find(user, expander.engine.encode(whole), {})
    if lease is None:
        return None
    lease.release()
    return lease.prefix.behaviours


def test_the_longest_part_of_a_history_is_found_for_its_user_alone(tmp_path):
    expander = Expander(engine(tmp_path), tmp_path / "shelf", 8 << 20)
    whole = history(100)
    for count in (30, 60):
        demote(expander, "u", cut(whole, 0, count))
    assert found(expander, "u", whole) == 60
    assert found(expander, "u", cut(whole, 0, 59)) == 30
    assert found(expander, "u", cut(whole, 0, 29)) is None
    assert found(expander, "v", whole) is None
    assert found(expander, "u", history(100, seed=5)) is None


def test_a_stored_prefix_is_not_stored_again(tmp_path):
    expander = Expander(engine(tmp_path), tmp_path / "shelf", 8 << 20)
    demote(expander, "u", history(60))
    prefix = expander.engine.prefill(history(60))
    assert expander.has(prefix.key("u"))
    assert expander.begin(prefix.key("u"), prefix) is None


def test_a_cancelled_demotion_leaves_nothing(tmp_path):
    expander = Expander(engine(tmp_path), tmp_path / "shelf", 8 << 20)
    prefix = expander.engine.prefill(history(60))
    demotion = expander.begin(prefix.key("u"), prefix)
    next(demotion.steps())
    assert expander.used > 0 and found(expander, "u", history(60)) is None
    expander.cancel(demotion)
    assert (expander.used, len(expander), expander.has(prefix.key("u"))) == (0, 0, False)


def test_another_model_finds_nothing(tmp_path):
    first = Expander(engine(tmp_path), tmp_path / "shelf", 4 << 20)
    demote(first, "u", history(50))
    first.close()
    again = Expander(engine(tmp_path), tmp_path / "shelf", 4 << 20)
    assert (again.warm, found(again, "u", history(50))) == (1, 50)
    again.close()
    other = Expander(engine(tmp_path, time_bias="next"), tmp_path / "shelf", 4 << 20)
    assert (other.warm, found(other, "u", history(50))) == (0, None)


def test_two_instances_never_share_a_shelf(tmp_path):
    served = engine(tmp_path)
    first = Expander(served, tmp_path / "shelf", 1 << 20)
    with pytest.raises(SlipstreamError, match="in use by another instance"):
        Expander(served, tmp_path / "shelf", 1 << 20)
    first.close()
    Expander(served, tmp_path / "shelf", 1 << 20).close()


def test_a_damaged_payload_is_noticed_and_dropped(tmp_path):
    served = engine(tmp_path)
    first = Expander(served, tmp_path / "shelf", 4 << 20)
    demote(first, "u", history(50))
    record = next(iter(first.shelf.records.values()))
    first.shelf.payload(record.offset, record.nbytes)[1000] += 1
    first.close()
    again = Expander(served, tmp_path / "shelf", 4 << 20)
    lease = again.find("u", served.encode(history(50)), {})
    assert not lease.verify()
    lease.drop()
    assert found(again, "u", history(50)) is None
    assert (again.damaged, again.used) == (1, 0)


def test_an_entry_that_is_read_does_not_leave(tmp_path):
    served = engine(tmp_path)
    expander = Expander(served, tmp_path / "shelf", served.prefix_bytes(60) * 2)
    demote(expander, "a", history(60, seed=1))
    demote(expander, "b", history(60, seed=2))
    lease = expander.find("a", served.encode(history(60, seed=1)), {})
    demote(expander, "c", history(60, seed=3))
    assert found(expander, "b", history(60, seed=2)) is None
    assert found(expander, "a", history(60, seed=1)) == 60
    second = expander.find("c", served.encode(history(60, seed=3)), {})
    prefix = served.prefill(history(60, seed=4))
    assert expander.begin(prefix.key("d"), prefix) is None  # all that is there is being read
    lease.release()
    second.release()
    assert expander.begin(prefix.key("d"), prefix) is not None


def test_a_users_entries_are_forgotten_when_nobody_reads_or_copies_them(tmp_path):
    served = engine(tmp_path)
    expander = Expander(served, tmp_path / "shelf", BYTES)
    for seed in (1, 2):
        demote(expander, "a", history(60, seed=seed))
    demote(expander, "b", history(60, seed=3))
    lease = expander.find("a", served.encode(history(60, seed=1)), {})
    assert expander.forget("a") == 1 and len(expander) == 2
    lease.release()
    assert expander.forget("a") == 0 and found(expander, "b", history(60, seed=3)) == 60
    prefix = served.prefill(history(60, seed=4))
    demotion = expander.begin(prefix.key("a"), prefix)
    assert expander.forget("a") == 1
    expander.cancel(demotion)
    assert expander.forget("a") == 0 and len(expander) == 1
    expander.close()
    assert len(Expander(served, tmp_path / "shelf", BYTES)) == 1  # nor does a restart find them


@pytest.mark.system
def test_a_kill_at_any_moment_leaves_only_whole_entries(tmp_path):
    served = engine(tmp_path)
    bundle = next(tmp_path.glob("hstu-*"))
    command = [sys.executable, "-m", "tests.support.demoting_process"]
    for extra in (1, 4):
        process = subprocess.Popen(
            [*command, str(bundle), str(tmp_path / "shelf")], stdout=subprocess.PIPE
        )
        with process.stdout:
            for _ in range(USERS + extra):
                assert process.stdout.readline().strip()
            process.kill()
            process.wait(60)
        expander = Expander(served, tmp_path / "shelf", BYTES)
        assert expander.warm >= 1
        for number in range(USERS):
            check_entry(expander, str(number), history_of(number))
        expander.close()


def check_entry(expander, user, whole):
    """What is stored for a user, if anything, equals what the engine computes."""
    lease = expander.find(user, expander.engine.encode(whole), {})
    if lease is None:
        return
    with lease:
        assert lease.verify()
        fresh = expander.engine.prefill(whole)
        assert same_tokens(lease.prefix, fresh)
