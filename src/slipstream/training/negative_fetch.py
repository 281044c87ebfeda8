"""Negatives fetched in segments: memory for two segments of rows, however many negatives. Exact.

Forward: the groups of a step are cut into segments; the distinct rows of a segment come from
wherever they live (this rank's memory, a disk, their owners among the ranks), and the next segment
is fetched while one is scored. A softmax weight per (token, negative) stays. Update: a row's
gradient is the weighted sum of the tokens it was scored with, so it is added up chunk of keys after
chunk of keys, sent to the owners, and updates those rows at once; a matrix of all rows' gradients
never exists either. Touch this when negatives need less memory or other rows.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from slipstream.errors import SlipstreamError
from slipstream.ops.grouped_losses import GroupedSoftmaxInputs, backend_steps
from slipstream.ops.grouped_types import GroupWeights, TokenGroups, weight_starts
from slipstream.ops.rows import unique_keys
from slipstream.pipeline.current_rows import RowSource
from slipstream.tables.collection import TableCollection, add
from slipstream.tables.communicator import Communicator
from slipstream.tables.embedding_table import EmbeddingTable
from slipstream.tables.exchange import Exchange, Gradients
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.replicas import AveragedWeights, Replicas, SummedGradients
from slipstream.tables.transport import half_rounded
from slipstream.training.device import HOST, DeviceTransfer

_ONLY_LIST = 0  # a segment is one list of keys
_BUCKETS_PER_CHUNK = 16  # neighbouring keys one thread adds up at a time


def refuse_chunked_updates(table: EmbeddingTable, replicas: Replicas | None) -> None:
    """Raise where updating a table chunk after chunk would not be one step of it."""
    if table.optimizer.updates_untouched_rows:
        raise SlipstreamError(
            "loss.fetch=segmented updates rows in chunks, but "
            f"tables.optimizer={table.optimizer.name} updates every row at every step; "
            "use tables.optimizer=rowwise_adam or rowwise_adagrad, or loss.fetch=whole"
        )
    if table.forgets:
        raise SlipstreamError(
            f"loss.fetch=segmented updates rows in chunks, but table '{table.name}' may forget "
            "rows in between (tables.admit_after, tables.max_rows); keep every row, or use "
            "loss.fetch=whole"
        )
    if isinstance(replicas, AveragedWeights):
        raise SlipstreamError(
            "loss.fetch=segmented needs tables.replicas=exact: averaged replicas count every "
            "update as a step"
        )


@dataclass(frozen=True)
class Segment:
    """Distinct rows of some groups' negatives."""

    keys_U: torch.Tensor
    rows_UD: torch.Tensor  # 16 bits where the fetch is in 16 bits
    index_XR: torch.Tensor


@dataclass(frozen=True)
class FetchConfig:
    """How negatives are compared and how much of them may be in memory."""

    segment_bytes: int
    normalize: bool = True
    half: bool = False
    # Fetch the next segment in a thread; None: where rows are waited for (other ranks, a disk).
    ahead: bool | None = None


