"""Replica groups: every group of ranks holds all tables, and lookups stay inside the group.

Touch this to change how replicas stay equal.

`SummedGradients` (hierarchical sparse parallelism, exact): before the update, the owners of the
same rows in all groups exchange their gradients as (key, gradient) lists and sum them in the order
of the groups. Rows that are equal before an update are equal after it, bit for bit, and the run
equals that of a single group.

`AveragedWeights` (2D sparse parallelism, inexact by design): every group updates its rows from its
own gradients. Every n steps the weights and the state of the rows touched since then are averaged
over the groups. This sends less between groups when n is large, and trains differently.
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
    """How the replicas of a table stay equal."""

    @property
    def are_equal(self) -> bool:
        """Whether all replicas hold the same rows now, so that settling would change nothing."""
        ...

    def before_update(self, gradients: Gradients) -> Gradients:
        """Turn the gradients of this replica into those to apply. Collective over replicas."""
        ...

    def after_update(self, tables: Mapping[str, EmbeddingTable], touched: Gradients) -> None:
        """Do what must follow each step's update. Collective over replicas."""
        ...

    def settle(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Make the replicas equal. Collective over replicas."""
        ...


class SummedGradients:
    """Exact replicas: gradients are summed over the groups before rows are updated."""

    are_equal = True

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
        """Nothing to do: all replicas made the same update."""

    def settle(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Nothing to do: the replicas are equal."""


class AveragedWeights:
    """Inexact replicas: touched rows are averaged over the groups every `every` steps."""

    def __init__(self, communicator: Communicator, every: int) -> None:
        if every < 1:
            raise ValueError(f"replicas are averaged every 1, 2, … steps, got {every}")
        self.communicator, self.every = communicator, every
        self._since = 0  # steps since the last average
        self._touched: dict[str, list[torch.Tensor]] = {}

    @property
    def are_equal(self) -> bool:
        return self._since == 0

    def before_update(self, gradients: Gradients) -> Gradients:
        """Scale this group's share of the global mean gradient to the mean of the group."""
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
        """Average the touched rows: mean of weights and moments, largest of counts. Collective."""
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


def rescaled_for_averaging(optimizer: RowOptimizer, groups: int) -> RowOptimizer:
    """Return row-wise Adagrad as 2D sparse parallelism scales it, by its eps and its factor of lr.

    A group's own gradient is noisier than the mean over the groups, so its accumulator grows about
    `groups` times as fast. The step is therefore lr / (sqrt(sum / groups) + eps), which equals
    lr * sqrt(groups) / (sqrt(sum) + eps * sqrt(groups)). Other optimizers are returned unchanged.
    """
    if not isinstance(optimizer, RowwiseAdagrad):
        return optimizer
    scale = math.sqrt(groups)
    return replace(optimizer, eps=optimizer.eps * scale, lr_factor=optimizer.lr_factor * scale)
