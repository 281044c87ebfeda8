"""The types of one training step: `StepPlan` before its rows are read, `StepInputs` after.

    plan = recommender.plan_step(batch, step)   # StepPlan: keys by table, seeds; no row is read yet
    inputs = recommender.read(plan)             # StepInputs: the batch with its rows
    loss = recommender.loss(inputs)             # a sum over the supervised tokens
    loss.backward()
    recommender.update([inputs], lr)            # rows and their optimiser state
    step_dense(...)                             # -> StepResult, the same for every schedule

Touch this when a step reads rows for something new. `StepResult` is in `pipeline/work.py`, because
schedules make it too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from slipstream.data.batch import JaggedBatch
from slipstream.models.jagged import segment_mean
from slipstream.ops.grouped_types import TokenGroups
from slipstream.ops.rows import take_rows
from slipstream.tables.exchange import Lookup, Lookups
from slipstream.training.negative_fetch import SegmentedStep


@dataclass(frozen=True)
class TableKeys:
    """The keys one step reads from one table, by purpose; or, after reading, the rows' places."""

    inputs: torch.Tensor  # of the history: one or several per behaviour, or per user
    targets: torch.Tensor | None = None  # [S], the items the loss asks for
    negatives: torch.Tensor | None = None  # [S, R], [X, R] or [R], the items they compete with

    def lists(self) -> list[torch.Tensor]:
        """Return the keys as the exchange takes them: a list for each purpose that has keys."""
        return [getattr(self, purpose) for purpose in self._purposes()]

    def with_places(self, places: Sequence[torch.Tensor]) -> "TableKeys":
        """Return the exchange's places of the keys, given in the order of `lists`, by purpose."""
        return TableKeys(**dict(zip(self._purposes(), places, strict=True)))

    def _purposes(self) -> list[str]:
        return [each.name for each in fields(self) if getattr(self, each.name) is not None]


# Where `TableKeys.lists()` of a retrieval step has its negatives, for `Exchange(half_lists=...)`.
NEGATIVES_LIST = frozenset([[each.name for each in fields(TableKeys)].index("negatives")])


@dataclass(frozen=True)
class StepPlan:
    """What a step over a batch needs before any row is read: keys by table, and what is drawn."""

    batch: JaggedBatch
    keys: dict[str, TableKeys]  # by table
    supervised_S: torch.Tensor  # places of the tokens the loss counts
    dropout_seed: int | None = None
    negatives: torch.Tensor | None = None  # item rows, [S, R], [X, R] or [R]; None: the catalogue
    groups: TokenGroups | None = None  # tokens that share negatives
    # by table, where a behaviour or user reads several rows: where its keys begin
    input_offsets: dict[str, torch.Tensor] = field(default_factory=dict)
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)  # pretrained, one per behaviour

    @property
    def count(self) -> int:
        """Supervised tokens."""
        return self.supervised_S.numel()

    def key_lists(self) -> dict[str, list[torch.Tensor]]:
        """Return the keys as the exchange takes them."""
        return {name: keys.lists() for name, keys in self.keys.items()}

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "StepPlan":
        """Return the plan with every tensor but the keys changed, such as copied to a device."""
        return replace(
            self,
            batch=self.batch.map_tensors(change),
            supervised_S=change(self.supervised_S),
            negatives=None if self.negatives is None else change(self.negatives),
            groups=None if self.groups is None else self.groups.map(change),
            input_offsets={name: change(each) for name, each in self.input_offsets.items()},
            vectors={name: change(each) for name, each in self.vectors.items()},
        )


@dataclass(frozen=True)
class StepInputs:
    """A batch with its rows: what one forward pass needs. Gradients arrive in `lookups`."""

    plan: StepPlan
    lookups: Lookups
    segments: SegmentedStep | None = None  # where negatives are fetched in segments instead

    @property
    def batch(self) -> JaggedBatch:
        """The batch of the plan."""
        return self.plan.batch

    def places(self, table: str) -> TableKeys:
        """Return where the row of each key is in the table's `rows_UD`, by purpose."""
        return self.plan.keys[table].with_places(self.lookups[table].inverses)

    def input_rows(self) -> dict[str, torch.Tensor]:
        """Return each table's rows of the inputs: one per behaviour or user, a mean of several.

        Pretrained vectors come with them.
        """
        rows = {
            name: take_rows(lookup.rows_UD, self.places(name).inputs)
            for name, lookup in self.lookups.items()
        }
        for name, offsets in self.plan.input_offsets.items():
            rows[name] = segment_mean(rows[name], offsets)
        return rows | self.plan.vectors

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "StepInputs":
        """Return the inputs with every tensor but the keys changed; gradients flow back."""
        lookups = {
            name: Lookup(
                lookup.unique_U,
                change(lookup.rows_UD),
                [change(places) for places in lookup.inverses],
            )
            for name, lookup in self.lookups.items()
        }
        if self.segments is None:
            plan = self.plan.map_tensors(change)
        else:  # which keep the negatives where they are
            plan = replace(self.plan, negatives=None, groups=None).map_tensors(change)
            plan = replace(plan, negatives=self.plan.negatives, groups=self.plan.groups)
        return StepInputs(plan, Lookups(lookups, self.lookups.route), self.segments)
