"""Queries through the model: one pass over all of them, or behind a prefix, in tiles and steps.

Candidates see the history and themselves, so they are scored in tiles of any size. Touch this when
a pass computes something else; what a request may ask for is checked in engine.py.
"""

import itertools
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from slipstream.models.head import SequenceModel
from slipstream.models.inputs import ModelInput
from slipstream.models.jagged import offsets_from_lengths
from slipstream.models.ranking import RankingModel
from slipstream.models.stream import Stream
from slipstream.ops.topk import score_rows
from slipstream.serving.engine.encoding import HistoryEncoder
from slipstream.serving.engine.feature_rows import FeatureRows
from slipstream.serving.engine.item_search import ItemSearch
from slipstream.serving.engine.prefix import MIN_ROWS, CachedTokens
from slipstream.serving.engine.prefix_steps import (
    RowScratch,
    StreamPass,
    Suffix,
    layer_steps,
    run_layers,
)
from slipstream.serving.engine.rank_query import NO_ROWS, RankQuery, context_of_tokens

CANDIDATE_TILE = 256  # candidates scored at once

Scores = dict[str, np.ndarray]
Work = TypeVar("Work")


class ModelPasses:
    """A model with its rows: what scores a query. `search` is that of a retrieval bundle."""

    def __init__(
        self,
        model: SequenceModel,
        rows: FeatureRows,
        encoder: HistoryEncoder,
        tasks: Sequence[str],
        search: ItemSearch | None,
    ) -> None:
        self.model, self._rows, self._encoder = model, rows, encoder
        self._tasks, self._search = tasks, search
        self._heads = model.heads if isinstance(model, RankingModel) else None
        self._scratch = RowScratch(model)

    # ---- scores ----------------------------------------------------------------------------------

    def score(self, query: RankQuery) -> Scores:
        """Score one query at once."""
        if self._search is not None:
            return self._similarity(self.query_vector_D(query), query.candidates_C)
        if query.past is None or query.candidates_C.numel() <= CANDIDATE_TILE:
            return self.score_together([query])[0]
        return run_steps(self._tile_steps(query))

    def score_steps(self, query: RankQuery) -> Generator[None, None, Scores]:
        """Score a query with many candidates, yielding after every layer of every tile."""
        if self._search is not None:
            return self.score(query)
        return (yield from self._tile_steps(query))

    def score_together(self, queries: Sequence[RankQuery]) -> list[Scores]:
        """Score all queries in one pass; either all have a past or none has."""
        if self._search is not None:
            last_BD = self._hidden_WD([q.with_candidates(NO_ROWS) for q in queries])
            return [
                self._similarity(query_D, q.candidates_C)
                for query_D, q in zip(self._search.directions(last_BD), queries, strict=True)
            ]
        ends = list(itertools.accumulate(q.candidates_C.numel() for q in queries))
        scores = self._probabilities(self._hidden_WD(queries))
        return [
            {task: values[begin:end].copy() for task, values in scores.items()}
            for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def score_one_item(
        self, stream: Stream, pasts: Sequence[CachedTokens], item_1: torch.Tensor
    ) -> Scores:
        """Score one item after each sequence of a stream, all behind a past.

        A ranking bundle's sequences end with the item as their candidate.
        """
        wanted = [1] * len(pasts)
        hidden_BD = run_layers(StreamPass(self.model, stream, pasts, wanted=wanted))
        if self._search is None:
            return self._probabilities(hidden_BD)
        [item_D] = self._search.rows.take(item_1)
        return {"score": score_rows(item_D, self._search.directions(hidden_BD)).numpy()}

    def query_vector_D(self, q: RankQuery) -> torch.Tensor:
        """Return a retrieval bundle's query vector: the last behaviour's direction."""
        assert self._search is not None
        return self._search.directions(self._hidden_WD([q.with_candidates(NO_ROWS)])[0])

    def _similarity(self, query_D: torch.Tensor, candidates_C: torch.Tensor) -> Scores:
        assert self._search is not None
        return {"score": self._search.scores(query_D, candidates_C).numpy()}

    def _probabilities(self, hidden_CD: torch.Tensor) -> Scores:
        assert self._heads is not None
        rows = hidden_CD.shape[0]
        if 0 < rows < MIN_ROWS:  # few rows could round differently
            hidden_CD = torch.cat([hidden_CD, hidden_CD[:1].expand(MIN_ROWS - rows, -1)])
        scores_CA = self._heads(hidden_CD).sigmoid()[:rows].numpy()
        return {task: scores_CA[:, i].copy() for i, task in enumerate(self._tasks)}

    # ---- passes ----------------------------------------------------------------------------------

    def stream(self, queries: Sequence[RankQuery], has_past: bool) -> Stream:
        """Return the token stream of new behaviours and candidates, one sequence per query."""
        counts_B = torch.tensor([q.candidates_C.numel() for q in queries])
        lengths_B = torch.tensor([len(q.new) for q in queries]) + counts_B
        rows_T = torch.cat([part for q in queries for part in (q.new.rows_T, q.candidates_C)])
        times, next_times, labels = [], [], []
        for q in queries:
            now_C = q.new.timestamps_T.new_full((q.candidates_C.numel(),), q.request_time)
            times += [q.new.timestamps_T, now_C]
            next_times += [
                q.new.timestamps_T[1:],
                now_C.new_full((min(1, len(q.new)),), q.request_time),
                now_C,
            ]
            labels += [
                q.new.labels_TA,
                q.new.labels_TA.new_zeros(now_C.numel(), q.new.labels_TA.shape[1]),
            ]
        context = context_of_tokens(queries, self._encoder.context)
        users = self._rows.of_users(self._encoder.features, [q.new.user_features for q in queries])
        items = self._rows.of_items(rows_T, queries[0].cold)
        given = ModelInput(
            rows=items | self._rows.of_context(context) | users,
            offsets_B1=offsets_from_lengths(lengths_B),
            timestamps_T=torch.cat(times),
            next_timestamps_T=torch.cat(next_times),
            token_ids_T=torch.zeros_like(rows_T),
            labels_TA=torch.cat(labels) if self._heads is not None else None,
            num_candidates_B=counts_B if bool(counts_B.any()) else None,
        )
        return self.model.stream(given, [] if has_past else None)

    def _hidden_WD(self, queries: Sequence[RankQuery]) -> torch.Tensor:
        """Return what the head reads of each query: its candidates, or else its last behaviour."""
        pasts = [q.past.cached for q in queries if q.past is not None]
        wanted = [q.candidates_C.numel() if self._search is None else 1 for q in queries]
        stream = self.stream(queries, bool(pasts))
        kept = [q.kept for q in queries] if not pasts else ()
        tokens = StreamPass(
            self.model, stream, pasts, wanted=wanted, kept=kept, scratch=self._scratch
        )
        return run_layers(tokens)

    def _tile_steps(self, q: RankQuery) -> Generator[None, None, Scores]:
        """Rank candidates in tiles: the first with the new behaviours, the others behind them.

        Yields after every layer.
        """
        nothing, tiles = q.new.part(0, 0), torch.split(q.candidates_C, CANDIDATE_TILE)
        added = self._tokens_added(q)
        suffix = Suffix(self.model, added + CANDIDATE_TILE)
        first = self.stream([q.with_candidates(tiles[0])], q.past is not None)
        parts = [(yield from self._layer_by_layer(q, first, suffix, tiles[0].numel()))]
        suffix.tokens = added
        for rows_C in tiles[1:]:
            padded_C = torch.cat([rows_C, rows_C[:1].expand(max(0, MIN_ROWS - rows_C.numel()))])
            later = RankQuery(q.past, nothing, padded_C, q.request_time, q.context, q.cold)
            stream = self.stream([later], True)
            hidden_CD = yield from self._layer_by_layer(q, stream, suffix, padded_C.numel())
            parts.append(hidden_CD[: rows_C.numel()])
        return self._probabilities(torch.cat(parts))

    def _layer_by_layer(
        self, q: RankQuery, stream: Stream, suffix: Suffix, wanted: int
    ) -> Generator[None, None, torch.Tensor]:
        """Run a stream behind a query's past, a layer a step; return its last `wanted` tokens."""
        last_WD, pasts = stream.x_SD, [] if q.past is None else [q.past.cached]
        tile = StreamPass(self.model, stream, pasts, wanted=[wanted], suffix=suffix)
        for hidden_WD in layer_steps(tile):
            last_WD = hidden_WD
            yield
        return last_WD

    def _tokens_added(self, q: RankQuery) -> int:
        """Return the tokens between a query's past and its candidates."""
        users = len(self.model.user_names) if q.past is None else 0
        return users + self.model.tokens_per_behaviour * len(q.new)


def run_steps(steps: Generator[Any, None, Work]) -> Work:
    """Run work in steps to its end and return its value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: Work = end.value
            return value
