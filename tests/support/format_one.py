"""Writes checkpoints of format 1 as many ranks did: the earlier writer, kept to test its reader.

`save_format_one(directory, step, recommender, optimizer, state, ranks)` is collective.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from slipstream.tables.embedding_table import CHUNK, EmbeddingTable, Rows, row_state
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.row_optimizers import State
from slipstream.tables.slices import SLICES, Placement, slice_of
from slipstream.training.checkpoint import (
    STATE,
    admission_file,
    checkpoint_path,
    one_directory,
    write_tensors,
)
from slipstream.training.optimizers import optimizer_tensors
from slipstream.training.plain_metadata import FORMAT, METADATA
from slipstream.training.ranks import Ranks
from slipstream.training.recipe import network_digest
from slipstream.training.sharded_checkpoint import Entries, Tensors, entries_of


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


class PlainWriter(FileSystemWriter):
    """Writes what torch's writer writes, and `metadata.json` in place of the pickle."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {
            result.index: result.storage_data for rank_results in results for result in rank_results
        }
        tensors = {}
        for name, described in metadata.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata), f"{name} is not a tensor"
            chunks = []
            for chunk in described.chunks:
                place = stored[MetadataIndex(name, chunk.offsets)]
                chunks.append(
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": place.relative_path,
                        "at": place.offset,
                        "bytes": place.length,
                    }
                )
            dtype = str(described.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(described.size), "chunks": chunks}
        text = json.dumps({"format": FORMAT, "tensors": tensors}, indent=1)
        (Path(self.path) / METADATA).write_text(text + "\n", encoding="utf-8")


def save_sharded(
    directory: Path, dense: Tensors, tables: dict[str, EmbeddingTable], ranks: Ranks
) -> None:
    """Write rank 0's `dense` and every rank's rows into the existing `directory`. Collective.

    Replicas hold the same rows, so the first one writes. A rank that cannot write makes all ranks
    fail.
    """
    parts: list[TablePart] = []
    if ranks.rank < ranks.shards:
        slices = Placement(ranks.shards).slices(ranks.shard)
        parts = [TablePart.of(table, slices) for table in tables.values()]
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
    dcp.save(
        {},
        # Each rank flushes what it wrote: the node that gives the directory its name cannot.
        storage_writer=PlainWriter(directory, sync_files=True),
        planner=_SavePlanner(dense, parts),
        process_group=group,
        no_dist=group is None,
    )


def save_format_one(directory, step, recommender, optimizer, state, ranks):
    """Write a checkpoint as version 1 did on several ranks. Collective."""
    model, tables = recommender.model, recommender.tables
    dense = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, value in optimizer_tensors(optimizer, model).items():
        dense[f"optimizer/{name}"] = value
    dense["random/torch"] = torch.get_rng_state()
    sharded = {}
    for name, table in tables.tables.items():
        if tables.exchange.replicates(name):
            dense |= {f"whole/{name}/{key}": value for key, value in table.state_dict().items()}
        else:
            sharded[name] = table
    scalars = {"format": 1, "step": step, "network": network_digest(recommender.recipe), **state}
    with one_directory(checkpoint_path(directory, step), ranks) as temporary:
        save_sharded(temporary, dense if ranks.first else {}, sharded, ranks)
        for name, table in sharded.items() if ranks.rank < ranks.shards else ():
            if isinstance(table, HashedTable):
                write_tensors(temporary / admission_file(name, ranks.shard), table.admission())
        if ranks.first:
            (temporary / STATE).write_text(json.dumps(scalars), encoding="utf-8")
