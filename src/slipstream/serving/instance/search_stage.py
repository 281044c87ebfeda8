"""The search of an instance's catalogue, behind the prefix that ranking uses too, in steps.

Touch this when retrieval takes another way through an instance; how items are compared is in
engine/item_search.py.
"""

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import torch

from slipstream.ops.topk import SearchLimits
from slipstream.serving.engine.engine import RetrievedItems
from slipstream.serving.engine.rank_query import RankQuery
from slipstream.serving.instance.request_stages import stage
from slipstream.serving.request_errors import OverloadError

if TYPE_CHECKING:
    from slipstream.serving.instance.instance import Instance
    from slipstream.serving.instance.prefix_manager import ReadyHistory

ROW_SECONDS = 1e-8  # of one row in a search, until searches have been seen
_LEARNING = 0.1  # share of the newest search in what is expected of the next


class SearchStage:
    """Searches the catalogue of one instance, as bulk work that other requests overtake."""

    def __init__(self, instance: "Instance") -> None:
        self._instance, self._engine = instance, instance.engine
        self._factor = 1.0  # seen / predicted seconds

    async def search(
        self,
        ready: "ReadyHistory",
        k: int,
        limits: Callable[[], SearchLimits],
        *,
        deadline: float,
        enough: Callable[[torch.Tensor], bool] | None = None,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
    ) -> RetrievedItems:
        """Find the `k` best items of the catalogue after a prepared history, exactly.

        `limits` and `enough` are called by the compute thread; for `enough` see
        `Engine.retrieve_steps`.
        """
        instance = self._instance
        query = instance.query(ready, request_time, context)
        plain = self._seconds(query)
        seconds = self._factor * plain

        def steps() -> Generator[None, None, RetrievedItems]:
            allowed = limits()
            yield
            return (yield from self._engine.retrieve_steps(query, k, allowed, enough))

        def release(_: BaseException | None = None) -> None:
            instance.prefixes.release(ready.held)

        def learn(spent: float) -> None:
            self._factor += _LEARNING * (spent / plain - self._factor)

        with instance.underway(), stage("retrieve"):
            if self._engine.search is None and instance.clock.now() + seconds > deadline:
                release()
                raise OverloadError(
                    "too_slow",
                    f"ranking all {len(self._engine.items):,} items would take about "
                    f"{seconds:.1f} s; send candidates, or serve a retrieval bundle before this "
                    "one (--retrieval)",
                )
            found: RetrievedItems = await instance.jobs.run(
                deadline, seconds, steps=steps(), bulk=True, spent=learn, release=release
            )
        instance.count_hit(ready)
        return found

    def _seconds(self, query: RankQuery) -> float:
        """Predict a search, before what was learnt from earlier ones."""
        count = len(self._engine.items)
        if self._engine.search is None:
            return self._instance.estimates.score_seconds(
                query.with_candidates(torch.arange(count))
            )
        return self._instance.estimates.batch_seconds([query]) + ROW_SECONDS * count
