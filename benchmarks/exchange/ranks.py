"""One rank of the exchange benchmark: looks up, differentiates and updates the same Zipf ids.

Bytes are counted by wrapping torch's collectives, so both systems pay for what they really send;
what stays on the rank is not counted. Started by `benchmarks.exchange.bench`; rank 0 prints the
figures of all ranks as one JSON line. Touch this when a step of either side does something else.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.bench.harness import set_training_allocator
from slipstream.ops.rows import take_rows, unique_keys
from slipstream.tables.collection import Lookups, TableCollection
from slipstream.tables.communicator import Communicator
from slipstream.tables.embedding_table import first_rows
from slipstream.tables.exchange import Exchange
from slipstream.tables.memory_table import MemoryTable
from slipstream.tables.replicas import SummedGradients
from slipstream.tables.row_optimizers import RowwiseAdagrad
from slipstream.tables.slices import Placement
from slipstream.training.ranks import Ranks, arrange

SEED, LR, EPS, INIT = 5, 0.1, 1e-8, 0.035
REPEATED = "torchrec, repeated keys"


@dataclass(frozen=True)
class Setting:
    """One step of one rank: `tokens` ids of a table of `rows` x `dim`."""

    rows: int = 1_000_000
    dim: int = 64
    tokens: int = 20_000
    exponent: float = 1.05
    repeats: int = 7
    seconds_allowed: float = 200.0

    @cached_property
    def _ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Return cumulative Zipf weights, and ids by popularity, spread over the table."""
        ends = np.cumsum(np.arange(1, self.rows + 1, dtype=np.float64) ** -self.exponent)
        return ends, np.random.default_rng(0).permutation(self.rows)

    def keys(self, rank: int, step: int) -> torch.Tensor:
        """Return this rank's ids of a step."""
        ends, ids = self._ids
        drawn = np.random.default_rng([rank, step]).random(self.tokens) * ends[-1]
        return torch.from_numpy(ids[np.searchsorted(ends, drawn)])


