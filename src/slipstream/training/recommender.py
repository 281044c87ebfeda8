"""A recommender: the dense model, its embedding tables, and how a batch's keys, negatives and loss
hang together.

Every number it draws has a name: dropout and negatives hang on (seed, step, token), so any cut of a
batch gives the same sums. Training asks for `gather` and `loss_sum`; evaluation and serving ask for
`queries_SD`, `catalogue_ND`, `predict_SA`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from slipstream.ops.counter_random import derive_seed
from slipstream.ops.grouped_types import TokenGroups, one_token_groups
from slipstream.ops.rows import take_rows
from slipstream.tables.collection import Lookups, TableCollection
from slipstream.tables.communicator import Communicator
from slipstream.tables.embedding_table import EmbeddingTable
from slipstream.tables.exchange import Exchange, Lookup
from slipstream.tables.factory import make_table
from slipstream.tables.replicas import (
    AveragedWeights,
    Replicas,
    SummedGradients,
    rescaled_for_averaging,
)
from slipstream.tables.row_optimizers import make_row_optimizer
from slipstream.tables.slices import Placement
from slipstream.training.device import HOST, DeviceTransfer
from slipstream.training.features import ITEM, Features, labels_TA
from slipstream.training.negative_fetch import FetchConfig, SegmentedFetch, SegmentedStep
from slipstream.training.negative_plan import mixed_by, plan_negatives
from slipstream.training.negatives import UniformNegatives, make_negatives, training_counts
from slipstream.training.objective import (
    RETRIEVAL_LOSSES,
    RetrievalLossInputs,
    half_precision,
    ranking_loss,
)
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recipe import Recipe

_INITIAL, _TABLES, _DROPOUT, _NEGATIVES = 1, 2, 3, 4  # purposes of seeds


@dataclass(frozen=True)
class StepPlan:
    """What a training step over a batch needs to know before it has rows: their keys, and what
    hangs on the step.
    """

    keys: dict[str, list[torch.Tensor]]  # table -> key lists, the inputs first
    supervised_S: torch.Tensor  # places of the tokens the loss counts
    dropout_seed: int | None = None
    negatives: torch.Tensor | None = None  # item rows, [S, R], [X, R] or [R]
    groups: TokenGroups | None = None  # tokens that share negatives


@dataclass(frozen=True)
class StepInputs:
    """A batch with its rows: what one forward pass needs, nothing shared with the tables until they
    are given the gradients.
    """

    batch: JaggedBatch
    lookups: Lookups
    supervised_S: torch.Tensor  # places of the tokens the loss counts
    dropout_seed: int | None = None
    negatives: torch.Tensor | None = None  # item rows, [S, R], [X, R] or [R]
    groups: TokenGroups | None = None  # tokens that share negatives
    segments: SegmentedStep | None = (
        None  # where negatives are fetched in segments: not among the lookups
    )

    def carried_by(self, carrier: DeviceTransfer) -> "StepInputs":
        """The same on the carrier's device; gradients still arrive at the rows of `lookups` as they
        were.
        """
        lookups = {
            name: Lookup(
                lookup.unique_U,
                carrier.move(lookup.rows_UD),
                [carrier.move(places) for places in lookup.inverses],
            )
            for name, lookup in self.lookups.items()
        }
        return replace(
            self,
            batch=self.batch.moved(carrier.move),
            lookups=Lookups(lookups, self.lookups.route),
            supervised_S=carrier.move(self.supervised_S),
            negatives=None if self.negatives is None else carrier.move(self.negatives),
            groups=None if self.groups is None else self.groups.map(carrier.move),
        )


class Recommender:
    """Model, tables and features of one recipe."""

    def __init__(
        self,
        recipe: Recipe,
        features: Features,
        *,
        dtype: torch.dtype = torch.float32,
        negatives: UniformNegatives | None = None,
        ranks: Ranks = ALONE,
        device: torch.device = HOST,
    ) -> None:
        self.recipe, self.features, self.dtype = recipe, features, dtype
        self.carrier = DeviceTransfer(device)
        self.negatives = negatives or UniformNegatives(features.num_items)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(recipe.seed, _INITIAL))
            self.model: nn.Module = build_model(
                recipe.model,
                recipe.task,
                tasks=tuple(recipe.tasks),
                user_features=recipe.user_features,
                item_features=recipe.item_features,
            ).to(dtype=dtype)
        self.model.to(device)
        self.tables = build_tables(recipe, features, dtype, ranks)
        self.fetch: SegmentedFetch | None = None
        if recipe.task == "retrieval" and recipe.loss.fetch == "segmented":
            loss = recipe.loss
            if device != HOST:
                raise SlipstreamError(
                    "loss.fetch=segmented scores negatives in host memory; with a device use "
                    "loss.fetch=whole"
                )
            config = FetchConfig(loss.segment_bytes, loss.normalize, loss.precision == "fp16")
            self.fetch = SegmentedFetch(
                self.tables, ITEM, config, ranks.another_shard_group(recipe.train.rank_timeout)
            )

    @classmethod
    def build(
        cls,
        recipe: Recipe,
        store: SequenceStore,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ALONE,
        device: torch.device = HOST,
    ) -> "Recommender":
        """A new recommender for the items, features and popularity of a store."""
        negatives = None
        if recipe.task == "retrieval" and recipe.loss.sampling != "uniform":
            train_lengths_U = recipe.split.train_lengths(store.lengths_U)
            negatives = make_negatives(
                recipe.loss,
                training_counts(store.items_N, store.offsets_U1, store.num_items, train_lengths_U),
            )
        return cls(
            recipe,
            Features.from_store(recipe, store),
            dtype=dtype,
            negatives=negatives,
            ranks=ranks,
            device=device,
        )

    def gather(self, batch: JaggedBatch, step: int) -> StepInputs:
        """Look up every row a training step needs."""
        wanted = self.plan_step(batch, step)
        return self.gathered(batch, wanted, self.tables.lookup(wanted.keys))

    def gathered(self, batch: JaggedBatch, wanted: StepPlan, lookups: Lookups) -> StepInputs:
        """A batch with rows that were looked up by `wanted.keys`."""
        segments = None
        if self.fetch is not None and wanted.negatives is not None:
            segments = SegmentedStep(
                self.fetch,
                wanted.negatives,
                wanted.groups or one_token_groups(wanted.supervised_S.numel()),
            )
        return StepInputs(
            batch,
            lookups,
            wanted.supervised_S,
            wanted.dropout_seed,
            wanted.negatives,
            wanted.groups,
            segments,
        )

    def apply(self, gathered: StepInputs, lr: float) -> None:
        """One optimiser step of the tables from the gradients a backward pass has left. Collective."""
        if gathered.segments is None:
            self.tables.apply(gathered.lookups, lr)
        else:
            gathered.segments.update(
                self.tables.exchange.collect(gathered.lookups.route, gathered.lookups), lr
            )

    def plan_step(self, batch: JaggedBatch, step: int) -> StepPlan:
        """The keys of every row a training step needs: history, features, targets, negatives."""
        keys = {name: [keys] for name, keys in self.features.input_keys(batch).items()}
        dropout_seed = derive_seed(self.recipe.seed, step, _DROPOUT)
        if self.recipe.task == "ranking":
            supervised_S = batch.supervised_T.nonzero().squeeze(1)
            return StepPlan(keys, supervised_S, dropout_seed)
        supervised_S = (batch.supervised_T & (batch.next_items_T >= 0)).nonzero().squeeze(1)
        plan = plan_negatives(
            self.recipe.loss,
            batch,
            supervised_S,
            derive_seed(self.recipe.seed, step, _NEGATIVES),
            self.negatives,
        )
        negatives = (
            torch.arange(self.features.num_items) if plan.negatives is None else plan.negatives
        )
        keys[ITEM] += [
            batch.next_items_T[plan.supervised_S],
            *([negatives] if self.fetch is None else []),
        ]
        return StepPlan(keys, plan.supervised_S, dropout_seed, plan.negatives, plan.groups)

    @property
    def mixes_samples(self) -> str | None:
        """The recipe key through which samples of a batch see one another, or None."""
        return (
            mixed_by(self.recipe.loss, self.negatives) if self.recipe.task == "retrieval" else None
        )

    def loss_sum(
        self, batch: JaggedBatch, step: int, gathered: StepInputs | None = None
    ) -> tuple[torch.Tensor, int]:
        """The loss summed over the batch's supervised tokens, and how many there are. Divide by the
        count of the whole step.
        """
        gathered = self.on_device(gathered or self.gather(batch, step))
        loss_S = (
            self._ranking_loss(gathered)
            if self.recipe.task == "ranking"
            else self._retrieval_loss(gathered)
        )
        return loss_S.sum(), gathered.supervised_S.numel()

    def on_device(self, gathered: StepInputs) -> StepInputs:
        """A gathered batch where the model is; one that is there already is left alone."""
        return (
            gathered
            if gathered.supervised_S.device == self.carrier.device
            else gathered.carried_by(self.carrier)
        )

    def forward(
        self, gathered: StepInputs, num_candidates_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The model over a gathered batch: hidden_TD for retrieval, logits_TA for ranking."""
        batch = gathered.batch
        labels = (
            labels_TA(self.recipe, batch, self.dtype) if self.recipe.task == "ranking" else None
        )
        return self.model(
            ModelInput(
                rows={name: lookup.rows(0) for name, lookup in gathered.lookups.items()},
                offsets_B1=batch.offsets_B1,
                timestamps_T=batch.timestamps_T,
                next_timestamps_T=batch.next_timestamps_T,
                token_ids_T=batch.token_ids_T,
                labels_TA=labels,
                num_candidates_B=num_candidates_B,
                dropout_seed=gathered.dropout_seed,
            )
        )

    @torch.no_grad()
    def queries_SD(self, batch: JaggedBatch) -> torch.Tensor:
        """Retrieval: what each supervised token asks the catalogue, as the loss compares it; no
        dropout.
        """
        gathered = self._gather_inputs(batch)
        return self._directions(self.forward(gathered)[gathered.supervised_S]).cpu()

    @torch.no_grad()
    def catalogue_ND(self) -> torch.Tensor:
        """Retrieval: every item's output embedding, as the loss compares it: scores are queries_SD
        @ catalogue_ND.T.
        """
        return self._directions(self.tables.all_rows(ITEM))

    @torch.no_grad()
    def predict_SA(
        self, batch: JaggedBatch, num_candidates_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Ranking: the probability of each action at each supervised token; no dropout."""
        gathered = self._gather_inputs(batch)
        candidates_B = None if num_candidates_B is None else self.carrier.move(num_candidates_B)
        return self.forward(gathered, candidates_B)[gathered.supervised_S].sigmoid().cpu()

    def _gather_inputs(self, batch: JaggedBatch) -> StepInputs:
        keys = {name: [keys] for name, keys in self.features.input_keys(batch).items()}
        return self.on_device(
            StepInputs(batch, self.tables.lookup(keys), batch.supervised_T.nonzero().squeeze(1))
        )

    def _directions(self, x_ND: torch.Tensor) -> torch.Tensor:
        return F.normalize(x_ND, dim=-1, eps=1e-6) if self.recipe.loss.normalize else x_ND

    def _retrieval_loss(self, gathered: StepInputs) -> torch.Tensor:
        config, lookup, batch = self.recipe.loss, gathered.lookups[ITEM], gathered.batch
        hidden_SD = self.forward(gathered).index_select(0, gathered.supervised_S)
        hidden_SD, target_keys_S = (
            self._directions(hidden_SD),
            batch.next_items_T[gathered.supervised_S],
        )
        corrected = (
            config.log_q and self.negatives.log_q_N is not None and gathered.negatives is not None
        )
        known_N = self.negatives.log_q_N if corrected else None
        log_q_N = None if known_N is None else known_N.to(self.carrier.device, self.dtype)
        target_log_q_S = None if log_q_N is None else log_q_N[target_keys_S]
        if gathered.segments is not None:
            targets_SD = self._directions(take_rows(lookup.rows_UD, lookup.inverses[1]))
            return gathered.segments.loss(
                hidden_SD, targets_SD, target_keys_S, config.temperature, target_log_q_S, log_q_N
            )
        question = RetrievalLossInputs(
            hidden_SD=hidden_SD,
            rows_UD=self._directions(lookup.rows_UD),
            targets_S=lookup.inverses[1],
            negatives=None if gathered.negatives is None else lookup.inverses[2],
            temperature=config.temperature,
            target_log_q_S=target_log_q_S,
            negative_log_q=None
            if log_q_N is None or gathered.negatives is None
            else log_q_N[gathered.negatives],
            groups=gathered.groups,
            negative_rows_UD=self._directions(half_precision(lookup.rows_UD))
            if config.precision == "fp16"
            else None,
            literal=config.share_by == "logits",
        )
        return RETRIEVAL_LOSSES[config.kind].per_token(question)

    def _ranking_loss(self, gathered: StepInputs) -> torch.Tensor:
        supervised_S = gathered.supervised_S
        weights_A = torch.tensor(
            [task.weight for task in self.recipe.tasks.values()],
            dtype=self.dtype,
            device=self.carrier.device,
        )
        labels_SA = labels_TA(self.recipe, gathered.batch, self.dtype)[supervised_S]
        return ranking_loss(self.forward(gathered)[supervised_S], labels_SA, weights_A)


def build_tables(
    recipe: Recipe, features: Features, dtype: torch.dtype, ranks: Ranks
) -> TableCollection:
    """This rank's part of the tables, connected with the ranks that hold the rest and with the
    replicas.
    """
    config = recipe.tables
    optimizer = make_row_optimizer(
        config.optimizer, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    averaged, lr_factor = config.replicas == "averaged" and ranks.replica_group is not None, 1.0
    if averaged:
        optimizer, lr_factor = rescaled_for_averaging(optimizer, ranks.replicas)
    placement = Placement(1 if optimizer.updates_untouched_rows else ranks.shards)
    directory = None if config.directory is None else Path(config.directory)
    if directory is not None and ranks.replicas > 1:
        directory /= f"replica-{ranks.rank // ranks.shards:05d}"
    tables: list[EmbeddingTable] = [
        make_table(
            config.tier,
            name,
            rows,
            recipe.model.dim,
            optimizer,
            seed=derive_seed(recipe.seed, _TABLES),
            init_scale=config.init_scale,
            dtype=dtype,
            placement=placement,
            rank=ranks.shard if placement.world > 1 else 0,
            directory=directory,
            cache_bytes=config.cache_bytes,
            admit_after=config.admit_after,
            max_rows=config.max_rows,
            evict=config.evict,
        )
        for name, rows in features.table_sizes().items()
    ]
    replicas: Replicas | None = None
    if ranks.replica_group is not None:
        communicator, whole = (
            Communicator(ranks.replica_group),
            frozenset(table.name for table in tables if table.optimizer.updates_untouched_rows),
        )
        replicas = (
            AveragedWeights(communicator, config.average_every, lr_factor)
            if averaged
            else SummedGradients(communicator, whole)
        )
    # The third list of keys a retrieval step asks of the items is its negatives'.
    half_lists = (
        {ITEM: frozenset([2])}
        if recipe.task == "retrieval" and recipe.loss.precision == "fp16"
        else None
    )
    by_name = {table.name: table for table in tables}
    exchange = Exchange(
        by_name, ranks.shard_group, transport=config.transport, half_lists=half_lists
    )
    return TableCollection(tables, exchange, replicas)
