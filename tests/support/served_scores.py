"""Histories as requests carry them, and the scores their answers should carry."""

from typing import Any

import numpy as np

from slipstream.serving.engine.engine import Engine
from slipstream.serving.http.messages import HistoryMessage


def as_message(whole: Any) -> HistoryMessage:
    """A history of the engine as a request carries it."""
    actions = {name: values.tolist() for name, values in whole.actions.items()}
    return HistoryMessage(whole.items.tolist(), whole.timestamps.tolist(), actions)


def full_pass(engine: Engine, whole: Any, candidates: list[int]) -> dict[str, list[float]]:
    """The scores without any cache, as an answer carries them."""
    scores = engine.rank(None, whole, candidates)
    return {task: np.asarray(row, dtype=np.float64).tolist() for task, row in scores.items()}
