"""What every embedding table offers, and the functions that all tables share.

Touch this when all kinds of tables (memory, disk, hashed) change together. A row is its weights
together with its optimizer state. Its first value is a pure function of (seed, table name, key), so
it does not depend on when a row is first used, nor on the rank or the kind of table that holds it.
Keys are always global.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from slipstream.errors import SlipstreamError
from slipstream.ops import counter_random, native
from slipstream.ops.kernel_call import kernel
from slipstream.tables.row_optimizers import RowOptimizer, State

if TYPE_CHECKING:
    from slipstream.tables.row_snapshot import RowSnapshot

CHUNK = 1 << 16  # rows handled at a time where a whole table is read or written


@dataclass(frozen=True)
class Rows:
    """Rows outside their table: weights, and the entries of optimizer state that belong to rows."""

    weights_UD: torch.Tensor
    state: State


class EmbeddingTable(Protocol):
    """One table. Keys are int64; those of `apply` and `write` are unique."""

    @property
    def name(self) -> str: ...

    @property
    def num_rows(self) -> int | None:
        """Keys are 0 … num_rows - 1; None: any key from 0 to 2^63 - 1."""
        ...

    @property
    def dim(self) -> int: ...

    @property
    def optimizer(self) -> RowOptimizer: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def forgets(self) -> bool:
        """Whether a trained row may later be read as new, because of admission or eviction."""
        ...

    @property
    def read_by_several(self) -> bool:
        """Whether threads may read rows at a time, beside one that writes other rows."""
        ...

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows; keys may come in any order and repeat."""
        ...

    def peek(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Copy the weights of these rows; what a cache holds and would evict next stays as is."""
        ...

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """Make one optimizer step for the rows `keys_U` (unique, ascending)."""
        ...

    def read(self, keys_U: torch.Tensor) -> Rows:
        """Copy rows with their state."""
        ...

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        """Replace rows and their state."""
        ...

    def all_rows(self) -> torch.Tensor:
        """Return the weights of rows 0 … num_rows - 1, for reading only."""
        ...

    def touched(self, chunk: int = CHUNK) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Yield every row that may differ from its first value, ascending by (slice, key)."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, its row and its state."""
        ...

    @property
    def num_updated(self) -> int:
        """How many rows changed since `mark_saved` or a snapshot (or ever)."""
        ...

    def mark_saved(self) -> None:
        """Forget which rows changed: a checkpoint holds them."""
        ...

    def snapshot(self, *, whole: bool, most_bytes: int) -> "RowSnapshot":
        """Take the rows that changed since `mark_saved`, or all touched ones, and count as saved.

        Updates may go on while it is read; `most_bytes` of rows may be kept for it in memory.
        """
        ...

    def flush(self) -> None:
        """Make all rows durable; a table in memory does nothing."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, saved: State) -> None: ...

    def clear(self) -> None:
        """Reset every row to its first value; flushed files stay until the next flush."""
        ...

    def close(self) -> None:
        """Close files and release locks, without flushing."""
        ...


def first_rows(
    seed: int, table: str, keys_U: torch.Tensor, dim: int, init_scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Draw first values from (seed, table, key), uniform in [-init_scale, init_scale)."""
    name = int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "little")
    own_seed = counter_random.derive_seed(seed, name)
    if dtype == torch.float32 and native.available():
        uniform_UD = torch.empty(keys_U.numel(), dim)
        kernel("ss_random_uniform")(own_seed, keys_U.contiguous(), keys_U.numel(), dim, uniform_UD)
    else:
        uniform_UD = counter_random.random_uniform(own_seed, keys_U, dim, dtype)
    return uniform_UD.mul_(2.0).sub_(1.0).mul_(init_scale)


def check_keys(name: str, num_rows: int | None, keys_U: torch.Tensor) -> None:
    """Raise unless the keys are int64 rows of this table."""
    if keys_U.dtype != torch.int64:
        raise TypeError(f"keys of table '{name}' must be int64, got {keys_U.dtype}")
    if keys_U.numel() == 0:
        return
    low, high = (int(bound) for bound in keys_U.aminmax())
    if low < 0 or (num_rows is not None and high >= num_rows):
        end = "2^63 - 1" if num_rows is None else str(num_rows - 1)
        raise IndexError(
            f"table '{name}' has rows 0 … {end}, but a key is {low if low < 0 else high}"
        )


def row_state(optimizer: RowOptimizer, dim: int, dtype: torch.dtype, count: int = 1) -> State:
    """Make the state of `count` untrained rows: the entries that belong to rows, by name."""
    state = optimizer.new_state(count, dim, dtype)
    return {name: value for name, value in state.items() if value.dim() > 0}


def key_and_row_bytes(table: EmbeddingTable) -> int:
    """Return the bytes of a key, its weights and its state."""
    state = row_state(table.optimizer, table.dim, table.dtype)
    return 8 + table.dim * table.dtype.itemsize + sum(each.nbytes for each in state.values())


def check_shape(name: str, num_rows: int, dim: int) -> None:
    """Raise unless the table has a row and a column."""
    if num_rows < 1 or dim < 1:
        raise ValueError(
            f"table '{name}' needs at least one row and one column, got {num_rows} x {dim}"
        )


def refuse_dense_optimizer(name: str, optimizer: RowOptimizer, tier: str) -> None:
    """Raise for an optimizer that updates all rows where a table holds only some of them."""
    if optimizer.updates_untouched_rows:
        raise SlipstreamError(
            f"optimizer '{optimizer.name}' updates every row of table '{name}' at every step, "
            f"which a {tier} table cannot do; use rowwise_adam or rowwise_adagrad, or "
            "tables.tier=memory"
        )


def save_touched(table: EmbeddingTable) -> State:
    """Return the touched rows as flat tensors: `keys`, `weights`, `state.…`."""
    parts = list(table.touched())
    state = row_state(table.optimizer, table.dim, table.dtype) if not parts else parts[0][1].state
    nothing = torch.zeros(0, table.dim, dtype=table.dtype)
    saved = {
        "keys": torch.cat([keys_U for keys_U, _ in parts] or [torch.zeros(0, dtype=torch.int64)]),
        "weights": torch.cat([rows.weights_UD for _, rows in parts] or [nothing]),
    }
    for entry, one in state.items():
        saved[f"state.{entry}"] = torch.cat([rows.state[entry] for _, rows in parts] or [one[:0]])
    return saved


def write_saved(table: EmbeddingTable, saved: State) -> None:
    """Write rows saved by `save_touched`, after checking that they fit this table."""
    expected: dict[str, tuple[int, ...]] = {"weights": (table.dim,)}
    expected |= {
        f"state.{name}": tuple(one.shape[1:])
        for name, one in row_state(table.optimizer, table.dim, table.dtype).items()
    }
    for name, shape in expected.items():
        if (
            "keys" not in saved
            or name not in saved
            or tuple(saved[name].shape) != (len(saved["keys"]), *shape)
        ):
            raise SlipstreamError(
                f"the saved rows of table '{table.name}' do not fit: this table has rows of "
                f"{table.dim} with optimizer {table.optimizer.name}; "
                "use the recipe it was trained with"
            )
    state = {
        name.removeprefix("state."): value
        for name, value in saved.items()
        if name.startswith("state.")
    }
    for start in range(0, len(saved["keys"]), CHUNK):
        part = slice(start, start + CHUNK)
        rows = Rows(saved["weights"][part], {name: value[part] for name, value in state.items()})
        table.write(saved["keys"][part], rows)
