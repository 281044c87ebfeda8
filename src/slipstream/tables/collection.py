"""All tables of a model: the keys of a batch go in, rows come out as leaf tensors, their gradients go back as one update.

Each table is asked once per batch for its unique keys. `Lookup.rows(i)` spreads the unique rows over the i-th key list; gradients
of all lists meet in the one leaf `rows_UD`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.ops.rows import coalesce, take_rows, unique_keys
from slipstream.tables.memory import MemoryTable
from slipstream.tables.rules import State


@dataclass(frozen=True)
class Lookup:
    """The rows one table lent to one batch."""

    unique_U: torch.Tensor  # int64, ascending
    rows_UD: torch.Tensor  # leaf; its .grad is what the table will apply
    inverses: list[torch.Tensor]  # per key list: int64 places in unique_U, shaped like the keys

    def rows(self, which: int) -> torch.Tensor:
        """The rows of the `which`-th key list, one per key."""
        return take_rows(self.rows_UD, self.inverses[which])


Lookups = dict[str, Lookup]


def _unique(lists: list[torch.Tensor], num_rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sorted unique keys, and each key's place among them: by counting where the table is not much larger than the key lists."""
    if num_rows > 8 * sum(keys.numel() for keys in lists):
        unique_U, inverse_T = unique_keys(torch.cat([keys.reshape(-1) for keys in lists]))
        parts = inverse_T.split([keys.numel() for keys in lists])
        return unique_U, [part.view(keys.shape) for part, keys in zip(parts, lists, strict=True)]
    counts_N = torch.zeros(num_rows, dtype=torch.int64)
    for keys in lists:
        counts_N += torch.bincount(keys.reshape(-1), minlength=num_rows)
    used_N = counts_N > 0
    unique_U = used_N.nonzero().squeeze(1)
    if unique_U.numel() == num_rows:  # many negatives over a small catalogue: keys are their own places
        return unique_U, lists
    places_N = used_N.cumsum(0) - 1
    return unique_U, [places_N.index_select(0, keys.reshape(-1)).view(keys.shape) for keys in lists]


class TableCollection:
    """The tables of one model, by name."""

    def __init__(self, tables: Sequence[MemoryTable]) -> None:
        self.tables = {table.name: table for table in tables}

    def __getitem__(self, name: str) -> MemoryTable:
        return self.tables[name]

    def lookup(self, keys: Mapping[str, Sequence[torch.Tensor]]) -> Lookups:
        """Gather each table's unique rows once; `keys` holds any number of int64 key tensors per table."""
        return {name: self._lookup(self.tables[name], list(lists)) for name, lists in keys.items()}

    def _lookup(self, table: MemoryTable, lists: list[torch.Tensor]) -> Lookup:
        for keys in lists:
            _check_keys(table, keys)
        if table.rule.moves_untouched_rows:  # the update reads every row anyway, so the keys are their own places
            unique_U, inverses = torch.arange(table.num_rows), lists
        else:
            unique_U, inverses = _unique(lists, table.num_rows)
        return Lookup(unique_U, table.gather(unique_U).requires_grad_(), inverses)

    def apply(self, lookups: Lookups | Sequence[Lookups], lr: float) -> None:
        """One optimiser step from the gradients the lookups have collected; several lookups (micro-batches) count as one step."""
        for name, (unique_U, grads_UD) in combine(lookups).items():
            self.tables[name].apply(unique_U, grads_UD, lr)

    def state_dict(self) -> State:
        """Every table's weights and state, flat: `table/weights`, `table/state.…`."""
        return {f"{name}/{key}": value for name, table in self.tables.items() for key, value in table.state_dict().items()}

    def load_state_dict(self, saved: State) -> None:
        for name, table in self.tables.items():
            table.load_state_dict({k.removeprefix(f"{name}/"): v for k, v in saved.items() if k.startswith(f"{name}/")})


def _check_keys(table: MemoryTable, keys: torch.Tensor) -> None:
    if keys.dtype != torch.int64:
        raise TypeError(f"keys of table '{table.name}' must be int64, got {keys.dtype}")
    if keys.numel():
        low, high = (int(bound) for bound in keys.aminmax())
        if low < 0 or high >= table.num_rows:
            raise IndexError(f"table '{table.name}' has rows 0 … {table.num_rows - 1}, but a key is {low if low < 0 else high}")


def _gradient(lookup: Lookup) -> torch.Tensor:
    return lookup.rows_UD.grad if lookup.rows_UD.grad is not None else torch.zeros_like(lookup.rows_UD)


def combine(lookups: Lookups | Sequence[Lookups]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per table the touched keys and their summed gradients, over one lookup or over the micro-batches of one step."""
    if isinstance(lookups, Mapping):
        return {name: (lookup.unique_U, _gradient(lookup)) for name, lookup in lookups.items()}
    combined = {}
    for name in dict.fromkeys(name for each in lookups for name in each):
        parts = [each[name] for each in lookups if name in each]
        unique_U, inverse_T = unique_keys(torch.cat([part.unique_U for part in parts]))
        combined[name] = (unique_U, coalesce(torch.cat([_gradient(part) for part in parts]), inverse_T, unique_U.numel()))
    return combined
