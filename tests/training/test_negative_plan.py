"""Sharing negatives between tokens: the groups, the objective, the lookups, what mixes samples."""

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.pipeline.lane_groups import LaneGroups
from slipstream.pipeline.runner import Pipeline
from slipstream.pipeline.schedule import make_schedule
from slipstream.training.loop import train_step
from slipstream.training.negative_plan import share_groups
from slipstream.training.optimizers import make_adamw
from slipstream.training.ranks import ALONE, Ranks
from slipstream.training.recommender import Recommender
from slipstream.training.run import make_sampler
from slipstream.training.scheduled import RecommenderWork
from tests.support.training_fixtures import (
    loss_of,
    read_step,
    small_recipe,
    small_store,
    users_of,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store"), users=14, items=40, mean_length=9)


def recommender(store, **loss):
    recipe = small_recipe(
        loss={"negatives": 6, **loss},
        sampler={"batch_size": 6},
        tables={"optimizer": "rowwise_adagrad"},
    )
    return Recommender.build(recipe, store, dtype=torch.float64), make_sampler(recipe, store, ALONE)


def test_groups_are_a_seeded_permutation_within_each_segment():
    names, segments = torch.arange(100, 123) * 7, torch.tensor([0] * 9 + [2] * 1 + [5] * 13)
    order, offsets = share_groups(3, names, segments, 4)
    assert order.sort().values.equal(torch.arange(23))
    assert offsets.diff().tolist() == [4, 4, 1, 1, 4, 4, 4, 1]
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        assert segments[order[first:last]].unique().numel() == 1
    assert order[:9].tolist() != sorted(order[:9].tolist())  # not the order of the log
    again, _ = share_groups(3, names, segments, 4)
    other, _ = share_groups(4, names, segments, 4)
    assert torch.equal(order, again) and not torch.equal(order, other)
    alone, _ = share_groups(
        3, names[10:], segments[10:], 4
    )  # a sequence keeps its order whatever the company
    assert torch.equal(alone + 10, order[10:])


@pytest.mark.parametrize("within", ["sequence", "batch"])
def test_the_loss_is_each_tokens_softmax_over_its_groups_sets(store, within):
    ours, sampler = recommender(store, share=3, share_within=within)
    batch = sampler.next_batch()
    inputs = read_step(ours, batch, 5)
    plan, loss = inputs.plan, ours.loss(inputs)
    rows = torch.nn.functional.normalize(inputs.lookups["item"].rows_UD, dim=-1, eps=1e-6)
    hidden = torch.nn.functional.normalize(ours.forward(inputs), dim=-1, eps=1e-6)[
        plan.supervised_S
    ]
    places = {key: place for place, key in enumerate(inputs.lookups["item"].unique_U.tolist())}
    expected = torch.zeros((), dtype=torch.float64)
    for first, last in zip(
        plan.groups.offsets_G1[:-1].tolist(),
        plan.groups.offsets_G1[1:].tolist(),
        strict=True,
    ):
        rivals = plan.negatives[first:last].flatten().tolist()
        for t in range(first, last):
            target = int(batch.next_items_T[plan.supervised_S[t]])
            scores = [
                hidden[t] @ rows[places[item]] / 0.05
                for item in [target, *(item for item in rivals if item != target)]
            ]
            expected = expected + torch.logsumexp(torch.stack(scores), 0) - scores[0]
    assert plan.count == plan.groups.offsets_G1[-1] and torch.allclose(loss, expected, rtol=1e-11)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("within", ["sequence", "batch"])
def test_sharing_looks_up_nothing_more(store, k, within):
    plain, sampler = recommender(store)
    shared, _ = recommender(store, share=k, share_within=within)
    batch = sampler.next_batch()
    asked = [each.plan_step(batch, 2).keys["item"].lists() for each in (plain, shared)]
    assert [lists.numel() for lists in asked[0]] == [lists.numel() for lists in asked[1]]
    # The very same items: tokens keep the sets they had without sharing, only their order differs.
    assert torch.equal(
        torch.cat([x.flatten() for x in asked[0]]).sort().values,
        torch.cat([x.flatten() for x in asked[1]]).sort().values,
    )
    inputs = [read_step(each, batch, 2) for each in (plain, shared)]
    assert torch.equal(inputs[0].lookups["item"].unique_U, inputs[1].lookups["item"].unique_U)


@pytest.mark.parametrize(
    "options",
    [
        {"share": 3},
        {"kind": "sequence_softmax"},
        {"kind": "sequence_softmax", "sampling": "popularity"},
        {"sampling": "in_batch"},
        {"sampling": "mixed", "kind": "shared_softmax"},
    ],
)
def test_cutting_a_batch_does_not_change_what_stays_within_sequences(store, options):
    ours, sampler = recommender(store, **options)
    batch = sampler.next_batch()
    assert ours.mixes_samples is None
    whole = loss_of(ours, batch, 4)
    parts = [loss_of(ours, users_of(batch, users), 4) for users in ([0, 3], [1, 2, 4, 5])]
    assert torch.allclose(whole, sum(parts), rtol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"sampling": "in_batch"}, {"sampling": "mixed", "mixed_share": 0.3}, {"share": 3}],
)
def test_the_objective_does_not_depend_on_the_number_of_ranks(store, options):
    ours, sampler = recommender(store, **options)
    whole = loss_of(ours, sampler.next_batch(), 4)
    parts = []
    for rank in range(3):
        part = make_sampler(ours.recipe, store, Ranks(rank, 3)).next_batch()
        parts.append(loss_of(ours, part, 4))
    assert torch.allclose(whole, sum(parts), rtol=1e-12)


