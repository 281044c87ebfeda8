"""Properties of every model: causal, independent of its batch, differentiable, deterministic."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from tests.support.models_samples import KINDS, TASKS, given, model, part, rows_of

BOTH = ["retrieval", "ranking"]
FEATURES = {"user_features": ("age", "city"), "item_features": ("genre",)}


@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_gives_what_it_gives_in_a_batch_dropout_included(kind, task):
    net = model(kind, task, **FEATURES)
    batch = given([4, 0, 1, 6], dropout_seed=12345, **FEATURES)
    together = net(batch)
    assert together.shape == (11, 8 if task == "retrieval" else len(TASKS))
    for b in range(4):
        assert_close(net(part(batch, b)), together[rows_of(batch, b)], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_depends_on_the_seed_and_on_token_ids(kind):
    net, batch = model(kind, "ranking"), given([5, 3])
    plain = net(batch)
    first, again, other = (net(replace(batch, dropout_seed=seed)) for seed in (1, 1, 2))
    renamed = net(replace(batch, dropout_seed=1, token_ids_T=batch.token_ids_T + 77))
    assert torch.equal(first, again)
    for changed in (plain, other, renamed):
        assert not torch.allclose(first, changed)


@pytest.mark.parametrize("time_bias", ["own", "next"])
@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_behaviour_never_changes_an_earlier_output(kind, task, time_bias):
    net = model(kind, task, **({} if kind == "sasrec" else {"time_bias": time_bias}))
    batch = given([7, 5])
    before = net(batch)
    rows = {"item": batch.rows["item"].clone()}
    rows["item"][4] *= -1
    labels = batch.labels_TA.clone()
    labels[4] = 1 - labels[4]
    times, next_times = batch.timestamps_T.clone(), batch.next_timestamps_T.clone()
    times[5:7] += 100_000  # behaviour 5 is what behaviour 4 may already look back from
    next_times[4:7] += 100_000
    after = net(
        replace(
            batch, rows=rows, labels_TA=labels, timestamps_T=times, next_timestamps_T=next_times
        )
    )
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[7:], after[7:])
    assert not torch.allclose(before[4], after[4])


@pytest.mark.parametrize("kind", KINDS)
def test_user_and_item_features_change_the_output(kind):
    net, batch = model(kind, **FEATURES), given([3, 2], **FEATURES)
    before = net(batch)
    for name, touched in (("user.city", slice(3, 5)), ("item.genre", slice(4, 5))):
        rows = {n: r.clone() for n, r in batch.rows.items()}
        rows[name][-1] *= -1
        changed = (net(replace(batch, rows=rows)) - before).abs().amax(1) > 1e-9
        expected = torch.zeros(5, dtype=torch.bool)
        expected[touched] = True
        assert torch.equal(changed, expected)


@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches_and_empty_sequences_are_served(kind, task):
    net = model(kind, task, **FEATURES)
    width = 8 if task == "retrieval" else len(TASKS)
    assert net(given([], **FEATURES)).shape == (0, width)
    assert net(given([0, 0], **FEATURES)).shape == (0, width)
    assert net(given([0, 1], **FEATURES)).isfinite().all()


@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind, task):
    settings = {} if kind == "sasrec" else {"time_bias": "next"}
    net = model(
        kind,
        task,
        dim=4,
        blocks=1,
        max_len=4,
        item_features=("genre",),
        user_features=("age",),
        **settings,
    )
    batch = given(
        [3, 0, 1], dim=4, dropout_seed=5, item_features=("genre",), user_features=("age",)
    )
    names = list(batch.rows)
    leaves = [batch.rows[name].requires_grad_() for name in names]
    parameters = [p.requires_grad_() for p in net.parameters()]

    def run(*tensors):
        return net(replace(batch, rows=dict(zip(names, tensors[: len(names)], strict=True))))

    assert torch.autograd.gradcheck(run, (*leaves, *parameters), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_something(kind):
    net, batch = (
        model(kind, "ranking", user_features=("age",)),
        given([5, 3], user_features=("age",)),
    )
    net(batch).square().sum().backward()
    still = [
        name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert not still


def outputs_and_gradients(net, batch):
    batch.rows["item"].requires_grad_()
    out = net(batch)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    wanted = {"rows": batch.rows["item"]} | dict(net.named_parameters())
    grads = torch.autograd.grad((out * direction).sum(), list(wanted.values()))
    return {"output": out.detach()} | dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_and_its_gradients_stay_close_to_fp64(kind, task):
    """The fast operators serve fp32, the reference fp64: the whole model through both."""
    settings = {"dim": 32, "heads": 2, "dqk": 8, "dv": 24, "max_len": 80}
    batch = given([70, 0, 1, 33], dim=32, dropout_seed=9)
    rough = replace(batch, rows={name: rows.float() for name, rows in batch.rows.items()})
    exact = outputs_and_gradients(model(kind, task, **settings), batch)
    single = outputs_and_gradients(model(kind, task, **settings).to(torch.float32), rough)
    for name, value in exact.items():
        size = float(value.abs().max())
        assert float((single[name].double() - value).abs().max()) <= 3e-5 * size + 1e-6, name


@pytest.mark.parametrize("task", BOTH)
@pytest.mark.parametrize("kind", KINDS)
def test_two_calls_give_the_same_bits(kind, task):
    net = model(kind, task, dtype=torch.float32, dim=32, max_len=80, user_features=("age",))
    batch = given(
        [70, 0, 1, 33, 50], dim=32, dtype=torch.float32, dropout_seed=9, user_features=("age",)
    )
    first, again = outputs_and_gradients(net, batch), outputs_and_gradients(net, batch)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_rows_of_a_feature_that_are_missing_are_named():
    with pytest.raises(ValueError, match=r"built with 'item\.genre'"):
        model("hstu", item_features=("genre",))(given([3]))
