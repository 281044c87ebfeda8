"""Negatives in segments train like all rows at hand: on one rank or two, from memory or disk."""

import threading

import pytest
import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.data.store import SequenceStore
from slipstream.errors import SlipstreamError
from slipstream.ops import grouped_losses_native, grouped_losses_reference
from slipstream.ops.grouped_losses import GroupedSoftmaxInputs
from slipstream.ops.grouped_types import TokenGroups
from slipstream.pipeline.current_rows import CurrentRows
from slipstream.training import negative_fetch, run
from slipstream.training.loop import train_step
from slipstream.training.negative_fetch import SegmentedStep
from slipstream.training.optimizers import make_adamw
from slipstream.training.recommender import Recommender
from tests.support.pipeline_problem import lanes_left
from tests.support.ranks_fixtures import run_ranks
from tests.support.shrunk_recipes import trained
from tests.support.training_fixtures import loss_of, same_tensors, small_recipe, small_store

SEGMENT = 4096  # bytes: 64 rows of 8 doubles, 128 rows of 8 floats
ITEMS = 900


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store"), users=16, items=ITEMS, mean_length=12)


def recommender(store, dtype=torch.float64, *, tables=None, **loss):
    recipe = small_recipe(
        loss={"negatives": 20, **loss},
        sampler={"batch_size": 8},
        tables={"lr": 0.01, **(tables or {})},
        item_features=("genre",),
    )
    return Recommender.build(recipe, store, dtype=dtype)


def train(ours, store, steps=3):
    sampler = TrainingSampler(store, ours.recipe.sampler, split=ours.recipe.split, seed=1)
    optimizer = make_adamw(ours.model, ours.recipe.optimizer)
    return [
        train_step(ours, optimizer, sampler.next_batch(), step, 100).loss_sum
        for step in range(steps)
    ]


def state(ours):
    """Rows with their state, and the dense weights."""
    found = {f"dense.{name}": value for name, value in ours.model.state_dict().items()}
    for name, table in ours.tables.tables.items():
        rows = table.read(torch.arange(table.num_rows))
        found |= {
            f"{name}.weights": rows.weights_UD,
            **{f"{name}.{key}": value for key, value in rows.state.items()},
        }
    return found


def distance(left, right):
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


OPTIONS = [
    {},
    {"share": 3},
    {"share": 4, "share_within": "batch"},
    {"kind": "sequence_softmax"},
    {"sampling": "popularity"},
    {"sampling": "mixed", "share": 2},
    {"normalize": False, "temperature": 1.0},
    {"precision": "fp16"},
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())) or "plain"
)
def test_segments_train_like_all_rows_at_once(store, options):
    whole, cut = (
        recommender(store, **options),
        recommender(store, fetch="segmented", segment_bytes=SEGMENT, **options),
    )
    losses = train(whole, store), train(cut, store)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert distance(state(whole), state(cut)) < 1e-11


@pytest.mark.parametrize("options", [{}, {"share": 4}], ids=str)
def test_compiled_segments_give_the_bits_of_one_segment(store, options):
    """All negatives of a token lie in its segment, so no sum depends on where segments end."""
    one = recommender(store, torch.float32, fetch="segmented", segment_bytes=1 << 24, **options)
    cut = recommender(store, torch.float32, fetch="segmented", segment_bytes=SEGMENT, **options)
    batch = TrainingSampler(store, one.recipe.sampler, seed=1).next_batch()
    losses = [loss_of(each, batch, 0) for each in (one, cut)]
    assert torch.equal(*losses)
    for each in (one, cut):
        train(each, store)
    assert distance(state(one), state(cut)) < 2e-6


@pytest.mark.parametrize("ahead", [False, True])
def test_two_segments_at_most_are_alive_and_the_next_is_fetched_ahead(store, monkeypatch, ahead):
    ours = recommender(store, fetch="segmented", segment_bytes=SEGMENT)
    ours.fetch.ahead = ahead
    alive, most, seen, fetched_by = set(), [0], [0], set()
    original = negative_fetch.SegmentedFetch._fetch

    class Counted(torch.Tensor):
        def __del__(self):
            alive.discard(id(self))

    def counting(self, keys):
        segment = original(self, keys)
        rows = segment.rows_UD.as_subclass(Counted)
        alive.add(id(rows))
        seen[0] += 1
        most[0] = max(most[0], len(alive))
        fetched_by.add(threading.current_thread() is threading.main_thread())
        assert len(segment.keys_U) <= ours.fetch.rows_per_segment
        return negative_fetch.Segment(segment.keys_U, rows, segment.index_XR)

    monkeypatch.setattr(negative_fetch.SegmentedFetch, "_fetch", counting)
    train(ours, store, steps=2)
    assert seen[0] > 20 and most[0] <= 2 and fetched_by == {not ahead}


