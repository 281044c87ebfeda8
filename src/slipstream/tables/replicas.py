"""Replica groups of embedding tables: every group of ranks holds the whole of every table, lookups
stay inside the group.

`SummedGradients` (hierarchical sparse parallelism, exact): before the update the owners of the same
rows in all groups send each other what they collected, as (key, row) lists, and sum them in replica
order. Equal rows plus equal sums stay equal rows: replicas are the same bits for ever, and the run
is the one a single group would make.

`AveragedWeights` (2D sparse parallelism, inexact by design): every group moves by its own gradient;
every n steps the rows touched since then are averaged over the groups, weights and state. Cheaper
between groups for large n, another trajectory than one group's.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from slipstream.ops.rows import coalesce, unique_keys
from slipstream.tables.communicator import Communicator
from slipstream.tables.embedding_table import EmbeddingTable, Rows
from slipstream.tables.exchange import Gradients
from slipstream.tables.row_optimizers import RowOptimizer, RowwiseAdagrad


class Replicas(Protocol):
    """How the replicas of a table stay together."""

    @property
    def lr_factor(self) -> float:
        """What the learning rate of the rows is multiplied by."""
        ...

    def before_update(self, gradients: Gradients) -> Gradients:
        """What this replica's owners apply, from what they collected. Collective over the replicas."""
        ...

    def after_update(self, tables: Mapping[str, EmbeddingTable], touched: Gradients) -> None:
        """Called after each step's update. Collective over the replicas."""
        ...

    def settle(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Make the replicas equal now. Collective over the replicas."""
        ...


class SummedGradients:
    """Exact replicas: gradients are summed over the groups before any row moves."""

    lr_factor = 1.0

    def __init__(
        self, communicator: Communicator, whole_tables: frozenset[str] = frozenset()
    ) -> None:
        self.communicator, self.whole_tables = communicator, whole_tables

    def before_update(self, gradients: Gradients) -> Gradients:
        names = [name for name in gradients if name not in self.whole_tables]
        everyone = self.communicator.share([part for name in names for part in gradients[name]])
        summed: Gradients = {}
        for name, (keys_O, grads_OD) in gradients.items():
            if name in self.whole_tables:
                summed[name] = (keys_O, self.communicator.sum_(grads_OD.contiguous()))
                continue
            at = 2 * names.index(name)
            union_U, inverse_T = unique_keys(torch.cat([each[at] for each in everyone]))
            grads_TD = torch.cat([each[at + 1] for each in everyone])
            summed[name] = (union_U, coalesce(grads_TD, inverse_T, union_U.numel()))
        return summed

    def after_update(self, tables: Mapping[str, EmbeddingTable], touched: Gradients) -> None:
        """Nothing: the replicas moved alike."""

    def settle(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Nothing: they are equal."""


class AveragedWeights:
    """Inexact replicas: own updates, and every `every` steps the mean of the touched rows over the
    groups.
    """

    def __init__(self, communicator: Communicator, every: int, lr_factor: float = 1.0) -> None:
        if every < 1:
            raise ValueError(f"replicas are averaged every 1, 2, … steps, got {every}")
        self.communicator, self.every, self.lr_factor, self._since = (
            communicator,
            every,
            lr_factor,
            0,
        )
        self._touched: dict[str, list[torch.Tensor]] = {}

    def before_update(self, gradients: Gradients) -> Gradients:
        """This group's own mean gradient: what it holds is its share of the mean over all groups."""
        return {
            name: (keys_O, grads_OD * self.communicator.world)
            for name, (keys_O, grads_OD) in gradients.items()
        }

    def after_update(self, tables: Mapping[str, EmbeddingTable], touched: Gradients) -> None:
        for name, (keys_O, _) in touched.items():
            self._touched.setdefault(name, []).append(keys_O)
        self._since += 1
        if self._since == self.every:
            self.settle(tables)

    def settle(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Replicas hold the same rows again: the mean of weights and moments, the largest of
        counts. Collective.
        """
        self._since = 0
        nothing = torch.empty(0, dtype=torch.int64)
        mine = [torch.cat([nothing, *self._touched.get(name, [])]).unique() for name in tables]
        unions = [
            torch.cat(list(keys)).unique()
            for keys in zip(*self.communicator.share(mine), strict=True)
        ]
        rows = [table.read(keys_U) for table, keys_U in zip(tables.values(), unions, strict=True)]
        everyone = self.communicator.share(
            [part for each in rows for part in (each.weights_UD, *each.state.values())]
        )
        merged = iter([_mean(list(versions)) for versions in zip(*everyone, strict=True)])
        for table, keys_U, each in zip(tables.values(), unions, rows, strict=True):
            weights_UD = next(merged)
            table.write(keys_U, Rows(weights_UD, {name: next(merged) for name in each.state}))
        self._touched.clear()


def _mean(versions: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(versions)
    return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)


def rescaled_for_averaging(optimizer: RowOptimizer, groups: int) -> tuple[RowOptimizer, float]:
    """Row-wise Adagrad as 2D sparse parallelism runs it, lr / (sqrt(sum / groups) + eps), as a
    plain optimizer and a factor of lr.

    A group's own gradient is noisier than the mean over the groups, so its accumulator grows about
    `groups` times as fast; dividing it restores the step. It equals lr * sqrt(groups) / (sqrt(sum)
    + eps * sqrt(groups)). Other optimizers stay as they are.
    """
    if not isinstance(optimizer, RowwiseAdagrad):
        return optimizer, 1.0
    return replace(optimizer, eps=optimizer.eps * math.sqrt(groups)), math.sqrt(groups)
