"""The engine: a bundle that prefills, ranks and retrieves. No HTTP, no threads, no policy.

    engine = Engine("bundles/ml-1m")
    prefix = engine.prefill(history)                    # early, while retrieval runs
    scores = engine.rank(prefix, recent, candidates)    # late, exact: the scores of the full pass

`rank(None, ...)` is that full pass: the whole history at once, no cache. A prefix grows by
`prefill(longer_history, past=prefix)`, which computes only the new behaviours. Candidates see the
history and themselves, so they are scored in tiles of any size. Long work comes in steps, between
which a server may do something more urgent: `prefill_steps`, `rank_steps`, `retrieve_steps`. Touch
this when scores are computed in another way; the order of work on a server is in serving/instance.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.bundle import Bundle, read_bundle
from slipstream.history.user_history import History
from slipstream.models.build import build_model
from slipstream.models.model_config import ModelConfig
from slipstream.ops.kv_precision import KVPrecision
from slipstream.ops.row_readers import RowReader
from slipstream.ops.topk import SearchLimits
from slipstream.serving.engine.cold_items import ColdItemEncoder
from slipstream.serving.engine.encoding import (
    EncodedHistory,
    HistoryEncoder,
    context_codes_of,
    user_features_of,
)
from slipstream.serving.engine.feature_rows import FeatureRows
from slipstream.serving.engine.item_search import ApproximateIndex, ItemSearch
from slipstream.serving.engine.items import ItemIds, whole_numbers
from slipstream.serving.engine.passes import ModelPasses, Scores, run_steps
from slipstream.serving.engine.popular_items import PopularItems
from slipstream.serving.engine.prefix import (
    MIN_ROWS,
    CachedTokens,
    KVShape,
    Prefix,
    PrefixBuffer,
)
from slipstream.serving.engine.prefix_steps import StreamPass, layer_steps, run_layers
from slipstream.serving.engine.rank_query import NO_ROWS, RankQuery
from slipstream.serving.engine.serving_rules import ServingRules
from slipstream.serving.request_errors import BadRequest

CHUNK_TOKENS = 512  # tokens of one step of a prefill


@dataclass(frozen=True)
class RetrievedItems:
    """The best rows of the catalogue, best first, and their scores by task."""

    rows_K: torch.Tensor
    scores: Scores
    index: ApproximateIndex | None = None  # that found them; None: they are exactly the best


class Engine:
    """A bundle's model and tables, ready to prefill, rank and retrieve."""

    def __init__(
        self, bundle: str | os.PathLike[str] | Bundle, kv_precision: KVPrecision = "fp32"
    ) -> None:
        """Open a bundle; keys and values are kept in `kv_precision`, exactly or in fewer bits."""
        bundle = bundle if isinstance(bundle, Bundle) else read_bundle(Path(bundle))
        recipe, sizes = bundle.description["recipe"], bundle.description["sizes"]
        self.version, self.rules = bundle.version, ServingRules.of(bundle)
        self.name = str(recipe.get("name", recipe["model"]["kind"]))
        self.figures: dict[str, float] = bundle.description.get("test") or {}
        self.task: str = recipe["task"]
        action_tasks = recipe.get("tasks") or {}
        self.tasks: tuple[str, ...] = tuple(action_tasks) if self.task == "ranking" else ("score",)
        self.config = ModelConfig.model_validate(recipe["model"])
        self.max_len = self.config.max_len
        self.items = ItemIds(bundle.items_path)
        self.encoder = HistoryEncoder(
            self.items,
            action_tasks if self.task == "ranking" else {},
            user_features_of(bundle),
            context_codes_of(bundle),
            timed=bundle.timed,
        )
        self.model = build_model(
            self.config,
            recipe["task"],
            tasks=tuple(action_tasks),
            user_features=tuple(sizes["user_cardinalities"]),
            item_features=tuple(sizes["item_cardinalities"]),
            joined=(
                *(f"vector.{name}" for name in sizes.get("item_vectors", ())),
                *(f"context.{name}" for name in self.encoder.context),
            ),
            widths=sizes.get("widths", {}),
        )
        self.model.load_state_dict(bundle.part("model"))
        self.model.requires_grad_(False).eval()
        self.model.backbone.freeze(kv_precision)
        self.popular = PopularItems.of(bundle)
        rows = self._rows = FeatureRows(bundle)
        self.cold_items = ColdItemEncoder(bundle, self.items)
        self.search: ItemSearch | None = None
        if self.task == "retrieval":
            normalize = bool(recipe.get("loss", {}).get("normalize", True))
            self.search = ItemSearch(bundle, rows.item, normalize=normalize)
        self.shape = KVShape.of(self.config, kv_precision)
        self.passes = ModelPasses(self.model, rows, self.encoder, self.tasks, self.search)
        self.tokens_per_behaviour = self.model.tokens_per_behaviour
        self.user_tokens = len(self.model.user_names)
        self.hold = max(self.model.held_back_behaviours, -(-MIN_ROWS // self.tokens_per_behaviour))

    # ---- sizes -----------------------------------------------------------------------------------

    def cached_behaviours(self, behaviours: int) -> int:
        """Return how many behaviours a prefix caches: all but the held ones; none of a few."""
        return behaviours - self.hold if behaviours >= 2 * self.hold else 0

    def tokens_of(self, behaviours: int) -> int:
        """Return the tokens of so many first behaviours, those of the user features included."""
        return self.user_tokens + self.tokens_per_behaviour * behaviours if behaviours else 0

    def cached_tokens(self, behaviours: int) -> int:
        """Return the tokens that the prefix of so many behaviours caches."""
        return self.tokens_of(self.cached_behaviours(behaviours))

    def prefix_bytes(self, behaviours: int) -> int:
        """Return the bytes of the buffer of a prefix of so many behaviours."""
        return self.shape.nbytes(self.cached_tokens(behaviours))

    # ---- prefill, rank, retrieve -----------------------------------------------------------------

    def encode(self, history: History | EncodedHistory | None) -> EncodedHistory:
        """Encode a history; an encoded one is returned as it is."""
        return history if isinstance(history, EncodedHistory) else self.encoder.encode(history)

    @torch.inference_mode()
    def prefill(self, history: History | EncodedHistory, past: Prefix | None = None) -> Prefix:
        """Compute the prefix of a history; with a shorter one as `past`, only what is missing."""
        encoded = self.encode(history)
        buffer = self.shape.buffer(self.cached_tokens(len(encoded)))
        for _ in self.prefill_steps(encoded, buffer, past):
            pass
        return self.prefix_of(encoded, buffer)

    def prefix_of(
        self, encoded: EncodedHistory, buffer: PrefixBuffer, digest: bytes | None = None
    ) -> Prefix:
        """Return the prefix of a history whose steps have all run into `buffer`."""
        held = encoded.part(self.cached_behaviours(len(encoded)))
        tokens = self.cached_tokens(len(encoded))
        return Prefix(self.version, len(encoded), digest or encoded.digest(), tokens, held, buffer)

    @torch.inference_mode()
    def prefill_steps(
        self,
        encoded: EncodedHistory,
        buffer: PrefixBuffer,
        past: Prefix | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> Iterator[int]:
        """Fill `buffer` with a history's prefix, one chunk through one layer at a time.

        Each step yields the tokens its chunk ends at.
        """
        self.check_length(len(encoded))
        at, end = 0, self.cached_behaviours(len(encoded))
        if past is not None:
            self._check_past(encoded, past)
            at = past.cached_behaviours
            if at < end:  # fewer rows than this could round differently from the full pass
                at = min(at, max(0, end - self.hold))
            for layer in range(self.shape.layers if at else 0):
                buffer.copy_layer(past.buffer, self.tokens_of(at), layer)
                yield 0
        chunk = max(self.hold, chunk_tokens // self.tokens_per_behaviour)
        while at < end:
            stop = end if end - at < chunk + self.hold else at + chunk
            piece = RankQuery(
                None, encoded.part(at, stop), NO_ROWS, self._time_after(encoded, stop)
            )
            pasts = [CachedTokens(buffer, self.tokens_of(at))]
            stream = self.passes.stream([piece], bool(at))
            for _ in layer_steps(StreamPass(self.model, stream, pasts, target=buffer)):
                yield self.tokens_of(stop)
            at = stop

    @torch.inference_mode()
    def rank(
        self,
        prefix: Prefix | None,
        recent: History | EncodedHistory | None,
        candidates: Any,
        *,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
    ) -> Scores:
        """Score every candidate for every task, after the prefix's history and `recent`.

        The scores are exact with any prefix. Ranking bundles give probabilities, retrieval bundles
        one similarity called "score". `context` has the labels of the request, such as its surface.
        """
        return self.passes.score(self.make_query(prefix, recent, candidates, request_time, context))

    @torch.inference_mode()
    def rank_batch(self, queries: Sequence[RankQuery]) -> list[Scores]:
        """Score each query as `rank` would; several share one pass over all their tokens."""
        if len(queries) == 1:
            return [self.passes.score(queries[0])]
        results: list[Scores] = [{} for _ in queries]
        for with_past in (False, True):
            places = [i for i, query in enumerate(queries) if (query.past is not None) == with_past]
            if places:
                found = self.passes.score_together([queries[i] for i in places])
                for place, scores in zip(places, found, strict=True):
                    results[place] = scores
        return results

    @torch.inference_mode()
    def rank_steps(self, query: RankQuery) -> Generator[None, None, Scores]:
        """Score a query with many candidates as `rank` would, a tile through a layer at a time."""
        return (yield from self.passes.score_steps(query))

    @torch.inference_mode()
    def retrieve_steps(
        self,
        query: RankQuery,
        k: int,
        limits: SearchLimits,
        enough: Callable[[torch.Tensor], bool] | None = None,
    ) -> Generator[None, None, RetrievedItems]:
        """Find the exact `k` best items after a query's behaviours, in steps.

        A retrieval bundle searches its catalogue. A ranking bundle ranks all of it and orders by
        its first task. `enough` is told the rows found and says whether they suffice; if not, the
        search goes on for more.
        """
        if self.search is not None:
            query_D = self.passes.query_vector_D(query)
            yield
            scores_K, rows_K = yield from self.search.best_steps(query_D, k, limits, enough)
            index = self.search.index_for(limits)
            return RetrievedItems(rows_K, {"score": scores_K.numpy()}, index)
        allowed_N = torch.ones(len(self.items), dtype=torch.bool)
        if limits.allowed_N is not None:
            allowed_N &= limits.allowed_N
        allowed_N[limits.excluded] = False
        rows_N = allowed_N.nonzero().squeeze(1)
        if not rows_N.numel():
            return RetrievedItems(rows_N, {task: np.empty(0, np.float32) for task in self.tasks})
        scores = yield from self.rank_steps(query.with_candidates(rows_N))
        by_N = limits.boost(torch.from_numpy(scores[self.tasks[0]]), rows_N)
        order_N = torch.sort(by_N, descending=True, stable=True).indices
        while k < rows_N.numel() and enough is not None and not enough(rows_N[order_N[:k]]):
            k *= 4
        order_K = order_N[:k]
        places = order_K.numpy()
        found = {task: values[places] for task, values in scores.items()}
        return RetrievedItems(rows_N[order_K], found)

    def retrieve(
        self,
        history: History | EncodedHistory,
        k: int,
        *,
        request_time: int | None = None,
        exclude_seen: bool | None = None,
        exclude: Any = (),
        context: Mapping[str, str | None] | None = None,
    ) -> tuple[list[int | str], list[float]]:
        """Return the exact `k` best items of the catalogue, best first, ties by row.

        Items of the history are left out where the bundle's `repeat` says so, or `exclude_seen`;
        those of `exclude` always. A ranking bundle orders the catalogue by its first task, in the
        `context` of the request.
        """
        encoded = self.encode(history)
        if k < 1:
            raise BadRequest(f"k must be at least 1, got {k}")
        sent = self.items.find(exclude)
        excluded = torch.from_numpy(sent[sent >= 0])
        if self.rules.exclude_seen if exclude_seen is None else exclude_seen:
            excluded = torch.cat([excluded, encoded.rows_T])
        query = self.make_query(self.prefill(encoded), None, [], request_time, context)
        found = run_steps(self.retrieve_steps(query, k, SearchLimits(excluded)))
        return self.items.originals(found.rows_K), found.scores[self.tasks[0]].tolist()

    @torch.inference_mode()
    def query_vectors(
        self, histories: Sequence[EncodedHistory], request_time: int | None = None
    ) -> torch.Tensor:
        """Return the vector of every history, which a retrieval bundle compares with items."""
        queries = [self.make_query(None, each, [], request_time) for each in histories]
        stream = self.passes.stream(queries, False)
        hidden_SD, _ = self.model.backbone(stream.x_SD, stream.layout)
        ends_B = torch.tensor([len(query.new) for query in queries]).cumsum(0)
        assert self.search is not None
        return self.search.directions(stream.behaviours(hidden_SD)[ends_B - 1])

    @property
    def item_vectors(self) -> RowReader:
        """The vectors of all items: what queries are compared with, or a ranking model's rows."""
        return self._rows.item if self.search is None else self.search.rows

    @torch.inference_mode()
    def run_pass(
        self, behaviours: EncodedHistory, buffer: PrefixBuffer, past_tokens: int, *, fill: bool
    ) -> None:
        """Run one pass behind what the buffer holds (`fill`: as in a prefill), to time it."""
        piece = RankQuery(None, behaviours, NO_ROWS, self._time_after(behaviours, len(behaviours)))
        stream, pasts = self.passes.stream([piece], True), [CachedTokens(buffer, past_tokens)]
        run_layers(StreamPass(self.model, stream, pasts, target=buffer if fill else None))

    # ---- queries and passes ----------------------------------------------------------------------

    def make_query(
        self,
        prefix: Prefix | None,
        recent: History | EncodedHistory | None,
        candidates: Any,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
    ) -> RankQuery:
        """Check a request and return it as the model reads it."""
        rows_C = self.items.rows(candidates)
        return self.query_of_rows(prefix, recent, rows_C, request_time, context)

    def query_of_rows(
        self,
        prefix: Prefix | None,
        recent: History | EncodedHistory | None,
        rows_C: torch.Tensor,
        request_time: int | None = None,
        context: Mapping[str, str | None] | None = None,
    ) -> RankQuery:
        """`make_query` for candidates whose rows are known."""
        new = self.encode(recent)
        if prefix is not None:
            if prefix.version != self.version:
                raise ValueError(
                    f"a prefix of version {prefix.version} cannot serve version {self.version}"
                )
            new = prefix.held.then(new)
            prefix = prefix if prefix.tokens else None
        before = 0 if prefix is None else prefix.cached_behaviours
        self.check_length(before + len(new))
        if not len(new) and self.task == "retrieval":
            raise BadRequest(
                "an empty history asks nothing of a retrieval bundle; send at least one behaviour"
            )
        if request_time is not None:
            request_time = int(whole_numbers("request_time", [request_time])[0])
            request_time = request_time if self.encoder.timed else 0
        return RankQuery(
            prefix,
            new,
            rows_C,
            self._time_after(new, len(new)) if request_time is None else request_time,
            self.encoder.encode_request(context),
        )

    def check_length(self, behaviours: int) -> None:
        """Refuse a history longer than the model; the engine never cuts one silently."""
        if behaviours > self.max_len:
            raise BadRequest(
                f"a history of {behaviours} behaviours is longer than the model's {self.max_len}; "
                "send the most recent"
            )

    def _check_past(self, encoded: EncodedHistory, past: Prefix) -> None:
        if past.version != self.version:
            raise ValueError(
                f"a prefix of version {past.version} cannot serve version {self.version}"
            )
        if past.behaviours > len(encoded) or encoded.digest(past.behaviours) != past.digest:
            raise ValueError("the past is not a prefix of this history; prefill without it")

    @staticmethod
    def _time_after(encoded: EncodedHistory, at: int) -> int:
        """Return the time of what follows behaviour `at - 1`, or the last time there is."""
        if not len(encoded):
            return 0
        return int(encoded.timestamps_T[min(at, len(encoded) - 1)])
