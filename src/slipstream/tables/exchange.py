"""Keys travel to their owners, rows to whoever asked, gradients back: the exchange of one shard
group.

    route    each rank's distinct keys, bucketed by owner, all tables in one message per peer; the
             owner dedups them again
    answer   the owner's rows back to the askers, as leaf tensors
    collect  the leaves' gradients to the owners, summed over the askers in rank order

With one rank the same verbs send nothing. Rows that only the lists named in `half_lists`
(negatives) ask for travel in 16 bits, and so do their gradients; a key that any other list names
too travels exactly, once. A table whose optimizer moves every row is small by its own word: each
rank keeps it whole, lookups stay local and its gradients are summed over the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from slipstream.ops.rows import coalesce, take_rows, unique_keys
from slipstream.tables.communicator import Communicator
from slipstream.tables.embedding_table import EmbeddingTable, check_keys
from slipstream.tables.slices import Placement
from slipstream.tables.transport import Transport

Gradients = dict[str, tuple[torch.Tensor, torch.Tensor]]  # table -> (keys_O ascending, grads_OD)


@dataclass(frozen=True)
class Lookup:
    """The rows one table lent to one batch."""

    unique_U: torch.Tensor  # int64, ascending
    rows_UD: torch.Tensor  # leaf; its .grad is what the table will apply
    inverses: list[torch.Tensor]  # per key list: int64 places in unique_U, shaped like the keys

    def rows(self, which: int) -> torch.Tensor:
        """The rows of the `which`-th key list, one per key."""
        return take_rows(self.rows_UD, self.inverses[which])


@dataclass(frozen=True)
class KeyRequest:
    """What this rank asks of one table."""

    unique_U: torch.Tensor  # distinct keys, ascending
    inverses: list[torch.Tensor]
    # Per column of the table (exact, and where it has one, half), once keys were sent:
    grouped: list[torch.Tensor] = field(
        default_factory=list
    )  # places in unique_U, owner after owner
    places: list[torch.Tensor] = field(
        default_factory=list
    )  # of every key the ranks asked for, in rank order: its place in `owned`


@dataclass(frozen=True)
class Route:
    """Where the keys of one batch went; `owned` are the distinct keys this rank must serve,
    ascending, per table.
    """

    owned: dict[str, torch.Tensor]
    asked: dict[str, KeyRequest]
    sent_WC: list[list[int]] = field(default_factory=list)  # keys sent to rank w, per column
    received_WC: list[list[int]] = field(default_factory=list)


class Lookups(dict[str, Lookup]):
    """The lookups of one batch by table, and the route their gradients will take back."""

    def __init__(self, lookups: Mapping[str, Lookup], route: Route) -> None:
        super().__init__(lookups)
        self.route = route


@dataclass(frozen=True)
class Column:
    """One kind of message of one table: its rows as the transport says, or in 16 bits."""

    table: str
    half: bool


class Exchange:
    """The exchange of `tables` within one group of ranks (`group=None`: one rank).

    `half_lists` names, per table, the key lists (by their place in what `route` is given) whose
    rows may travel in 16 bits.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingTable],
        group: dist.ProcessGroup | None = None,
        *,
        transport: str = "exact",
        half_lists: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        self.tables, self.half_lists = dict(tables), dict(half_lists or {})
        self.communicator = (
            None if group is None or dist.get_world_size(group) == 1 else Communicator(group)
        )
        self.placement = Placement(1 if self.communicator is None else self.communicator.world)
        self.rank = 0 if self.communicator is None else self.communicator.rank
        self._sharded = [
            name
            for name, table in self.tables.items()
            if not table.optimizer.updates_untouched_rows
        ]
        self._columns = [
            Column(name, half)
            for name in self._sharded
            for half in (False, True)
            if not half or name in self.half_lists
        ]
        self.transport = Transport(transport, [self.tables[name].dtype for name in self._sharded])
        self.half_rows, self.half_gradients = (
            Transport(kind, [self.tables[name].dtype for name in self._sharded])
            for kind in ("half", "fp16")
        )

    def replicates(self, name: str) -> bool:
        """Whether every rank keeps a table whole because its optimizer moves all rows."""
        return name not in self._sharded

    def keeps_whole(self, name: str) -> bool:
        """Whether this rank holds all rows of a table."""
        return self.communicator is None or self.replicates(name)

    def on(self, group: dist.ProcessGroup) -> "Exchange":
        """The same exchange over another process group of the same ranks: a communicator of its
        own, for another thread.
        """
        return Exchange(
            self.tables, group, transport=self.transport.kind, half_lists=self.half_lists
        )

    def route(self, keys: Mapping[str, Sequence[torch.Tensor]]) -> Route:
        """Tell every owner which of its rows this batch needs. Collective: all ranks of the group
        take part, keys or none.
        """
        asked = {
            name: self._distinct(self.tables[name], list(lists)) for name, lists in keys.items()
        }
        if self.communicator is None:
            return Route({name: each.unique_U for name, each in asked.items()}, asked)
        nothing = torch.empty(0, dtype=torch.int64)
        grouped, sent_CW, sent_keys = [], [], []
        for column in self._columns:
            mine = asked.get(column.table, KeyRequest(nothing, []))
            places, counts_W = self._group_by_owner(mine.unique_U, self._travels(mine, column))
            grouped.append(places)
            sent_keys.append(mine.unique_U.index_select(0, places))
            sent_CW.append(counts_W)
        sent_WC = (
            torch.stack(sent_CW, dim=1)
            if sent_CW
            else torch.empty(self.communicator.world, 0, dtype=torch.int64)
        )
        received_WC = self.communicator.swap_counts(sent_WC).tolist()
        route = Route({}, {}, sent_WC.tolist(), received_WC)
        arrived = self._swap_keys(route, sent_keys)
        for name in self.tables:
            if name in self._sharded:
                columns = self._columns_of(name)
                route.owned[name], places_R = unique_keys(torch.cat([arrived[c] for c in columns]))
                mine = asked.get(name, KeyRequest(nothing, []))
                places_of = list(places_R.split([arrived[c].numel() for c in columns]))
                route.asked[name] = KeyRequest(
                    mine.unique_U, mine.inverses, [grouped[c] for c in columns], places_of
                )
            elif name in asked:
                route.owned[name], route.asked[name] = asked[name].unique_U, asked[name]
        return route

    def answer(self, route: Route, owned_rows: Mapping[str, torch.Tensor]) -> Lookups:
        """`owned_rows[name]` are the rows of `route.owned[name]`; every asker gets its own as leaf
        tensors. Collective.
        """
        rows = dict(owned_rows)
        if self.communicator is not None:
            sent = [
                (rows[column.table], _known(route, column).places[column.half])
                for column in self._columns
            ]
            arrived = self._swap_all(sent, route.received_WC, route.sent_WC, "rows")
            for name in self._sharded:
                table, mine = self.tables[name], route.asked[name]
                rows[name] = torch.empty(mine.unique_U.numel(), table.dim, dtype=table.dtype)
                for c, places_U in zip(self._columns_of(name), mine.grouped, strict=True):
                    rows[name][places_U] = arrived[c]
        lent = {
            name: Lookup(each.unique_U, rows[name].requires_grad_(), each.inverses)
            for name, each in route.asked.items()
        }
        return Lookups(lent, route)

    def collect(self, route: Route, lookups: Mapping[str, Lookup]) -> Gradients:
        """The gradients of all askers at their rows' owners: per table the owned keys and their
        summed gradients. Collective.
        """
        if self.communicator is None:
            return {name: (lookup.unique_U, gradient(lookup)) for name, lookup in lookups.items()}
        grads = {name: gradient(lookups[name]) for name in self._sharded}
        sent = [
            (grads[column.table], _known(route, column).grouped[column.half])
            for column in self._columns
        ]
        arrived = self._swap_all(sent, route.sent_WC, route.received_WC, "gradients")
        collected: Gradients = {}
        for name in self.tables:
            if name in self._sharded:
                owned_O, places_R = route.owned[name], torch.cat(route.asked[name].places)
                parts = torch.cat([arrived[c] for c in self._columns_of(name)])
                collected[name] = (owned_O, coalesce(parts, places_R, owned_O.numel()))
            elif name in lookups:
                collected[name] = (
                    lookups[name].unique_U,
                    self.communicator.sum_(gradient(lookups[name]).contiguous()),
                )
        return collected

    def _columns_of(self, name: str) -> list[int]:
        return [c for c, column in enumerate(self._columns) if column.table == name]

    def _travels(self, asked: KeyRequest, column: Column) -> torch.Tensor | None:
        """Places in unique_U of the keys that travel in a column, ascending; None for all of them."""
        half = self.half_lists.get(column.table)
        if half is None:
            return None
        exact_U = torch.zeros(asked.unique_U.numel(), dtype=torch.bool)
        for place, inverse in enumerate(asked.inverses):
            if place not in half:
                exact_U[inverse.reshape(-1)] = True
        return (exact_U != column.half).nonzero().squeeze(1)

    def _distinct(self, table: EmbeddingTable, lists: list[torch.Tensor]) -> KeyRequest:
        for keys in lists:
            check_keys(table.name, table.num_rows, keys)
        if (
            table.optimizer.updates_untouched_rows
        ):  # the update reads every row anyway, so the keys are their own places
            assert table.num_rows is not None
            return KeyRequest(torch.arange(table.num_rows), lists)
        return KeyRequest(*distinct(lists, table.num_rows))

    def _group_by_owner(
        self, unique_U: torch.Tensor, places_P: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the keys (those at `places_P`), owner after owner (ascending keys within), and
        how many each owner has.
        """
        owners_P = self.placement.owner_of(
            unique_U if places_P is None else unique_U.index_select(0, places_P)
        )
        counts_W = torch.bincount(owners_P, minlength=self.placement.world)
        order_P = owners_P.argsort(stable=True)
        return order_P if places_P is None else places_P.index_select(0, order_P), counts_W

    def _swap_keys(self, route: Route, keys: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self.communicator is not None
        widths = [1] * len(self._columns)
        sent = self.communicator.buffer("keys out", sum(map(sum, route.sent_WC)), torch.int64)
        splits = [
            keys[c].split([row[c] for row in route.sent_WC]) for c in range(len(self._columns))
        ]
        for w, c, part in segments(sent, route.sent_WC, widths):
            part.copy_(splits[c][w])
        received = self.communicator.swap(
            sent,
            [sum(row) for row in route.sent_WC],
            [sum(row) for row in route.received_WC],
            "keys",
        )
        return by_column(received, route.received_WC, widths)

    def _swap_all(
        self,
        sent: list[tuple[torch.Tensor, torch.Tensor]],
        send_WC: list[list[int]],
        receive_WC: list[list[int]],
        kind: str,
    ) -> list[torch.Tensor]:
        """Per column what arrived: the exact ones in one message per peer, those in 16 bits, where
        there are any, in another.
        """
        half = self.half_rows if kind == "rows" else self.half_gradients
        arrived: dict[int, torch.Tensor] = {}
        for transport, is_half in ((self.transport, False), (half, True)):
            chosen = [c for c, column in enumerate(self._columns) if column.half == is_half]
            if chosen:
                send, receive = (
                    [[row[c] for c in chosen] for row in counts_WC]
                    for counts_WC in (send_WC, receive_WC)
                )
                parts = self._swap_rows(
                    chosen, [sent[c] for c in chosen], send, receive, kind, transport
                )
                arrived |= dict(zip(chosen, parts, strict=True))
        return [arrived[c] for c in range(len(self._columns))]

    def _swap_rows(
        self,
        columns: list[int],
        sent: list[tuple[torch.Tensor, torch.Tensor]],
        send_WC: list[list[int]],
        receive_WC: list[list[int]],
        kind: str,
        transport: Transport,
    ) -> list[torch.Tensor]:
        """Send rows (source_ND at index_R, rank after rank) and receive others', as [sum over
        ranks, dim] per column.
        """
        assert self.communicator is not None
        of_column = [self.tables[self._columns[c].table] for c in columns]
        widths = [table.dim for table in of_column]
        sizes_out, sizes_in = (
            [sum(n * width for n, width in zip(row, widths, strict=True)) for row in counts_WC]
            for counts_WC in (send_WC, receive_WC)
        )
        flat = self.communicator.buffer("rows out", sum(sizes_out), transport.wide)
        indices = [
            index_R.split([row[c] for row in send_WC]) for c, (_, index_R) in enumerate(sent)
        ]
        for w, c, part in segments(flat, send_WC, widths):
            part.view(-1, widths[c]).copy_(sent[c][0].detach().index_select(0, indices[c][w]))
        received = transport.swap(self.communicator, flat, sizes_out, sizes_in, kind)
        parts = by_column(received, receive_WC, widths)
        return [
            part.view(-1, table.dim).to(table.dtype)
            for part, table in zip(parts, of_column, strict=True)
        ]


def by_column(
    flat: torch.Tensor, counts_WC: list[list[int]], widths: list[int]
) -> list[torch.Tensor]:
    """A received buffer (rank after rank, column after column) as one tensor per column, rank after
    rank; copies.
    """
    parts: list[list[torch.Tensor]] = [[] for _ in widths]
    for _, c, part in segments(flat, counts_WC, widths):
        parts[c].append(part)
    return [torch.cat(each) for each in parts]


def segments(
    flat: torch.Tensor, counts_WC: list[list[int]], widths: list[int]
) -> list[tuple[int, int, torch.Tensor]]:
    """(rank, column, its part) of a buffer laid out rank after rank and, within a rank, column
    after column.
    """
    found, at = [], 0
    for w, row in enumerate(counts_WC):
        for c, (count, width) in enumerate(zip(row, widths, strict=True)):
            found.append((w, c, flat[at : at + count * width]))
            at += count * width
    return found


def distinct(
    lists: list[torch.Tensor], num_rows: int | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sorted unique keys, and each key's place among them: by counting where the table is not much
    larger than the key lists.
    """
    if num_rows is None or num_rows > 8 * sum(keys.numel() for keys in lists):
        unique_U, inverse_T = unique_keys(torch.cat([keys.reshape(-1) for keys in lists]))
        parts = inverse_T.split([keys.numel() for keys in lists])
        return unique_U, [part.view(keys.shape) for part, keys in zip(parts, lists, strict=True)]
    counts_N = torch.zeros(num_rows, dtype=torch.int64)
    for keys in lists:
        counts_N += torch.bincount(keys.reshape(-1), minlength=num_rows)
    used_N = counts_N > 0
    unique_U = used_N.nonzero().squeeze(1)
    if (
        unique_U.numel() == num_rows
    ):  # many negatives over a small catalogue: keys are their own places
        return unique_U, lists
    places_N = used_N.cumsum(0) - 1
    return unique_U, [places_N.index_select(0, keys.reshape(-1)).view(keys.shape) for keys in lists]


def gradient(lookup: Lookup) -> torch.Tensor:
    """What the backward pass left at the leaf; zeros where it left nothing."""
    return (
        lookup.rows_UD.grad if lookup.rows_UD.grad is not None else torch.zeros_like(lookup.rows_UD)
    )


def _known(route: Route, column: Column) -> KeyRequest:
    asked = route.asked[column.table]
    assert asked.grouped, "a route of one rank was used by an exchange of many"
    return asked
