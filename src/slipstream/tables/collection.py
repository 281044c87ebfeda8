"""All tables of a model: look up the rows of a batch, then update them from their gradients.

Touch this when a step uses its tables in a new way. Each table is read once per batch, for the
unique keys. `Lookup.rows(i)` repeats the unique rows for the i-th key list; the gradients of all
lists are summed in the one leaf tensor `rows_UD`. On many ranks the exchange carries keys, rows and
gradients between the ranks, and replica groups agree on the sums before rows are updated.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from slipstream.ops.row_readers import RowTile
from slipstream.ops.rows import coalesce, unique_keys
from slipstream.tables.embedding_table import CHUNK, EmbeddingTable
from slipstream.tables.exchange import Exchange, Gradients, Lookups
from slipstream.tables.replicas import Replicas
from slipstream.tables.row_optimizers import State

__all__ = ["Lookups", "TableCollection", "TableRows", "add"]


class TableCollection:
    """The tables of one model, by name.

    `exchange` connects the ranks that share the tables, `replicas` the groups that hold copies.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        exchange: Exchange | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.tables = {table.name: table for table in tables}
        self.exchange = exchange or Exchange(self.tables)
        self.replicas = replicas

    def __getitem__(self, name: str) -> EmbeddingTable:
        return self.tables[name]

    def lookup(self, keys: Mapping[str, Sequence[torch.Tensor]]) -> Lookups:
        """Read each table's unique rows once; `keys` are int64 key lists per table. Collective."""
        route = self.exchange.route(keys)
        return self.exchange.answer(
            route,
            {name: self.tables[name].gather(owned_O) for name, owned_O in route.owned.items()},
        )

    def peek(self, name: str, keys_C: torch.Tensor) -> torch.Tensor:
        """Copy the weights of rows of all ranks, past every cache. Collective.

        Keys may come in any order and repeat.
        """
        if self.exchange.keeps_whole(name):
            return self.tables[name].peek(keys_C)
        route = self.exchange.route({name: [keys_C]})
        owned = {table: self.tables[table].peek(keys_O) for table, keys_O in route.owned.items()}
        return self.exchange.answer(route, owned)[name].rows(0).detach()

    def row_tiles(self, name: str) -> Iterator[RowTile]:
        """Yield (first row, weights of rows) over the whole table, tile by tile. Collective."""
        rows = self.tables[name].num_rows
        assert rows is not None
        for begin in range(0, rows, CHUNK):
            yield begin, self.peek(name, torch.arange(begin, min(begin + CHUNK, rows)))

    def apply(self, lookups: Lookups | Sequence[Lookups], lr: float) -> None:
        """Make one optimizer step from the gradients of one lookup or several micro-batches."""
        steps = [lookups] if isinstance(lookups, Lookups) else lookups
        self.update(add([self.exchange.collect(each.route, each) for each in steps]), lr)

    def update(self, gradients: Gradients, lr: float) -> None:
        """Make one optimizer step from collected gradients. Collective if there are replicas."""
        if self.replicas is not None:
            gradients = self.replicas.before_update(gradients)
        for name, (keys_O, grads_OD) in gradients.items():
            if keys_O.numel():
                self.tables[name].apply(keys_O, grads_OD, lr)
        if self.replicas is not None:
            self.replicas.after_update(self.tables, gradients)

    def settle(self) -> None:
        """Make replicas equal, before rows are saved or evaluated. Collective."""
        if self.replicas is not None:
            self.replicas.settle(self.tables)

    def all_rows(self, name: str) -> torch.Tensor:
        """Return the weights of rows 0 … num_rows - 1 of all ranks, to read only. Collective."""
        if self.exchange.keeps_whole(name):
            return self.tables[name].all_rows()
        return torch.cat([rows_CD for _, rows_CD in self.row_tiles(name)])

    def clear(self) -> None:
        """Reset every row to its first value; flushed files stay until the next flush."""
        for table in self.tables.values():
            table.clear()

    def close(self) -> None:
        """Close files and release locks, without flushing."""
        for table in self.tables.values():
            table.close()

    def state_dict(self) -> State:
        """Return every table's weights and state, flat: `table/weights`, `table/state.…`."""
        return {
            f"{name}/{key}": value
            for name, table in self.tables.items()
            for key, value in table.state_dict().items()
        }

    def load_state_dict(self, saved: State) -> None:
        """Load what `state_dict` returned."""
        for name, table in self.tables.items():
            start = f"{name}/"
            own = {k.removeprefix(start): v for k, v in saved.items() if k.startswith(start)}
            table.load_state_dict(own)


class TableRows:
    """The rows of a table as a search reads them: past every cache, tile by tile. Collective."""

    def __init__(self, tables: TableCollection, name: str) -> None:
        self._tables, self._name = tables, name

    @property
    def shape(self) -> tuple[int, int]:
        table = self._tables[self._name]
        assert table.num_rows is not None
        return table.num_rows, table.dim

    def take(self, rows_C: torch.Tensor) -> torch.Tensor:
        return self._tables.peek(self._name, rows_C)

    def tiles(self) -> Iterator[RowTile]:
        return self._tables.row_tiles(self._name)


def add(parts: Sequence[Gradients]) -> Gradients:
    """Sum gradients per table and key, in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    total: Gradients = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        keys, grads = zip(*(part[name] for part in parts if name in part), strict=True)
        unique_U, inverse_T = unique_keys(torch.cat(keys))
        total[name] = (unique_U, coalesce(torch.cat(grads), inverse_T, unique_U.numel()))
    return total
