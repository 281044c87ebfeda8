"""A new item told by its features is ranked as one of the catalogue with the mean row would be."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.serving.bundle import random_bundle
from slipstream.bundle import read_bundle
from slipstream.history.user_history import History
from slipstream.serving.engine.cold_items import ColdItemEncoder
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.item_rules import Boost, ItemRules
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.instance_config import InstanceConfig
from slipstream.serving.instance.recommend_query import RecommendQuery
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_instance import COST, soon

MODEL = {"kind": "hstu", "dim": 16, "blocks": 2, "heads": 2, "max_len": 64}
GENRES = ["", "war", "love", "noir"]
SMALL = InstanceConfig(device_bytes=1 << 22, host_bytes=0)
ACTIONS = {"click": np.ones(30, np.float32), "like": np.zeros(30, np.float32)}
HISTORY = History(np.arange(5, 35), np.arange(30), ACTIONS)


def write(path: Path, task: str = "ranking") -> Path:
    genres = pa.DictionaryArray.from_arrays(np.arange(40) % 4, GENRES)
    features = {"item_features": {"genre": 4}, "about_items": {"feature:genre": genres}}
    random_bundle(path, MODEL, task=task, num_items=40, first_id=0, noise=0.05, **features)
    return path


def recommend(served: Instance, **query: Any) -> Any:
    asked = RecommendQuery(9, soon(), **query)
    return asyncio.run(served.cascade.recommend("ann", HISTORY, asked))


def test_a_new_item_scores_as_a_row_with_the_mean_and_its_features(tmp_path: Path, monkeypatch):
    served = Instance(write(tmp_path / "b"), SMALL, COST)
    engine = served.engine
    new = {"x": {"genre": "war"}, "y": {"genre": None}, "z": {"genre": ["love", "noir"]}}
    rules = ItemRules(boosts=(Boost(0.0, items=(3,)),), most_per={"genre": 1})
    sent = [3, "x", "y", "z", "w"]
    found = recommend(served, candidates=sent, new_items=new, rules=rules)
    assert found.unknown == ["w"] and set(found.items) == {3, "x", "y", "z"}
    scores = dict(zip(found.items, found.scores["click"], strict=True))
    served.close()
    # The same items as rows 0, 1, 2 of the catalogue, which no behaviour has.
    rows, codes = engine._rows, {0: [1], 1: [0], 2: [2, 3]}
    mean_D = rows.item.take(torch.arange(40)).mean(0)
    plain = rows.of_items

    def changed(rows_T: torch.Tensor, cold: Any = None) -> dict[str, torch.Tensor]:
        taken = plain(rows_T)
        for place, row in enumerate(rows_T.tolist()):
            if row in codes:
                taken["item"][place] = mean_D
                genres = rows._take("item.genre", torch.tensor(codes[row]))
                taken["item.genre"][place] = genres.mean(0)
        return taken

    monkeypatch.setattr(rows, "of_items", changed)
    expected = engine.rank(None, HISTORY, [3, 0, 1, 2])["click"].tolist()
    assert [scores[item] for item in (3, "x", "y", "z")] == pytest.approx(expected, abs=1e-7)
    assert len(set(scores.values())) == 4


def test_what_the_model_cannot_read_is_refused(tmp_path: Path):
    encoder = Engine(write(tmp_path / "b")).cold_items
    assert encoder.encode([{"genre": "no such"}, {}]).codes == {"genre": [(0,), (0,)]}
    with pytest.raises(BadRequest, match="it reads genre"):
        encoder.encode([{"colour": "red"}])
    bundle = read_bundle(tmp_path / "b")
    bundle.description["number_edges"] = {"item.genre": [1.0, 2.0]}
    encoder = ColdItemEncoder(bundle, ItemIds(bundle.items_path))
    low, high = (encoder.encode([{"genre": value}]).codes["genre"][0] for value in (0.5, 9))
    assert low != high
    with pytest.raises(BadRequest, match="must be a number"):
        encoder.encode([{"genre": "war"}])
    served = Instance(write(tmp_path / "r", "retrieval"), SMALL, COST)
    with pytest.raises(BadRequest, match="ranking bundles only"):
        recommend(served, candidates=["x"], new_items={"x": {"genre": "war"}})
    served.close()
