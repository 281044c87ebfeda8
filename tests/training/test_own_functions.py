"""Own metrics and losses: recorded by name, equal to the shipped ones where they do the same."""

import pytest
import torch

import slipstream as ss
from slipstream.errors import SlipstreamError
from slipstream.files import read_json
from slipstream.training.objective import (
    RETRIEVAL_LOSSES,
    RetrievalLossInputs,
    full_softmax,
    sampled_softmax,
)
from slipstream.training.own_functions import NO_FUNCTIONS, OwnFunctions, own_metrics
from slipstream.training.recommender import Recommender
from slipstream.training.run import train
from tests.support.training_fixtures import small_recipe, small_store


def softmax(inputs: RetrievalLossInputs) -> torch.Tensor:
    """The shipped sampled softmax, written with `logits`."""
    target_S, negative_SR = inputs.logits()
    all_SR1 = torch.cat([target_S.unsqueeze(1), negative_SR], dim=1)
    return all_SR1.logsumexp(1) - target_S


def bayesian_personalised_ranking(inputs: RetrievalLossInputs) -> torch.Tensor:
    target_S, negative_SR = inputs.logits()
    return -torch.nn.functional.logsigmoid(target_S.unsqueeze(1) - negative_SR).mean(1)


def median_place(places: torch.Tensor) -> float:
    return -float(places.median())


def hit_rate(places: torch.Tensor) -> float:
    return float((places <= 10).double().mean())


def inputs_of(negatives: torch.Tensor | None, **more: object) -> RetrievalLossInputs:
    torch.manual_seed(0)
    hidden_SD, rows_UD = torch.randn(5, 4).double(), torch.randn(9, 4).double()
    targets_S = torch.tensor([0, 3, 3, 8, 1])
    return RetrievalLossInputs(hidden_SD, rows_UD, targets_S, negatives, 0.5, **more)


def test_logits_are_those_of_the_sampled_softmax():
    negatives = torch.randint(0, 9, (5, 6), generator=torch.Generator().manual_seed(1))
    for more in (
        {},
        {"target_log_q_S": torch.rand(5).double(), "negative_log_q": torch.rand(5, 6).double()},
    ):
        inputs = inputs_of(negatives, **more)
        torch.testing.assert_close(softmax(inputs), sampled_softmax(inputs))


def test_logits_of_the_whole_catalogue_and_of_one_set_for_all():
    torch.testing.assert_close(softmax(inputs_of(None)), full_softmax(inputs_of(None)))
    shared = inputs_of(torch.tensor([2, 3, 5]))
    expected = RETRIEVAL_LOSSES["shared_softmax"].per_token(shared)
    torch.testing.assert_close(softmax(shared), expected)


def test_a_negative_that_is_the_target_does_not_compete():
    _, negative_SR = inputs_of(torch.full((5, 2), 3)).logits()
    assert negative_SR[1].isneginf().all() and negative_SR[0].isfinite().all()


def test_training_with_the_same_loss_as_a_function_gives_the_same_weights(tmp_path):
    store, recipe = small_store(tmp_path / "store"), small_recipe()
    train(recipe, store, tmp_path / "shipped", quiet=True)
    train(recipe, store, tmp_path / "own", quiet=True, own=OwnFunctions(loss=softmax))
    ours, theirs = ss.Run(tmp_path / "own"), ss.Run(tmp_path / "shipped")
    torch.testing.assert_close(
        ours.recommender.catalogue_ND(), theirs.recommender.catalogue_ND(), atol=1e-4, rtol=1e-3
    )


def test_another_loss_gives_other_weights_and_is_recorded(tmp_path):
    store, recipe = small_store(tmp_path / "store"), small_recipe()
    start = Recommender.build(recipe, store).catalogue_ND()
    own = OwnFunctions(loss=bayesian_personalised_ranking)
    train(recipe, store, tmp_path / "run", quiet=True, own=own)
    trained = ss.Run(tmp_path / "run").recommender.catalogue_ND()
    assert not torch.equal(start, trained)
    note = read_json(tmp_path / "run" / "run.json")
    assert note["functions"] == {"loss": "bayesian_personalised_ranking"}


def test_own_metrics_are_recorded_and_choose_the_best(tmp_path):
    store = small_store(tmp_path / "store")
    recipe = small_recipe(train={"evaluate_every": 1, "metric": "median_place", "epochs": 3})
    own = OwnFunctions(own_metrics([median_place, hit_rate]))
    result = train(recipe, store, tmp_path / "run", quiet=True, own=own)
    run = ss.Run(tmp_path / "run")
    curve = run.metrics.drop_nulls("validation median_place")
    assert len(curve) == 3
    best = curve["validation median_place"].max()
    assert result.metrics["median_place"] == best
    assert result.metrics["hit_rate"] == pytest.approx(result.metrics["HR@10"])


def test_a_run_with_functions_is_not_resumed_without_them(tmp_path):
    store, recipe = small_store(tmp_path / "store"), small_recipe()
    own = OwnFunctions(own_metrics(hit_rate), softmax)
    train(recipe, store, tmp_path / "run", quiet=True, own=own)
    longer = small_recipe(train={"epochs": 3})
    for other in (NO_FUNCTIONS, OwnFunctions(loss=bayesian_personalised_ranking)):
        with pytest.raises(
            SlipstreamError, match="holds a run with the loss function 'softmax' and"
        ):
            train(longer, store, tmp_path / "run", quiet=True, own=other)
    assert train(longer, store, tmp_path / "run", quiet=True, own=own).epoch == 3


def test_a_run_without_functions_is_not_resumed_with_some(tmp_path):
    store = small_store(tmp_path / "store")
    train(small_recipe(), store, tmp_path / "run", quiet=True)
    with pytest.raises(SlipstreamError, match="holds a run with no functions"):
        train(
            small_recipe(train={"epochs": 3}),
            store,
            tmp_path / "run",
            quiet=True,
            own=OwnFunctions(loss=softmax),
        )


@pytest.mark.parametrize(
    "loss", [{"kind": "sequence_softmax"}, {"share": 2}, {"fetch": "segmented"}]
)
def test_losses_over_shared_negatives_are_refused(loss):
    with pytest.raises(SlipstreamError, match="an own loss takes the negatives of each token"):
        OwnFunctions(loss=softmax).check(small_recipe(loss={"negatives": 4, **loss}))


def test_metrics_are_one_several_or_named():
    assert list(own_metrics(hit_rate)) == ["hit_rate"] and own_metrics(None) == {}
    assert list(own_metrics({"H": hit_rate})) == ["H"]
    with pytest.raises(SlipstreamError, match="give a function of the places"):
        own_metrics({"H": 3})