def test_rows_from_disk_and_hashed_tables(store, tmp_path):
    plain = recommender(store)
    expected = train(plain, store)
    for tier in ("disk", "hashed"):
        tables = {"tier": tier, "directory": str(tmp_path / tier), "cache_bytes": 1 << 16}
        ours = recommender(store, fetch="segmented", segment_bytes=SEGMENT, tables=tables)
        assert ours.fetch.ahead and train(ours, store) == pytest.approx(expected, rel=1e-12)
        assert distance(state(plain), state(ours)) < 1e-11
        ours.tables.close()


def test_plain_and_compiled_pieces_agree():
    draw = torch.Generator().manual_seed(4)
    groups = TokenGroups(torch.tensor([0, 3, 7, 8]), torch.tensor([0, 3, 7, 8]))
    hidden, targets, rows = (torch.randn(n, 20, generator=draw) for n in (8, 8, 50))
    negatives, same = (
        torch.randint(50, (8, 9), generator=draw),
        torch.randint(-1, 50, (8,), generator=draw),
    )
    gradients = []
    for serve in (grouped_losses_native, grouped_losses_reference):
        loss, scored = serve.score(
            GroupedSoftmaxInputs(hidden, targets, same, rows, negatives, groups, 0.5)
        )
        order, starts = serve.sort_into_buckets(negatives, 50, 6)
        out = torch.zeros(50, 20)
        for first in (0, 2, 4):
            serve.add_bucket_gradients(
                out,
                hidden,
                scored,
                groups.of_sets().to(torch.int32),
                order,
                starts,
                (first, first + 2),
                negatives,
                by_position=False,
            )
        gradients.append([loss, scored.unit_TD, scored.target_weights_T, out, order, starts])
    for ours, plain in zip(*gradients, strict=True):
        assert torch.allclose(ours, plain, atol=2e-5)


def test_a_chunk_that_is_left_out_would_be_seen(store, monkeypatch):
    """The comparison can fail: without one chunk's gradients the rows end elsewhere."""
    whole, cut = recommender(store), recommender(store, fetch="segmented", segment_bytes=SEGMENT)
    original = SegmentedStep.chunks

    def broken(self, chunks, below):
        for place, (keys, grads) in enumerate(original(self, chunks, below)):
            yield keys, grads * (place != 1)

    monkeypatch.setattr(SegmentedStep, "chunks", broken)
    train(whole, store), train(cut, store)
    assert distance(state(whole), state(cut)) > 1e-4


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"optimizer": "adamw"}, "updates every row"),
        ({"tier": "hashed", "admit_after": 2}, "may forget rows"),
    ],
)
def test_tables_that_cannot_be_updated_in_chunks_are_refused(store, tables, words):
    with pytest.raises(SlipstreamError, match=words):
        recommender(store, fetch="segmented", tables=tables)


def scheduled_recipe(schedule, tables=None, **train_options):
    cut = {"micro_batches": 3} if schedule in ("nested", "frozen_window") else {}
    options = {"schedule": schedule, "checkpoint_every": 3, "max_steps": 5, "epochs": 9}
    return small_recipe(
        loss={"negatives": 20, "fetch": "segmented", "segment_bytes": SEGMENT},
        sampler={"batch_size": 6},
        tables={"lr": 0.01, "optimizer": "rowwise_adam", **(tables or {})},
        item_features=("genre",),
        train={**options, **cut, **train_options},
    )


def trained_by(store, place, schedule, tables=None, dtype=torch.float64, **options):
    if tables is not None and tables.get("tier") == "disk":
        tables = {**tables, "directory": f"{place}-rows"}
    recipe = scheduled_recipe(schedule, tables, **options)
    run.train(recipe, store, place, quiet=True, dtype=dtype)
    return trained(place)


@pytest.mark.system
@pytest.mark.parametrize("tables", [{}, {"tier": "disk", "cache_bytes": 1 << 16}], ids=str)
def test_every_exact_schedule_trains_like_the_plain_loop(store, tmp_path, tables):
    found = {
        schedule: trained_by(store, tmp_path / schedule, schedule, tables, torch.float32)
        for schedule in ("synchronous", "dual_buffer", "frozen_window", "nested")
    }
    plain = found["synchronous"]
    assert same_tensors(found["dual_buffer"], plain)
    assert same_tensors(found["nested"], found["frozen_window"])
    double = [
        trained_by(store, tmp_path / f"{schedule}-fp64", schedule, tables)
        for schedule in ("synchronous", "nested")
    ]
    assert distance(*double) < 1e-11 and not lanes_left()


@pytest.mark.system
def test_a_schedule_that_misses_updates_outside_its_buffers_would_be_seen(
    store, tmp_path, monkeypatch
):
    plain = trained_by(store, tmp_path / "plain", "synchronous")
    monkeypatch.setattr(CurrentRows, "_others", lambda self: [])
    assert distance(plain, trained_by(store, tmp_path / "broken", "nested")) > 1e-6


