"""A recommender against training written out by hand: nn.Embedding, torch's optimisers."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.data.sampler import TrainingSampler
from slipstream.models.inputs import ModelInput
from slipstream.tables.collection import add
from slipstream.training.features import labels_TA
from slipstream.training.loop import train_step
from slipstream.training.optimizers import make_adamw
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import (
    RICH,
    loss_of,
    read_step,
    small_recipe,
    small_store,
    users_of,
)

STEPS = 6
RANKING = {
    "task": "ranking",
    "tasks": {"click": {"column": "click"}, "like": {"column": "like", "weight": 0.5}},
    "loss": {"kind": "bce"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("data") / "store")


def sampler_of(recipe, store):
    return TrainingSampler(
        store, recipe.sampler, seed=recipe.seed, split=recipe.split, task=recipe.task
    )


def plain_loss(model, embedding, plan, temperature):
    """Sampled softmax over dense logits, as a reader of the paper would write it."""
    batch = plan.batch
    hidden = model(
        ModelInput(
            rows={"item": embedding(batch.items_T)},
            offsets_B1=batch.offsets_B1,
            timestamps_T=batch.timestamps_T,
            next_timestamps_T=batch.next_timestamps_T,
            token_ids_T=batch.token_ids_T,
            dropout_seed=plan.dropout_seed,
        )
    )
    logits = F.normalize(hidden, dim=1) @ F.normalize(embedding.weight, dim=1).T / temperature
    total, count = torch.zeros((), dtype=torch.float64), 0
    for t in batch.supervised_T.nonzero().flatten().tolist():
        target = int(batch.next_items_T[t])
        rivals = [n for n in plan.negatives[count].tolist() if n != target]
        total = total + torch.logsumexp(logits[t, [target, *rivals]], 0) - logits[t, target]
        count += 1
    return total / count


def rowwise_step(optimizer, weights, grad, touched, memory, lr):
    """Row-wise Adagrad and Adam, one row after the other."""
    for row in touched:
        g = grad[row]
        if optimizer == "rowwise_adagrad":
            memory.setdefault(row, 0.0)
            memory[row] += float((g**2).mean())
            weights[row] -= lr * g / (memory[row] ** 0.5 + 1e-8)
        else:
            m, v, n = memory.get(row, (torch.zeros_like(g), 0.0, 0))
            m, v, n = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * float((g**2).mean()), n + 1
            memory[row] = (m, v, n)
            weights[row] -= lr * (m / (1 - 0.9**n)) / ((v / (1 - 0.98**n)) ** 0.5 + 1e-8)


@pytest.mark.parametrize("optimizer", ["adamw", "rowwise_adagrad", "rowwise_adam"])
@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_training_equals_a_plain_pytorch_loop(store, optimizer, kind):
    optimizer_section = {"lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5, "warmup_steps": 2}
    recipe = small_recipe(
        model={"kind": kind},
        tables={"optimizer": optimizer, "lr": 0.02},
        optimizer=optimizer_section,
    )
    ours, plain = (Recommender.build(recipe, store, torch.float64) for _ in range(2))
    embedding = torch.nn.Embedding.from_pretrained(
        plain.tables["item"].weights_ND.clone(), freeze=False
    )
    dense = torch.optim.AdamW(
        plain.model.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.1
    )
    rows = torch.optim.AdamW(embedding.parameters(), lr=0.02, betas=(0.9, 0.98), weight_decay=0.0)
    ours_dense, memory = make_adamw(ours.model, recipe.optimizer), {}
    sampler = sampler_of(recipe, store)
    for step in range(STEPS):
        batch, factor = sampler.next_batch(), min(1.0, (step + 1) / 2)
        plan = plain.plan_step(batch, step)
        loss = plain_loss(plain.model, embedding, plan, recipe.loss.temperature)
        dense.zero_grad()
        rows.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        dense.param_groups[0]["lr"], rows.param_groups[0]["lr"] = 0.01 * factor, 0.02 * factor
        dense.step()
        if optimizer == "adamw":
            rows.step()
        else:
            touched = (
                torch.cat([batch.items_T, batch.next_items_T, plan.negatives.flatten()])
                .unique()
                .tolist()
            )
            with torch.no_grad():
                rowwise_step(
                    optimizer,
                    embedding.weight,
                    embedding.weight.grad,
                    touched,
                    memory,
                    0.02 * factor,
                )
        result = train_step(ours, ours_dense, batch, step, STEPS)
        assert result.loss_sum / result.count == pytest.approx(float(loss.detach()), rel=1e-9)
    assert torch.allclose(ours.tables["item"].weights_ND, embedding.weight, rtol=1e-6, atol=1e-9)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-9)


def gradients(recommender, parts, step, total):
    """Dense and row gradients of one step, whose batch comes in parts."""
    recommender.model.zero_grad()
    lookups = []
    for part in parts:
        inputs = read_step(recommender, part, step)
        (recommender.loss(inputs) / total).backward()
        lookups.append(inputs.lookups)
    dense = {
        name: p.grad.clone()
        for name, p in recommender.model.named_parameters()
        if p.grad is not None
    }
    rows = {}
    collect = recommender.tables.exchange.collect
    gradients = add([collect(each.route, each) for each in lookups])
    for name, (unique_U, grads_UD) in gradients.items():
        table = recommender.tables[name]
        rows[name] = torch.zeros_like(table.weights_ND).index_copy_(0, unique_U, grads_UD)
    return dense | rows


LOSSES = [
    {"loss": {"kind": "sampled_softmax"}},
    {"loss": {"kind": "sampled_softmax", "sampling": "popularity"}},
    {"loss": {"kind": "shared_softmax", "sampling": "popularity"}},
    {"loss": {"kind": "full_softmax"}, "tables": {"optimizer": "adamw"}},
    {"loss": {"kind": "bce", "negatives": 9, "normalize": False, "temperature": 1.0}},
    RANKING,
]


@pytest.mark.parametrize(
    "changes",
    LOSSES,
    ids=lambda c: c["loss"]["kind"] + c["loss"].get("sampling", "") + c.get("task", ""),
)
def test_how_a_batch_is_cut_does_not_change_its_gradient(store, changes):
    recipe = small_recipe(
        model={"dropout": 0.3, "input_dropout": 0.3},
        item_features=["genre"],
        user_features=["age"],
        **changes,
    )
    recommender = Recommender.build(recipe, store, torch.float64)
    batch = sampler_of(recipe, store).next_batch()
    total = recommender.plan_step(batch, 7).count
    assert total > 3
    whole = gradients(recommender, [batch], 7, total)
    thirds = gradients(
        recommender, [users_of(batch, [3]), users_of(batch, [0, 2]), users_of(batch, [1])], 7, total
    )
    other_step = gradients(recommender, [batch], 8, total)
    assert whole.keys() == thirds.keys()
    for name, expected in whole.items():
        assert torch.allclose(expected, thirds[name], rtol=1e-9, atol=1e-12), name
    assert any(
        not torch.allclose(expected, other_step[name]) for name, expected in whole.items()
    )  # dropout is really drawn


def plain_rows(store, recommender, batch, tables):
    """What tokens and users read, one by one: a row, or the mean of several."""
    rows = {"item": torch.stack([tables["item"][item] for item in batch.items_T.tolist()])}
    for noun, names, features, places in (
        ("item", recommender.recipe.item_features, store.item_features, batch.items_T),
        ("user", recommender.recipe.user_features, store.user_features, batch.sample_ids_B),
    ):
        for name in names:
            feature, table, taken = features[name], tables[f"{noun}.{name}"], []
            edges = recommender.features.by_table()[f"{noun}.{name}"].edges
            for place in places.tolist():
                if feature.kind == "number":
                    value = float(feature.values[place])
                    codes = [1 + sum(value >= edge for edge in edges) if value == value else 0]
                elif feature.kind == "category":
                    codes = [int(feature.codes[place])]
                else:
                    start, end = feature.offsets_V1[place : place + 2]
                    codes = sorted(set(feature.codes[start:end].tolist())) or [0]
                taken.append(sum(table[code] for code in codes) / len(codes))
            rows[f"{noun}.{name}"] = torch.stack(taken)
    for name in recommender.recipe.context_features:
        taken = []
        for user, first, length in zip(
            batch.sample_ids_B, batch.first_positions_B, batch.lengths_B, strict=True
        ):
            begin = int(store.offsets_U1[user] + first)
            codes = store.context[name].codes[begin : begin + int(length)]
            taken += [tables[f"context.{name}"][int(code)] for code in codes]
        rows[f"context.{name}"] = torch.stack(taken)
    return rows


def test_features_of_every_kind_have_the_gradient_of_a_plain_loop(tmp_path):
    store = small_store(tmp_path / "rich", rich=True)
    recipe = small_recipe(
        **RICH, loss={"kind": "full_softmax"}, model={"dropout": 0.0, "input_dropout": 0.0}
    )
    recommender = Recommender.build(recipe, store, torch.float64)
    batch = sampler_of(recipe, store).next_batch()
    tables = {
        name: table.all_rows().clone().requires_grad_()
        for name, table in recommender.tables.tables.items()
    }
    hidden_TD = recommender.model(
        ModelInput(
            rows=plain_rows(store, recommender, batch, tables),
            offsets_B1=batch.offsets_B1,
            timestamps_T=batch.timestamps_T,
            next_timestamps_T=batch.next_timestamps_T,
            token_ids_T=batch.token_ids_T,
        )
    )
    logits_TN = F.normalize(hidden_TD, dim=1) @ F.normalize(tables["item"], dim=1).T
    asked_T = batch.supervised_T
    loss = F.cross_entropy(
        logits_TN[asked_T] / recipe.loss.temperature, batch.next_items_T[asked_T], reduction="sum"
    )
    loss.backward()
    found = gradients(recommender, [batch], 0, 1)
    ours = loss_of(recommender, batch, 0).detach()
    assert float(ours) == pytest.approx(float(loss.detach()), rel=1e-12)
    for name, table in tables.items():
        assert torch.allclose(found[name], table.grad, rtol=1e-9, atol=1e-12), name
        assert float(table.grad.abs().max()) > 1e-4, name


@pytest.mark.parametrize("changes", [{}, RANKING], ids=["retrieval", "ranking"])
def test_cutting_a_batch_cuts_features_with_several_values_alike(tmp_path, changes):
    store = small_store(tmp_path / "rich", rich=True)
    recipe = small_recipe(**RICH, **changes)
    recommender = Recommender.build(recipe, store, torch.float64)
    batch = sampler_of(recipe, store).next_batch()
    whole = gradients(recommender, [batch], 7, 10)
    parts = [batch.take(torch.tensor(users, dtype=torch.int64)) for users in ([3], [], [0, 2], [1])]
    cut = gradients(recommender, [part for part in parts if part.num_users], 7, 10)
    for name, expected in whole.items():
        assert torch.allclose(expected, cut[name], rtol=1e-9, atol=1e-12), name
    empty = recommender.plan_step(parts[1], 7)
    assert empty.count == 0 and all(not each[0].numel() for each in empty.key_lists().values())


def test_ranking_predicts_what_its_loss_trains(store):
    recipe = small_recipe(**RANKING, model={"dropout": 0.0, "input_dropout": 0.0})
    recommender = Recommender.build(recipe, store, torch.float64)
    batch = sampler_of(recipe, store).next_batch()
    predicted_SA = recommender.predict_SA(batch)
    labels_SA = labels_TA(recipe, batch, torch.float64)[batch.supervised_T]
    expected = F.binary_cross_entropy(predicted_SA, labels_SA, reduction="none") * torch.tensor(
        [1.0, 0.5]
    )
    loss = loss_of(recommender, batch, 0)
    assert recommender.plan_step(batch, 0).count == int(batch.supervised_T.sum())
    assert float(loss.detach()) == pytest.approx(float(expected.sum()), rel=1e-9)


def test_queries_and_catalogue_are_what_the_loss_compares(store):
    recipe = small_recipe(
        model={"dropout": 0.0, "input_dropout": 0.0}, loss={"kind": "full_softmax"}
    )
    recommender = Recommender.build(recipe, store, torch.float64)
    batch = sampler_of(recipe, store).next_batch()
    logits_SN = (
        recommender.queries_SD(batch) @ recommender.catalogue_ND().T / recipe.loss.temperature
    )
    expected = F.cross_entropy(logits_SN, batch.next_items_T[batch.supervised_T], reduction="sum")
    loss = loss_of(recommender, batch, 0)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-9)
