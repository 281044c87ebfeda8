"""The shelf: payloads outlive the process, incomplete records are dropped, one process a file."""

import asyncio
import mmap
import resource
import threading

import pytest

from slipstream.errors import SlipstreamError
from slipstream.serving.cache.shelf import Shelf


def store(shelf: Shelf, name: bytes, fill: int = 0):
    """Store 1,000 bytes under a user's name."""
    offset = shelf.take(1000)
    shelf.payload(offset, 1000).fill_(fill)
    checksum = shelf.checksum(offset, 1000)
    who = {"user": name * 16, "digest": name * 16}
    return shelf.record(offset, 1000, checksum, tokens=1, behaviours=1, **who)


def names(shelf: Shelf) -> list[bytes]:
    """The first letters of the users that are stored, the least recently used first."""
    records = sorted(shelf.records.values(), key=lambda record: record.order)
    return [record.user[:1] for record in records]


def test_records_and_payloads_are_there_for_the_next_process(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    first = store(shelf, b"a", 7)
    store(shelf, b"b", 8)
    shelf.touch(first)
    shelf.close()
    again = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    assert names(again) == [b"b", b"a"]
    record = again.records[b"a" * 16, 1, b"a" * 16]
    assert not record.verified and again.verify(record)
    assert (again.payload(record.offset, record.nbytes) == 7).all()


def test_a_removed_record_frees_its_bytes_and_its_place(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 1024, b"identity", max_records=1)
    record = store(shelf, b"a")
    assert shelf.take(1000) is None
    shelf.remove(record)
    assert (shelf.extents.used, shelf.records) == (0, {})
    assert store(shelf, b"b").place == record.place


def test_an_open_shelf_is_refused_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.serving.cache.shelf._LOCK_SECONDS", 0.05)
    shelf = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    with pytest.raises(SlipstreamError, match="in use by another instance"):
        Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    shelf.close()
    Shelf(tmp_path / "shelf", 1 << 20, b"identity").close()


def test_a_shelf_is_opened_when_the_instance_before_has_left_it(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    store(shelf, b"a", 7)
    leaving = threading.Timer(0.2, shelf.close)
    leaving.start()
    assert names(Shelf(tmp_path / "shelf", 1 << 20, b"identity")) == [b"a"]
    leaving.join()


def test_incomplete_records_are_dropped_and_their_room_is_free(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 1 << 20, b"identity")
    store(shelf, b"a")
    store(shelf, b"b")
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


def test_an_empty_shelf_takes_no_memory_and_a_full_one_its_limit(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 3 << 20, b"identity")
    assert shelf.path.stat().st_blocks * 512 < 1 << 20
    offsets = [shelf.take(1 << 20) for _ in range(4)]
    assert offsets == [0, 1 << 20, 2 << 20, None]
    assert shelf.path.stat().st_blocks * 512 >= 3 << 20


def test_a_shelf_stays_smaller_where_the_system_has_no_memory_left(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 1 << 42, b"identity")  # more than any disk has
    assert shelf.take(1 << 41) is None
    assert shelf.take(1000) is None, "the system is not asked again at once"
    shelf._grow_again_at = 0.0
    assert store(shelf, b"a") and shelf.extents.nbytes == 1 << 20
    shelf.close()


def test_a_reopened_shelf_writes_only_where_memory_was_allocated(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 8 << 20, b"identity")
    for name in (b"a", b"b", b"c"):
        store(shelf, name)
    shelf.close()
    again = Shelf(tmp_path / "shelf", 8 << 20, b"identity")
    assert (again.extents.nbytes, again.extents.used) == (3 * 1024, 3 * 1024)
    assert store(again, b"d").offset == 3 * 1024


def test_a_shelf_without_room_for_its_table_is_refused(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(SlipstreamError, match="has no room"):
        Shelf(tmp_path / "shelf", 1 << 20, b"identity")


def test_memory_taken_in_the_background_has_its_pages_and_a_closed_shelf_survives_it(tmp_path):
    shelf = Shelf(tmp_path / "shelf", 64 << 20, b"identity")
    size = shelf.missing_bytes(1000, 32 << 20)
    assert size == 32 << 20
    asyncio.run(shelf.grow(size))
    assert shelf.missing_bytes(1000) == 0 and shelf.extents.nbytes == size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    shelf.payload(0, size).fill_(7)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < size // mmap.PAGESIZE // 8

    async def close_meanwhile():
        growth = asyncio.ensure_future(shelf.grow(shelf.missing_bytes(size + 1, 32 << 20) or 4096))
        await asyncio.sleep(0)
        assert shelf.missing_bytes(size + 1) == 0, "one growth at a time"
        shelf.close()
        await growth

    asyncio.run(close_meanwhile())
    asyncio.run(shelf.grow(4096))  # a closed one stays as it is
    assert not shelf._growing
