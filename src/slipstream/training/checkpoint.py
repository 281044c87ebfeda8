"""Checkpoints: whole or absent, no pickle, and enough in them to go on as if nothing had happened.

    checkpoints/step-00000120/
        state.json              format, step, sampler position, early stopping, digests, row files
        tensors.safetensors     dense weights, optimiser state, small tables, torch's random state
        rows-….safetensors      rows of the other tables (row_files.py): those of the checkpoint
                                before as hard links, and those updated since
        admission-….safetensors ids that wait for a row of a hashed table

A directory appears under its name only when it is complete, so the newest one is always good, and
it needs no other directory. `checkpoints/best-…` is the same for the best evaluation so far. Every
checkpoint loads on any number of ranks. Touch this when a run must keep something more, or a format
changes; writing behind the next steps is in checkpoint_writer.py.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, explained, fsync_path, link_or_copy, read_json
from slipstream.tables.collection import TableCollection
from slipstream.tables.embedding_table import EmbeddingTable, write_saved
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.row_optimizers import State
from slipstream.tables.slices import Placement
from slipstream.training.optimizers import load_optimizer_tensors, optimizer_tensors
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import network_digest
from slipstream.training.recommender import Recommender
from slipstream.training.row_files import (
    PATTERN,
    RowFile,
    RowPiece,
    list_row_files,
    load_rows,
    write_pieces,
)

if TYPE_CHECKING:
    from slipstream.training.sharded_checkpoint import ShardedReader

FORMAT = 2
READABLE = (1, 2)  # 1: many ranks wrote with torch.distributed.checkpoint, one rank a single file
WHOLE_BYTES = 1 << 26  # a table of one rank that is not larger is written whole every time
TENSORS, STATE = "tensors.safetensors", "state.json"
LAST, BEST = "step", "best"


def checkpoint_path(directory: Path, step: int, kind: str = LAST) -> Path:
    """Return where the checkpoint of a step is."""
    return directory / f"{kind}-{step:08d}"


def list_checkpoints(directory: Path, kind: str = LAST) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    pattern = re.compile(rf"{kind}-(\d+)")
    found = [
        (int(match[1]), path)
        for path in directory.glob(f"{kind}-*")
        if (match := pattern.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def latest(directory: Path, kind: str = LAST) -> Path | None:
    """Return the newest complete checkpoint, if there is one."""
    found = list_checkpoints(directory, kind)
    return found[-1] if found else None


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is written from, all of it copied: the run goes on beside."""

    target: Path
    keep: int
    tensors: State
    scalars: dict[str, Any]
    row_tables: dict[str, int | None]  # tables written as row files, and their numbers of rows
    extra_files: dict[str, State] = field(default_factory=dict)


def take_snapshot(
    directory: Path,
    step: int,
    recommender: Recommender,
    optimizer: torch.optim.AdamW | None,
    state: dict[str, Any],
    *,
    kind: str = LAST,
    keep: int = 1,
    ranks: Ranks = ALONE,
    extra_files: Mapping[str, State] | None = None,
    row_tables: Iterable[str] = (),
) -> Snapshot:
    """Copy all but the rows that go to row files: `row_tables` and those too large to be whole."""
    recommender.tables.settle()
    recipe, tables = recommender.recipe, recommender.tables.tables
    in_rows = {
        name: table.num_rows
        for name, table in tables.items()
        if name in row_tables or not _is_written_whole(table, recommender, ranks)
    }
    tensors: State = {}
    if ranks.first:
        tensors = {f"model/{name}": value for name, value in recommender.model.state_dict().items()}
        if optimizer is not None:
            tensors |= {
                f"optimizer/{name}": value
                for name, value in optimizer_tensors(optimizer, recommender.model).items()
            }
            tensors["random/torch"] = torch.get_rng_state()
        for name in tables.keys() - in_rows.keys():
            saved = tables[name].state_dict().items()
            tensors |= {f"tables/{name}/{key}": value for key, value in saved}
    files = dict(extra_files or {})
    if ranks.rank < ranks.shards:  # replicas hold the same, so the first one writes
        for name in in_rows:
            if isinstance(table := tables[name], HashedTable):
                files[admission_file(name, ranks.shard)] = table.admission()
    scalars = {
        "format": FORMAT,
        "step": step,
        "network": network_digest(recipe),
        **state,
        "row_tables": sorted(in_rows),
    }
    if in_rows:  # rows that were never updated are in no file: they begin as these say
        scalars["first_rows"] = _first_rows_of(recommender)
    return Snapshot(
        checkpoint_path(directory, step, kind),
        keep,
        _copy(tensors),
        json.loads(json.dumps(scalars)),
        in_rows,
        {name: _copy(each) for name, each in files.items()},
    )


