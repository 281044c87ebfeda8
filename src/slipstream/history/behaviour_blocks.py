"""Behaviours as bytes: blocks of columns that describe themselves.

Touch this when the bytes of a block change; a changed block needs another tag. A block is
MessagePack: [tag, items, times, actions], where items are little-endian int64 bytes or a list of
texts, times are int64 bytes, and actions maps each name to float32 bytes. Reading makes arrays of
whole columns, with no work per behaviour for whole numbers.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from slipstream.history.append_rules import id_kind
from slipstream.history.history_store import HistoryStoreError
from slipstream.history.user_history import History, join_histories

CHUNK = 1_024  # behaviours of a block at most


class BehaviourBlock(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """What the bytes of a block hold."""

    items: bytes | list[str]
    times: bytes
    actions: dict[str, bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BehaviourBlock)


def encode_block(history: History) -> bytes:
    """Return the bytes of a history whose columns have the stored types."""
    text = id_kind(history.items) == "text"
    block = BehaviourBlock(
        history.items.tolist() if text else history.items.tobytes(),
        history.timestamps.tobytes(),
        {name: values.tobytes() for name, values in history.actions.items()},
    )
    return _encoder.encode(block)


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
        if any(column.shape != times_T.shape for column in (items_T, *actions.values())):
            raise ValueError("columns of different lengths")
    except (msgspec.MsgspecError, ValueError) as error:
        raise HistoryStoreError(
            f"a stored block of behaviours is damaged or of a later version ({error}); delete the "
            "user, or restore the store"
        ) from error
    return History(items_T, times_T, actions, first=first)


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


def cut_blocks(history: History) -> Iterator[tuple[int, int, bytes]]:
    """Yield (first number, count, bytes) of blocks of at most `CHUNK` behaviours."""
    for first in range(history.first, history.total, CHUNK):
        part = history.part(first, min(first + CHUNK, history.total))
        yield first, len(part), encode_block(part)


def names_of(histories: Iterable[History]) -> set[str]:
    """Return the actions that occur in histories."""
    return {name for history in histories for name in history.actions}
