"""What a run and a bundle answer alike: recommendations, scores, vectors, similar items.

    model.recommend("c/0042", k=10)
    model.score(["c/0042", "c/0043"], ["LAM/0001", "RUG/0002"])
    model.similar_items("LAM/0001")

Both compute with the serving engine, so a run, its bundle and a server give the same numbers.
Original ids in and out, always; tables are Polars frames. Touch this to answer something more.
"""

import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import torch

from slipstream.api.arguments import clear_arguments, ids_of, is_id, one_of, whole_number
from slipstream.api.questions import Question, questions
from slipstream.bundle import Bundle
from slipstream.data.store import SequenceStore, Vocabulary
from slipstream.errors import SlipstreamError
from slipstream.history.window import window_start
from slipstream.ops.row_readers import NormalizedRows
from slipstream.ops.tiled_search import NO_ROW, Pairs, TopRows, top_k_of_tiles
from slipstream.ops.topk import top_k
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine

USERS_AT_ONCE = 64  # users who share one pass over the catalogue
Repeat = Literal["allow", "exclude"]
REPEAT = ("allow", "exclude")
ItemId = int | str
RequestLabels = Mapping[str, str | None] | None  # by context column
Filter = Callable[[Any], bool] | Collection[Any]
COUNT = {"count": "did you mean 'k'?", "n": "did you mean 'k'?", "top_k": "did you mean 'k'?"}