def _copy(tensors: State) -> State:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def _first_rows_of(recommender: Recommender) -> dict[str, Any]:
    return {"seed": recommender.recipe.seed, "init_scale": recommender.recipe.tables.init_scale}


def _is_written_whole(table: EmbeddingTable, recommender: Recommender, ranks: Ranks) -> bool:
    """Whether a table is small enough to be written whole; one whose every row moves always is."""
    if table.optimizer.updates_untouched_rows:
        return True
    if ranks.world > 1 or recommender.recipe.tables.directory is not None:
        return False
    rows = len(table) if isinstance(table, HashedTable) else table.num_rows or 0
    return rows * table.row_bytes <= WHOLE_BYTES


def write_snapshot(
    snapshot: Snapshot,
    pieces: Iterable[RowPiece],
    ranks: Ranks,
    *,
    number: int = 0,
    source: Path | None = None,
    anew: frozenset[str] = frozenset(),
) -> Path:
    """Write a checkpoint: the row files of `source` but for tables `anew`, and these pieces.

    Then delete all but the newest of its kind. A failure leaves the old ones alone. Collective.
    """
    target = snapshot.target

    def finish(temporary: Path) -> None:
        names = sorted(path.name for path in temporary.iterdir() if PATTERN.fullmatch(path.name))
        text = json.dumps({**snapshot.scalars, "row_files": names}, indent=2)
        with explained(target):
            (temporary / STATE).write_text(text + "\n", encoding="utf-8")

    with one_directory(target, ranks, finish) as temporary:
        if ranks.first:
            older = snapshot.row_tables.keys() - anew
            for file in row_files(source, older) if source is not None else ():
                link_or_copy(file.path, temporary / file.path.name)
            write_tensors(temporary / TENSORS, snapshot.tensors)
        for name, more in snapshot.extra_files.items():
            write_tensors(temporary / name, more)
        if ranks.rank < ranks.shards:
            write_pieces(temporary, number, ranks.shard, pieces)
    for old in list_checkpoints(target.parent, _kind_of(target))[: -snapshot.keep]:
        if ranks.first:
            shutil.rmtree(old, ignore_errors=True)
    return target


def _kind_of(path: Path) -> str:
    return path.name.rpartition("-")[0]


def row_files(checkpoint: Path, tables: Iterable[str]) -> list[RowFile]:
    """Return the row files of these tables in a checkpoint, newest first."""
    names, wanted = read_state(checkpoint).get("row_files", []), set(tables)
    return [file for file in list_row_files(checkpoint, names) if file.table in wanted]


@contextlib.contextmanager
def one_directory(
    target: Path, ranks: Ranks, finish: Callable[[Path], None] = lambda temporary: None
) -> Iterator[Path]:
    """Make a directory that appears once all ranks have written their parts. Collective.

    Rank 0 calls `finish` after all have.
    """
    with contextlib.ExitStack() as stack:
        temporary = Path(
            ranks.on_first_rank(lambda: str(stack.enter_context(atomic_directory(target))))
        )
        failure: Exception | None = None
        try:
            with explained(target):
                yield temporary
        except SlipstreamError as error:
            failure = error
        ranks.fail_together(failure)
        ranks.on_first_rank(lambda: finish(temporary))
    ranks.on_first_rank(lambda: None)  # no rank continues before it has its name


def admission_file(table: str, shard: int) -> str:
    """Return the file of a shard's ids that wait for a row of a hashed table."""
    return f"admission-{shard:05d}-{table}.safetensors"


