"""The memory of the tiers is this machine's unless another is handed over."""

from slipstream.serving.cache.prefix_cache import PrefixCache
from slipstream.serving.cache.prefix_memory import PREFIX_MEMORY
from slipstream.serving.engine.prefix import KVShape, PrefixKey


def test_a_cache_takes_its_room_from_the_arena_it_is_given():
    shape = KVShape(1, 1, 4, 4)
    arena = PREFIX_MEMORY.arena(shape.nbytes(64))
    cache = PrefixCache(shape, arena.nbytes, arena=arena)
    slot = cache.reserve(PrefixKey("v", "u", 8, b"d"), 8)
    assert arena.used == cache.used == shape.nbytes(8) and cache.budget == arena.nbytes
    slot.buffer.times_S.fill_(7)
    assert int(arena.memory[:8].sum()) == 7


def test_a_shelf_is_opened_where_it_was_left(tmp_path):
    shelf = PREFIX_MEMORY.open_shelf(tmp_path / "shelf", 1 << 12, b"model")
    offset = shelf.take(64)
    names = {"tokens": 1, "behaviours": 1, "user": bytes(16), "digest": bytes(16)}
    shelf.record(offset, 64, shelf.checksum(offset, 64), **names)
    shelf.close()
    again = PREFIX_MEMORY.open_shelf(tmp_path / "shelf", 1 << 12, b"model")
    assert len(again.records) == 1
    again.close()
