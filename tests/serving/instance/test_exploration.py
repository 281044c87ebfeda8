"""Neighbours are those of brute force; explanations wait behind ranking and may be given up."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.ops import row_readers
from slipstream.serving.instance.exploration import Exploration
from slipstream.serving.instance.scheduler import Kind
from slipstream.serving.request_errors import BadRequest
from tests.support.serving_instance import instance, run, soon
from tests.support.serving_samples import FIRST_ID, ITEMS, candidates, history


def test_neighbours_are_the_nearest_directions_whatever_the_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, served = instance(tmp_path)
    rows = torch.nn.functional.normalize(plain.item_vectors.take(torch.arange(ITEMS)), dim=-1)
    cosines = rows @ rows[17]
    cosines[17] = -2
    order = torch.sort(cosines, descending=True, stable=True).indices[:12]
    for tile in (7, 65_536):
        monkeypatch.setattr(row_readers, "TILE", tile)
        found, scores = run(Exploration(served).neighbours(FIRST_ID + 17, 12, soon()))
        assert found == (FIRST_ID + order).tolist()
        np.testing.assert_allclose(scores, cosines[order], atol=1e-6)
    everything, _ = run(Exploration(served).neighbours(FIRST_ID, 100_000, soon()))
    assert len(everything) == ITEMS - 1
    with pytest.raises(BadRequest, match="not in this bundle"):
        run(Exploration(served).neighbours(3, 5, soon()))
    served.close()


def test_a_ranking_goes_before_an_explanation_that_is_under_way(tmp_path: Path):
    _, served = instance(tmp_path)
    ended: list[str] = []

    async def ask() -> None:
        given, item = history(300), int(candidates(1)[0])
        explored = Exploration(served)
        explaining = asyncio.create_task(
            explored.explain(given, item, task="like", behaviours=200, deadline=soon())
        )
        explaining.add_done_callback(lambda _: ended.append("explained"))
        while not served.scheduler.waiting(Kind.EXPLORE):
            await asyncio.sleep(0)
        await served.rank("ann", history(40), [item], deadline=soon())
        ended.append("ranked")
        found = await explaining
        assert (found.first, len(found.without)) == (100, 200)

    run(ask())
    assert ended == ["ranked", "explained"]
    served.close()


def test_an_explanation_that_nobody_waits_for_any_more_is_dropped(tmp_path: Path):
    _, served = instance(tmp_path)

    async def ask() -> None:
        explaining = asyncio.create_task(
            Exploration(served).explain(
                history(300), int(candidates(1)[0]), task="like", behaviours=300, deadline=soon()
            )
        )
        while not served.scheduler.waiting(Kind.EXPLORE):
            await asyncio.sleep(0)
        explaining.cancel()
        while served.scheduler.waiting(Kind.EXPLORE):
            await asyncio.sleep(0.001)
        assert explaining.cancelled()

    run(ask())
    served.close()