def _load_admission(table: HashedTable, parts: list[State], ranks: Ranks) -> None:
    """Load the waiting ids of this rank's slices, whichever shards wrote them."""
    for part in parts:
        mine = Placement(ranks.shards).owner_of(part["candidates"]) == ranks.shard
        table.load_admission(
            {
                "candidates": part["candidates"][mine],
                "candidate_sightings": part["candidate_sightings"][mine],
                "clock": torch.stack([each["clock"] for each in parts]).max(),
            }
        )


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file to the disk; a failure to write is an OSError."""
    try:
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(None, str(error)) from error
    fsync_path(path)


def read_tensors(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Read the tensors whose names begin with one of `prefixes`."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in list(file.keys()) if name.startswith(prefixes)]
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise SlipstreamError(f"{path} is not a readable checkpoint: {error}") from error


def read_state(path: Path) -> dict[str, Any]:
    """Read the scalars of a checkpoint."""
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("format") not in READABLE:
        found = state.get("format") if isinstance(state, dict) else None
        raise SlipstreamError(
            f"{path} is not a checkpoint of format {' or '.join(map(str, READABLE))} (it says "
            f"{found!r}); use the version of Slipstream that wrote it, or train again"
        )
    return state


def load_weights(path: Path, recommender: Recommender, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Load weights and rows with their state; return the scalars. Refuses another model's."""
    state = read_state(path)
    if state["network"] != network_digest(recommender.recipe):
        raise SlipstreamError(
            f"{path} was written by another model than this recipe describes; use the recipe it "
            "was trained with"
        )
    try:
        recommender.model.load_state_dict(_part(read_dense(path, ("model/",)), "model/"))
    except RuntimeError as error:
        raise SlipstreamError(
            f"{path} does not fit this model: {str(error).splitlines()[-1].strip()}"
        ) from error
    if is_sharded(path):
        _load_shards(path, recommender.tables, ranks)
        return state
    in_rows = state.get("row_tables", [])
    if in_rows and state.get("first_rows") != _first_rows_of(recommender):
        raise SlipstreamError(
            f"{path} was trained from other first rows ({state.get('first_rows')}); use the recipe "
            "it was trained with"
        )
    files = row_files(path, in_rows)
    for name, table in recommender.tables.tables.items():
        if name in in_rows:
            load_rows(files, table, ranks.shards, ranks.shard)
            _load_waiting(path, table, ranks)
        elif ranks.shards == 1:
            prefix = f"tables/{name}/"
            table.load_state_dict(_part(read_tensors(path / TENSORS, (prefix,)), prefix))
        else:
            _load_part(path, table, recommender.tables.exchange.replicates(name), ranks)
    return state


def read_dense(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Read tensors of either kind of checkpoint whose names begin with one of `prefixes`."""
    return (
        _sharded(path).dense(prefixes)
        if is_sharded(path)
        else read_tensors(path / TENSORS, prefixes)
    )


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint was written rank by rank."""
    return (path / "metadata.json").exists()


def _sharded(path: Path) -> "ShardedReader":
    """Open such a checkpoint; its module is loaded only where there is one."""
    from slipstream.training.sharded_checkpoint import ShardedReader

    return ShardedReader(path)


def _load_shards(path: Path, tables: TableCollection, ranks: Ranks) -> None:
    reader = _sharded(path)
    for name, table in tables.tables.items():
        if table.optimizer.updates_untouched_rows:
            table.load_state_dict(_part(reader.dense((f"whole/{name}/",)), f"whole/{name}/"))
        else:
            reader.load_table(table, Placement(ranks.shards).slices(ranks.shard))
            _load_waiting(path, table, ranks)


def _load_waiting(path: Path, table: EmbeddingTable, ranks: Ranks) -> None:
    """Load the ids that wait for a row, where a table has such."""
    if isinstance(table, HashedTable):
        files = sorted(path.glob(f"admission-?????-{table.name}.safetensors"))
        _load_admission(table, [read_tensors(file, ("",)) for file in files], ranks)


def _load_part(path: Path, table: EmbeddingTable, whole: bool, ranks: Ranks) -> None:
    """Load one rank's rows from a checkpoint that one rank wrote."""
    saved = _part(read_tensors(path / TENSORS, (f"tables/{table.name}/",)), f"tables/{table.name}/")
    if whole:
        table.load_state_dict(saved)
        return
    keys_N = saved.get("keys", torch.arange(len(saved.get("weights", ()))))
    owned = (Placement(ranks.shards).owner_of(keys_N) == ranks.shard).nonzero().squeeze(1)
    admission = [saved] if "clock" in saved else []
    saved = {
        name: value
        for name, value in saved.items()
        if name == "weights" or name.startswith("state.")
    }
    misfits = {
        name for name, value in saved.items() if value.dim() == 0 or len(value) != len(keys_N)
    }
    if (
        misfits
        or "weights" not in saved
        or (table.num_rows is not None and len(keys_N) > table.num_rows)
    ):
        raise SlipstreamError(
            f"the saved rows of table '{table.name}' do not fit; use the recipe it was trained with"
        )
    write_saved(
        table, {"keys": keys_N[owned], **{name: value[owned] for name, value in saved.items()}}
    )
    if isinstance(table, HashedTable):
        _load_admission(table, admission, ranks)


def load_checkpoint(
    path: Path, recommender: Recommender, optimizer: torch.optim.AdamW, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Load weights, rows, optimiser and random state as after that step; return the scalars."""
    state = load_weights(path, recommender, ranks)
    tensors = read_dense(path, ("optimizer/", "random/"))
    load_optimizer_tensors(optimizer, recommender.model, _part(tensors, "optimizer/"))
    torch.set_rng_state(tensors["random/torch"])
    return state


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
