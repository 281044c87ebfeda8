"""Two real ranks train one step with negatives in 32 and in 16 bits and count the bytes they send.

Touch this when rows or gradients travel in another way.
"""

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.local_ranks import run_ranks
from benchmarks.negatives.steps import recipe_of
from slipstream.bench.negative_memory import CHILD_SECONDS
from slipstream.bench.step_samples import batch_of
from slipstream.tables.communicator import Communicator
from slipstream.training.features import Features
from slipstream.training.loop import train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import arrange
from slipstream.training.recommender import Recommender

WORLD = 2


class CountingCommunicator(Communicator):
    """Counts the bytes it sends to other ranks: keys, and rows and gradients by their precision."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.bytes: dict[str, int] = {}

    def swap(
        self, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], purpose: str
    ) -> torch.Tensor:
        width = sent.dtype.itemsize
        away = (sum(send_sizes) - send_sizes[self.rank]) * width
        name = "keys" if purpose == "keys" else "16 bits" if width == 2 else "exact"
        self.bytes[name] = self.bytes.get(name, 0) + away
        return super().swap(sent, send_sizes, receive_sizes, purpose)


def child(rank: int, meeting: str, lengths: list[int], items: int, negatives: int) -> None:
    """Run one rank; rank 0 prints the bytes of both ranks per precision."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=CHILD_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=wait
    )
    try:
        ranks, found = arrange("auto", wait), {}
        for precision in ("fp32", "fp16"):
            recipe = recipe_of({"negatives": negatives, "precision": precision})
            recommender = Recommender(recipe, Features(items), ranks=ranks)
            optimizer = make_adamw(recommender.model, recipe.optimizer)
            batch = batch_of(lengths, items, seed=rank, first_user=rank * len(lengths))
            assert ranks.shard_group is not None
            counting = CountingCommunicator(ranks.shard_group)
            recommender.tables.exchange.communicator = counting
            train_step(recommender, optimizer, batch, 0, 1_000, ranks)
            names = ("keys", "exact", "16 bits")
            total = ranks.sum([float(counting.bytes.get(name, 0)) for name in names])
            found[precision] = dict(zip(names, total, strict=True))
        if rank == 0:
            print(json.dumps(found))
    finally:
        dist.destroy_process_group()


def measure(lengths: list[int], items: int, negatives: int) -> dict[str, dict[str, float]]:
    """Count bytes of one step over both ranks: keys, exact rows and gradients, those in 16 bits."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = json.dumps([str(Path(scratch) / "meeting"), lengths, items, negatives])
        found: dict[str, dict[str, float]] = run_ranks(
            "benchmarks.negatives.ranks", [arguments], world=WORLD, seconds_allowed=CHILD_SECONDS
        )
        return found


if __name__ == "__main__":
    child(int(sys.argv[1]), *json.loads(sys.argv[2]))
