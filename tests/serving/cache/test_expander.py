"""The host tier: warm after a restart, empty for another model, never torn, never damaged, and safe
against kill -9.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.cache.expander import Expander
from slipstream.serving.cache.shelf import Shelf
from tests.support.serving_samples import cut, engine, history


def demote(expander, user, whole):
    prefix = expander.engine.prefill(whole)
    storing = expander.begin(prefix.key(user), prefix)
    assert storing is not None
    for _ in storing.steps():
        pass
    expander.finish(storing)


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
    assert expander.begin(*reversed_key(expander, cut(whole, 0, 60))) is None  # there already


def reversed_key(expander, whole):
    prefix = expander.engine.prefill(whole)
    return prefix.key("u"), prefix


def test_another_model_finds_nothing(tmp_path):
    first = Expander(engine(tmp_path), tmp_path / "shelf", 4 << 20)
    demote(first, "u", history(50))
    first.close()
    again = Expander(engine(tmp_path), tmp_path / "shelf", 4 << 20)
    assert (again.warm, found(again, "u", history(50))) == (1, 50)
    again.close()
    other = Expander(engine(tmp_path, time_bias="next"), tmp_path / "shelf", 4 << 20)
    assert (other.warm, found(other, "u", history(50))) == (0, None)


def test_one_process_at_a_time(tmp_path):
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
    assert not again.sound(lease)
    again.drop(lease)
    assert found(again, "u", history(50)) is None
    assert (again.damaged, again.used) == (1, 0)


def test_torn_records_are_dropped_and_their_room_is_free(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    for name in (b"a", b"b"):
        offset = shelf.take(1000)
        shelf.record(
            offset,
            1000,
            shelf.checksum(offset, 1000),
            tokens=1,
            behaviours=1,
            user=name * 16,
            digest=name * 16,
        )
    shelf._map[4096 + 20] ^= 1  # a bit of the first record
    shelf.close()
    again = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    assert (again.dropped, [key[0][:1] for key in again.records], again.extents.used) == (
        1,
        [b"b"],
        1024,
    )
    again.close()
    assert not Shelf(tmp_path / "shelf", 1 << 20, b"another").records


def test_memory_that_is_not_there_is_refused_at_the_start(tmp_path):
    with pytest.raises(SlipstreamError, match="no room for"):
        Shelf(tmp_path / "shelf", 1 << 50, b"identity")
    assert (
        Shelf(tmp_path / "shelf", 1 << 20, b"identity").path.stat().st_blocks * 512 >= 1 << 20
    )  # all of it, from the start


def test_what_is_read_does_not_leave(tmp_path):
    served = engine(tmp_path)
    expander = Expander(served, tmp_path / "shelf", served.prefix_bytes(60, room=0) * 2)
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


def test_kill_at_any_moment_leaves_only_whole_entries(tmp_path):
    """A process that demotes without pause is killed; what the next one finds is what was written."""
    served = engine(tmp_path)
    bundle = next(tmp_path.glob("hstu-*"))
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from tests.support.serving_samples import history
        from test_serving_expander import demote
        from slipstream.serving.engine.engine import Engine
        from slipstream.serving.cache.expander import Expander
        expander = Expander(Engine({str(bundle)!r}), Path({str(tmp_path / "shelf")!r}), 3 << 19)
        prefixes = {{n: history(40 + n, seed=n) for n in range(6)}}
        n = 0
        while True:
            n += 1
            if not expander.has(expander.engine.prefill(prefixes[n % 6]).key(str(n % 6))):
                demote(expander, str(n % 6), prefixes[n % 6])
            if n == 6:
                print("warm", flush=True)
        """
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for round in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
        )
        try:
            assert process.stdout.readline() == b"warm\n"
            time.sleep(0.05 + 0.03 * round)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(20)
        expander = Expander(served, tmp_path / "shelf", 3 << 19)
        assert expander.warm >= 1
        for n in range(6):
            whole = history(40 + n, seed=n)
            lease = expander.find(str(n), served.encode(whole), {})
            if lease is not None:
                assert expander.sound(lease)
                fresh = served.prefill(whole)
                for mine, right in zip(lease.prefix.past(), fresh.past(), strict=True):
                    assert (mine.k_SHK == right.k_SHK).all() and (mine.v_SHV == right.v_SHV).all()
                lease.release()
        expander.close()
