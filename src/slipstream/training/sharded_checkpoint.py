"""Checkpoints of format 1 that many ranks wrote: any number of ranks reads them.

Rows lie as one long list per table, ascending by (slice, key): `tables/item/keys`, `…/weights`,
`…/state.m` and, to find one's way, `…/slices` (rows in each of the 65,536 slices). A rank owns a
contiguous range of slices, so it writes a contiguous part of the list, and on another mesh reads
another contiguous part. Dense weights and whole tables are written by rank 0. Rows are read in
chunks, so that a table larger than memory can be saved. Touch this when that layout changes.
"""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slipstream.errors import SlipstreamError
from slipstream.tables.embedding_table import CHUNK, EmbeddingTable, Rows, row_state
from slipstream.tables.row_optimizers import State
from slipstream.tables.slices import SLICES
from slipstream.training.plain_metadata import PlainReader

Tensors = dict[str, torch.Tensor]
Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def entries_of(table: EmbeddingTable, state: State) -> Entries:
    """Type and shape (without the rows' axis) of a row of this table with this state."""
    found: Entries = {"keys": (torch.int64, ()), "weights": (table.dtype, (table.dim,))}
    return found | {
        f"state.{name}": (value.dtype, tuple(value.shape[1:])) for name, value in state.items()
    }


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
