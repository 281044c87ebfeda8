"""What one launch of the pipeline benchmark runs, and its batches.

Users have one topic each and draw items by Zipf's law, some from everywhere, so that batches
overlap. Touch this when a setting needs another number.
"""

from dataclasses import dataclass

import numpy as np
import torch

from slipstream.data.batch import JaggedBatch
from slipstream.training.recipe import Recipe

START = 1_600_000_000


@dataclass(frozen=True)
class Setting:
    """What is run where."""

    world: int = 2
    users: int = 16  # per rank
    length: int = 2048
    items: int = 20_000
    topics: int = 24
    zipf: float = 1.2
    dim: int = 64
    heads: int = 2
    blocks: int = 1
    batches: int = 12  # different ones, in a circle
    tier: str = "disk"
    read_rate: float | None = None
    latency: float = 0.0  # seconds that a read of any number of rows waits
    cache_rows: int = 1024  # of a schedule's table; the plain loop also gets those of the buffers
    buffers: int = 2  # that `nested` holds at a time: one more than it looks ahead
    link_rate: float | None = None  # of the emulated link; None: the network is the link
    steps: int = 2  # timed, after `warm_up`
    warm_up: int = 2
    repeats: int = 5
    check_steps: int = 4
    variants: tuple[tuple[str, int], ...] = (("serial", 1), ("nested", 8))
    adaptive: bool = False  # nested chooses its own numbers
    seconds_allowed: int = 400
    device_seconds: float | None = None  # per token, on an emulated device; None: on the core

    def recipe(self) -> Recipe:
        model = {
            "kind": "hstu",
            "dim": self.dim,
            "heads": self.heads,
            "blocks": self.blocks,
            "max_len": self.length,
        }
        model["position_embedding"] = False
        loss = {"kind": "shared_softmax", "negatives": 32}
        return Recipe.model_validate(
            {
                "name": "pipeline",
                "model": model,
                "loss": loss,
                "sampler": {"max_len": self.length},
                "tables": {"optimizer": "rowwise_adagrad"},
            }
        )


def make_batch(setting: Setting, number: int, rank: int) -> JaggedBatch:
    """Make a batch of one rank: nine items in ten come from the topic of the user."""
    rng = np.random.default_rng([7, number, rank])
    per_topic = setting.items // setting.topics
    weights = (np.arange(per_topic) + 1.0) ** -setting.zipf
    cumulated = np.cumsum(weights) / weights.sum()
    shape = (setting.users, setting.length + 1)
    topics = np.where(
        rng.random(shape) < 0.9,
        rng.integers(0, setting.topics, (setting.users, 1)),
        rng.integers(0, setting.topics, shape),
    )
    ranks_drawn = np.minimum(np.searchsorted(cumulated, rng.random(shape)), per_topic - 1)
    log = torch.from_numpy(topics * per_topic + ranks_drawn)
    times = START + torch.from_numpy(rng.integers(1, 10_000, shape)).cumsum(1)
    tokens = setting.users * setting.length
    return JaggedBatch(
        sample_ids_B=torch.arange(setting.users) + (number * setting.world + rank) * setting.users,
        first_positions_B=torch.zeros(setting.users, dtype=torch.int64),
        offsets_B1=torch.arange(setting.users + 1) * setting.length,
        items_T=log[:, :-1].reshape(-1),
        timestamps_T=times[:, :-1].reshape(-1),
        next_items_T=log[:, 1:].reshape(-1),
        next_timestamps_T=times[:, 1:].reshape(-1),
        supervised_T=torch.ones(tokens, dtype=torch.bool),
    )
