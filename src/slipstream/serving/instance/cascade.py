"""The cascade of `/v1/recommend`: retrieve, apply the request's rules, rank, choose the best.

    one bundle    prefix ──▶ search of the catalogue, whose scores are the ranking
    two bundles   prefix of A ──▶ search ──▶ candidates ──▶ scores behind the prefix of B
                  prefix of B, computed while A searches ──┘

A history is computed once per bundle and request at most: retrieval and ranking of one bundle share
the prefix, and it stays for the next request. Touch this when the stages or their order change.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from slipstream.history.user_history import History
from slipstream.ops.topk import SearchLimits
from slipstream.serving.engine.cold_items import ColdItems
from slipstream.serving.engine.item_rules import ItemRules
from slipstream.serving.engine.item_search import ApproximateIndex
from slipstream.serving.engine.item_selector import ItemSelector
from slipstream.serving.instance.instance_config import Admission
from slipstream.serving.instance.recommend_query import (
    Cold,
    RecommendQuery,
    RecommendResult,
    RetrievalReport,
)
from slipstream.serving.instance.request_stages import stage
from slipstream.serving.instance.search_stage import SearchStage
from slipstream.serving.request_errors import BadRequest

if TYPE_CHECKING:
    from slipstream.serving.instance.instance import Instance
    from slipstream.serving.instance.prefix_manager import ReadyHistory


@dataclass(frozen=True)
class ScoredItems:
    """Rows of the ranking bundle with their scores by task; equal scores keep this order."""

    rows_C: np.ndarray
    scores: dict[str, np.ndarray]
    hit: str = "none"
    truncated: bool = False
    index: ApproximateIndex | None = None  # that found them
    new: tuple[int | str, ...] = ()  # items that the bundle lacks: rows behind its last one


class Cascade:
    """The stages of one instance, or of a retrieval instance before a ranking one."""

    def __init__(self, ranking: "Instance", retrieval: "Instance | None" = None) -> None:
        self.ranking, self.retrieval = ranking, retrieval or ranking
        self._stage = SearchStage(self.retrieval)
        self._selector = ItemSelector(ranking.items)
        self._popular = ranking.engine.popular
        # Of two bundles: the ranking bundle's row of each row of the retrieval bundle, -1: none.
        self._rows_N: np.ndarray | None = None
        if retrieval is not None:
            self._rows_N = ranking.items.find(retrieval.items.ids_N)
            self._popular = self._popular or retrieval.engine.popular.mapped(self._rows_N)

    @property
    def unranked_items(self) -> int:
        """Items of the retrieval bundle that the ranking bundle lacks; they are never retrieved."""
        return 0 if self._rows_N is None else int((self._rows_N < 0).sum())

    @property
    def answers_anybody(self) -> bool:
        """Whether users of whom nothing is known are answered."""
        alone = self._rows_N is None and self.ranking.engine.task == "ranking"
        return bool(self._popular) or alone

    @property
    def from_behaviours(self) -> int:
        """The fewest behaviours whose pre-inference gains enough, in one bundle at least."""
        return min(each.estimates.from_behaviours for each in (self.ranking, self.retrieval))

    async def preinfer(self, user: str, history: History, rank_in: float | None) -> Admission:
        """Announce a request; the admission is that of the ranking bundle."""
        admission = await self.ranking.preinfer(
            user, self._known(self.ranking, history)[0], rank_in=rank_in
        )
        if self._rows_N is not None:
            known, _ = self._known(self.retrieval, history)
            await self.retrieval.preinfer(user, known, rank_in=rank_in)
        return admission

    async def recommend(
        self, user: str, history: History, query: RecommendQuery
    ) -> RecommendResult:
        """Return the best items for a user, by scores and boosts, within the caps.

        `history` is all that a bundle may see; each bundle reads its own window of it.
        """
        self._selector.check(query.rules)
        if query.by is not None and query.by not in self.ranking.tasks:
            tasks = ", ".join(self.ranking.tasks)
            raise BadRequest(f"'{query.by:.80}' is no task of this model; name one of {tasks}")
        known, skipped = self._known(self.ranking, history)
        cold, report, unknown = self._how_cold(known), None, []
        if query.candidates is not None:
            self.ranking.check_candidates(len(query.candidates))
            rows = self.ranking.items.find(query.candidates)
            unknown = [query.candidates[place] for place in np.flatnonzero(rows < 0).tolist()]
            rows = rows[rows >= 0]
            rows = rows[self._selector.allowed(query.rules, rows)]
            new = [item for item in unknown if str(item) in query.new_items]
            unknown = [item for item in unknown if str(item) not in query.new_items]
            found = await self._rank(user, known, rows, query, cold, new)
        elif cold == "popularity":
            rows = self._popular_rows(query)
            found = await self._rank(user, known, rows, query, cold)
        elif self._rows_N is None:
            found = await self._search_and_rank(user, known, query)
        else:
            found, report = await self._two_stages(user, history, known, query)
        result = self._choose(found, query)
        if found.index is not None:
            result = replace(result, search=found.index.name, recall=found.index.recall)
        return replace(result, unknown=unknown, skipped=skipped, cold=cold, retrieval=report)

    # ---- stages ----------------------------------------------------------------------------------

    async def _search_and_rank(
        self, user: str, history: History, query: RecommendQuery
    ) -> ScoredItems:
        """Search the catalogue of the one bundle; the scores of the search are the ranking."""
        ready = await self._prepare(self.ranking, user, history, len(self.ranking.items), query)
        found = await self._stage.search(
            ready,
            max(query.retrieve, query.count),
            lambda: self._selector.limits(query.rules),
            deadline=query.deadline,
            enough=self._enough(query),
            request_time=query.request_time,
            context=query.context,
        )
        rows, how = found.rows_K.numpy(), (ready.hit, ready.truncated, found.index)
        return ScoredItems(rows, found.scores, *how)

    async def _two_stages(
        self, user: str, history: History, known: History, query: RecommendQuery
    ) -> tuple[ScoredItems, RetrievalReport]:
        """Retrieve by one bundle and rank by the other, whose prefix is computed meanwhile."""
        wanted = max(query.retrieve, query.count)
        prefix = asyncio.ensure_future(self._prepare(self.ranking, user, known, wanted, query))
        try:
            rows, index, report = await self._retrieve(user, history, wanted, query)
            ready = await prefix
        except BaseException:
            prefix.cancel()
            prefix.add_done_callback(self._release)
            raise
        if not len(rows):
            self.ranking.release(ready)
            return self._nothing(), report
        return replace(await self._score(ready, rows, query), index=index), report

    def _release(self, prefix: "asyncio.Future[ReadyHistory]") -> None:
        """Let go of a prefix whose request has failed."""
        if not prefix.cancelled() and prefix.exception() is None:
            self.ranking.release(prefix.result())

    async def _retrieve(
        self, user: str, history: History, count: int, query: RecommendQuery
    ) -> tuple[np.ndarray, ApproximateIndex | None, RetrievalReport]:
        """Return the rows of the ranking bundle that the retrieval bundle finds."""
        assert self._rows_N is not None
        known, skipped = self._known(self.retrieval, history)
        version = self.retrieval.version
        if not len(known):
            rows = self._popular_rows(query)
            return rows, None, RetrievalReport(version, "none", skipped, len(rows))
        ready = await self._prepare(self.retrieval, user, known, count, query)
        found = await self._stage.search(
            ready,
            count,
            lambda: self._retrieval_limits(query.rules),
            deadline=query.deadline,
            enough=self._enough(query),
            request_time=query.request_time,
        )
        rows = self._rows_N[found.rows_K.numpy()]
        return rows, found.index, RetrievalReport(version, ready.hit, skipped, len(rows))

    async def _rank(
        self,
        user: str,
        history: History,
        rows: np.ndarray,
        query: RecommendQuery,
        cold: Cold | None,
        new: Sequence[int | str] = (),
    ) -> ScoredItems:
        """Rank rows of the ranking bundle, by their popularity where nothing else is known.

        `new` are items that it lacks, whose features the request tells.
        """
        if new:
            return await self._rank_new(user, history, rows, query, new)
        if cold == "popularity":
            counts = self._popular.counts_of(rows, query.popular_days)
            return ScoredItems(rows, {"popularity": counts.astype(np.float32)})
        if not len(rows):
            return self._nothing()
        ready = await self._prepare(self.ranking, user, history, len(rows), query)
        return await self._score(ready, rows, query)

    async def _rank_new(
        self,
        user: str,
        history: History,
        rows: np.ndarray,
        query: RecommendQuery,
        new: Sequence[int | str],
    ) -> ScoredItems:
        """Rank rows together with items that the ranking bundle lacks."""
        engine = self.ranking.engine
        if engine.task != "ranking":
            raise BadRequest("new items are ranked by their features in ranking bundles only")
        cold = engine.cold_items.encode([query.new_items[str(item)] for item in new])
        behind = len(self.ranking.items) + np.arange(cold.count)
        both = np.concatenate([rows, behind])
        ready = await self._prepare(self.ranking, user, history, len(both), query)
        found = await self._score(ready, both, query, cold)
        return replace(found, new=tuple(new))

    async def _prepare(
        self, instance: "Instance", user: str, history: History, count: int, query: RecommendQuery
    ) -> "ReadyHistory":
        with stage("prefix"):
            return await instance.prepare(
                user,
                history,
                candidates=count,
                deadline=query.deadline,
                allow_truncate=query.allow_truncate,
            )

    async def _score(
        self,
        ready: "ReadyHistory",
        rows: np.ndarray,
        query: RecommendQuery,
        cold: ColdItems | None = None,
    ) -> ScoredItems:
        with stage("rank"):
            ranked = await self.ranking.score(
                ready,
                torch.from_numpy(rows),
                deadline=query.deadline,
                request_time=query.request_time,
                context=query.context,
                cold=cold,
            )
        return ScoredItems(rows, ranked.scores, ranked.hit, ranked.truncated)

    # ---- rules -----------------------------------------------------------------------------------

    def _choose(self, found: ScoredItems, query: RecommendQuery) -> RecommendResult:
        """Return the best of scored items: by the task asked for and boosts, within the caps."""
        by = query.by if query.by in found.scores else next(iter(found.scores))
        boosts_C = self._selector.boosts(query.rules, found.rows_C)
        order = np.argsort(-(found.scores[by] + boosts_C), kind="stable")
        places = self._selector.within_caps(query.rules, found.rows_C[order].tolist(), query.count)
        best = order[places]
        return RecommendResult(
            self._ids(found.rows_C[best], found.new),
            {task: values[best].tolist() for task, values in found.scores.items()},
            found.hit,
            found.truncated,
            boosts=boosts_C[best].tolist() if query.rules.boosts else None,
        )

    def _ids(self, rows: np.ndarray, new: Sequence[int | str]) -> list[int | str]:
        """Return the ids of rows; those behind the catalogue's last are of `new` items."""
        count = len(self.ranking.items)
        known = self.ranking.items.originals(np.where(rows < count, rows, 0))
        pairs = zip(rows.tolist(), known, strict=True)
        return [new[row - count] if row >= count else item for row, item in pairs]

    def _enough(self, query: RecommendQuery) -> Callable[[torch.Tensor], bool] | None:
        """Return what tells whether retrieved rows suffice under the caps; None: any do."""
        if not query.rules.most_per:
            return None

        def enough(rows_K: torch.Tensor) -> bool:
            rows = rows_K.numpy() if self._rows_N is None else self._rows_N[rows_K.numpy()]
            left = self._selector.within_caps(query.rules, rows.tolist(), query.count)
            return len(left) == query.count

        return enough

    def _retrieval_limits(self, rules: ItemRules) -> SearchLimits:
        """Return the limits in rows of the retrieval bundle; boosts act on the ranking only."""
        assert self._rows_N is not None
        found = self._selector.limits(replace(rules, boosts=()))
        allowed_N = self._rows_N >= 0
        if found.allowed_N is not None:
            allowed_N &= found.allowed_N.numpy()[self._rows_N]
        excluded = self.retrieval.items.find(rules.exclude)
        return SearchLimits(torch.from_numpy(excluded[excluded >= 0]), torch.from_numpy(allowed_N))

    # ---- users of whom nothing is known ----------------------------------------------------------

    def _how_cold(self, known: History) -> Cold | None:
        """Return how a user without known behaviours is answered, None for all others."""
        if len(known) or not self.answers_anybody:
            return None
        by_features = self.ranking.engine.task == "ranking" and bool(known.user_features)
        return "features" if by_features or not self._popular else "popularity"

    def _popular_rows(self, query: RecommendQuery) -> np.ndarray:
        """Return the most popular rows of the ranking bundle that the rules leave."""
        count = max(query.retrieve, query.count)
        return self._popular.best(
            count, query.popular_days, lambda rows: self._selector.allowed(query.rules, rows)
        )

    # ---- histories -------------------------------------------------------------------------------

    def _known(self, instance: "Instance", history: History) -> tuple[History, int]:
        """Return what an instance reads of a history, and how many behaviours it had to skip."""
        first = instance.rules.window_start(history.total, history.first)
        window = history.part(min(first, history.total), history.total)
        known = window.where(instance.items.contains(window.items)) if len(window) else window
        if self._rows_N is not None:  # features that only the other bundle reads are no error
            read = instance.engine.encoder.features
            other = self.ranking if instance is self.retrieval else self.retrieval
            left = {
                name: value
                for name, value in history.user_features.items()
                if name in read or name not in other.engine.encoder.features
            }
            known = replace(known, user_features=left)
        return known, len(window) - len(known)

    def _nothing(self) -> ScoredItems:
        empty = np.empty(0, dtype=np.float32)
        scores = dict.fromkeys(self.ranking.tasks, empty)
        return ScoredItems(np.empty(0, dtype=np.int64), scores)
