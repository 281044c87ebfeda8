"""The process groups of a pipeline: one set for every network lane, and the sums all ranks share.

Ranks stand in a mesh of replicas x shards (rank = replica * shards + shard). Keys, rows and
gradients travel on different groups, each used by one lane in one fixed order, so their messages
overlap without being confused. With one rank every exchange is the identity. Touch this when a lane
needs another collective.
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

_DESTROYING = threading.Lock()  # torch keeps its groups in plain dictionaries


class LaneGroups:
    """One rank's process groups. Collective to build with `world` > 1, in the same order."""

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
        self.everybody: Communicator | None = None  # used by the gradients lane
        self.communicators: dict[Lane, list[Communicator]] = {}
        if self.alone:
            return
        places = torch.arange(world).view(replicas, world // replicas)

        def group(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
            """Make several groups together with all ranks; return the one of this rank."""
            made = [(row, dist.new_group(list(row), timeout=timeout)) for row in members]
            mine: dist.ProcessGroup = next(each for row, each in made if dist.get_rank() in row)
            return mine

        def communicator(members: Sequence[Sequence[int]], lane: Lane) -> Communicator:
            self.communicators.setdefault(lane, []).append(Communicator(group(members)))
            return self.communicators[lane][-1]

        everybody, shards, copies = [list(range(world))], places.tolist(), places.T.tolist()
        self._agreement = communicator(everybody, Lane.NETWORK)
        self.everybody = communicator(everybody, Lane.GRADIENTS)
        if world > replicas:
            self.keys, self.rows, self.gradients = (exchange.on(group(shards)) for _ in range(3))
            for lane, twin in zip(
                (Lane.NETWORK, Lane.ROWS, Lane.GRADIENTS),
                (self.keys, self.rows, self.gradients),
                strict=True,
            ):
                if twin.communicator is not None:
                    self.communicators.setdefault(lane, []).append(twin.communicator)
        if replicas > 1:
            self._replica_keys = communicator(copies, Lane.NETWORK)
            self._replica_sums = SummedGradients(communicator(copies, Lane.GRADIENTS))

    @property
    def closers(self) -> Mapping[Lane, Callable[[], None]]:
        """What each network lane calls when it leaves after an error, so that no rank waits."""
        return {lane: partial(_destroy, used) for lane, used in self.communicators.items()}

    def agree(self, count: int, has_data: bool, stop: bool) -> tuple[int, bool]:
        """Keys lane: return a step's supervised tokens, and whether the step takes place.

        It does when a rank has data and no rank was asked to stop.
        """
        if self.alone:
            return count, has_data and not stop
        total = self._agreement.sum_(torch.tensor([count, int(has_data), int(stop)])).tolist()
        return total[0], total[1] > 0 and total[2] == 0

    def union(self, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keys lane: return the keys this rank will update: its own and those of other replicas."""
        everyone = self._replica_keys.share(list(keys.values()))
        return {
            name: torch.unique(torch.cat(parts))
            for name, parts in zip(keys, zip(*everyone, strict=True), strict=True)
        }

    def sum_replicas(self, gradients: Gradients) -> Gradients:
        """Gradients lane: sum the gradients of the same rows over the replicas, in their order."""
        return gradients if self.replicas == 1 else self._replica_sums.before_update(gradients)

    def sum_loss(self, loss_sum: float) -> float:
        """Gradients lane: return the loss of all ranks."""
        if self.everybody is None:
            return loss_sum
        return float(self.everybody.sum_(torch.tensor([loss_sum], dtype=torch.float64))[0])

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over ranks of each number; call it while no lane runs."""
        if self.everybody is None:
            return list(values)
        total = self.everybody.sum_(torch.tensor(values, dtype=torch.float64))
        return [float(value) for value in total / self.everybody.world]

    def close(self) -> None:
        """Destroy the groups."""
        for communicators in self.communicators.values():
            _destroy(communicators)


def _destroy(communicators: Sequence[Communicator]) -> None:
    """Destroy process groups. A connection closes once nothing refers to its group any more."""
    for communicator in communicators:
        with _DESTROYING, suppress(RuntimeError, ValueError, AssertionError):
            if (group := communicator.__dict__.pop("group", None)) is not None:
                dist.destroy_process_group(group)
