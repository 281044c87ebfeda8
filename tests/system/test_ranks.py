"""Training on 2 and 4 real ranks, flat and in replicas, ends where one rank ends; replicas stay the
same bits.
"""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slipstream.data.store import SequenceStore
from slipstream.tables.slices import Placement
from slipstream.training.evaluation import evaluate
from slipstream.training.loop import train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import ALONE, Ranks, arrange
from slipstream.training.recommender import Recommender
from slipstream.training.run import make_sampler
from tests.support.ranks_fixtures import run_ranks
from tests.support.training_fixtures import RICH, small_recipe, small_store

STEPS, MANY_STEPS = 10, 50  # usual, and in the slow tests
RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}, "like": {"column": "like", "weight": 0.5}},
    "loss": {"kind": "bce"},
    "user_features": ["age"],
}
RETRIEVAL = {"item_features": ["genre"], "optimizer": {"clip_norm": 0.5}}
KINDS = {
    "retrieval adagrad": {**RETRIEVAL, "tables": {"optimizer": "rowwise_adagrad", "lr": 0.05}},
    "retrieval adam": {
        **RETRIEVAL,
        "tables": {"optimizer": "rowwise_adam"},
        "sampler": {"balance": "lpt"},
    },
    "ranking adagrad": {**RANKING, "tables": {"optimizer": "rowwise_adagrad", "lr": 0.05}},
    "ranking adam": {**RANKING, "tables": {"optimizer": "rowwise_adam"}},
    "retrieval adagrad on disk": {
        **RETRIEVAL,
        "tables": {"optimizer": "rowwise_adagrad", "lr": 0.05, "tier": "disk"},
    },
    "ranking adam hashed": {**RANKING, "tables": {"optimizer": "rowwise_adam", "tier": "hashed"}},
    "ranking adam, features of all kinds": {
        **RANKING,
        **RICH,
        "tables": {"optimizer": "rowwise_adam"},
    },
    "whole catalogue, every row moves": {
        **RETRIEVAL,
        "loss": {"kind": "full_softmax"},
        "tables": {"optimizer": "adamw"},
    },
}


def recipe_of(kind: str, directory: str | None = None):
    """The recipe of a kind; the oracle (no directory) keeps the rows of a disk table in memory."""
    recipe = small_recipe(**KINDS[kind])
    if recipe.tables.tier != "disk":
        return recipe
    place = (
        {"tier": "memory"}
        if directory is None
        else {"directory": directory, "cache_bytes": 1 << 16}
    )
    return recipe.model_copy(update={"tables": recipe.tables.model_copy(update=place)})


class Session:
    """A run without its bookkeeping."""

    def __init__(self, store, recipe, dtype, ranks: Ranks = ALONE) -> None:
        self.recipe, self.ranks, self.store = recipe, ranks, store
        self.recommender = Recommender.build(recipe, store, dtype, ranks)
        self.optimizer = make_adamw(self.recommender.model, recipe.optimizer)
        self.sampler = make_sampler(recipe, store, ranks)
        self.step = 0

    def train(self, steps: int) -> "Session":
        for _ in range(steps):
            train_step(
                self.recommender,
                self.optimizer,
                self.sampler.next_batch(),
                self.step,
                10**6,
                self.ranks,
            )
            self.step += 1
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """Dense weights, AdamW's moments, and the rows this rank owns with their state, by key."""
        found = {
            f"model/{name}": value for name, value in self.recommender.model.state_dict().items()
        }
        for name, parameter in self.recommender.model.named_parameters():
            found |= {
                f"adamw/{name}/{key}": value
                for key, value in self.optimizer.state[parameter].items()
            }
        for name, table in self.recommender.tables.tables.items():
            rows = table.read(self.owned(name, table.num_rows))
            found |= {
                f"tables/{name}/weights": rows.weights_UD,
                **{f"tables/{name}/{k}": v for k, v in rows.state.items()},
            }
        return {name: value.detach().double() for name, value in found.items()}

    def owned(self, name, num_rows):
        keys = torch.arange(num_rows)
        if self.recommender.tables.exchange.keeps_whole(name):
            return keys
        return keys[Placement(self.ranks.shards).owner_of(keys) == self.ranks.shard]