def test_groups_over_a_batch_are_refused_on_several_ranks(store):
    ours, _ = recommender(store, share=3, share_within="batch")
    with pytest.raises(SlipstreamError, match=r"share_within=batch.*number of ranks; use"):
        Recommender.build(ours.recipe, store, ranks=Ranks(0, 2))


def test_what_mixes_samples_says_so_and_a_cutting_schedule_refuses_it(store):
    ours, sampler = recommender(store, share=3, share_within="batch")
    key = "loss.share_within=batch"
    assert ours.mixes_samples == key
    batch = sampler.next_batch()
    whole = loss_of(ours, batch, 4)
    parts = [loss_of(ours, users_of(batch, users), 4) for users in ([0, 3], [1, 2, 4, 5])]
    assert not torch.allclose(whole, sum(parts), rtol=1e-6)  # the mark is true
    work = RecommenderWork(ours, make_adamw(ours.model, ours.recipe.optimizer), lambda: None, 10)
    with pytest.raises(SlipstreamError, match=key):
        Pipeline(
            make_schedule("nested", micro_batches=2),
            work,
            ours.tables.tables,
            LaneGroups(ours.tables.exchange),
        )


def test_one_set_per_sequence_is_drawn_by_the_sequences_name(store):
    ours, sampler = recommender(store, kind="sequence_softmax")
    batch = sampler.next_batch()
    plan = ours.plan_step(batch, 1)
    used = [b for b in range(batch.num_users) if batch.lengths_B[b] > 0]
    assert plan.negatives.shape == (len(used), 6)
    alone = ours.plan_step(users_of(batch, [3]), 1)
    assert torch.equal(alone.negatives[0], plan.negatives[used.index(3)])
    assert plan.groups.offsets_G1.diff().tolist() == [int(batch.lengths_B[b]) for b in used]


@pytest.mark.parametrize(
    "options",
    [
        {"share": 2},
        {"share": 4, "share_within": "batch"},
        {"share": 2, "share_by": "logits"},
        {"kind": "sequence_softmax"},
        {"sampling": "in_batch"},
        {"sampling": "mixed", "mixed_share": 0.3, "share": 2},
    ],
)
def test_every_option_learns(store, options):
    recipe = small_recipe(
        loss={"negatives": 6, "temperature": 0.3, **options}, sampler={"batch_size": 6}
    )
    ours, sampler = (
        Recommender.build(recipe, store),
        make_sampler(recipe, store, ALONE),
    )
    optimizer, batch = make_adamw(ours.model, recipe.optimizer), sampler.next_batch()
    losses = [train_step(ours, optimizer, batch, 0, 100).loss_sum for _ in range(15)]
    assert losses[-1] < 0.9 * losses[0]


def test_options_that_do_not_fit_are_refused():
    for options, words in (
        ({"kind": "shared_softmax", "share": 2}, "no set per token"),
        ({"kind": "full_softmax", "precision": "fp16"}, "not for full_softmax"),
        ({"share": 2, "share_by": "logits", "precision": "fp16"}, "ablation"),
    ):
        with pytest.raises(ValueError, match=words):
            small_recipe(loss=options)


def test_only_valid_positions_have_negatives(tmp_path):
    """Ids are drawn for the supervised tokens of the jagged batch, never for padding."""
    store = small_store(tmp_path, users=9)
    ours = Recommender.build(small_recipe(sampler={"batch_size": 9}), store)
    batch = make_sampler(ours.recipe, store, ALONE).next_batch()
    plan = ours.plan_step(batch, 0)
    valid = int((batch.next_items_T >= 0).sum())
    padded = batch.num_users * int(batch.lengths_B.max())
    assert plan.keys["item"].negatives.shape == (valid, 5) and valid < padded
