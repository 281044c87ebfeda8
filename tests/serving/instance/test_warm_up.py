"""The first request of a version: it passes where scores are right, else the version is refused."""

from pathlib import Path

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.serving.engine.engine import Engine
from slipstream.serving.instance.warm_up import warm_up
from tests.support.serving_samples import engine


@pytest.fixture
def model(tmp_path: Path) -> Engine:
    return engine(tmp_path, max_len=100)


def test_a_version_in_order_passes(model: Engine, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    rank = model.rank

    def noted(*given: object, **more: object) -> object:
        asked.append("rank")
        return rank(*given, **more)

    monkeypatch.setattr(model, "rank", noted)
    warm_up(model)
    assert asked, "nothing was tried"


def test_scores_that_are_no_numbers_are_refused(model: Engine, monkeypatch: pytest.MonkeyPatch):
    rank = model.rank

    def spoiled(*given: object, **more: object) -> object:
        return {task: scores * float("nan") for task, scores in rank(*given, **more).items()}

    monkeypatch.setattr(model, "rank", spoiled)
    with pytest.raises(SlipstreamError, match="are no numbers"):
        warm_up(model)


def test_a_prefix_that_gives_other_scores_is_refused(model: Engine, monkeypatch):
    prefill = model.prefill

    def spoiled(history: object) -> object:
        prefix = prefill(history)
        with torch.inference_mode():
            for stored in prefix.buffer.tensors:
                stored.add_(1)
        return prefix

    monkeypatch.setattr(model, "prefill", spoiled)
    with pytest.raises(SlipstreamError, match="differently behind a cached prefix"):
        warm_up(model)
