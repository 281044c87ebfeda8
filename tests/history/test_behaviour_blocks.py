"""A block tells what it holds, and damaged bytes are an error of the store."""

import dataclasses

import msgspec
import numpy as np
import pytest

from slipstream.history.behaviour_blocks import (
    CHUNK,
    RecentBlocks,
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


def test_context_is_kept_by_label_and_absent_context_is_not_known():
    labels = np.array(["home", "", "ü", "home"], dtype=object)
    seen = dataclasses.replace(behaviours([1, 2, 3, 4], click=[1] * 4), context={"surface": labels})
    plain = behaviours([5], [9], first=4)
    assert len(msgspec.msgpack.decode(encode_block(plain))) == 4  # as before there was context
    assert decode_block(encode_block(seen)).context["surface"].tolist() == labels.tolist()
    merged = merge_blocks([(0, encode_block(seen)), (4, encode_block(plain))], 1, 5)
    assert merged.context["surface"].tolist() == ["", "ü", "home", ""]
    assert names_of([seen]) == {"click", "context:surface"}


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
        msgspec.msgpack.encode([1, b"\0" * 8, b"\0" * 8, {}, {"s": [["a"], b"\1\0"]}]),
        msgspec.msgpack.encode([1, b"\0" * 8, b"\0" * 8, {}, {"s": [["a"], b"\0" * 4]}]),
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


def numbered(count):
    return behaviours(list(range(count)), list(range(count)))


def blocks_of(history):
    return [(first, data) for first, _, data in cut_blocks(history)]


def test_equal_bytes_are_decoded_once():
    recent, blocks = RecentBlocks(), blocks_of(numbered(30))
    first = recent.merge("ann", blocks, 0, 30)
    assert recent.merge("ann", blocks_of(numbered(30)), 0, 30) is first
    assert first.source is not None and len(first) == 30
    shorter = recent.merge("ann", blocks, 5, 30)
    assert len(shorter) == 25 and shorter.source is not first.source
    other = recent.merge("bob", blocks, 5, 30)
    assert other.source is not shorter.source


def test_changed_bytes_of_the_same_length_are_decoded_again():
    recent = RecentBlocks()
    first = recent.merge("ann", blocks_of(numbered(30)), 0, 30)
    changed = dataclasses.replace(numbered(30), items=numbered(30).items + 1)
    again = recent.merge("ann", blocks_of(changed), 0, 30)
    assert (again.items == changed.items).all() and again.source is not first.source


def test_the_bytes_kept_are_bounded():
    blocks = blocks_of(numbered(30))
    recent = RecentBlocks(most_bytes=2 * len(blocks[0][1]))
    kept = [recent.merge(user, blocks, 0, 30) for user in "abc"]
    assert recent.merge("c", blocks, 0, 30) is kept[2]
    assert recent.merge("a", blocks, 0, 30) is not kept[0]
