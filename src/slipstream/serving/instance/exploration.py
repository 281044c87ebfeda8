"""What people ask an instance beside its requests: why an item has its score, what is like it.

The work goes through the queue of the compute thread behind ranking and pre-inference, in small
steps. Touch this when people ask something else of a model.
"""

from collections.abc import Generator, Mapping
from typing import Any

import torch

from slipstream.history.user_history import History
from slipstream.ops.row_readers import NormalizedRows
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.leave_one_out import Explanation, explain_steps
from slipstream.serving.instance.instance import Instance
from slipstream.serving.instance.scheduler import Kind

TILE_SECONDS = 0.01  # of one step of a search, as predicted


class Exploration:
    """Explains scores and finds neighbours with the engine of one instance."""

    def __init__(self, instance: Instance) -> None:
        self.engine, self._jobs, self._cost = instance.engine, instance.jobs, instance.cost

    async def explain(
        self,
        history: History,
        item: Any,
        *,
        task: str,
        behaviours: int,
        deadline: float,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
    ) -> Explanation:
        """Measure what each of the newest `behaviours` adds to the score of an item."""
        query = self.engine.make_query(None, history, [item], request_time, context)
        tokens = self.engine.tokens_of(len(history))
        seconds = self._cost.prefill_seconds(tokens) * (1 + min(behaviours, len(history)) / 2)
        steps = explain_steps(self.engine, query, task, behaviours)
        found: Explanation = await self._jobs.run(deadline, seconds, kind=Kind.EXPLORE, steps=steps)
        return found

    async def neighbours(
        self, item: Any, count: int, deadline: float
    ) -> tuple[list[int | str], list[float]]:
        """Return the items whose vectors point most nearly the same way, and the cosines."""
        row = int(self.engine.items.rows([item])[0])
        steps = neighbour_steps(self.engine, row, count)
        rows_K, cosines_K = await self._jobs.run(
            deadline, TILE_SECONDS, kind=Kind.EXPLORE, steps=steps
        )
        return self.engine.items.originals(rows_K), cosines_K.tolist()


def neighbour_steps(
    engine: Engine, row: int, count: int
) -> Generator[int, None, tuple[torch.Tensor, torch.Tensor]]:
    """Search the catalogue for the nearest items, a tile of it a step; ties by row."""
    vectors = NormalizedRows(engine.item_vectors)
    query_D = vectors.take(torch.tensor([row]))[0]
    best_K, rows_K = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for begin, tile_CD in vectors.tiles():
        cosines_C = tile_CD @ query_D
        if begin <= row < begin + len(cosines_C):
            cosines_C[row - begin] = -torch.inf
        cosines_S = torch.cat([best_K, cosines_C])
        rows_S = torch.cat([rows_K, torch.arange(begin, begin + len(cosines_C))])
        order_K = torch.sort(cosines_S, descending=True, stable=True).indices[:count]
        best_K, rows_K = cosines_S[order_K], rows_S[order_K]
        yield len(cosines_C)
    found_K = best_K > -torch.inf
    return rows_K[found_K], best_K[found_K]
