"""The other ranks, as a pipeline needs them: one process group per network lane, and the few sums that all ranks share.

Keys, rows and gradients travel on groups of their own, each used by one lane in one fixed order, so they may overlap without ever
being confused. Alone, everything is the identity.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from slipstream.pipeline.schedule import Lane
from slipstream.tables.exchange import Exchange


class Peers:
    """One rank's view of its group; `Peers(exchange)` is alone. Collective to build when `group` is given."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup | None = None) -> None:
        self.alone = group is None or dist.get_world_size(group) == 1
        self.keys = self.rows = self.gradients = exchange
        self._groups: dict[Lane, dist.ProcessGroup] = {}
        if group is not None and not self.alone:
            ranks = dist.get_process_group_ranks(group)
            self._groups = {lane: dist.new_group(ranks) for lane in (Lane.NETWORK, Lane.ROWS, Lane.GRADIENTS)}
            self.keys, self.rows, self.gradients = (exchange.on(each) for each in self._groups.values())

    @property
    def give_up(self) -> Mapping[Lane, Callable[[], None]]:
        """What a network lane does when it leaves after an error: it closes its group, so that peers in it fail instead of waiting."""
        return {lane: lambda group=group: _abort(group) for lane, group in self._groups.items()}  # type: ignore[misc]

    def agree(self, count: int, going_on: bool) -> tuple[int, int]:
        """Keys lane: the supervised tokens of the step, and how many ranks still have data."""
        if self.alone:
            return count, int(going_on)
        total = torch.tensor([count, int(going_on)])
        dist.all_reduce(total, group=self._groups[Lane.NETWORK])
        return int(total[0]), int(total[1])

    def union(self, keys_U: torch.Tensor) -> torch.Tensor:
        """Keys lane: the keys whose rows this rank will move; with replicas also those the other replicas touch."""
        return keys_U

    def sum_dense(self, parameters: Sequence[torch.nn.Parameter], loss_sum: float) -> float:
        """Gradients lane: every parameter's gradient summed over all ranks, in place; returns the loss summed likewise."""
        if self.alone:
            return loss_sum
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
        flat = torch.cat([*(grad.reshape(-1).to(wide) for grad in grads), torch.tensor([loss_sum], dtype=wide)])
        dist.all_reduce(flat, group=self._groups[Lane.GRADIENTS])
        for grad, part in zip(grads, flat[:-1].split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        return float(flat[-1])

    def close(self) -> None:
        """Let the groups go."""
        for group in self._groups.values():
            with suppress(Exception):
                dist.destroy_process_group(group)
        self._groups = {}


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(Exception):
        group._get_backend(torch.device("cpu")).abort()