class Predictor(abc.ABC):
    """A trained model that answers for users of its store, or for histories given by hand."""

    @property
    @abc.abstractmethod
    def bundle(self) -> Bundle:
        """The weights and rules that answer, as serving opens them."""

    @property
    @abc.abstractmethod
    def data(self) -> SequenceStore | None:
        """The store whose users can be asked about."""

    @property
    @abc.abstractmethod
    def items(self) -> Vocabulary:
        """The catalogue: original ids and titles."""

    @cached_property
    def engine(self) -> Engine:
        """The engine that computes the answers."""
        return Engine(self.bundle)

    @clear_arguments(COUNT | {"user": "did you mean 'users'?", "history": "use 'histories'"})
    def recommend(
        self,
        users: Any = None,
        k: int = 10,
        *,
        histories: Any = None,
        filter: Filter | None = None,
        exclude: Collection[Any] | None = None,
        repeat: Repeat | None = None,
        request_time: int | None = None,
        context: RequestLabels = None,
    ) -> pl.DataFrame:
        """Recommend the `k` best items to each user: columns user, rank, item, score (, title).

        `users` is an id or several (default: all users of the store). `histories` takes their
        place: an `ss.History`, a list of item ids, a dict or a frame, or several of them.
        `filter` is a function of an item's id that says whether it may be recommended, or a
        collection of the allowed ids; `exclude` is a collection of those that may not. `repeat`
        replaces the model's rule about items the user has seen. `request_time` is in seconds;
        `context` are labels of the request by context column, which a ranking model reads.
        """
        k, allowed_N = whole_number("k", k, least=1), self._allowed_N(filter, exclude)
        rule = self.bundle.repeat if repeat is None else one_of("repeat", repeat, REPEAT)
        owners: list[ItemId] = []
        ranks: list[int] = []
        rows: list[int] = []
        scores: list[float] = []
        search = self._search_catalogue
        if self.engine.task == "ranking":
            search = partial(self._search_ranked, context)
        for asked, encoded in self._batches(users, histories, request_time):
            seen = _seen(encoded) if rule == "exclude" else None
            best = search(encoded, request_time, min(k, len(self.items)), seen, allowed_N)
            for question, best_scores, best_rows in zip(asked, *best, strict=True):
                kept = int((best_rows != NO_ROW).sum())
                owners += [question.user] * kept
                ranks += range(1, kept + 1)
                rows += best_rows[:kept].tolist()
                scores += best_scores[:kept].tolist()
        before = [self._users_column(owners), pl.Series("rank", ranks, dtype=pl.Int64)]
        return self._table(before, rows, {"score": scores})

    @clear_arguments({"item": "did you mean 'items'?", "user": "did you mean 'users'?"})
    def score(
        self,
        users: Any = None,
        items: Any = None,
        *,
        histories: Any = None,
        request_time: int | None = None,
        context: RequestLabels = None,
    ) -> pl.DataFrame:
        """Score every given item for every user: columns user, item, score (, title).

        A ranking model adds a column for each of its tasks; `score` is the first task's. `context`
        are labels of the request by context column, such as {"surface": "home"}.
        """
        if items is None:
            raise SlipstreamError("score needs the items to score; give items=[…]")
        rows_C = torch.tensor(self._rows(items), dtype=torch.int64)
        owners: list[ItemId] = []
        found: list[dict[str, np.ndarray]] = []
        asks = (users, histories, rows_C, request_time, context)
        for asked, scores in self._candidate_scores(*asks):
            owners += [asked.user] * rows_C.numel()
            found.append(scores)
        tasks = self.engine.tasks if self.engine.task == "ranking" else ()
        columns = {
            name: [score for scores in found for score in scores[name].tolist()]
            for name in ("score", *tasks)
        }
        return self._table([self._users_column(owners)], rows_C.tolist() * len(found), columns)

    @clear_arguments({"user": "did you mean 'users'?"})
    def user_vectors(self, users: Any = None, *, histories: Any = None) -> pl.DataFrame:
        """Return each user's vector as columns user and vector (retrieval models only).

        Its dot product with an item's vector is the item's score.
        """
        owners, parts = [], []
        for asked, encoded in self._batches(users, histories, None):
            owners += [question.user for question in asked]
            parts.append(self._query_vectors_BD(encoded, None))
        vectors_BD = torch.cat(parts) if parts else torch.empty(0, self.engine.config.dim)
        return _vectors(self._users_column(owners), vectors_BD)

    @clear_arguments({"item": "did you mean 'items'?"})
    def item_vectors(self, items: Any = None) -> pl.DataFrame:
        """Return the vectors of items (default: all) as columns item and vector."""
        rows = list(range(len(self.items))) if items is None else self._rows(items)
        chosen_CD = self.engine.item_vectors.take(torch.tensor(rows, dtype=torch.int64))
        return _vectors(self._items_column(rows), chosen_CD)

    @clear_arguments(COUNT | {"items": "it compares one item; did you mean 'item'?"})
    def similar_items(self, item: ItemId, k: int = 10) -> pl.DataFrame:
        """Return the `k` items nearest to one by cosine: columns rank, item, score (, title)."""
        if not is_id(item):
            raise SlipstreamError(f"similar_items compares one item; give its id, got {item!r}")
        k, row = whole_number("k", k, least=1), self.items.row(item)
        directions = NormalizedRows(self.engine.item_vectors)
        itself = torch.tensor([row])
        found = top_k(directions.take(itself)[0], directions, k, excluded=itself)
        scores, rows = (each.tolist() for each in found)
        ranks = pl.Series("rank", range(1, len(rows) + 1), dtype=pl.Int64)
        return self._table([ranks], rows, {"score": scores})

    # ---- parts of an answer ----------------------------------------------------------------------

    def _rows(self, items: Any) -> list[int]:
        found: list[int] = self.items.rows(ids_of("items", items)).tolist()
        return found

    def _allowed_N(
        self, filter: Filter | None, exclude: Collection[Any] | None
    ) -> torch.Tensor | None:
        """Return which rows of the catalogue may be recommended; None: all."""
        if filter is None and exclude is None:
            return None
        allowed_N = torch.ones(len(self.items), dtype=torch.bool)
        if callable(filter):
            allowed_N = torch.tensor(
                [bool(filter(self.items.id(row))) for row in range(len(self.items))]
            )
        elif filter is not None:
            allowed_N[:] = False
            allowed_N[self._rows(filter)] = True
        if exclude is not None:
            allowed_N[self._rows(exclude)] = False
        return allowed_N

    def _batches(
        self, users: Any, histories: Any, request_time: int | None
    ) -> Iterator[tuple[list[Question], list[EncodedHistory]]]:
        """Yield whom to answer with their whole histories as the model reads them."""
        if request_time is not None:
            whole_number("request_time", request_time)
        features = self.engine.encoder.features
        asked = questions(users, histories, self.data, self.items, features)
        for start in range(0, len(asked), USERS_AT_ONCE):
            part = asked[start : start + USERS_AT_ONCE]
            encoded = [self.engine.encode(question.history) for question in part]
            for question, each in zip(part, encoded, strict=True):
                last = int(each.timestamps_T[-1]) if len(each) else 0
                if request_time is not None and self.bundle.timed and request_time < last:
                    raise SlipstreamError(
                        f"request_time {request_time} is before the last behaviour of user "
                        f"{question.user!r} at {last}; give the time of the request in seconds"
                    )
            yield part, encoded

    def _window(self, encoded: EncodedHistory) -> EncodedHistory:
        bundle = self.bundle
        return encoded.part(window_start(len(encoded), bundle.max_len, rule=bundle.window))

    def _query_vectors_BD(
        self, encoded: list[EncodedHistory], request_time: int | None
    ) -> torch.Tensor:
        if self.engine.task == "ranking":
            raise SlipstreamError(
                "a ranking model reads a history together with each candidate, so users have no "
                "vector; use score"
            )
        return self.engine.query_vectors([self._window(each) for each in encoded], request_time)

    def _search_catalogue(
        self,
        encoded: list[EncodedHistory],
        request_time: int | None,
        k: int,
        seen: Pairs | None,
        allowed_N: torch.Tensor | None,
    ) -> TopRows:
        """Return the best items of every history, in one pass over the catalogue."""
        queries_BD = self._query_vectors_BD(encoded, request_time)
        tiles = self.engine.item_vectors.tiles()
        return top_k_of_tiles(queries_BD, tiles, k, excluded=seen, allowed_N=allowed_N)

    def _search_ranked(
        self,
        context: RequestLabels,
        encoded: list[EncodedHistory],
        request_time: int | None,
        k: int,
        seen: Pairs | None,
        allowed_N: torch.Tensor | None,
    ) -> TopRows:
        """Return the best items by a ranking model's first task, every item a candidate."""
        scores_BK = torch.full((len(encoded), k), -torch.inf)
        rows_BK = torch.full((len(encoded), k), NO_ROW)
        for place, each in enumerate(encoded):
            scores = self._rank(each, torch.arange(len(self.items)), request_time, context)
            kept_N = torch.ones(len(self.items), dtype=torch.bool)
            if allowed_N is not None:
                kept_N &= allowed_N
            if seen is not None:
                kept_N[seen.rows_P[seen.queries_P == place]] = False
            rows_N = kept_N.nonzero().squeeze(1)
            scores_N = torch.from_numpy(scores["score"])[rows_N]
            order = torch.sort(scores_N, descending=True, stable=True).indices[:k]
            scores_BK[place, : len(order)] = scores_N[order]
            rows_BK[place, : len(order)] = rows_N[order]
        return TopRows(scores_BK, rows_BK)

    def _candidate_scores(
        self,
        users: Any,
        histories: Any,
        rows_C: torch.Tensor,
        request_time: int | None,
        context: RequestLabels,
    ) -> Iterator[tuple[Question, dict[str, np.ndarray]]]:
        """Yield every question with the candidates' scores by column."""
        for asked, encoded in self._batches(users, histories, request_time):
            if self.engine.task == "ranking":
                for question, each in zip(asked, encoded, strict=True):
                    yield question, self._rank(each, rows_C, request_time, context)
                continue
            vectors_CD = self.engine.item_vectors.take(rows_C)
            scores_BC = self._query_vectors_BD(encoded, request_time) @ vectors_CD.T
            for question, scores_C in zip(asked, scores_BC, strict=True):
                yield question, {"score": scores_C.numpy()}

    def _rank(
        self,
        encoded: EncodedHistory,
        rows_C: torch.Tensor,
        request_time: int | None,
        context: RequestLabels,
    ) -> dict[str, np.ndarray]:
        """Return a ranking model's probabilities by task, and `score`, the first task's."""
        prefix = self.engine.prefill(self._window(encoded))
        candidates = self.engine.items.originals(rows_C)
        scores = self.engine.rank(
            prefix, None, candidates, request_time=request_time, context=context
        )
        return {"score": scores[self.engine.tasks[0]], **scores}

    def _users_column(self, users: list[ItemId]) -> pl.Series:
        """Return users as a column; text as soon as one of them is text."""
        is_text = any(isinstance(user, str) for user in users)
        is_text |= not users and self.data is not None and not self.data.users.numeric
        values = [str(user) for user in users] if is_text else users
        return pl.Series("user", values, dtype=pl.String if is_text else pl.Int64)

    def _items_column(self, rows: list[int]) -> pl.Series:
        kind = pl.Int64 if self.items.numeric else pl.String
        return pl.Series("item", [self.items.id(row) for row in rows], dtype=kind)

    def _table(
        self, before: list[pl.Series], rows: list[int], scores: dict[str, list[float]]
    ) -> pl.DataFrame:
        """Return a frame with the items of `rows` between the columns before and the scores."""
        after = [pl.Series(name, values, dtype=pl.Float32) for name, values in scores.items()]
        table = pl.DataFrame([*before, self._items_column(rows), *after])
        if not self.items.titled:
            return table
        titles = [self.items.title(row) for row in rows]
        return table.with_columns(pl.Series("title", titles, dtype=pl.String))


def _seen(encoded: list[EncodedHistory]) -> Pairs:
    """Return the items of every history."""
    lengths_B = torch.tensor([len(each) for each in encoded])
    rows_P = torch.cat([each.rows_T for each in encoded])
    return Pairs(torch.arange(len(encoded)).repeat_interleave(lengths_B), rows_P)


def _vectors(owners: pl.Series, vectors_CD: torch.Tensor) -> pl.DataFrame:
    """Return vectors as a frame with their owners."""
    values = pa.array(vectors_CD.flatten().numpy())
    column = pa.FixedSizeListArray.from_arrays(values, vectors_CD.shape[1])
    return pl.DataFrame([owners, pl.Series("vector", pl.from_arrow(column))])
