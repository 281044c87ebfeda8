"""Linear layers in bf16 round only products; checkpointed blocks keep less, with the same bits."""

import pytest
import torch

from slipstream.data.sampler import TrainingSampler
from slipstream.models.precision import linear, linear_silu
from slipstream.ops import pointwise
from slipstream.training.recommender import Recommender
from tests.support.training_fixtures import loss_of, small_recipe, small_store

KINDS = ("hstu", "fuxi", "sasrec")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store"))


def gradients(store, kind, **train):
    """Loss, gradients and bytes kept for the backward pass of one batch, with dropout."""
    heads = {"heads": 1} if kind == "sasrec" else {}
    model = {"kind": kind, "dropout": 0.3, "input_dropout": 0.2, "blocks": 4, **heads}
    ours = Recommender.build(small_recipe(model=model, train=train), store)
    batch, kept = TrainingSampler(store, ours.recipe.sampler, seed=1).next_batch(), [0]

    def count(tensor):
        kept[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = loss_of(ours, batch, 3)
    loss.backward()
    found = {name: each.grad for name, each in ours.model.named_parameters()}
    return loss.detach(), {name: grad for name, grad in found.items() if grad is not None}, kept[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_checkpointed_blocks_keep_less_and_give_the_same_bits(store, kind, precision):
    plain = gradients(store, kind, precision=precision)
    again = gradients(store, kind, precision=precision, activation_checkpointing=True)
    assert torch.equal(plain[0], again[0]) and plain[1].keys() == again[1].keys()
    assert all(torch.equal(grad, again[1][name]) for name, grad in plain[1].items())
    assert again[2] < plain[2] / 2


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_products_leave_master_weights_and_gradients_in_full_precision(store, kind):
    full, half = gradients(store, kind), gradients(store, kind, precision="bf16")
    assert not torch.equal(full[0], half[0]) and full[0] == pytest.approx(float(half[0]), rel=0.02)
    assert {grad.dtype for grad in half[1].values()} == {torch.float32}


def test_products_are_those_of_rounded_operands():
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    found = linear(x, weight, bias, dtype=torch.bfloat16)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), exact + bias.double(), rtol=2**-7, atol=2**-7)
    assert torch.equal(linear(x, weight, bias), pointwise.linear(x, weight, bias))
    assert torch.equal(linear_silu(x, weight), pointwise.linear_silu(x, weight))
    half = linear_silu(x, weight, dtype=torch.bfloat16)
    assert torch.equal(half, torch.nn.functional.silu(linear(x, weight, dtype=torch.bfloat16)))


def test_without_gradients_a_model_computes_as_it_is_served(store):
    batch, found = None, []
    for precision in ("fp32", "bf16"):
        ours = Recommender.build(small_recipe(train={"precision": precision}), store)
        batch = batch or TrainingSampler(store, ours.recipe.sampler, seed=1).next_batch()
        found.append(ours.queries_SD(batch))
    assert torch.equal(*found)
