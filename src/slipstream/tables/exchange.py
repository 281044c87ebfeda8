"""Keys travel to their owners, rows to whoever asked, gradients back: the exchange of one shard group.

    route    each rank's distinct keys, bucketed by owner, all tables in one message per peer; the owner dedups them again
    answer   the owner's rows back to the askers, as leaf tensors
    collect  the leaves' gradients to the owners, summed over the askers in rank order

With one rank the same verbs send nothing. A table whose rule moves every row is small by its own word: each rank keeps it whole,
lookups stay local and its gradients are summed over the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from slipstream.ops.rows import coalesce, take_rows, unique_keys
from slipstream.tables.lanes import Lane
from slipstream.tables.slices import Placement
from slipstream.tables.tier import Tier, check_keys
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
class Asked:
    """What this rank asks of one table."""

    unique_U: torch.Tensor  # distinct keys, ascending
    inverses: list[torch.Tensor]
    grouped_U: torch.Tensor | None = None  # places in unique_U, owner after owner; None where nothing is sent
    places_R: torch.Tensor | None = None  # for every key the ranks asked this one for, in rank order: its place in `owned`


@dataclass(frozen=True)
class Route:
    """Where the keys of one batch went; `owned` are the distinct keys this rank must serve, ascending, per table."""

    owned: dict[str, torch.Tensor]
    asked: dict[str, Asked]
    sent_WC: list[list[int]] = field(default_factory=list)  # keys sent to rank w, per sent table
    received_WC: list[list[int]] = field(default_factory=list)


class Lookups(dict[str, Lookup]):
    """The lookups of one batch by table, and the route their gradients will take back."""

    def __init__(self, lookups: Mapping[str, Lookup], route: Route) -> None:
        super().__init__(lookups)
        self.route = route


class Exchange:
    """The exchange of `tables` within one group of ranks (`group=None`: one rank)."""

    def __init__(self, tables: Mapping[str, Tier], group: dist.ProcessGroup | None = None, *, transport: str = "exact") -> None:
        self.tables = dict(tables)
        self.lane = None if group is None or dist.get_world_size(group) == 1 else Lane(group)
        self.placement = Placement(1 if self.lane is None else self.lane.world)
        self.rank = 0 if self.lane is None else self.lane.rank
        self._sharded = [name for name, table in self.tables.items() if not table.rule.moves_untouched_rows]
        self.transport = Transport(transport, [self.tables[name].dtype for name in self._sharded])

    def replicates(self, name: str) -> bool:
        """Whether every rank keeps a table whole because its rule moves all rows."""
        return name not in self._sharded

    def keeps_whole(self, name: str) -> bool:
        """Whether this rank holds all rows of a table."""
        return self.lane is None or self.replicates(name)

    def on(self, group: dist.ProcessGroup) -> "Exchange":
        """The same exchange over another process group of the same ranks: a lane of its own, for another thread."""
        return Exchange(self.tables, group, transport=self.transport.kind)

    def route(self, keys: Mapping[str, Sequence[torch.Tensor]]) -> Route:
        """Tell every owner which of its rows this batch needs. Collective: all ranks of the group take part, keys or none."""
        asked = {name: self._distinct(self.tables[name], list(lists)) for name, lists in keys.items()}
        if self.lane is None:
            return Route({name: each.unique_U for name, each in asked.items()}, asked)
        nothing = torch.empty(0, dtype=torch.int64)
        grouped, sent_CW, keys_CU = {}, [], {}
        for name in self._sharded:
            unique_U = asked[name].unique_U if name in asked else nothing
            grouped[name], counts_W = self._group_by_owner(unique_U)
            keys_CU[name] = unique_U.index_select(0, grouped[name])
            sent_CW.append(counts_W)
        sent_WC = torch.stack(sent_CW, dim=1) if sent_CW else torch.empty(self.lane.world, 0, dtype=torch.int64)
        received_WC = self.lane.swap_counts(sent_WC).tolist()
        route = Route({}, {}, sent_WC.tolist(), received_WC)
        arrived = self._swap_keys(route, keys_CU)
        for name in self.tables:
            if name in self._sharded:
                route.owned[name], places_R = unique_keys(arrived[name])
                mine = asked.get(name, Asked(nothing, []))
                route.asked[name] = Asked(mine.unique_U, mine.inverses, grouped[name], places_R)
            elif name in asked:
                route.owned[name], route.asked[name] = asked[name].unique_U, asked[name]
        return route

    def answer(self, route: Route, owned_rows: Mapping[str, torch.Tensor]) -> Lookups:
        """`owned_rows[name]` are the rows of `route.owned[name]`; every asker gets its own as leaf tensors. Collective."""
        rows = dict(owned_rows)
        if self.lane is not None:
            sent = {name: (rows[name], _known(route.asked[name].places_R)) for name in self._sharded}
            arrived = self._swap_rows(sent, route.received_WC, route.sent_WC, "rows")
            for name in self._sharded:
                table, mine = self.tables[name], route.asked[name]
                rows[name] = torch.empty(mine.unique_U.numel(), table.dim, dtype=table.dtype)
                rows[name][_known(mine.grouped_U)] = arrived[name]
        lent = {name: Lookup(each.unique_U, rows[name].requires_grad_(), each.inverses) for name, each in route.asked.items()}
        return Lookups(lent, route)

    def collect(self, route: Route, lookups: Mapping[str, Lookup]) -> Gradients:
        """The gradients of all askers at their rows' owners: per table the owned keys and their summed gradients. Collective."""
        if self.lane is None:
            return {name: (lookup.unique_U, gradient(lookup)) for name, lookup in lookups.items()}
        sent = {name: (gradient(lookups[name]), _known(route.asked[name].grouped_U)) for name in self._sharded}
        arrived = self._swap_rows(sent, route.sent_WC, route.received_WC, "gradients")
        collected: Gradients = {}
        for name in self.tables:
            if name in self._sharded:
                owned_O = route.owned[name]
                collected[name] = (owned_O, coalesce(arrived[name], _known(route.asked[name].places_R), owned_O.numel()))
            elif name in lookups:
                collected[name] = (lookups[name].unique_U, self.lane.sum_(gradient(lookups[name]).contiguous()))
        return collected

    def _distinct(self, table: Tier, lists: list[torch.Tensor]) -> Asked:
        for keys in lists:
            check_keys(table.name, table.num_rows, keys)
        if table.rule.moves_untouched_rows:  # the update reads every row anyway, so the keys are their own places
            assert table.num_rows is not None
            return Asked(torch.arange(table.num_rows), lists)
        return Asked(*distinct(lists, table.num_rows))

    def _group_by_owner(self, unique_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the keys, owner after owner (ascending keys within), and how many each owner has."""
        owners_U = self.placement.owner_of(unique_U)
        counts_W = torch.bincount(owners_U, minlength=self.placement.world)
        return owners_U.argsort(stable=True), counts_W

    def _swap_keys(self, route: Route, keys: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self.lane is not None
        widths = [1] * len(self._sharded)
        sent = self.lane.buffer("keys out", sum(map(sum, route.sent_WC)), torch.int64)
        splits = {name: keys[name].split([row[c] for row in route.sent_WC]) for c, name in enumerate(self._sharded)}
        for w, c, part in segments(sent, route.sent_WC, widths):
            part.copy_(splits[self._sharded[c]][w])
        received = self.lane.swap(sent, [sum(row) for row in route.sent_WC], [sum(row) for row in route.received_WC], "keys")
        return self._by_table(received, route.received_WC, widths)

    def _swap_rows(
        self,
        sent: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        send_WC: list[list[int]],
        receive_WC: list[list[int]],
        kind: str,
    ) -> dict[str, torch.Tensor]:
        """Send rows (source_ND at index_R, rank after rank) and receive others', as [sum over ranks, dim] per table."""
        assert self.lane is not None
        widths, transport = [self.tables[name].dim for name in self._sharded], self.transport
        sizes_out, sizes_in = (
            [sum(n * width for n, width in zip(row, widths, strict=True)) for row in counts_WC]
            for counts_WC in (send_WC, receive_WC)
        )
        flat = self.lane.buffer("rows out", sum(sizes_out), transport.wide)
        indices = {name: sent[name][1].split([row[c] for row in send_WC]) for c, name in enumerate(self._sharded)}
        for w, c, part in segments(flat, send_WC, widths):
            name = self._sharded[c]
            part.view(-1, widths[c]).copy_(sent[name][0].detach().index_select(0, indices[name][w]))
        received = transport.swap(self.lane, flat, sizes_out, sizes_in, kind)
        return {
            name: part.view(-1, width).to(self.tables[name].dtype)
            for (name, part), width in zip(self._by_table(received, receive_WC, widths).items(), widths, strict=True)
        }

    def _by_table(self, flat: torch.Tensor, counts_WC: list[list[int]], widths: list[int]) -> dict[str, torch.Tensor]:
        """A received buffer (rank after rank, table after table) as one tensor per table, rank after rank; copies."""
        parts: list[list[torch.Tensor]] = [[] for _ in widths]
        for _, c, part in segments(flat, counts_WC, widths):
            parts[c].append(part)
        return {name: torch.cat(parts[c]) for c, name in enumerate(self._sharded)}


def segments(flat: torch.Tensor, counts_WC: list[list[int]], widths: list[int]) -> list[tuple[int, int, torch.Tensor]]:
    """(rank, table, its part) of a buffer laid out rank after rank and, within a rank, table after table."""
    found, at = [], 0
    for w, row in enumerate(counts_WC):
        for c, (count, width) in enumerate(zip(row, widths, strict=True)):
            found.append((w, c, flat[at : at + count * width]))
            at += count * width
    return found


def distinct(lists: list[torch.Tensor], num_rows: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sorted unique keys, and each key's place among them: by counting where the table is not much larger than the key lists."""
    if num_rows is None or num_rows > 8 * sum(keys.numel() for keys in lists):
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


def gradient(lookup: Lookup) -> torch.Tensor:
    """What the backward pass left at the leaf; zeros where it left nothing."""
    return lookup.rows_UD.grad if lookup.rows_UD.grad is not None else torch.zeros_like(lookup.rows_UD)


def _known(index: torch.Tensor | None) -> torch.Tensor:
    assert index is not None, "a route of one rank was used by an exchange of many"
    return index