class ByteCount:
    """Bytes sent to other ranks through torch's all-to-all, by process group."""

    def __init__(self) -> None:
        self.by_group: dict[int, int] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        original = dist.all_to_all_single

        def counted(
            output: torch.Tensor, input: torch.Tensor, *arguments: Any, **options: Any
        ) -> Any:  # torch's own names
            splits = options.get("input_split_sizes", arguments[1] if len(arguments) > 1 else None)
            group = options.get("group", arguments[2] if len(arguments) > 2 else None)
            own = dist.get_rank(group)
            rows = max(1, input.shape[0] if input.dim() else 1)
            mine = splits[own] if splits else rows // dist.get_world_size(group)
            sent = (
                (rows - mine) * (input.numel() // rows) * input.element_size()
                if input.numel()
                else 0
            )
            self.by_group[id(group)] = self.by_group.get(id(group), 0) + sent
            return original(output, input, *arguments, **options)

        dist.all_to_all_single = counted
        try:
            yield
        finally:
            dist.all_to_all_single = original

    def total(self, group: dist.ProcessGroup | None = None) -> int:
        return sum(self.by_group.values()) if group is None else self.by_group.get(id(group), 0)


class Ours:
    """Our tables on a mesh; `predicted` is the bytes of the last step by the formula."""

    def __init__(self, setting: Setting, ranks: Ranks, transport: str = "exact") -> None:
        self.ranks, self.dim = ranks, setting.dim
        placement = Placement(ranks.shards)
        table = MemoryTable(
            "item",
            setting.rows,
            setting.dim,
            RowwiseAdagrad(EPS),
            seed=SEED,
            placement=placement,
            rank=ranks.shard,
        )
        keys_N = torch.arange(
            setting.rows
        )  # all rows are there before the clock runs, as they are in the peer's table
        table.gather(keys_N[placement.owner_of(keys_N) == ranks.shard])
        replicas = (
            None
            if ranks.replica_group is None
            else SummedGradients(Communicator(ranks.replica_group))
        )
        self.tables = TableCollection(
            [table], Exchange({"item": table}, ranks.shard_group, transport=transport), replicas
        )
        self.bytes_per_value = 4 if transport == "exact" else 2
        self.predicted = 0

    def step(self, keys_T: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        lookups = self.tables.lookup({"item": [keys_T]})
        rows_TD = lookups["item"].rows(0)
        (rows_TD * weights_T1).sum().backward()
        self.tables.apply(lookups, LR)
        self.predicted = self._formula(lookups)
        return rows_TD.detach()

    def _formula(self, lookups: Lookups) -> int:
        """Count keys and gradients to other owners, and rows to the ranks that requested them."""
        route, own = lookups.route, self.ranks.shard
        others = [w for w in range(self.ranks.shards) if w != own]
        requested, served = (
            sum(counts[w][0] for w in others) for counts in (route.sent_WC, route.received_WC)
        )
        return (
            8 * len(others) + 8 * requested + self.bytes_per_value * self.dim * (requested + served)
        )


class TorchRec:
    """TorchRec's EmbeddingCollection with FBGEMM's fused row-wise Adagrad, our first rows."""

    def __init__(self, setting: Setting, *, dedup: bool) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv

        world, cpu = dist.get_world_size(), torch.device("cpu")
        config = EmbeddingConfig(
            num_embeddings=setting.rows,
            embedding_dim=setting.dim,
            name="item",
            feature_names=["item"],
        )
        whole = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPS}
        sharder = EmbeddingCollectionSharder(fused_params=fused, use_index_dedup=dedup)
        plan = construct_module_sharding_plan(
            whole,
            {"item": row_wise(compute_kernel="fused")},
            sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.module = sharder.shard(
            whole, plan, ShardingEnv.from_process_group(dist.group.WORLD), cpu
        )
        for value in self.module.state_dict().values():
            for shard in value.local_shards():
                first, count = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
                keys_U = torch.arange(first, first + count)
                shard.tensor.detach().copy_(
                    first_rows(SEED, "item", keys_U, setting.dim, INIT, torch.float32)
                )
        self._batch = KeyedJaggedTensor

    def rows(self, keys_K: torch.Tensor) -> torch.Tensor:
        """Return the rows of these keys, in their order."""
        batch = self._batch(keys=["item"], values=keys_K, lengths=torch.tensor([keys_K.numel()]))
        rows_KD: torch.Tensor = self.module(batch)["item"].values()
        return rows_KD

    def step(self, keys_T: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Hand over every occurrence of a key."""
        return _backward(self.rows(keys_T), weights_T1)

    def step_unique(self, keys_T: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Deduplicate the keys with torch's operators first, as its users on a CPU would."""
        unique_U, inverse_T = torch.unique(keys_T, return_inverse=True)
        return _backward(self.rows(unique_U).index_select(0, inverse_T), weights_T1)

    def step_our_unique(self, keys_T: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
        """Deduplicate the keys with our operators first."""
        unique_U, inverse_T = unique_keys(keys_T)
        return _backward(take_rows(self.rows(unique_U), inverse_T), weights_T1)


def _backward(rows_TD: torch.Tensor, weights_T1: torch.Tensor) -> torch.Tensor:
    (rows_TD * weights_T1).sum().backward()
    return rows_TD.detach()


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weights_of(setting: Setting, rank: int, step: int) -> torch.Tensor:
    """Return a gradient that differs from token to token."""
    return torch.rand(setting.tokens, 1, generator=torch.Generator().manual_seed(step * 64 + rank))


def measure(
    setting: Setting, rank: int, variants: dict[str, Step]
) -> tuple[dict[str, dict[str, Any]], float]:
    """Time and count every step of every variant, in turns; compare the variants' rows."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "bytes": []} for name in variants}
    worst = 0.0
    for step in range(-2, setting.repeats):
        keys_T, weights_T1, rows = (
            setting.keys(rank, step + 2),
            weights_of(setting, rank, step + 2),
            {},
        )
        for name, work in variants.items():
            count = ByteCount()
            dist.barrier()
            begin = time.perf_counter()
            with count.counting():
                rows[name] = work(keys_T, weights_T1)
            dist.barrier()
            if step >= 0:
                found[name]["seconds"].append(time.perf_counter() - begin)
                found[name]["bytes"].append(count.total())
        first = next(iter(rows.values()))
        worst = max(worst, *(float((first - other).abs().max()) for other in rows.values()))
    return found, worst


def against_torchrec(setting: Setting, rank: int, world: int) -> dict[str, Any]:
    """Measure ours (exact, and in 16 bits) against TorchRec, each variant with its own table."""
    ranks = arrange("auto", timedelta(seconds=setting.seconds_allowed))
    ours, rounded = Ours(setting, ranks), Ours(setting, ranks, "fp16")
    variants: dict[str, Step] = {
        "slipstream": ours.step,
        "torchrec, torch.unique": TorchRec(setting, dedup=False).step_unique,
        "torchrec, our unique_keys": TorchRec(setting, dedup=False).step_our_unique,
        REPEATED: TorchRec(setting, dedup=False).step,
    }
    deduplicating = TorchRec(setting, dedup=True)
    try:
        deduplicating.step(setting.keys(rank, 999)[:8], torch.zeros(8, 1))
        variants["torchrec, index dedup"] = deduplicating.step
    except NotImplementedError:  # FBGEMM has no CPU kernel for it
        pass
    found, difference = measure(setting, rank, variants)
    error = abs(ours.predicted - found["slipstream"]["bytes"][-1])
    small, _ = measure(setting, rank, {"slipstream, fp16 transport": rounded.step})
    report = rounded.tables.exchange.transport.report()
    dedup = "torchrec, index dedup" in variants
    return {
        "rows": found | small,
        "max_diff": difference,
        "formula_error": error,
        "transport": report,
        "peer_dedup": dedup,
    }


def replicas_against_flat(setting: Setting, rank: int, world: int) -> dict[str, Any]:
    """Count all-to-all bytes of four ranks, flat and in 2 x 2 replicas.

    The lists that replicas exchange among themselves are not counted.
    """
    found: dict[str, Any] = {}
    for mesh in ("auto", "2x2"):
        ranks = arrange(mesh, timedelta(seconds=setting.seconds_allowed))
        ours = Ours(setting, ranks)
        shard, replica, errors = [], [], 0
        for step in range(setting.repeats):
            count = ByteCount()
            with count.counting():
                ours.step(setting.keys(rank, step), weights_of(setting, rank, step))
            shard.append(count.total(ranks.shard_group))
            replica.append(count.total() - shard[-1])
            errors += abs(ours.predicted - shard[-1])
        found[mesh] = {"all_to_all": shard, "replica_lists": replica, "formula_error": errors}
    return found


def child(rank: int, world: int, meeting: str, setting: Setting, work: str) -> None:
    """Run one rank; rank 0 prints the figures of all."""
    torch.set_num_threads(1)
    set_training_allocator()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) >= world:
        os.sched_setaffinity(0, {cpus[rank]})
    patience = timedelta(seconds=setting.seconds_allowed)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=patience
    )
    try:
        mine = {"torchrec": against_torchrec, "replicas": replicas_against_flat}[work](
            setting, rank, world
        )
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, mine)
        if rank == 0:
            print(json.dumps({"setting": asdict(setting), "ranks": everybody}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    child(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Setting(**json.loads(sys.argv[4])),
        sys.argv[5],
    )
