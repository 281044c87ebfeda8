"""The memory tier: a table whose rows all live in this process.

A row is its weights together with its optimiser state. Its first value is a pure function of (seed, table name, key), so it does
not matter when, where or in which order rows are born; this tier simply lets all of them be born at once. Other tiers offer the
same verbs: gather, apply, read, write.
"""

import hashlib
from dataclasses import dataclass

import torch

from slipstream.errors import SlipstreamError
from slipstream.ops import counter_random
from slipstream.tables.rules import RowRule, State

_BIRTH_CHUNK = 1 << 16  # rows drawn at a time, so that a big table needs no second copy of itself in random bits


@dataclass(frozen=True)
class Rows:
    """Rows on their way between places: weights, and every entry of state that belongs to a row."""

    weights_UD: torch.Tensor
    state: State


def first_rows(seed: int, table: str, keys_U: torch.Tensor, dim: int, init_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The rows as they are born: uniform in [-init_scale, init_scale), drawn from (seed, table name, key)."""
    name = int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "little")
    uniform_UD = counter_random.random_uniform(counter_random.derive_seed(seed, name), keys_U, dim, dtype)
    return uniform_UD.mul_(2.0).sub_(1.0).mul_(init_scale)


class MemoryTable:
    """`num_rows` rows of width `dim` and the state of their rule, in memory."""

    def __init__(
        self,
        name: str,
        num_rows: int,
        dim: int,
        rule: RowRule,
        *,
        seed: int = 0,
        init_scale: float = 0.035,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_rows < 1 or dim < 1:
            raise ValueError(f"table '{name}' needs at least one row and one column, got {num_rows} x {dim}")
        self.name, self.num_rows, self.dim, self.rule, self.dtype = name, num_rows, dim, rule, dtype
        self.weights_ND = torch.empty(num_rows, dim, dtype=dtype)
        for start in range(0, num_rows, _BIRTH_CHUNK):
            keys = torch.arange(start, min(start + _BIRTH_CHUNK, num_rows))
            self.weights_ND[start : start + len(keys)] = first_rows(seed, name, keys, dim, init_scale, dtype)
        self.state = rule.new_state(num_rows, dim, dtype)

    def gather(self, keys_U: torch.Tensor) -> torch.Tensor:
        """A copy of the weights of these rows."""
        return self.weights_ND.index_select(0, keys_U)

    def all_rows(self) -> torch.Tensor:
        """Every row's weights, not copied: read only."""
        return self.weights_ND

    def apply(self, keys_U: torch.Tensor, grads_UD: torch.Tensor, lr: float) -> None:
        """One optimiser step for the rows `keys_U` (unique, ascending)."""
        self.rule.update_(self.weights_ND, self.state, keys_U, grads_UD, lr)

    def read(self, keys_U: torch.Tensor) -> Rows:
        """Rows with their state, copied."""
        return Rows(self.gather(keys_U), {name: value[keys_U] for name, value in self._row_state().items()})

    def write(self, keys_U: torch.Tensor, rows: Rows) -> None:
        """Put rows with their state in place."""
        self.weights_ND[keys_U] = rows.weights_UD
        for name, value in self._row_state().items():
            value[keys_U] = rows.state[name]

    def state_dict(self) -> State:
        """Weights and state by name, not copied: save or clone before the next step."""
        return {"weights": self.weights_ND, **{f"state.{name}": value for name, value in self.state.items()}}

    def load_state_dict(self, saved: State) -> None:
        """Take over saved weights and state; another table's are refused."""
        mine = self.state_dict()
        if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in mine.items()}:
            raise SlipstreamError(
                f"the saved rows of table '{self.name}' do not fit: this table has {self.num_rows} rows of {self.dim} "
                f"with rule {self.rule.name}; use the recipe and the store it was trained with"
            )
        for name, value in mine.items():
            value.copy_(saved[name])

    def _row_state(self) -> State:
        return {name: value for name, value in self.state.items() if value.dim() > 0}
