"""The exchange of keys, rows and gradients between the ranks that share the tables.

Touch this when the messages between ranks change; the format of a value is in transport.py.

    route    sends each rank's distinct keys to their owners, all tables in one message per peer;
             the owner removes duplicates between ranks
    answer   sends the owners' rows back to the ranks that requested them, as leaf tensors
    collect  sends the gradients of the leaves to the owners, and sums them in rank order

With one rank these methods send nothing. Rows that only the lists in `half_lists` (negatives)
request are sent in 16 bits, and so are their gradients; a key that another list requests too is
sent once, exactly. A table whose optimizer updates every row is small: each rank keeps it whole,
lookups are local and its gradients are summed over the ranks.
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
    """The rows that one batch has read from one table."""

    unique_U: torch.Tensor  # int64, ascending
    rows_UD: torch.Tensor  # leaf tensor; the table is updated from its .grad
    inverses: list[torch.Tensor]  # per key list: int64 places in unique_U, shaped like the keys

    def rows(self, which: int) -> torch.Tensor:
        """Return the rows of the `which`-th key list, one per key."""
        return take_rows(self.rows_UD, self.inverses[which])


@dataclass(frozen=True)
class KeyRequest:
    """The keys that this rank requests from one table.

    Once keys were sent, `grouped` and `places` have one entry per channel of the table: `grouped`
    holds places in `unique_U`, owner after owner; `places` holds, for every key that the ranks
    requested from this one, in rank order, its place in `Route.owned`.
    """

    unique_U: torch.Tensor  # distinct keys, ascending
    inverses: list[torch.Tensor]  # per key list: int64 places in unique_U, shaped like the keys
    grouped: list[torch.Tensor] = field(default_factory=list)
    places: list[torch.Tensor] = field(default_factory=list)


NO_KEYS = KeyRequest(torch.empty(0, dtype=torch.int64), [])


@dataclass(frozen=True)
class Route:
    """Where the keys of one batch were sent."""

    owned: dict[str, torch.Tensor]  # per table: distinct keys this rank must serve, ascending
    requests: dict[str, KeyRequest]
    sent_WC: list[list[int]] = field(default_factory=list)  # keys sent to rank w, per channel
    received_WC: list[list[int]] = field(default_factory=list)


class Lookups(dict[str, Lookup]):
    """The lookups of one batch by table, and the route for their gradients."""

    def __init__(self, lookups: Mapping[str, Lookup], route: Route) -> None:
        super().__init__(lookups)
        self.route = route


@dataclass(frozen=True)
class Channel:
    """Rows of one table in one format: that of the transport, or (`half`) 16 bits."""

    table: str
    half: bool


class Exchange:
    """The exchange of `tables` within one group of ranks (`group=None`: one rank).

    `half_lists` names, per table, the key lists (by their place in the argument of `route`) whose
    rows may be sent in 16 bits.
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
        self._channels = [
            Channel(name, half)
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
        """Return whether every rank keeps this table whole, because all rows are updated."""
        return name not in self._sharded

    def keeps_whole(self, name: str) -> bool:
        """Return whether this rank holds all rows of a table."""
        return self.communicator is None or self.replicates(name)

    def on(self, group: dist.ProcessGroup) -> "Exchange":
        """Make the same exchange over another group of the same ranks, for another thread."""
        return Exchange(
            self.tables, group, transport=self.transport.kind, half_lists=self.half_lists
        )

    def route(self, keys: Mapping[str, Sequence[torch.Tensor]]) -> Route:
        """Send every owner the keys that this batch needs from it.

        Collective: all ranks of the group take part, even without keys.
        """
        return self.route_parts([keys])[0]

    def route_parts(self, parts: Sequence[Mapping[str, Sequence[torch.Tensor]]]) -> list[Route]:
        """Send the keys of several batches together, in one message per peer; a route for each.

        Collective: all ranks of the group take part, with as many parts.
        """
        requests = [
            {name: self._distinct(self.tables[name], list(lists)) for name, lists in keys.items()}
            for keys in parts
        ]
        if self.communicator is None:
            return [
                Route({name: each.unique_U for name, each in one.items()}, one) for one in requests
            ]
        grouped, sent_keys, sent_CW = [], [], []  # part after part, each by channel
        for mine in requests:
            for channel in self._channels:
                request = mine.get(channel.table, NO_KEYS)
                places, counts_W = self._group_by_owner(
                    request.unique_U, self._keys_of(request, channel)
                )
                grouped.append(places)
                sent_keys.append(request.unique_U.index_select(0, places))
                sent_CW.append(counts_W)
        sent_WC = (
            torch.stack(sent_CW, dim=1)
            if sent_CW
            else torch.empty(self.communicator.world, 0, dtype=torch.int64)
        )
        received, sent = self.communicator.swap_counts(sent_WC).tolist(), sent_WC.tolist()
        arrived, step = self._swap_keys(sent, received, sent_keys), len(self._channels)
        routes = []
        for part, mine in enumerate(requests):
            own = slice(part * step, (part + 1) * step)
            counts = ([row[own] for row in sent], [row[own] for row in received])
            routes.append(self._arrived(mine, grouped[own], arrived[own], *counts))
        return routes

    def _arrived(
        self,
        requests: Mapping[str, KeyRequest],
        grouped: list[torch.Tensor],
        arrived: list[torch.Tensor],
        sent_WC: list[list[int]],
        received_WC: list[list[int]],
    ) -> Route:
        """Make the route of one batch, once the keys of all ranks have arrived."""
        route = Route({}, {}, sent_WC, received_WC)
        for name in self.tables:
            if name in self._sharded:
                channels = self._channels_of(name)
                route.owned[name], places_R = unique_keys(torch.cat([arrived[c] for c in channels]))
                mine = requests.get(name, NO_KEYS)
                places_of = list(places_R.split([arrived[c].numel() for c in channels]))
                route.requests[name] = KeyRequest(
                    mine.unique_U, mine.inverses, [grouped[c] for c in channels], places_of
                )
            elif name in requests:
                route.owned[name], route.requests[name] = requests[name].unique_U, requests[name]
        return route

    def answer(self, route: Route, owned_rows: Mapping[str, torch.Tensor]) -> Lookups:
        """Send rows to the ranks that requested them, and return this rank's own. Collective.

        `owned_rows[name]` are the rows of `route.owned[name]`. Lookups hold leaf tensors.
        """
        rows = dict(owned_rows)
        if self.communicator is not None:
            sent = [
                (rows[channel.table], _routed(route, channel).places[channel.half])
                for channel in self._channels
            ]
            arrived = self._swap_all(sent, route.received_WC, route.sent_WC, "rows")
            for name in self._sharded:
                table, mine = self.tables[name], route.requests[name]
                rows[name] = torch.empty(mine.unique_U.numel(), table.dim, dtype=table.dtype)
                for c, places_U in zip(self._channels_of(name), mine.grouped, strict=True):
                    rows[name][places_U] = arrived[c]
        lookups = {
            name: Lookup(each.unique_U, rows[name].requires_grad_(), each.inverses)
            for name, each in route.requests.items()
        }
        return Lookups(lookups, route)

    def collect(self, route: Route, lookups: Mapping[str, Lookup]) -> Gradients:
        """Send the gradients that backward left to the owners of their rows. Collective."""
        return self.sum_at_owners(
            route, {name: (each.unique_U, gradient(each)) for name, each in lookups.items()}
        )

    def sum_at_owners(self, route: Route, gradients: Gradients) -> Gradients:
        """Send gradients to the owners of their rows and sum them there. Collective.

        Returns per table the keys this rank owns and their summed gradients.
        """
        if self.communicator is None:
            return gradients
        sent = [
            (gradients[channel.table][1], _routed(route, channel).grouped[channel.half])
            for channel in self._channels
        ]
        arrived = self._swap_all(sent, route.sent_WC, route.received_WC, "gradients")
        collected: Gradients = {}
        for name in self.tables:
            if name in self._sharded:
                owned_O, places_R = route.owned[name], torch.cat(route.requests[name].places)
                parts = torch.cat([arrived[c] for c in self._channels_of(name)])
                collected[name] = (owned_O, coalesce(parts, places_R, owned_O.numel()))
            elif name in gradients:
                keys_U, grads_UD = gradients[name]
                collected[name] = (keys_U, self.communicator.sum_(grads_UD.contiguous()))
        return collected

    def _channels_of(self, name: str) -> list[int]:
        return [c for c, channel in enumerate(self._channels) if channel.table == name]

    def _keys_of(self, request: KeyRequest, channel: Channel) -> torch.Tensor | None:
        """Return the places in unique_U of a channel's keys, ascending; None means all keys."""
        half = self.half_lists.get(channel.table)
        if half is None:
            return None
        exact_U = torch.zeros(request.unique_U.numel(), dtype=torch.bool)
        for place, inverse in enumerate(request.inverses):
            if place not in half:
                exact_U[inverse.reshape(-1)] = True
        return (exact_U != channel.half).nonzero().squeeze(1)

    def _distinct(self, table: EmbeddingTable, lists: list[torch.Tensor]) -> KeyRequest:
        for keys in lists:
            check_keys(table.name, table.num_rows, keys)
        if table.optimizer.updates_untouched_rows:
            # The update reads every row anyway, so the keys are their own places.
            assert table.num_rows is not None
            return KeyRequest(torch.arange(table.num_rows), lists)
        return KeyRequest(*distinct(lists, table.num_rows))

    def _group_by_owner(
        self, unique_U: torch.Tensor, places_P: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the keys (those at `places_P`) by owner; returns places, and a count per owner."""
        owners_P = self.placement.owner_of(
            unique_U if places_P is None else unique_U.index_select(0, places_P)
        )
        counts_W = torch.bincount(owners_P, minlength=self.placement.world)
        order_P = owners_P.argsort(stable=True)
        return order_P if places_P is None else places_P.index_select(0, order_P), counts_W

    def _swap_keys(
        self, sent_WC: list[list[int]], received_WC: list[list[int]], keys: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Swap lists of keys, each sorted by owner; returns what arrived for each list."""
        assert self.communicator is not None
        widths = [1] * len(keys)
        sent = self.communicator.buffer("keys out", sum(map(sum, sent_WC)), torch.int64)
        splits = [each.split([row[c] for row in sent_WC]) for c, each in enumerate(keys)]
        for w, c, part in segments(sent, sent_WC, widths):
            part.copy_(splits[c][w])
        received = self.communicator.swap(
            sent, [sum(row) for row in sent_WC], [sum(row) for row in received_WC], "keys"
        )
        return by_channel(received, received_WC, widths)

    def _swap_all(
        self,
        sent: list[tuple[torch.Tensor, torch.Tensor]],
        send_WC: list[list[int]],
        receive_WC: list[list[int]],
        kind: str,
    ) -> list[torch.Tensor]:
        """Swap rows of all channels; returns what arrived per channel.

        Exact rows are one message per peer; rows in 16 bits, if there are any, are another.
        """
        half = self.half_rows if kind == "rows" else self.half_gradients
        arrived: dict[int, torch.Tensor] = {}
        for transport, is_half in ((self.transport, False), (half, True)):
            chosen = [c for c, channel in enumerate(self._channels) if channel.half == is_half]
            if chosen:
                send, receive = (
                    [[row[c] for c in chosen] for row in counts_WC]
                    for counts_WC in (send_WC, receive_WC)
                )
                parts = self._swap_rows(
                    chosen, [sent[c] for c in chosen], send, receive, kind, transport
                )
                arrived |= dict(zip(chosen, parts, strict=True))
        return [arrived[c] for c in range(len(self._channels))]

    def _swap_rows(
        self,
        channels: list[int],
        sent: list[tuple[torch.Tensor, torch.Tensor]],
        send_WC: list[list[int]],
        receive_WC: list[list[int]],
        kind: str,
        transport: Transport,
    ) -> list[torch.Tensor]:
        """Swap rows (source_ND at index_R, rank after rank); per channel [sum over ranks, dim]."""
        assert self.communicator is not None
        tables = [self.tables[self._channels[c].table] for c in channels]
        widths = [table.dim for table in tables]
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
        parts = by_channel(received, receive_WC, widths)
        return [
            part.view(-1, table.dim).to(table.dtype)
            for part, table in zip(parts, tables, strict=True)
        ]


def by_channel(
    flat: torch.Tensor, counts_WC: list[list[int]], widths: list[int]
) -> list[torch.Tensor]:
    """Copy a received buffer into one tensor per channel, rank after rank."""
    parts: list[list[torch.Tensor]] = [[] for _ in widths]
    for _, c, part in segments(flat, counts_WC, widths):
        parts[c].append(part)
    return [torch.cat(each) for each in parts]


def segments(
    flat: torch.Tensor, counts_WC: list[list[int]], widths: list[int]
) -> list[tuple[int, int, torch.Tensor]]:
    """Return (rank, channel, its part) of a buffer: rank after rank, within one by channel."""
    found, at = [], 0
    for w, row in enumerate(counts_WC):
        for c, (count, width) in enumerate(zip(row, widths, strict=True)):
            found.append((w, c, flat[at : at + count * width]))
            at += count * width
    return found


def distinct(
    lists: list[torch.Tensor], num_rows: int | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sorted unique keys, and each key's place among them.

    It counts where the table is much smaller than the key lists.
    """
    if num_rows is None or 16 * num_rows > sum(keys.numel() for keys in lists):
        unique_U, inverse_T = unique_keys(torch.cat([keys.reshape(-1) for keys in lists]))
        if unique_U.numel() == num_rows:  # many negatives, few items: keys are their own places
            return unique_U, lists
        parts = inverse_T.split([keys.numel() for keys in lists])
        return unique_U, [part.view(keys.shape) for part, keys in zip(parts, lists, strict=True)]
    counts_N = torch.zeros(num_rows, dtype=torch.int64)
    for keys in lists:
        counts_N += torch.bincount(keys.reshape(-1), minlength=num_rows)
    used_N = counts_N > 0
    unique_U = used_N.nonzero().squeeze(1)
    if unique_U.numel() == num_rows:
        return unique_U, lists
    places_N = used_N.cumsum(0) - 1
    return unique_U, [places_N.index_select(0, keys.reshape(-1)).view(keys.shape) for keys in lists]


def gradient(lookup: Lookup) -> torch.Tensor:
    """Return the gradient of the looked-up rows; zeros if the backward pass did not reach them."""
    grad = lookup.rows_UD.grad
    return grad if grad is not None else torch.zeros_like(lookup.rows_UD)


def _routed(route: Route, channel: Channel) -> KeyRequest:
    request = route.requests[channel.table]
    assert request.grouped, "a route of one rank was used by an exchange of many"
    return request
