"""The other ranks, as a pipeline needs them: process groups of their own for every network lane, and the sums all ranks share.

Ranks stand in a mesh of replicas x shards (rank = replica * shards + shard). Keys, rows and gradients travel on different groups,
each used by one lane in one fixed order, so they overlap without ever being confused. Alone, everything is the identity.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.pipeline.schedule import Lane
from slipstream.tables.exchange import Exchange, Gradients
from slipstream.tables.lanes import Lane as Wire
from slipstream.tables.replicas import SummedGradients


class Peers:
    """One rank's view. With `world` > 1 it is collective to build: all ranks of the default group, in the same order."""

    def __init__(
        self, exchange: Exchange, *, world: int = 1, replicas: int = 1, timeout: timedelta = timedelta(minutes=10)
    ) -> None:
        self.alone, self.replicas = world == 1, replicas
        self.keys = self.rows = self.gradients = exchange
        self.everybody: Wire | None = None  # of the gradients lane
        self._groups: dict[Lane, list[dist.ProcessGroup]] = {}
        if self.alone:
            return
        places = torch.arange(world).view(replicas, world // replicas)

        def group(members: Sequence[Sequence[int]], lane: Lane) -> dist.ProcessGroup:
            """This rank's of several groups that all ranks make together."""
            made = [(dist.new_group(list(row), timeout=timeout), dist.get_rank() in row) for row in members]
            mine = next(each for each, inside in made if inside)
            self._groups.setdefault(lane, []).append(mine)
            return mine

        everybody, shards, copies = [list(range(world))], places.tolist(), places.T.tolist()
        self._agreement = Wire(group(everybody, Lane.NETWORK))
        self.everybody = Wire(group(everybody, Lane.GRADIENTS))
        if world > replicas:
            self.keys, self.rows, self.gradients = (
                exchange.on(group(shards, lane)) for lane in (Lane.NETWORK, Lane.ROWS, Lane.GRADIENTS)
            )
        if replicas > 1:
            self._replica_keys = Wire(group(copies, Lane.NETWORK))
            self._replica_sums = SummedGradients(Wire(group(copies, Lane.GRADIENTS)))

    @property
    def give_up(self) -> Mapping[Lane, Callable[[], None]]:
        """What a network lane does when it leaves after an error: it closes its groups, so that peers in them fail instead of waiting."""

        def closing(groups: list[dist.ProcessGroup]) -> Callable[[], None]:
            return lambda: [_abort(group) for group in groups] and None

        return {lane: closing(groups) for lane, groups in self._groups.items()}

    def agree(self, count: int, going_on: bool) -> tuple[int, int]:
        """Keys lane: the supervised tokens of the step, and how many ranks still have data."""
        if self.alone:
            return count, int(going_on)
        total = self._agreement.sum_(torch.tensor([count, int(going_on)]))
        return int(total[0]), int(total[1])

    def union(self, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keys lane: the keys whose rows this rank will move: with replicas also those the other replicas touch."""
        if self.replicas == 1:
            return dict(keys)
        everyone = self._replica_keys.share(list(keys.values()))
        return {name: torch.unique(torch.cat(parts)) for name, parts in zip(keys, zip(*everyone, strict=True), strict=True)}

    def sum_replicas(self, gradients: Gradients) -> Gradients:
        """Gradients lane: gradients of the same rows summed over the replicas, in replica order."""
        return gradients if self.replicas == 1 else self._replica_sums.before_update(gradients)

    def sum_loss(self, loss_sum: float) -> float:
        """Gradients lane: the loss of all ranks."""
        return loss_sum if self.everybody is None else float(self.everybody.sum_(torch.tensor([loss_sum], dtype=torch.float64))[0])

    def close(self) -> None:
        """Let the groups go."""
        for groups in self._groups.values():
            for group in groups:
                with suppress(Exception):
                    dist.destroy_process_group(group)
        self._groups = {}


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(Exception):
        group._get_backend(torch.device("cpu")).abort()
