"""A recommender: the dense model, its embedding tables, and how keys, negatives and loss connect.

Every number it draws has a name: dropout and negatives depend on (seed, step, token), so any cut of
a batch gives the same sums. Training calls `plan_step`, `read`, `loss` and `update` (`step.py`);
evaluation and recommendation call `queries_SD`, `catalogue_tiles` and `predict_SA`. Touch this when
a model needs other rows, or when a loss is given something new.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from slipstream.data.batch import JaggedBatch
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from slipstream.ops.counter_random import derive_seed
from slipstream.ops.grouped_types import one_token_groups
from slipstream.ops.row_readers import RowTile, normalize_rows
from slipstream.ops.rows import take_rows
from slipstream.tables.collection import Lookups, TableCollection, add
from slipstream.tables.communicator import Communicator
from slipstream.tables.embedding_table import EmbeddingTable
from slipstream.tables.exchange import Exchange
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
from slipstream.training.features import ITEM, Features, NumberEdges, labels_TA
from slipstream.training.negative_fetch import (
    FetchConfig,
    SegmentedFetch,
    SegmentedStep,
    update_segmented,
)
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
from slipstream.training.step import NEGATIVES_LIST, StepInputs, StepPlan, TableKeys

_INITIAL, _TABLES, _DROPOUT, _NEGATIVES = 1, 2, 3, 4  # what seeds are derived for


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
        self.device_transfer = DeviceTransfer(device)
        self.negatives = negatives or UniformNegatives(features.num_items)
        self.loss_per_token = RETRIEVAL_LOSSES[recipe.loss.kind].per_token  # or a caller's own
        self.input_widths = input_widths(recipe) | features.vector_widths()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(recipe.seed, _INITIAL))
            model = build_model(
                recipe.model,
                recipe.task,
                tasks=tuple(recipe.tasks),
                user_features=recipe.user_features,
                item_features=recipe.item_features,
                joined=features.joined,
                widths=self.input_widths,
            ).to(dtype=dtype)
        model.backbone.product_dtype = torch.bfloat16 if recipe.train.precision == "bf16" else None
        model.backbone.checkpoint_activations = recipe.train.activation_checkpointing
        self.model: nn.Module = model.to(device)
        if recipe.train.accumulate > 1 and self.mixes_samples is not None:
            raise SlipstreamError(
                f"train.accumulate computes parts of a step one after the other, but "
                f"{self.mixes_samples} mixes its samples, so the objective would change; use "
                "train.accumulate=1, or loss.share_within=sequence"
            )
        if ranks.world > 1 and self.mixes_samples is not None:
            raise SlipstreamError(
                f"{self.mixes_samples} mixes the samples of a rank, so the objective would depend "
                "on the number of ranks; use loss.share_within=sequence, or one rank"
            )
        self.tables = build_tables(recipe, features, dtype, ranks)
        self.fetch: SegmentedFetch | None = None
        if recipe.task == "retrieval" and recipe.loss.fetch == "segmented":
            loss = recipe.loss
            config = FetchConfig(loss.segment_bytes, loss.normalize, loss.precision == "fp16")
            self.fetch = SegmentedFetch(
                self.tables,
                ITEM,
                config,
                ranks.another_shard_group(recipe.train.rank_timeout),
                self.device_transfer,
            )

    @classmethod
    def build(
        cls,
        recipe: Recipe,
        store: SequenceStore,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks = ALONE,
        device: torch.device = HOST,
        edges: NumberEdges | None = None,
    ) -> "Recommender":
        """Make a new recommender for the items, features and popularity of a store.

        `edges` are those of a run that goes on, between the bins of its numbers.
        """
        negatives = None
        if recipe.task == "retrieval" and recipe.loss.sampling != "uniform":
            train_lengths_U = recipe.split.train_lengths(store)
            negatives = make_negatives(
                recipe.loss,
                training_counts(store.items_N, store.offsets_U1, store.num_items, train_lengths_U),
            )
        return cls(
            recipe,
            Features.from_store(recipe, store, edges),
            dtype=dtype,
            negatives=negatives,
            ranks=ranks,
            device=device,
        )

    def plan_step(self, batch: JaggedBatch, step: int) -> StepPlan:
        """Plan a training step: the keys of history, features, targets and negatives, and seeds."""
        input_keys, offsets = self.features.input_keys(batch)
        keys = {name: TableKeys(keys) for name, keys in input_keys.items()}
        dropout_seed = derive_seed(self.recipe.seed, step, _DROPOUT)
        vectors = self.features.input_vectors(batch, self.dtype)
        if self.recipe.task == "ranking":
            supervised_S = batch.supervised_T.nonzero().squeeze(1)
            return StepPlan(
                batch, keys, supervised_S, dropout_seed, input_offsets=offsets, vectors=vectors
            )
        supervised_S = (batch.supervised_T & (batch.next_items_T >= 0)).nonzero().squeeze(1)
        drawn = plan_negatives(
            self.recipe.loss,
            batch,
            supervised_S,
            derive_seed(self.recipe.seed, step, _NEGATIVES),
            self.negatives,
        )
        negatives = drawn.negatives
        if negatives is None:  # the whole catalogue competes
            negatives = torch.arange(self.features.num_items)
        keys[ITEM] = TableKeys(
            input_keys[ITEM],
            targets=batch.next_items_T[drawn.supervised_S],
            negatives=negatives if self.fetch is None else None,
        )
        return StepPlan(
            batch,
            keys,
            drawn.supervised_S,
            dropout_seed,
            drawn.negatives,
            drawn.groups,
            offsets,
            vectors,
        )

    def read(self, plan: StepPlan) -> StepInputs:
        """Read every row a step needs. Collective."""
        return self.inputs(plan, self.tables.lookup(plan.key_lists()))

    def inputs(self, plan: StepPlan, lookups: Lookups) -> StepInputs:
        """Return a plan with its rows, which were looked up by `plan.key_lists()`."""
        segments = None
        if self.fetch is not None and plan.negatives is not None:
            segments = SegmentedStep(
                self.fetch, plan.negatives, plan.groups or one_token_groups(plan.count)
            )
        return StepInputs(plan, lookups, segments)

    def update(self, parts: Sequence[StepInputs], lr: float) -> None:
        """Take one optimiser step of the tables from the gradients in all `parts`. Collective."""
        if self.fetch is None:
            self.tables.apply([part.lookups for part in parts], lr)
            return
        collect = self.tables.exchange.collect
        collected = add([collect(part.lookups.route, part.lookups) for part in parts])
        segmented = {ITEM: collected.pop(ITEM)}
        if collected:
            self.tables.update(collected, lr)
        segments = [
            part.segments for part in parts if part.segments is not None and part.batch.num_users
        ]
        update_segmented(self.fetch, segments, segmented, lr)

    @property
    def mixes_samples(self) -> str | None:
        """The recipe key through which samples of a batch see one another, or None."""
        return mixed_by(self.recipe.loss) if self.recipe.task == "retrieval" else None

    def loss(self, inputs: StepInputs) -> torch.Tensor:
        """Return the loss summed over the supervised tokens; divide by the count of the step."""
        inputs = self.on_device(inputs)
        loss_S = (
            self._ranking_loss(inputs)
            if self.recipe.task == "ranking"
            else self._retrieval_loss(inputs)
        )
        return loss_S.sum()

    def on_device(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs where the model is, copied only if they are elsewhere."""
        if inputs.plan.supervised_S.device == self.device_transfer.device:
            return inputs
        return inputs.map_tensors(self.device_transfer.copy)

    def forward(
        self, inputs: StepInputs, num_candidates_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model over a batch: hidden_TD for retrieval, logits_TA for ranking."""
        batch = inputs.batch
        labels = (
            labels_TA(self.recipe, batch, self.dtype) if self.recipe.task == "ranking" else None
        )
        return self.model(
            ModelInput(
                rows=inputs.input_rows(),
                offsets_B1=batch.offsets_B1,
                timestamps_T=batch.timestamps_T,
                next_timestamps_T=batch.next_timestamps_T,
                token_ids_T=batch.token_ids_T,
                labels_TA=labels,
                num_candidates_B=num_candidates_B,
                dropout_seed=inputs.plan.dropout_seed,
            )
        )

    @torch.no_grad()
    def queries_SD(self, batch: JaggedBatch) -> torch.Tensor:
        """Retrieval: return each supervised token's query, as the loss compares it; no dropout."""
        inputs = self._read_inputs(batch)
        return self._directions(self.forward(inputs)[inputs.plan.supervised_S]).cpu()

    @torch.no_grad()
    def catalogue_tiles(self) -> Iterator[RowTile]:
        """Retrieval: yield (first item, embeddings) over the catalogue; a score is a product.

        Collective: every rank goes through all tiles.
        """
        for begin, rows_CD in self.tables.row_tiles(ITEM):
            yield begin, self._directions(rows_CD)

    @torch.no_grad()
    def item_vectors_CD(self, items_C: torch.Tensor) -> torch.Tensor:
        """Retrieval: return the embeddings of items, as `catalogue_tiles` has them. Collective."""
        return self._directions(self.tables.peek(ITEM, items_C))

    @torch.no_grad()
    def catalogue_ND(self) -> torch.Tensor:
        """Retrieval: return every item's embedding at once, of a catalogue that fits in memory."""
        return self._directions(self.tables.all_rows(ITEM))

    @torch.no_grad()
    def predict_SA(
        self, batch: JaggedBatch, num_candidates_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Ranking: return each action's probability at each supervised token; no dropout."""
        inputs = self._read_inputs(batch)
        candidates_B = (
            None if num_candidates_B is None else self.device_transfer.copy(num_candidates_B)
        )
        return self.forward(inputs, candidates_B)[inputs.plan.supervised_S].sigmoid().cpu()

    def _read_inputs(self, batch: JaggedBatch) -> StepInputs:
        """Read the rows of the history and the features only."""
        input_keys, offsets = self.features.input_keys(batch)
        keys = {name: TableKeys(keys) for name, keys in input_keys.items()}
        supervised_S = batch.supervised_T.nonzero().squeeze(1)
        vectors = self.features.input_vectors(batch, self.dtype)
        plan = StepPlan(batch, keys, supervised_S, input_offsets=offsets, vectors=vectors)
        return self.on_device(self.read(plan))

    def _directions(self, x_ND: torch.Tensor) -> torch.Tensor:
        return normalize_rows(x_ND) if self.recipe.loss.normalize else x_ND

    def _retrieval_loss(self, inputs: StepInputs) -> torch.Tensor:
        config, plan, rows_UD = self.recipe.loss, inputs.plan, inputs.lookups[ITEM].rows_UD
        places = inputs.places(ITEM)
        assert places.targets is not None
        hidden_SD = self._directions(self.forward(inputs).index_select(0, plan.supervised_S))
        target_keys_S = plan.batch.next_items_T[plan.supervised_S]
        known_N = self.negatives.log_q_N if config.log_q and plan.negatives is not None else None
        log_q_N = None if known_N is None else known_N.to(self.device_transfer.device, self.dtype)
        target_log_q_S = None if log_q_N is None else log_q_N[target_keys_S]
        if inputs.segments is not None:
            targets_SD = self._directions(take_rows(rows_UD, places.targets))
            return inputs.segments.loss(
                hidden_SD, targets_SD, target_keys_S, config.temperature, target_log_q_S, log_q_N
            )
        # In this order: autograd adds the gradients of the leaf in the reverse of it.
        compared_UD, half_UD = self._directions(rows_UD), None
        if config.precision == "fp16":
            half_UD = self._directions(half_precision(rows_UD))
        return self.loss_per_token(
            RetrievalLossInputs(
                hidden_SD=hidden_SD,
                rows_UD=compared_UD,
                targets_S=places.targets,
                negatives=None if plan.negatives is None else places.negatives,
                temperature=config.temperature,
                target_log_q_S=target_log_q_S,
                negative_log_q=None if log_q_N is None else log_q_N[plan.negatives],
                groups=plan.groups,
                negative_rows_UD=half_UD,
                literal=config.share_by == "logits",
            )
        )

    def _ranking_loss(self, inputs: StepInputs) -> torch.Tensor:
        supervised_S = inputs.plan.supervised_S
        weights_A = torch.tensor(
            [task.weight for task in self.recipe.tasks.values()],
            dtype=self.dtype,
            device=self.device_transfer.device,
        )
        labels_SA = labels_TA(self.recipe, inputs.batch, self.dtype)[supervised_S]
        return ranking_loss(self.forward(inputs)[supervised_S], labels_SA, weights_A)


def build_tables(
    recipe: Recipe, features: Features, dtype: torch.dtype, ranks: Ranks
) -> TableCollection:
    """Make this rank's part of the tables, connected with the other ranks and replicas."""
    config = recipe.tables
    averaged = config.replicas == "averaged" and ranks.replica_group is not None
    tables = [
        _build_table(recipe, name, rows, dtype, ranks)
        for name, rows in features.table_sizes().items()
    ]
    replicas: Replicas | None = None
    if ranks.replica_group is not None:
        communicator, whole = (
            Communicator(ranks.replica_group),
            frozenset(table.name for table in tables if table.optimizer.updates_untouched_rows),
        )
        replicas = (
            AveragedWeights(communicator, config.average_every)
            if averaged
            else SummedGradients(communicator, whole)
        )
    half_lists = None
    if recipe.task == "retrieval" and recipe.loss.precision == "fp16":
        half_lists = {ITEM: NEGATIVES_LIST}
    by_name = {table.name: table for table in tables}
    exchange = Exchange(
        by_name, ranks.shard_group, transport=config.transport, half_lists=half_lists
    )
    return TableCollection(tables, exchange, replicas)


def _build_table(
    recipe: Recipe, name: str, rows: int, dtype: torch.dtype, ranks: Ranks
) -> EmbeddingTable:
    """Make this rank's part of one table, by its own settings where it has some."""
    config = recipe.tables.of_table(name)
    optimizer = make_row_optimizer(
        config.optimizer,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        lr_factor=config.lr / recipe.tables.lr,
    )
    if config.replicas == "averaged" and ranks.replica_group is not None:
        optimizer = rescaled_for_averaging(optimizer, ranks.replicas)
    placement = Placement(1 if optimizer.updates_untouched_rows else ranks.shards)
    directory = None
    if config.directory is not None and config.tier != "memory":
        directory = Path(config.directory)
        if ranks.replicas > 1:
            directory /= f"replica-{ranks.rank // ranks.shards:05d}"
    return make_table(
        config.tier,
        name,
        rows,
        recipe.tables.dim_of(name, recipe.model.dim),
        optimizer,
        seed=derive_seed(recipe.seed, _TABLES),
        init_scale=config.init_scale,
        dtype=dtype,
        placement=placement,
        rank=ranks.shard if placement.world > 1 else 0,
        directory=directory,
        cache_bytes=config.cache_bytes,
        admit_after=config.admit_after,
        max_rows=None if config.max_rows is None else -(-config.max_rows // placement.world),
        evict=config.evict,
    )


def input_widths(recipe: Recipe) -> dict[str, int]:
    """Return the tables whose rows are not as wide as the model, with their widths."""
    dim = recipe.model.dim
    widths = {name: recipe.tables.dim_of(name, dim) for name in recipe.table_names()}
    return {name: width for name, width in widths.items() if width != dim}
