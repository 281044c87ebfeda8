"""The other ranks, as a pipeline needs them: process groups of their own for every network lane,
and the sums all ranks share.

Ranks stand in a mesh of replicas x shards (rank = replica * shards + shard). Keys, rows and
gradients travel on different groups, each used by one lane in one fixed order, so they overlap
without ever being confused. Alone, everything is the identity.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from slipstream.pipeline.schedule import Lane
from slipstream.tables.communicator import Communicator
from slipstream.tables.exchange import Exchange, Gradients
from slipstream.tables.replicas import SummedGradients

_CUTTING = threading.Lock()  # torch keeps its groups in plain dictionaries


class Peers:
    """One rank's view. With `world` > 1 it is collective to build: all ranks of the default group,
    in the same order.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        world: int = 1,
        replicas: int = 1,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.alone, self.replicas = world == 1, replicas
        self.keys = self.rows = self.gradients = exchange
        self.everybody: Communicator | None = None  # of the gradients lane
        self.wires: dict[Lane, list[Communicator]] = {}
        if self.alone:
            return
        places = torch.arange(world).view(replicas, world // replicas)

        def group(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
            """This rank's of several groups that all ranks make together."""
            made = [
                (dist.new_group(list(row), timeout=timeout), dist.get_rank() in row)
                for row in members
            ]
            return next(each for each, inside in made if inside)

        def wire(members: Sequence[Sequence[int]], lane: Lane) -> Communicator:
            self.wires.setdefault(lane, []).append(Communicator(group(members)))
            return self.wires[lane][-1]

        everybody, shards, copies = [list(range(world))], places.tolist(), places.T.tolist()
        self._agreement = wire(everybody, Lane.NETWORK)
        self.everybody = wire(everybody, Lane.GRADIENTS)
        if world > replicas:
            self.keys, self.rows, self.gradients = (exchange.on(group(shards)) for _ in range(3))
            for lane, twin in zip(
                (Lane.NETWORK, Lane.ROWS, Lane.GRADIENTS),
                (self.keys, self.rows, self.gradients),
                strict=True,
            ):
                if twin.communicator is not None:
                    self.wires.setdefault(lane, []).append(twin.communicator)
        if replicas > 1:
            self._replica_keys = wire(copies, Lane.NETWORK)
            self._replica_sums = SummedGradients(wire(copies, Lane.GRADIENTS))

    @property
    def give_up(self) -> Mapping[Lane, Callable[[], None]]:
        """What a network lane does as it leaves after an error: close its groups, so that peers in
        them fail instead of waiting.
        """

        return {lane: partial(_cut, wires) for lane, wires in self.wires.items()}

    def agree(self, count: int, has_data: bool, stop: bool) -> tuple[int, bool]:
        """Keys lane: the supervised tokens of a step, and whether there is one: somebody has data,
        nobody was asked to stop.
        """
        if self.alone:
            return count, has_data and not stop
        total = self._agreement.sum_(torch.tensor([count, int(has_data), int(stop)])).tolist()
        return total[0], total[1] > 0 and total[2] == 0

    def union(self, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keys lane, with several replicas: the keys whose rows this rank will move: its own and
        those the others touch.
        """
        everyone = self._replica_keys.share(list(keys.values()))
        return {
            name: torch.unique(torch.cat(parts))
            for name, parts in zip(keys, zip(*everyone, strict=True), strict=True)
        }

    def sum_replicas(self, gradients: Gradients) -> Gradients:
        """Gradients lane: gradients of the same rows summed over the replicas, in replica order."""
        return gradients if self.replicas == 1 else self._replica_sums.before_update(gradients)

    def sum_loss(self, loss_sum: float) -> float:
        """Gradients lane: the loss of all ranks."""
        return (
            loss_sum
            if self.everybody is None
            else float(self.everybody.sum_(torch.tensor([loss_sum], dtype=torch.float64))[0])
        )

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean over ranks of each number; while no lane runs."""
        if self.everybody is None:
            return list(values)
        return (
            self.everybody.sum_(torch.tensor(values, dtype=torch.float64)) / self.everybody.world
        ).tolist()

    def close(self) -> None:
        """Let the groups go."""
        for wires in self.wires.values():
            _cut(wires)


def _cut(wires: Sequence[Communicator]) -> None:
    """Destroy the wires' groups. Connections close when nobody refers to a group any more, so the
    wires forget theirs.
    """
    for wire in wires:
        with _CUTTING, suppress(RuntimeError, ValueError, AssertionError):
            if (group := wire.__dict__.pop("group", None)) is not None:
                dist.destroy_process_group(group)