class SegmentedFetch:
    """Fetches a table's rows for negatives, segment after segment. Collective to build and use."""

    def __init__(
        self,
        tables: TableCollection,
        name: str,
        config: FetchConfig,
        group: dist.ProcessGroup | None = None,
        transfer: DeviceTransfer | None = None,
    ) -> None:
        self.transfer = transfer or DeviceTransfer(HOST)
        self.tables, self.name, self.config = tables, name, config
        self.table = tables[name]
        self.rows: RowSource = self.table
        refuse_chunked_updates(self.table, tables.replicas)
        half_lists = {name: frozenset([_ONLY_LIST])} if config.half else None
        only = {name: self.table}
        self.exchange = Exchange(
            only, group, transport=tables.exchange.transport.kind, half_lists=half_lists
        )
        waits = self.exchange.communicator is not None or not isinstance(self.table, MemoryTable)
        self.ahead = waits if config.ahead is None else config.ahead
        row_bytes = self.table.dim * (2 if config.half else self.table.dtype.itemsize)
        self.rows_per_segment = max(1, config.segment_bytes // row_bytes)

    def cut(self, groups: TokenGroups, per_set: int) -> list[tuple[int, int]]:
        """Return ranges of one group or more whose negatives fill a buffer if all differ."""
        if self.table.num_rows is not None and self.table.num_rows <= self.rows_per_segment:
            return [(0, groups.count)] if groups.count else []
        sets, ranges, first = max(1, self.rows_per_segment // per_set), [], 0
        while first < groups.count:
            full = (
                int(
                    torch.searchsorted(
                        groups.set_offsets_G1, groups.set_offsets_G1[first] + sets, right=True
                    )
                )
                - 1
            )
            ranges.append((first, max(first + 1, min(full, groups.count))))
            first = ranges[-1][1]
        return ranges

    def most(self, counts: list[int]) -> list[int]:
        """Return the largest of each number over the ranks that share the rows. Collective."""
        return _most(self.exchange.communicator, counts)

    def most_of_replicas(self, counts: list[int]) -> list[int]:
        """Return the largest of each number over all ranks. Collective."""
        counts, replicas = self.most(counts), self.tables.replicas
        return (
            _most(replicas.communicator, counts)
            if isinstance(replicas, SummedGradients)
            else counts
        )

    def take_part(self) -> None:
        """Serve the segments of other ranks where this rank has no negatives. Collective."""
        nothing = torch.empty(0, 1, dtype=torch.int64)
        for _ in self.segments([nothing] * self.most([0])[0]):
            pass

    def update(self, gradients: Gradients, lr: float) -> None:
        """Make one optimizer step of these rows; replicas sum first. Collective."""
        if self.tables.replicas is not None:
            gradients = self.tables.replicas.before_update(gradients)
        keys_O, grads_OD = gradients[self.name]
        if keys_O.numel():
            self.rows.apply(keys_O, grads_OD, lr)

    def no_gradients(self) -> Gradients:
        """Return the gradients of no rows."""
        grads_OD = torch.empty(0, self.table.dim, dtype=self.table.dtype)
        return {self.name: (torch.empty(0, dtype=torch.int64), grads_OD)}

    def segments(self, keys: list[torch.Tensor]) -> Iterator[Segment]:
        """Yield the segments of these key matrices; while one is in use only the next is fetched.

        Collective: every rank gives as many matrices.
        """
        if not self.ahead:
            yield from map(self._fetch, keys)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="slipstream-negatives") as thread:
            coming = thread.submit(self._fetch, keys[0]) if keys else None
            for place in range(len(keys)):
                assert coming is not None
                now = coming.result()
                coming = (
                    thread.submit(self._fetch, keys[place + 1]) if place + 1 < len(keys) else None
                )
                yield now
                del now

    def compared(self, rows_UD: torch.Tensor) -> torch.Tensor:
        """Return rows as the loss compares them, in the table's type."""
        rows_UD = rows_UD.to(self.table.dtype)
        return F.normalize(rows_UD, dim=-1, eps=1e-6) if self.config.normalize else rows_UD

    @torch.no_grad()
    def _fetch(self, keys_XR: torch.Tensor) -> Segment:
        route = self.exchange.route({self.name: [keys_XR]})
        owned = {self.name: self.rows.gather(route.owned[self.name])}
        lookup = self.exchange.answer(route, owned)[self.name]
        rows_UD = lookup.rows_UD.detach()
        return Segment(
            lookup.unique_U,
            half_rounded(rows_UD).to(torch.float16) if self.config.half else rows_UD,
            lookup.inverses[_ONLY_LIST],
        )


@dataclass
class SegmentedStep:
    """The negatives of one micro-batch: scored by `loss`, updated by `update_segmented`."""

    fetch: SegmentedFetch
    keys_XR: torch.Tensor
    groups: TokenGroups
    scored: GroupWeights | None = None
    # Hidden states times the gradient of their loss.
    source_SD: torch.Tensor | None = field(default=None, repr=False)

    def loss(
        self,
        hidden_SD: torch.Tensor,
        targets_SD: torch.Tensor,
        target_keys_S: torch.Tensor,
        temperature: float,
        target_log_q_S: torch.Tensor | None,
        log_q_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the softmax loss of each token.

        Gradients reach hidden_SD and targets_SD; those of the negatives stay here for the update.
        """
        return _SegmentedSoftmax.apply(
            hidden_SD, targets_SD, self, target_keys_S, temperature, target_log_q_S, log_q_N
        )

    def score(
        self,
        hidden_SD: torch.Tensor,
        targets_SD: torch.Tensor,
        target_keys_S: torch.Tensor,
        temperature: float,
        target_log_q_S: torch.Tensor | None,
        log_q_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the forward pass over all segments."""
        backend, groups, per_set = backend_steps(hidden_SD), self.groups, self.keys_XR.shape[1]
        block, copy = backend.block_size(groups), self.fetch.transfer.copy
        places_G1 = weight_starts(groups, per_set, block)
        weights = hidden_SD.new_empty(int(places_G1[-1]))
        loss_S, target_weights_S = hidden_SD.new_empty(2, len(hidden_SD)).unbind()
        unit_SD = torch.empty_like(hidden_SD, memory_format=torch.contiguous_format)
        ranges = self.fetch.cut(groups, per_set)
        set_ranges = [
            tuple(groups.set_offsets_G1[[first, last]].tolist()) for first, last in ranges
        ]
        keys = [self.keys_XR[begin:end] for begin, end in set_ranges]
        keys += [self.keys_XR[:0]] * (self.fetch.most([len(keys)])[0] - len(keys))
        place = -1  # counted by hand: enumerate would hold on to the segment before
        for segment in self.fetch.segments(keys):
            place += 1
            if place >= len(ranges):
                continue
            first, last = ranges[place]
            tokens = slice(*groups.offsets_G1[[first, last]].tolist())
            inputs = GroupedSoftmaxInputs(
                hidden_SD[tokens],
                targets_SD[tokens],
                _places_of(target_keys_S[tokens], copy(segment.keys_U)),
                self.fetch.compared(copy(segment.rows_UD)),
                copy(segment.index_XR),
                groups.take(first, last).map(copy),
                temperature,
                None if target_log_q_S is None else target_log_q_S[tokens],
                None if log_q_N is None else log_q_N[copy(keys[place])],
            )
            loss_S[tokens], part = backend.score(
                inputs, block=block, weights=weights[places_G1[first] : places_G1[last]]
            )
            target_weights_S[tokens], unit_SD[tokens] = part.target_weights_T, part.unit_TD
            del segment, inputs, part
        self.scored = GroupWeights(
            groups.map(copy), per_set, block, copy(places_G1), weights, target_weights_S, unit_SD
        )
        return loss_S

    def chunks(self, chunks: int, below: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield chunk after chunk of neighbouring keys: this rank's, with their gradients."""
        if self.scored is None or self.source_SD is None or self.keys_XR.numel() == 0:
            yield from (self.fetch.no_gradients()[self.fetch.name] for _ in range(chunks))
            return
        copy, source_SD = self.fetch.transfer.copy, self.source_SD.contiguous()
        keys_E = self.keys_XR.contiguous().view(-1)
        on_host = backend_steps(torch.empty(0, dtype=source_SD.dtype))
        order_E, starts = on_host.sort_into_buckets(keys_E, below, chunks * _BUCKETS_PER_CHUNK)
        backend, entries_E = backend_steps(source_SD), copy(order_E)
        group_of_set_X = copy(self.groups.of_sets().to(torch.int32))
        for chunk in range(chunks):
            buckets = chunk * _BUCKETS_PER_CHUNK, (chunk + 1) * _BUCKETS_PER_CHUNK
            mine_E = keys_E[order_E[starts[buckets[0]] : starts[buckets[1]]].to(torch.int64)]
            keys_U, place_E = unique_keys(mine_E)
            grads_UD = source_SD.new_zeros(keys_U.numel(), source_SD.shape[1])
            backend.add_bucket_gradients(
                grads_UD,
                source_SD,
                self.scored,
                group_of_set_X,
                entries_E,
                starts,
                buckets,
                copy(place_E),
                by_position=True,
            )
            yield keys_U, grads_UD.to(HOST)


class SegmentedRows:
    """The negatives of a schedule's step: `pipeline.work.OnDemandRows`."""

    def __init__(self, fetch: SegmentedFetch) -> None:
        self.fetch, self.table = fetch, fetch.name
        self.steps: list[SegmentedStep] = []  # micro-batches of the running step

    def connect(self, rows: RowSource) -> None:
        self.fetch.rows = rows

    def take_part(self) -> None:
        self.fetch.take_part()

    def update(self, gradients: Gradients, lr: float) -> None:
        update_segmented(self.fetch, self.steps, gradients, lr)
        self.steps.clear()


def update_segmented(
    fetch: SegmentedFetch, steps: Sequence[SegmentedStep], collected: Gradients, lr: float
) -> None:
    """Update every row of the table from the micro-batches of one optimiser step. Collective.

    `collected` holds the gradients of the ordinary lookups of this table at their owners.
    """
    name, below = fetch.name, fetch.table.num_rows or (1 << 62)
    others_O, other_grads_OD = collected[name]
    distinct = min(sum(step.keys_XR.numel() for step in steps), below)
    chunks = fetch.most_of_replicas([max(1, -(-distinct // fetch.rows_per_segment))])[0]
    parts = [step.chunks(chunks, below) for step in steps]
    begin = 0
    for chunk in range(chunks):
        end = int(torch.searchsorted(others_O, -(-below * (chunk + 1) // chunks)))
        part = {name: (others_O[begin:end], other_grads_OD[begin:end])}
        negatives = add([{name: next(each)} for each in parts]) if parts else fetch.no_gradients()
        fetch.update(add([part, {name: _at_owners(fetch, negatives)}]), lr)
        begin = end
    for step in steps:
        step.scored = step.source_SD = None


def _at_owners(fetch: SegmentedFetch, mine: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum gradients at the owners of their keys, and turn them into gradients of the rows."""
    exchange, name = fetch.exchange, fetch.name
    owned_O, grads_OD = mine[name]
    if exchange.communicator is not None:
        route = exchange.route({name: [owned_O]})
        owned_O, grads_OD = exchange.sum_at_owners(route, mine)[name]
    rows_OD = fetch.rows.gather(owned_O)
    if fetch.config.half:
        rows_OD = half_rounded(rows_OD)
    return owned_O, _through_comparison(rows_OD, grads_OD, fetch.config.normalize)


def _most(communicator: Communicator | None, counts: list[int]) -> list[int]:
    if communicator is None:
        return counts
    return communicator.gather_counts(torch.tensor(counts)).amax(0).tolist()


def _through_comparison(
    rows_OD: torch.Tensor, grads_OD: torch.Tensor, normalize: bool
) -> torch.Tensor:
    """Return the gradient of the rows from that of their directions."""
    if not normalize or rows_OD.numel() == 0:
        return grads_OD
    with torch.enable_grad():
        leaf_OD = rows_OD.detach().requires_grad_()
        return torch.autograd.grad(F.normalize(leaf_OD, dim=-1, eps=1e-6), leaf_OD, grads_OD)[0]


def _places_of(asked_S: torch.Tensor, keys_U: torch.Tensor) -> torch.Tensor:
    """Return where keys stand among ascending keys; -1 where they do not."""
    if keys_U.numel() == 0:
        return torch.full_like(asked_S, -1)
    place_S = torch.searchsorted(keys_U, asked_S).clamp(max=keys_U.numel() - 1)
    return torch.where(keys_U[place_S] == asked_S, place_S, -1)


class _SegmentedSoftmax(torch.autograd.Function):
    """The autograd function of a segmented step."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_SD: torch.Tensor,
        targets_SD: torch.Tensor,
        step: SegmentedStep,
        target_keys_S: torch.Tensor,
        temperature: float,
        target_log_q_S: torch.Tensor | None,
        log_q_N: torch.Tensor | None,
    ) -> torch.Tensor:
        loss_S = step.score(
            hidden_SD, targets_SD, target_keys_S, temperature, target_log_q_S, log_q_N
        )
        ctx.save_for_backward(hidden_SD)
        ctx.step = step  # type: ignore[attr-defined]
        return loss_S

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_S: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden_SD,) = ctx.saved_tensors  # type: ignore[attr-defined]
        step: SegmentedStep = ctx.step  # type: ignore[attr-defined]
        assert step.scored is not None
        grad_S1 = grad_S.unsqueeze(1)
        step.source_SD = hidden_SD * grad_S1
        grad_targets_SD = step.source_SD * step.scored.target_weights_T.unsqueeze(1)
        return step.scored.unit_TD * grad_S1, grad_targets_SD, None, None, None, None, None
