"""The peer of the pipeline benchmark: the same model, batches and link under TorchRec's pipeline.

TorchRec's TrainPipelineSparseDist shards the table row by row over the ranks (FBGEMM's fused
row-wise Adagrad), wraps the dense part in DDP and overlaps the key exchange of the next batch with
the compute of this one. Its tables are in memory, so it takes part where ours are too. Keys are
deduplicated before they are sent, as our loader lane does; TorchRec alone would send every
occurrence. Touch this when TorchRec's interface changes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.data.batch import JaggedBatch
from slipstream.tables.exchange import Lookup, Lookups, Route, distinct
from slipstream.training.features import ITEM
from slipstream.training.optimizers import make_adamw
from slipstream.training.recommender import Recommender
from slipstream.training.step import StepPlan

_IN_FLIGHT = 3


@dataclass
class PeerBatch:
    """One batch in the form that TorchRec copies to a device; on a CPU it stays."""

    sparse: Any  # KeyedJaggedTensor
    content: tuple[StepPlan, torch.Tensor, list[torch.Tensor]]

    def to(self, device: torch.device, non_blocking: bool = False) -> "PeerBatch":
        return self

    def record_stream(self, stream: Any) -> None:
        """Do nothing: a CPU has no streams."""

    def pin_memory(self) -> "PeerBatch":
        return self


class Head(nn.Module):
    """Everything after the lookup: our model and loss over rows that TorchRec read."""

    def __init__(self, recommender: Recommender) -> None:
        super().__init__()
        self.model, self._recommender = recommender.model, [recommender]

    def forward(self, batch: PeerBatch, rows: Any) -> torch.Tensor:
        recommender = self._recommender[0]
        plan, unique_U, inverses = batch.content
        lookups = Lookups({ITEM: Lookup(unique_U, rows[ITEM].values(), inverses)}, Route({}, {}))
        return recommender.loss(recommender.inputs(plan, lookups)) / plan.count


class PeerModel(nn.Module):
    """The lookup, then the head."""

    def __init__(self, tables: nn.Module, head: Head) -> None:
        super().__init__()
        self.tables, self.head = tables, head

    def forward(self, batch: PeerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.head(batch, self.tables(batch.sparse))
        return loss, loss.detach()


class TorchRecPipeline:
    """TorchRec's pipeline; `first_rows` gives the initial rows of keys."""

    def __init__(
        self, recommender: Recommender, first_rows: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.streamable import Pipelineable

        Pipelineable.register(PeerBatch)
        world, cpu = dist.get_world_size(), torch.device("cpu")
        recipe, items = recommender.recipe, recommender.features.num_items
        config = EmbeddingConfig(
            num_embeddings=items, embedding_dim=recipe.model.dim, name=ITEM, feature_names=[ITEM]
        )
        whole = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        fused = {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": recipe.tables.lr,
            "eps": recipe.tables.eps,
        }
        sharder = EmbeddingCollectionSharder(fused_params=fused)
        plan = construct_module_sharding_plan(
            whole,
            {ITEM: row_wise(compute_kernel="fused")},
            sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        model = DistributedModelParallel(
            PeerModel(whole, Head(recommender)),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=cpu,
            plan=ShardingPlan({"tables": plan}),
            sharders=[sharder],
        )
        for value in model.module.tables.state_dict().values():
            for shard in value.local_shards():
                first, count = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
                shard.tensor.detach().copy_(first_rows(torch.arange(first, first + count)))
        self.recommender, self._keys = recommender, KeyedJaggedTensor
        self._pipeline = TrainPipelineSparseDist(
            model, make_adamw(recommender.model, recipe.optimizer), cpu
        )

    def batch(self, jagged: JaggedBatch, step: int) -> PeerBatch:
        """What the loader hands over."""
        plan = self.recommender.plan_step(jagged, step)
        unique_U, inverses = distinct(plan.key_lists()[ITEM], self.recommender.features.num_items)
        keys = self._keys(keys=[ITEM], values=unique_U, lengths=torch.tensor([unique_U.numel()]))
        # Its gradients are means over the ranks, so every rank divides by its own tokens: the ranks
        # have as many.
        return PeerBatch(keys, (plan, unique_U, inverses))

    def run(self, batches: list[JaggedBatch], steps: int) -> tuple[list[float], list[float]]:
        """Take steps; returns when each ended, and its loss. Batches ahead are finished too."""
        source = (
            self.batch(batches[step % len(batches)], step) for step in range(steps + _IN_FLIGHT)
        )
        ends, losses = [], []
        for _ in range(steps + _IN_FLIGHT):
            losses.append(float(self._pipeline.progress(source)))
            ends.append(time.perf_counter())
        return ends[:steps], losses[:steps]
