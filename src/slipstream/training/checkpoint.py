"""Checkpoints: whole or absent, no pickle, and enough in them to go on as if nothing had happened.

`checkpoints/step-00000120/` holds `tensors.safetensors` (dense weights, optimiser state, tables'
rows with their state, torch's random state) and `state.json` (step, sampler position, early
stopping, digests). A directory appears under its name only when it is complete, so the newest one
is always good. `checkpoints/best-…` is the same thing for the best evaluation so far. Many ranks
write their rows side by side instead of one file (`sharded_checkpoint.py`); both kinds load on any
number of ranks. Touch this when a run must keep something more, or a format changes.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slipstream.errors import SlipstreamError
from slipstream.files import atomic_directory, fsync_path, read_json
from slipstream.tables.collection import TableCollection
from slipstream.tables.embedding_table import EmbeddingTable, write_saved
from slipstream.tables.hashed_table import HashedTable
from slipstream.tables.row_optimizers import State
from slipstream.tables.slices import Placement
from slipstream.training.optimizers import load_optimizer_tensors, optimizer_tensors
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import network_digest
from slipstream.training.recommender import Recommender

if TYPE_CHECKING:
    from slipstream.training.sharded_checkpoint import ShardedReader

FORMAT = 1
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


def save_checkpoint(
    directory: Path,
    step: int,
    recommender: Recommender,
    optimizer: torch.optim.AdamW | None,
    state: dict[str, Any],
    *,
    kind: str = LAST,
    keep: int = 1,
    ranks: Ranks = ALONE,
    extra_files: Mapping[str, dict[str, torch.Tensor]] | None = None,
) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest `keep` of its kind.

    A failure leaves the old ones alone. `extra_files` are more files of this rank: name -> tensors.
    Collective.
    """
    recommender.tables.settle()
    tensors = {f"model/{name}": value for name, value in recommender.model.state_dict().items()}
    if optimizer is not None:
        tensors |= {
            f"optimizer/{name}": value
            for name, value in optimizer_tensors(optimizer, recommender.model).items()
        }
        tensors["random/torch"] = torch.get_rng_state()
    tensors = {name: value.cpu() for name, value in tensors.items()}
    scalars = {
        "format": FORMAT,
        "step": step,
        "network": network_digest(recommender.recipe),
        **state,
    }
    target = checkpoint_path(directory, step, kind)
    with one_directory(target, ranks) as temporary:
        if ranks.world > 1 or recommender.recipe.tables.directory is not None:
            _write_shards(temporary, tensors, recommender.tables, ranks)
        else:
            tensors |= {
                f"tables/{name}": value for name, value in recommender.tables.state_dict().items()
            }
            write_tensors(temporary / TENSORS, tensors)
        for name, more in (extra_files or {}).items():
            write_tensors(temporary / name, more)
        if ranks.first:  # plain text: the temporary directory itself becomes whole or vanishes
            (temporary / STATE).write_text(json.dumps(scalars, indent=2) + "\n", encoding="utf-8")
    for old in list_checkpoints(directory, kind)[:-keep] if ranks.first else ():
        shutil.rmtree(old, ignore_errors=True)
    return target


@contextlib.contextmanager
def one_directory(target: Path, ranks: Ranks) -> Iterator[Path]:
    """Make a directory that appears once all ranks have written their parts. Collective."""
    with contextlib.ExitStack() as stack:
        temporary = Path(
            ranks.on_first_rank(lambda: str(stack.enter_context(atomic_directory(target))))
        )
        failure: Exception | None = None
        try:
            yield temporary
        except SlipstreamError as error:
            failure = error
        except OSError as error:
            failure = SlipstreamError(
                f"could not write {target}: {error.strerror or error}; nothing was left behind"
            )
        ranks.fail_together(failure)
    ranks.on_first_rank(lambda: None)  # no rank continues before it has its name


def _write_shards(
    directory: Path, dense: dict[str, torch.Tensor], tables: TableCollection, ranks: Ranks
) -> None:
    whole = {
        name: table for name, table in tables.tables.items() if tables.exchange.replicates(name)
    }
    for name, table in whole.items():
        dense |= {f"whole/{name}/{key}": value for key, value in table.state_dict().items()}
    sharded = {name: table for name, table in tables.tables.items() if name not in whole}
    # Imported here: torch.distributed.checkpoint takes seconds to load.
    from slipstream.training.sharded_checkpoint import save_sharded

    save_sharded(directory, dense if ranks.first else {}, sharded, ranks)
    if ranks.rank < ranks.shards:  # replicas hold the same, so the first one writes
        for name, table in sharded.items():
            if isinstance(table, HashedTable):
                write_tensors(directory / admission_file(name, ranks.shard), table.admission())


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
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise SlipstreamError(f"{path} is not a checkpoint of format {FORMAT}")
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
    elif ranks.shards == 1:
        recommender.tables.load_state_dict(
            _part(read_tensors(path / TENSORS, ("tables/",)), "tables/")
        )
    else:
        for name, table in recommender.tables.tables.items():
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
            if isinstance(table, HashedTable):
                files = sorted(path.glob(f"admission-?????-{name}.safetensors"))
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
