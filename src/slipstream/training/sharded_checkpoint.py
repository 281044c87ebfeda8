"""Checkpoints of many ranks: each rank writes its own rows, and any number of ranks reads them.

Rows lie as one long list per table, ascending by (slice, key): `tables/item/keys`, `…/weights`,
`…/state.m` and, to find one's way, `…/slices` (rows in each of the 65,536 slices). A rank owns a
contiguous range of slices, so it writes a contiguous part of the list, and on another mesh reads
another contiguous part. Dense weights and whole tables are written by rank 0. Rows are read in
chunks, so that a table larger than memory can be saved. Touch this when that layout changes.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import CHUNK, EmbeddingTable, Rows, row_state
from slipstream.tables.row_optimizers import State
from slipstream.tables.slices import SLICES, Placement, slice_of
from slipstream.training.plain_metadata import PlainReader, PlainWriter
from slipstream.training.ranks import Ranks

Tensors = dict[str, torch.Tensor]
Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass
class TablePart:
    """The rows of one table that this rank saves, ascending by (slice, key), from `start` on."""

    table: EmbeddingTable
    slices: tuple[int, int]
    keys: torch.Tensor
    bounds: list[int]  # where the tier's chunks of rows begin and end in `keys`
    state: State  # what a row has besides its weights, with an empty axis of rows
    start: int = 0
    total: int = 0
    _passing: Iterator[tuple[torch.Tensor, Rows]] | None = field(default=None, repr=False)
    _read: tuple[int, Rows] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, table: EmbeddingTable, slices: tuple[int, int]) -> "TablePart":
        parts, bounds, state = (
            [torch.empty(0, dtype=torch.int64)],
            [0],
            row_state(table.optimizer, table.dim, table.dtype),
        )
        for keys_U, rows in table.touched(CHUNK):
            parts.append(keys_U)
            bounds.append(bounds[-1] + keys_U.numel())
            state = {name: value[:0] for name, value in rows.state.items()}
        return cls(table, slices, torch.cat(parts), bounds, state)

    def entries(self) -> Entries:
        """Type and shape (without the rows' axis) of everything a saved row has."""
        return entries_of(self.table, self.state)

    def write_items(self) -> Iterator[tuple[WriteItem, str, int]]:
        """Yield what goes to disk, chunk by chunk: the item, its entry, and the chunk's number."""
        low, high = self.slices
        yield (
            _write_item(
                f"tables/{self.table.name}/slices", torch.int64, (low,), (high - low,), (SLICES,)
            ),
            "slices",
            0,
        )
        for number, (begin, end) in enumerate(pairwise(self.bounds)):
            for entry, (dtype, shape) in self.entries().items():
                offsets, sizes = (self.start + begin, *[0] * len(shape)), (end - begin, *shape)
                name = f"tables/{self.table.name}/{entry}"
                yield _write_item(name, dtype, offsets, sizes, (self.total, *shape)), entry, number

    def data(self, entry: str, number: int) -> torch.Tensor:
        """The values of one write item."""
        if entry == "slices":
            return torch.bincount(slice_of(self.keys), minlength=SLICES)[
                slice(*self.slices)
            ].clone()
        if entry == "keys":
            return self.keys[self.bounds[number] : self.bounds[number + 1]].clone()
        rows = self._chunk(number)
        return rows.weights_UD if entry == "weights" else rows.state[entry.removeprefix("state.")]

    def _chunk(self, number: int) -> Rows:
        """The rows of one chunk; chunks are asked for in their order, entry after entry."""
        if self._read is None or self._read[0] > number:
            self._passing, self._read = self.table.touched(CHUNK), (-1, Rows(torch.empty(0), {}))
        while self._read[0] < number:
            assert self._passing is not None
            self._read = (self._read[0] + 1, next(self._passing)[1])
        return self._read[1]


def entries_of(table: EmbeddingTable, state: State) -> Entries:
    """Type and shape (without the rows' axis) of a row of this table with this state."""
    found: Entries = {"keys": (torch.int64, ()), "weights": (table.dtype, (table.dim,))}
    return found | {
        f"state.{name}": (value.dtype, tuple(value.shape[1:])) for name, value in state.items()
    }


def _write_item(
    name: str,
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    size: tuple[int, ...],
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    written = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=written)


class _SavePlanner(DefaultSavePlanner):
    """This rank's dense tensors and parts of tables; rows are read when they are written."""

    def __init__(self, dense: Tensors, parts: list[TablePart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._dense = dense
        self._sources: dict[MetadataIndex, tuple[TablePart, str, int]] = {}
        self._items = [
            _write_item(
                name, value.dtype, (0,) * value.dim(), tuple(value.shape), tuple(value.shape)
            )
            for name, value in dense.items()
        ]
        for part in parts:
            for item, entry, begin in part.write_items():
                self._items.append(item)
                self._sources[item.index] = (part, entry, begin)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        source = self._sources.get(write_item.index)
        if source is None:
            return self._dense[write_item.index.fqn].detach().contiguous()
        part, entry, begin = source
        return part.data(entry, begin)


class _LoadPlanner(DefaultLoadPlanner):
    """Fills tensors from place `starts[name]` of their first axis on, or from 0."""

    def __init__(self, targets: Tensors, starts: dict[str, int]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._targets, self._starts = targets, starts

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, target in self._targets.items():
            offsets = torch.Size(
                [self._starts.get(name, 0), *[0] * (target.dim() - 1)] if target.dim() else []
            )
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(
                name, stored, [ChunkStorageMetadata(offsets, target.shape)]
            )
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index.fqn]
        for axis, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(axis, offset, length)
        return target


def save_sharded(
    directory: Path, dense: Tensors, tables: dict[str, EmbeddingTable], ranks: Ranks
) -> None:
    """Write rank 0's `dense` and every rank's rows into the existing `directory`. Collective.

    Replicas hold the same rows, so the first one writes. A rank that cannot write makes all ranks
    fail.
    """
    parts: list[TablePart] = []
    failure: Exception | None = None
    if ranks.rank < ranks.shards:
        try:
            parts = [
                TablePart.of(table, Placement(ranks.shards).slices(ranks.shard))
                for table in tables.values()
            ]
        except (OSError, SlipstreamError) as error:
            failure = error
    ranks.fail_together(failure)
    group, rank = (None, 0) if ranks.everybody is None else (ranks.everybody.group, ranks.rank)
    counts = [part.keys.numel() for part in parts] if parts else [0] * len(tables)
    counts_WC = (
        torch.tensor([counts])
        if ranks.everybody is None
        else ranks.everybody.gather_counts(torch.tensor(counts))
    )
    for part, before, total in zip(
        parts, counts_WC[:rank].sum(0).tolist(), counts_WC.sum(0).tolist(), strict=False
    ):
        part.start, part.total = before, total
    try:
        dcp.save(
            {},
            # Each rank flushes what it wrote: the node that gives the directory its name cannot.
            storage_writer=PlainWriter(directory, sync_files=True),
            planner=_SavePlanner(dense, parts),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise SlipstreamError(
            f"a rank could not write its part: {_first_reason(error)}; older checkpoints are whole"
        ) from error


class ShardedReader:
    """An opened checkpoint of many ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = PlainReader(path)
        stored = self._reader.read_metadata().state_dict_metadata
        self.stored: dict[str, TensorStorageMetadata] = stored  # type: ignore[assignment]

    def read(self, shapes: dict[str, tuple[int, int]]) -> Tensors:
        """Rows begin … end of the named tensors."""
        targets, starts = {}, {}
        for name, (begin, end) in shapes.items():
            kind = self.stored[name]
            targets[name], starts[name] = (
                torch.empty(end - begin, *kind.size[1:], dtype=kind.properties.dtype),
                begin,
            )
        return self._fill(targets, starts)

    def dense(self, prefixes: tuple[str, ...]) -> Tensors:
        """Every whole tensor whose name begins with one of `prefixes`."""
        chosen = {name: kind for name, kind in self.stored.items() if name.startswith(prefixes)}
        return self._fill(
            {
                name: torch.empty(kind.size, dtype=kind.properties.dtype)
                for name, kind in chosen.items()
            },
            {},
        )

    def _fill(self, targets: Tensors, starts: dict[str, int]) -> Tensors:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", UserWarning
                )  # that a single process loads is what is meant
                dcp.load(
                    {},
                    storage_reader=self._reader,
                    planner=_LoadPlanner(targets, starts),
                    no_dist=True,
                )
        except (CheckpointException, OSError, RuntimeError, ValueError) as error:
            raise SlipstreamError(
                f"{self.path} is not a readable checkpoint: {_first_reason(error)}"
            ) from error
        return targets

    def load_table(self, table: EmbeddingTable, slices: tuple[int, int]) -> None:
        """Put the rows of these slices into `table`, which has never been trained."""
        prefix = f"tables/{table.name}/"
        needed = entries_of(table, row_state(table.optimizer, table.dim, table.dtype))
        if f"{prefix}keys" not in self.stored:
            if f"{prefix}slices" not in self.stored:
                raise SlipstreamError(
                    f"{self.path} has no table '{table.name}'; use the recipe it was trained with"
                )
            return  # none of its rows was ever touched
        total = self.stored[f"{prefix}keys"].size[0]
        found = {
            name.removeprefix(prefix): kind
            for name, kind in self.stored.items()
            if name.startswith(prefix)
        }
        about_use = {
            entry for entry in found if entry.startswith("state.tier.")
        }  # a hashed table's; others let it be
        mine = needed.keys() | about_use
        fits = {
            entry: (found[entry].properties.dtype, tuple(found[entry].size))
            for entry in found.keys() - about_use - {"slices"}
        }
        if fits != {entry: (dtype, (total, *shape)) for entry, (dtype, shape) in needed.items()}:
            raise SlipstreamError(
                f"the saved rows of table '{table.name}' do not fit: this table has rows of "
                f"{table.dim} ({table.dtype}) with optimizer "
                f"{table.optimizer.name}; use the recipe it was trained with"
            )
        ends_S = self.read({f"{prefix}slices": (0, SLICES)})[f"{prefix}slices"].cumsum(0)
        first, last = (int(ends_S[border - 1]) if border else 0 for border in slices)
        for begin in range(first, last, CHUNK):
            part = (begin, min(begin + CHUNK, last))
            rows = {
                name.removeprefix(prefix): value
                for name, value in self.read({prefix + e: part for e in mine}).items()
            }
            keys_U, weights_UD = rows.pop("keys"), rows.pop("weights")
            order_U = keys_U.argsort()
            state = {name.removeprefix("state."): value[order_U] for name, value in rows.items()}
            table.write(keys_U[order_U], Rows(weights_UD[order_U], state))


def _first_reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        failure = next(iter(error.failures.values()))
        return str(failure[0] if isinstance(failure, tuple) else failure).splitlines()[0]
    return str(error).splitlines()[0] if str(error) else type(error).__name__
