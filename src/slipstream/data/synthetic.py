"""A synthetic log with lasting interests, Zipf popularity and lognormal lengths.

Touch this to give synthetic logs another property; their digests then change. Items belong to
topics. A user has a few topics of interest, draws most behaviours from them (popular items of a
topic more often) and the others from all items. Clicks and likes are likelier for items of
interest. Users are made in blocks, each from (seed, block), so any size is reproducible.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from slipstream.data.raw_log import Columns, Progress, RawLog
from slipstream.errors import SlipstreamError

COLUMNS = Columns("user_id", "item_id", "timestamp", actions=("click", "like"))
BLOCK_USERS = 4096
START = 1_600_000_000


@dataclass(frozen=True)
class Synthetic:
    """Size and shape of a synthetic log. Lengths are lognormal(mu, sigma), clipped."""

    users: int = 1_000
    items: int = 2_000
    topics: int = 50
    interests: int = 3
    loyalty: float = 0.85  # share of behaviours that follow an interest
    zipf: float = 1.0
    length_mu: float = 4.5
    length_sigma: float = 0.8
    length_min: int = 5
    length_max: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.users, self.items, self.topics, self.interests, self.length_min) < 1
            or self.length_max < self.length_min
        ):
            raise SlipstreamError(
                "a synthetic log needs at least one user, item, topic, interest and behaviour "
                f"each, got {self}"
            )


LENGTHS: dict[str, dict[str, Any]] = {
    "movielens": {},
    # Fits the published mean and median of KuaiRand-1K.
    "kuairand-1k": {
        "length_mu": 8.125,
        "length_sigma": 0.894,
        "length_min": 10,
        "length_max": 49_332,
    },
    # Fits the published median (8,591), mean (11,796) and range of KuaiRand-27K.
    "kuairand-27k": {
        "length_mu": 9.058,
        "length_sigma": 0.796,
        "length_min": 100,
        "length_max": 228_000,
    },
}


def with_lengths(shape: Synthetic, name: str) -> Synthetic:
    """Return the same shape with the lengths of a known data set."""
    if name not in LENGTHS:
        raise SlipstreamError(
            f"unknown lengths '{name}'; choose one of {', '.join(sorted(LENGTHS))}"
        )
    return replace(shape, **LENGTHS[name])


def draw_lengths(shape: Synthetic, users: int, generator: np.random.Generator) -> np.ndarray:
    """Draw the lengths of `users` logs, int64."""
    drawn = generator.lognormal(shape.length_mu, shape.length_sigma, users)
    return np.clip(np.rint(drawn), shape.length_min, shape.length_max).astype(np.int64)


class _ItemWeights:
    """Items sorted by topic with cumulated Zipf weights: a uniform number selects an item."""

    def __init__(self, shape: Synthetic) -> None:
        generator = np.random.default_rng([shape.seed, 0])
        self.topic_V = generator.integers(0, shape.topics, shape.items)
        # Every topic has an item, if there are enough items.
        self.topic_V[: min(shape.topics, shape.items)] = np.arange(min(shape.topics, shape.items))
        popularity_V = (generator.permutation(shape.items) + 1.0) ** -shape.zipf
        self.order_V = np.argsort(self.topic_V, kind="stable")
        self.cumulated_V = np.cumsum(popularity_V[self.order_V])
        ends = np.searchsorted(self.topic_V[self.order_V], np.arange(shape.topics), side="right")
        edges = np.concatenate([[0.0], self.cumulated_V])[np.concatenate([[0], ends])]
        self.low_K, self.high_K = edges[:-1], edges[1:]

    def draw(
        self, uniform_T: np.ndarray, topic_T: np.ndarray, anything_T: np.ndarray
    ) -> np.ndarray:
        """Draw one item per behaviour: from its topic, or from all items."""
        low_T = np.where(anything_T, 0.0, self.low_K[topic_T])
        high_T = np.where(anything_T, self.cumulated_V[-1], self.high_K[topic_T])
        place_T = np.searchsorted(
            self.cumulated_V, low_T + uniform_T * (high_T - low_T), side="right"
        )
        return self.order_V[np.minimum(place_T, self.order_V.size - 1)]


def _block(shape: Synthetic, weights: _ItemWeights, block: int) -> pl.DataFrame:
    generator = np.random.default_rng([shape.seed, 1, block])
    first = block * BLOCK_USERS
    users = min(BLOCK_USERS, shape.users - first)
    lengths_B = draw_lengths(shape, users, generator)
    user_T = np.repeat(np.arange(users), lengths_B)
    total = user_T.size
    topics = np.flatnonzero(weights.high_K > weights.low_K)
    cares_BI = topics[generator.integers(0, topics.size, (users, shape.interests))]
    # The first interest weighs most: the minimum of two uniform draws leans towards small numbers.
    which_T = (generator.random((2, total)).min(axis=0) * shape.interests).astype(np.int64)
    topic_T = cares_BI[user_T, which_T]
    anything_T = generator.random(total) >= shape.loyalty
    item_T = weights.draw(generator.random(total), topic_T, anything_T)
    liked_T = (weights.topic_V[item_T][:, None] == cares_BI[user_T]).any(axis=1)
    click_T = generator.random(total) < np.where(liked_T, 0.7, 0.2)
    like_T = click_T & (generator.random(total) < np.where(liked_T, 0.3, 0.05))
    gap_T = generator.exponential(np.where(generator.random(total) < 0.9, 120.0, 86_400.0)).astype(
        np.int64
    )
    time_T = np.cumsum(gap_T)
    starts_B = np.cumsum(lengths_B) - lengths_B
    time_T += np.repeat(
        START + generator.integers(0, 30 * 86_400, users) - time_T[starts_B], lengths_B
    )
    return pl.DataFrame(
        {
            "user_id": user_T + first + 1,
            "item_id": item_T + 1,
            "timestamp": time_T,
            "click": click_T.astype(np.int8),
            "like": like_T.astype(np.int8),
        }
    )


def synthetic_log(shape: Synthetic, scratch: Path, progress: Progress) -> RawLog:
    """Make the log in `scratch`, a Parquet file per block of users."""
    weights = _ItemWeights(shape)
    paths = []
    for block in range(-(-shape.users // BLOCK_USERS)):
        progress("making the log", block * BLOCK_USERS, shape.users)
        path = scratch / f"log_{block:06d}.parquet"
        _block(shape, weights, block).write_parquet(path, compression="lz4", statistics=False)
        paths.append(path)
    items = pl.DataFrame(
        {"id": np.arange(1, shape.items + 1), "topic": weights.topic_V}
    ).with_columns(
        title=pl.format("item {} of topic {}", "id", "topic"),
        topic=pl.format("{}", pl.col("topic").cast(pl.String).str.zfill(6)),
    )
    return RawLog(
        pl.scan_parquet(paths), COLUMNS, items=items.lazy(), source={"synthetic": shape.__dict__}
    )
