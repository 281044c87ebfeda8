"""A block tells what it holds, and damaged bytes are an error of the store."""

import msgspec
import numpy as np
import pytest

from slipstream.history.behaviour_blocks import (
    CHUNK,
    cut_blocks,
    decode_block,
    encode_block,
    merge_blocks,
    names_of,
)
from slipstream.history.history_store import HistoryStoreError
from tests.support.history_stores import behaviours, columns


def test_a_block_is_columns_that_any_reader_of_messagepack_understands():
    data = encode_block(behaviours([7, -8], [1, 2], like=[0.5, 1.0]))
    tag, items, times, actions = msgspec.msgpack.decode(data)
    assert tag == 1
    assert np.frombuffer(items, "<i8").tolist() == [7, -8]
    assert np.frombuffer(times, "<i8").tolist() == [1, 2]
    assert np.frombuffer(actions["like"], "<f4").tolist() == [0.5, 1]
    assert msgspec.msgpack.decode(encode_block(behaviours(["a/b", "ü"])))[1] == ["a/b", "ü"]


@pytest.mark.parametrize("items", [[2**63 - 1, -(2**63)], ["a/b", "\0", "日本"]])
def test_a_block_comes_back_as_it_went(items):
    sent = behaviours(items, list(range(len(items))), click=[0.1] * len(items))
    found = decode_block(encode_block(sent), first=40)
    assert columns(found) == columns(sent) and (found.first, len(found)) == (40, len(items))


def test_blocks_are_cut_and_merged_again_at_any_place():
    whole = behaviours(list(range(2 * CHUNK + 5)), first=100)
    blocks = list(cut_blocks(whole))
    assert [(first, count) for first, count, _ in blocks] == [
        (100, CHUNK),
        (100 + CHUNK, CHUNK),
        (100 + 2 * CHUNK, 5),
    ]
    numbered = [(first, data) for first, _, data in blocks]
    merged = merge_blocks(numbered, 107, whole.total)
    assert (merged.first, merged.items.tolist()) == (107, list(range(7, 2 * CHUNK + 5)))
    assert merged.items.flags.writeable


def test_blocks_with_different_actions_merge_into_all_of_them():
    parts = [behaviours([1], a=[1]), behaviours([2], [2], first=1, b=[2])]
    merged = merge_blocks([(part.first, encode_block(part)) for part in parts], 0, 2)
    assert columns(merged)[2] == {"a": [1, 0], "b": [0, 2]}
    assert names_of(parts) == {"a", "b"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a block",
        encode_block(behaviours([1, 2]))[:-3],
        msgspec.msgpack.encode([2, b"", b"", {}]),
        msgspec.msgpack.encode([1, b"1234567", b"1234567", {}]),
        msgspec.msgpack.encode([1, b"\0" * 8, b"\0" * 16, {}]),
        msgspec.msgpack.encode([1, b"\0" * 8, b"\0" * 8, {"a": b"\0" * 8}]),
    ],
)
def test_damaged_bytes_are_an_error_of_the_store(data):
    with pytest.raises(HistoryStoreError, match="damaged or of a later version"):
        decode_block(data)


def test_blocks_that_do_not_follow_each_other_are_an_error_of_the_store():
    block = encode_block(behaviours([1, 2]))
    for blocks, total in (([(0, block), (3, block)], 5), ([(0, block)], 3), ([], 0)):
        with pytest.raises(HistoryStoreError, match="do not follow each other"):
            merge_blocks(blocks, 0, total)
