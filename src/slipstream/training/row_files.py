"""The rows of tables in the files of a checkpoint: written in parts, read newest first.

`rows-00000003-00001-00000-item.safetensors` holds rows of table `item` that shard 1 saved in
checkpoint number 3 of its chain: `keys`, `weights`, `state.…`, or as `removed` the ids that lost
their row since the number before. A row counts as its newest file has it; a row in no file has its
first value. Files are small, so that a table larger than memory is written and read. Touch this
when that layout changes; which files a checkpoint has is in checkpoint.py.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import CHUNK, EmbeddingTable, Rows, row_state
from slipstream.tables.hash_index import make_index
from slipstream.tables.row_optimizers import State
from slipstream.tables.slices import Placement
from slipstream.uncached_files import UncachedFile

FILE_BYTES = 1 << 26  # of rows in a file, about
PATTERN = re.compile(r"rows-(\d{8,})-(\d{5,})-(\d{5,})-(.+)\.safetensors")
_REMOVED, _NOTHING = "removed", torch.empty(0, dtype=torch.int64)
_PAST = "state.tier."  # what a hashed table knows of a row's use; other tables let it be
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class RowPiece:
    """Some rows of a table outside it, or ids of it that lost their row."""

    table: str
    keys_U: torch.Tensor
    rows: Rows | None = None  # None: the keys are removed ids

    def tensors(self) -> State:
        """Return the entries of a file."""
        if self.rows is None:
            return {_REMOVED: self.keys_U}
        state = {f"state.{name}": value for name, value in self.rows.state.items()}
        return {"keys": self.keys_U, "weights": self.rows.weights_UD, **state}


@dataclass(frozen=True)
class RowFile:
    """A file of rows and what its name says."""

    path: Path
    number: int  # of the checkpoint in its chain that wrote it
    table: str


def list_row_files(directory: Path, names: Sequence[str]) -> list[RowFile]:
    """Return the named row files of a checkpoint, newest first; a missing one is an error."""
    found = []
    for name in names:
        match = PATTERN.fullmatch(name) if isinstance(name, str) else None
        if match is None or Path(name).name != name:
            raise SlipstreamError(f"{directory} is not a readable checkpoint: it names {name!r}")
        if not (directory / name).is_file():
            raise SlipstreamError(f"{directory} is not a readable checkpoint: {name} is missing")
        found.append(RowFile(directory / name, int(match[1]), match[4]))
    return sorted(found, key=lambda file: (-file.number, file.path.name))


def write_pieces(directory: Path, number: int, shard: int, pieces: Iterable[RowPiece]) -> None:
    """Write the pieces of one shard, each into a file, before the next one is asked for."""
    parts: dict[str, int] = {}
    for piece in pieces:
        if piece.keys_U.numel():
            part = parts.setdefault(piece.table, 0)
            parts[piece.table] += 1
            name = f"rows-{number:08d}-{shard:05d}-{part:05d}-{piece.table}.safetensors"
            write_row_file(directory / name, piece.tensors())


def write_row_file(path: Path, tensors: State) -> None:
    """Write a safetensors file from where the tensors are, and flush it; other threads run on."""
    header, end = {}, 0
    for entry, value in tensors.items():
        begin, end = end, end + value.nbytes
        about = {"dtype": _DTYPES[value.dtype], "shape": list(value.shape)}
        header[entry] = {**about, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with UncachedFile(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for value in tensors.values():
            if value.numel():
                as_bytes = value.detach().contiguous().reshape(-1).view(torch.uint8)
                file.write(as_bytes.numpy().data)


def read_rows(path: Path) -> State:
    """Read a row file."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{path} is not a readable checkpoint: {error}") from error
    count = len(found.get("keys", ()))
    for name, value in found.items():
        if value.dim() < 1 or (name != _REMOVED and len(value) != count):
            raise SlipstreamError(f"{path} is not a readable checkpoint: '{name}' is cut short")
    return found


class _SeenKeys:
    """The keys that newer files have decided."""

    def __init__(self, num_rows: int | None) -> None:
        self._map_N = None if num_rows is None else np.zeros(num_rows, dtype=bool)
        self._index = make_index()

    def new(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Return which of these keys are seen for the first time, and remember all."""
        if self._map_N is not None:
            keys = keys_U.numpy()
            new_U = torch.from_numpy(~self._map_N[keys])
            self._map_N[keys] = True
            return new_U
        new_U = self._index.find(keys_U) < 0
        self._index.insert(keys_U[new_U], keys_U[new_U])
        return new_U


def live_rows(
    files: Sequence[RowFile],
    num_rows: int | None,
    mine: Callable[[torch.Tensor], torch.Tensor],
    check: Callable[[State], None] = lambda found: None,
) -> Iterator[RowPiece]:
    """Yield each row that counts once, of one table's files, newest first.

    `num_rows` bounds the keys, if they are bounded; `mine` tells which keys to read; `check` may
    refuse what a file holds.
    """
    seen = _SeenKeys(num_rows)
    for file in files:
        found = read_rows(file.path)
        check(found)
        removed, keys_N = found.pop(_REMOVED, None), found.pop("keys", torch.empty(0))
        for begin in range(0, len(keys_N), CHUNK):
            part = slice(begin, begin + CHUNK)
            keys_U = keys_N[part]
            chosen_U = seen.new(keys_U) & mine(keys_U)
            if not bool(chosen_U.any()):
                continue
            rows = {name: value[part][chosen_U] for name, value in found.items()}
            weights_UD = rows.pop("weights")
            state = {name.removeprefix("state."): value for name, value in rows.items()}
            yield RowPiece(file.table, keys_U[chosen_U], Rows(weights_UD, state))
        if removed is not None:
            seen.new(removed)


def load_rows(files: Sequence[RowFile], table: EmbeddingTable, shards: int, shard: int) -> None:
    """Put the rows of a shard into its part of a table, which has never been trained."""
    state = row_state(table.optimizer, table.dim, table.dtype)
    needed = {"keys": (torch.int64, ()), "weights": (table.dtype, (table.dim,))} | {
        f"state.{name}": (value.dtype, tuple(value.shape[1:])) for name, value in state.items()
    }

    def check(found: State) -> None:
        kept = {
            name: (value.dtype, tuple(value.shape[1:]))
            for name, value in found.items()
            if name != _REMOVED and not name.startswith(_PAST)
        }
        keys_N = torch.cat([found.get(name, _NOTHING) for name in ("keys", _REMOVED)])
        outside = keys_N.numel() and (
            int(keys_N.min()) < 0
            or (table.num_rows is not None and int(keys_N.max()) >= table.num_rows)
        )
        if (kept and kept != needed) or outside:
            rows = "" if table.num_rows is None else f"{table.num_rows} "
            raise SlipstreamError(
                f"the saved rows of table '{table.name}' do not fit: this table has {rows}rows of "
                f"{table.dim} ({table.dtype}) with optimizer {table.optimizer.name}; use the "
                "recipe and the store it was trained with"
            )

    own, placement = [file for file in files if file.table == table.name], Placement(shards)
    for piece in live_rows(
        own, table.num_rows, lambda keys_U: placement.owner_of(keys_U) == shard, check
    ):
        assert piece.rows is not None
        order_U = piece.keys_U.argsort()
        rows = {name: value[order_U] for name, value in piece.rows.state.items()}
        table.write(piece.keys_U[order_U], Rows(piece.rows.weights_UD[order_U], rows))