@pytest.mark.system
def test_a_scheduled_run_with_segments_is_resumed_bit_for_bit(store, tmp_path):
    whole = trained_by(store, tmp_path / "whole", "nested", dtype=torch.float32)
    trained_by(store, tmp_path / "cut", "nested", dtype=torch.float32, max_steps=2)
    assert same_tensors(trained_by(store, tmp_path / "cut", "nested", dtype=torch.float32), whole)


def test_stale_schedules_refuse_segments(store, tmp_path):
    with pytest.raises(SlipstreamError, match="read on demand"):
        trained_by(store, tmp_path / "run", "semi_async")


def train_on_ranks(rank, world, directory, place, mesh):
    """Train by the plain loop and by schedules; most micro-batches of a rank have no samples."""
    store = SequenceStore.open(directory)
    for schedule in ("synchronous", "dual_buffer", "nested", "frozen_window"):
        recipe = scheduled_recipe(schedule, mesh=mesh)
        few = recipe.sampler.model_copy(
            update={"batch_size": 3}
        )  # fewer than micro-batches x ranks
        run.train(
            recipe.model_copy(update={"sampler": few}),
            store,
            f"{place}/{schedule}",
            quiet=True,
            dtype=torch.float64,
        )
    return {"lanes": lanes_left()}


@pytest.mark.system
@pytest.mark.parametrize("mesh", ["1x2", pytest.param("2x1", marks=pytest.mark.slow)])
def test_two_ranks_train_alike_by_every_exact_schedule(store, tmp_path, mesh):
    answers = run_ranks(
        2,
        f"{__name__}:train_on_ranks",
        tmp_path,
        directory=str(store.directory),
        place=str(tmp_path / "runs"),
        mesh=mesh,
    )
    assert [answer["lanes"] for answer in answers] == [[], []]
    found = {
        schedule: trained(tmp_path / "runs" / schedule)
        for schedule in ("synchronous", "dual_buffer", "nested", "frozen_window")
    }
    assert same_tensors(found["dual_buffer"], found["synchronous"])
    assert same_tensors(found["nested"], found["frozen_window"])
    assert distance(found["synchronous"], found["nested"]) < 1e-11


def check_ranks(rank, world, directory, options):
    """Three steps over the ranks against one rank with all users: the largest distance of rows."""
    from datetime import timedelta

    from slipstream.data.store import SequenceStore
    from slipstream.tables.slices import Placement
    from slipstream.training.ranks import arrange

    store = SequenceStore.open(directory)
    ranks = arrange("auto", timedelta(seconds=60))
    alone = recommender(store, **options)
    shared = Recommender(
        alone.recipe, alone.features, dtype=torch.float64, negatives=alone.negatives, ranks=ranks
    )
    optimizers = [make_adamw(each.model, each.recipe.optimizer) for each in (alone, shared)]
    sampler = TrainingSampler(store, alone.recipe.sampler, split=alone.recipe.split, seed=1)
    losses = []
    for step in range(3):
        batch = sampler.next_batch()
        users = torch.arange(batch.num_users)
        mine = batch.take(
            users[rank::world] if step != 1 else users[:1] if rank else users[1:]
        )  # the second step is uneven
        expected = train_step(alone, optimizers[0], batch, step, 100).loss_sum
        found = train_step(shared, optimizers[1], mine, step, 100, ranks).loss_sum
        losses.append([found, expected])
    keys = torch.arange(ITEMS)
    keys = keys[Placement(world).owner_of(keys) == rank]
    rows = [each.tables["item"].read(keys) for each in (alone, shared)]
    worst = max(
        float((a.double() - b.double()).abs().max())
        for a, b in [
            (rows[0].weights_UD, rows[1].weights_UD),
            *zip(rows[0].state.values(), rows[1].state.values(), strict=True),
        ]
    )
    return {"losses": losses, "worst": worst}


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        {"share": 2},
        {"kind": "sequence_softmax", "sampling": "popularity"},
        {"fetch": "segmented", "segment_bytes": SEGMENT, "share": 3},
    ],
    ids=["share", "sequence", "segmented"],
)
def test_two_ranks_train_like_one(store, tmp_path, options):
    for answer in run_ranks(
        2, f"{__name__}:check_ranks", tmp_path, directory=str(store.directory), options=options
    ):
        assert all(
            ours == pytest.approx(expected, rel=1e-10) for ours, expected in answer["losses"]
        )
        assert answer["worst"] < 1e-10


@pytest.mark.system
@pytest.mark.parametrize("fetch", ["whole", "segmented"])
def test_two_ranks_with_half_precision_negatives_stay_close_to_one(store, tmp_path, fetch):
    """Rows round alike wherever they are; only gradients that travel lose bits."""
    options = {"precision": "fp16", "fetch": fetch, "segment_bytes": SEGMENT}
    for answer in run_ranks(
        2, f"{__name__}:check_ranks", tmp_path, directory=str(store.directory), options=options
    ):
        assert answer["losses"][0][0] == pytest.approx(answer["losses"][0][1], rel=1e-10)
        assert all(ours == pytest.approx(expected, rel=1e-3) for ours, expected in answer["losses"])
