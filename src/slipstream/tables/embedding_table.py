"""What every tier of embedding rows offers, whatever holds the rows: memory, a disk, a hash index
over either.

A row is its weights together with its optimiser state. Its first value is a pure function of (seed,
table name, key), so it does not matter when, where or in which order rows are born, nor which rank
or tier holds them. Keys are always the global ones.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.errors import SlipstreamError
from slipstream.ops import counter_random, native
from slipstream.ops.kernel_call import kernel
from slipstream.tables.row_optimizers import RowOptimizer, State

CHUNK = 1 << 16  # rows handled at a time where a whole table passes by


@dataclass(frozen=True)
class Rows:
    """Rows on their way between places: weights, and every entry of state that belongs to a row."""

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
        """Whether a trained row may be read as new later (admission, eviction): a schedule that
        keeps rows elsewhere must know.
        """
        ...

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """A copy of the weights of these rows, in any order of keys, repeats allowed."""
        ...

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """One optimiser step for the rows `keys_U` (unique, ascending)."""
        ...

    def read(self, keys_U: torch.Tensor) -> Rows:
        """Rows with their state, copied."""
        ...

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        """Put rows with their state in place."""
        ...

    def all_rows(self) -> torch.Tensor:
        """The weights of rows 0 … num_rows - 1: read only."""
        ...

    def touched(self, chunk: int = CHUNK) -> Iterator[tuple[torch.Tensor, Rows]]:
        """Every row that may differ from its birth, at most `chunk` at a time, ascending by (slice,
        key).
        """
        ...

    def flush(self) -> None:
        """Make all rows durable where the tier has a file; nothing to do in memory."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, saved: State) -> None: ...

    def clear(self) -> None:
        """As if new: every row is as it was born. What was flushed stays on disk until the next
        flush.
        """
        ...

    def close(self) -> None:
        """Let go of files and locks, without flushing."""
        ...


def first_rows(
    seed: int, table: str, keys_U: torch.Tensor, dim: int, init_scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """The rows as they are born: uniform in [-init_scale, init_scale), drawn from (seed, table
    name, key).
    """
    name = int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "little")
    own_seed = counter_random.derive_seed(seed, name)
    if dtype == torch.float32 and native.available():
        uniform_UD = torch.empty(keys_U.numel(), dim)
        kernel("ss_random_uniform")(own_seed, keys_U.contiguous(), keys_U.numel(), dim, uniform_UD)
    else:
        uniform_UD = counter_random.random_uniform(own_seed, keys_U, dim, dtype)
    return uniform_UD.mul_(2.0).sub_(1.0).mul_(init_scale)


def check_keys(name: str, num_rows: int | None, keys_U: torch.Tensor) -> None:
    """Keys are int64 rows of this table."""
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


def row_state(optimizer: RowOptimizer, dim: int, dtype: torch.dtype) -> State:
    """One untrained row's state by name, each with a leading axis of one: what travels with a row
    under this optimizer.
    """
    return {
        name: value for name, value in optimizer.new_state(1, dim, dtype).items() if value.dim() > 0
    }


def refuse_dense_optimizer(name: str, optimizer: RowOptimizer, tier: str) -> None:
    """Tiers that hold only some rows cannot serve a optimizer that moves all of them."""
    if optimizer.updates_untouched_rows:
        raise SlipstreamError(
            f"optimizer '{optimizer.name}' moves every row of table '{name}' at every step, which "
            f"a {tier} "
            "table cannot do; "
            "use rowwise_adam or rowwise_adagrad, or tables.tier=memory"
        )


def saved_touched(tier: EmbeddingTable) -> State:
    """The touched rows as flat tensors: `keys`, `weights`, `state.…`."""
    parts = list(tier.touched())
    state = row_state(tier.optimizer, tier.dim, tier.dtype) if not parts else parts[0][1].state
    saved = {
        "keys": torch.cat([keys_U for keys_U, _ in parts] or [torch.zeros(0, dtype=torch.int64)]),
        "weights": torch.cat(
            [rows.weights_UD for _, rows in parts] or [torch.zeros(0, tier.dim, dtype=tier.dtype)]
        ),
    }
    for entry, one in state.items():
        saved[f"state.{entry}"] = torch.cat([rows.state[entry] for _, rows in parts] or [one[:0]])
    return saved


def write_saved(tier: EmbeddingTable, saved: State) -> None:
    """Put rows saved by `saved_touched` in place, after checking that they are this table's kind of
    rows.
    """
    expected: dict[str, tuple[int, ...]] = {"weights": (tier.dim,)}
    expected |= {
        f"state.{name}": tuple(one.shape[1:])
        for name, one in row_state(tier.optimizer, tier.dim, tier.dtype).items()
    }
    for name, shape in expected.items():
        if (
            "keys" not in saved
            or name not in saved
            or tuple(saved[name].shape) != (len(saved["keys"]), *shape)
        ):
            raise SlipstreamError(
                f"the saved rows of table '{tier.name}' do not fit: this table has rows of "
                f"{tier.dim} with optimizer {tier.optimizer.name}; "
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
        tier.write(saved["keys"][part], rows)
