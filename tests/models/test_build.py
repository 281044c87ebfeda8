"""Models are built by kind and task; their weights depend on the seed alone."""

import pytest
import torch

from slipstream.models.build import build_model, dense_parameters
from slipstream.models.model_config import ModelConfig
from slipstream.models.ranking import RankingModel
from slipstream.models.retrieval import RetrievalModel
from tests.support.models_samples import KINDS, TASKS


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_the_seed_alone(kind):
    def weights(seed):
        torch.manual_seed(seed)
        return build_model(ModelConfig(kind=kind), "ranking", TASKS).state_dict()

    first, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_task_has_its_model_and_an_unknown_one_is_refused():
    assert isinstance(build_model(ModelConfig(), "retrieval"), RetrievalModel)
    assert isinstance(build_model(ModelConfig(), "ranking", TASKS), RankingModel)
    with pytest.raises(ValueError, match="at least one task"):
        build_model(ModelConfig(), "ranking")
    with pytest.raises(ValueError, match="unknown task"):
        build_model(ModelConfig(), "rank")


def test_dense_parameters_are_counted():
    assert dense_parameters(torch.nn.Linear(3, 4)) == 3 * 4 + 4
