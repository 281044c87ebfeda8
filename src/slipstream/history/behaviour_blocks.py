"""Behaviours as bytes: blocks of columns that describe themselves.

Touch this when the bytes of a block change; a changed block needs another tag, but a column may
come after the last one. A block is MessagePack: [tag, items, times, actions, context], where items
are little-endian int64 bytes or a list of texts, times are int64 bytes, and actions maps each name
to float32 bytes. Context maps each name to its different labels and the uint16 place of each
behaviour's label among them; a block may lack it. Reading makes arrays of whole columns, with no
work per behaviour for whole numbers.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from slipstream.history.append_rules import id_kind
from slipstream.history.history_store import HistoryStoreError
from slipstream.history.user_history import History, join_histories

CHUNK = 1_024  # behaviours of a block at most
TAG = 1


class BehaviourBlock(msgspec.Struct, array_like=True, frozen=True, tag=TAG):
    """What the bytes of a block hold."""

    items: bytes | list[str]
    times: bytes
    actions: dict[str, bytes]
    context: dict[str, tuple[list[str], bytes]] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BehaviourBlock)


def encode_block(history: History) -> bytes:
    """Return the bytes of a history whose columns have the stored types."""
    text = id_kind(history.items) == "text"
    block: list[object] = [
        TAG,
        history.items.tolist() if text else history.items.tobytes(),
        history.timestamps.tobytes(),
        {name: values.tobytes() for name, values in history.actions.items()},
    ]
    if history.context:
        block.append({name: _encode_labels(each) for name, each in history.context.items()})
    return _encoder.encode(block)


def _encode_labels(labels_T: np.ndarray) -> tuple[list[str], bytes]:
    """Return the different labels, and where each behaviour's is among them."""
    places = {label: place for place, label in enumerate(dict.fromkeys(labels_T.tolist()))}
    found = np.array([places[label] for label in labels_T.tolist()], dtype="<u2")
    return list(places), found.tobytes()


def _decode_labels(stored: tuple[list[str], bytes]) -> np.ndarray:
    labels, places = stored
    try:
        found: np.ndarray = np.array(labels, dtype=object)[np.frombuffer(places, dtype="<u2")]
    except IndexError as error:
        raise ValueError("a label is missing") from error
    return found


def decode_block(data: bytes, first: int = 0) -> History:
    """Return the history of a block; its arrays may be read-only views of the bytes."""
    try:
        block = _decoder.decode(data)
        times_T = np.frombuffer(block.times, dtype="<i8")
        if isinstance(block.items, bytes):
            items_T = np.frombuffer(block.items, dtype="<i8")
        else:
            items_T = np.array(block.items, dtype=object)
        actions = {
            name: np.frombuffer(values, dtype="<f4") for name, values in block.actions.items()
        }
        context = {name: _decode_labels(stored) for name, stored in block.context.items()}
        columns = (items_T, *actions.values(), *context.values())
        if any(column.shape != times_T.shape for column in columns):
            raise ValueError("columns of different lengths")
    except (msgspec.MsgspecError, ValueError) as error:
        raise HistoryStoreError(
            f"a stored block of behaviours is damaged or of a later version ({error}); delete the "
            "user, or restore the store"
        ) from error
    return History(items_T, times_T, actions, first=first, context=context)


def merge_blocks(blocks: Sequence[tuple[int, bytes]], begin: int, total: int) -> History:
    """Return behaviours `[begin, total)` of blocks that follow each other up to `total`."""
    parts = [decode_block(data, first) for first, data in blocks]
    ends = [part.total for part in parts]
    if not parts or ends != [*(part.first for part in parts[1:]), total]:
        raise HistoryStoreError(
            "the stored blocks of a user do not follow each other; delete the user, or restore "
            "the store"
        )
    return join_histories(parts).part(begin, total)


class RecentBlocks:
    """Histories merged lately, kept while their bytes stay the same: a read then decodes nothing.

    Memory is bounded by the bytes of the blocks. Used by one thread.
    """

    def __init__(self, most_bytes: int = 32 << 20) -> None:
        self._most, self._bytes = most_bytes, 0
        self._known: OrderedDict[str, tuple[list[tuple[int, bytes]], History]] = OrderedDict()

    def merge(self, user: str, blocks: list[tuple[int, bytes]], begin: int, total: int) -> History:
        """`merge_blocks`; equal bytes give a history of the same source."""
        known = self._known.pop(user, None)
        if known is not None:
            self._bytes -= _size(known[0])
            if known[0] == blocks and (known[1].first, known[1].total) == (begin, total):
                self._keep(user, *known)
                return known[1]
        history = dataclasses.replace(merge_blocks(blocks, begin, total), source=object())
        self._keep(user, blocks, history)
        return history

    def _keep(self, user: str, blocks: list[tuple[int, bytes]], history: History) -> None:
        self._known[user] = (blocks, history)
        self._bytes += _size(blocks)
        while self._bytes > self._most:
            _, (oldest, _) = self._known.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(blocks: Sequence[tuple[int, bytes]]) -> int:
    return sum(len(data) for _, data in blocks)


def cut_blocks(history: History) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first number, count, bytes) of blocks of at most `CHUNK` behaviours."""
    for first in range(history.first, history.total, CHUNK):
        part = history.part(first, min(first + CHUNK, history.total))
        yield first, len(part), encode_block(part)


def names_of(histories: Iterable[History]) -> set[str]:
    """Return the actions that occur in histories, and their context as `context:<name>`."""
    return {
        name
        for history in histories
        for name in (*history.actions, *(f"context:{each}" for each in history.context))
    }