def distance(mine: Session, alone: dict[str, torch.Tensor]) -> float:
    """Largest difference of anything trained, over what this rank holds; of values above 1 (sums of
    squares) the relative one.
    """
    worst = 0.0
    for name, value in mine.tensors().items():
        other = alone[name]
        if name.startswith("tables/"):
            other = other[mine.owned(name.split("/")[1], len(other))]
        worst = max(
            worst,
            float(((value - other).abs() / other.abs().clamp(min=1.0)).max())
            if value.numel()
            else 0.0,
        )
    return worst


def one_rank(rank, store, recipe, dtype, scratch, steps):
    """What one rank trains, and its validation figures: worked out by rank 0, read by all."""
    if rank == 0:
        alone = Session(store, recipe, dtype).train(steps)
        torch.save(
            [alone.tensors(), evaluate(alone.recommender, store, recipe, "validation")], scratch
        )
    dist.barrier()
    found = torch.load(scratch, weights_only=True)
    dist.barrier()
    return found


def compare(rank, world, store, meshes, cases, steps=STEPS):
    """Per (kind, type) and mesh the largest distance from one rank after so many steps; and
    whether replicas are the same bits.
    """
    opened, found = SequenceStore.open(Path(store)), {}
    arranged = {mesh: arrange(mesh, timedelta(seconds=60)) for mesh in meshes}
    for kind, dtype in ((kind, getattr(torch, name)) for kind, name in cases):
        recipe = recipe_of(kind)
        alone, expected = one_rank(rank, opened, recipe, dtype, f"{store}-oracle.pt", steps)
        for mesh, ranks in arranged.items():
            mine = Session(opened, recipe_of(kind, f"{store}-{mesh}-{dtype}"), dtype, ranks).train(
                steps
            )
            found[f"{kind}, {mesh}, {dtype}"] = distance(mine, alone)
            if ranks.replica_group is not None:
                assert same_bits_over(ranks.replica_group, mine), "replicas drifted apart"
            figures = evaluate(mine.recommender, opened, recipe, "validation", ranks)
            assert figures == pytest.approx(expected, abs=1e-4), (kind, mesh)
    return found


def same_bits_over(group, session) -> bool:
    flat = torch.cat([value.reshape(-1) for _, value in sorted(session.tensors().items())])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, flat, group=group)
    return all(torch.equal(flat, other) for other in gathered)


def assert_close(answers):
    for found in answers:
        for case, worst in found.items():
            assert worst < (1e-12 if "float64" in case else 1e-5), f"{case}: {worst}"


@pytest.fixture
def store(tmp_path):
    directory = tmp_path / "store"
    small_store(directory, rich=True)
    return str(directory)


FP32 = ("retrieval adam", "ranking adagrad")
FOUR = [(kind, "float64") for kind in KINDS] + [(kind, "float32") for kind in FP32]


@pytest.mark.parametrize("steps", [STEPS, pytest.param(MANY_STEPS, marks=pytest.mark.slow)])
def test_four_ranks_and_replicas_equal_one(tmp_path, store, steps):
    where = {"store": store, "meshes": ["auto", "2x2"]}
    answers = run_ranks(4, f"{__name__}:compare", tmp_path, **where, cases=FOUR, steps=steps)
    assert len(answers[0]) == 2 * len(FOUR)
    assert_close(answers)


def test_two_ranks_equal_one(tmp_path, store):
    kinds = ["retrieval adagrad", "ranking adam", "ranking adam, features of all kinds"]
    where = {"store": store, "meshes": ["1x2", "2x1"]}
    cases = [(kind, "float64") for kind in kinds]
    assert_close(run_ranks(2, f"{__name__}:compare", tmp_path, **where, cases=cases))
