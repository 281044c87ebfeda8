"""What only the Redis store does; what both stores do is in test_history_store.py."""

import pytest

from slipstream.errors import SlipstreamError
from slipstream.history.history_store import HistoryStore, Records
from slipstream.history.redis_store import RedisHistoryStore
from tests.support.history_stores import run


def test_a_redis_that_is_not_there_is_named_without_its_password():
    async def work(store: HistoryStore):
        await store.read("ann", 1)

    with pytest.raises(SlipstreamError, match="does not answer") as refused:
        run("redis://user:geheim@127.0.0.1:1/0", work)
    assert "geheim" not in str(refused.value)


def test_both_keys_of_a_user_live_on_one_node_of_a_cluster():
    store = RedisHistoryStore("redis://127.0.0.1:1/0", Records(()), keep=10)
    assert store._keys("ann") == ["slipstream:h:{ann}", "slipstream:f:{ann}"]
