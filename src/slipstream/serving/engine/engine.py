"""The engine: a bundle that prefills, ranks and retrieves. No HTTP, no threads, no policy.

    engine = Engine("bundles/ml-1m")
    prefix = engine.prefill(history)                    # early, while retrieval runs
    scores = engine.rank(prefix, recent, candidates)    # late, exact: the scores of the full pass

`rank(None, ...)` is that full pass: the whole history at once, no cache. A prefix grows by
`prefill(longer_history, past=prefix)`, which computes only the new behaviours. Candidates see the
history and themselves, so they are scored in tiles of any size. Touch this when scores are computed
in another way; the order of work on a server is in serving/instance.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.bundle import Bundle, read_bundle
from slipstream.history.user_history import History
from slipstream.models.backbone import KV
from slipstream.models.build import build_model
from slipstream.models.inputs import ModelInput
from slipstream.models.jagged import offsets_from_lengths
from slipstream.models.model_config import ModelConfig
from slipstream.models.ranking import RankingModel
from slipstream.models.stream import Stream
from slipstream.ops.topk import quantize_rows, top_k
from slipstream.serving.engine.encoding import EncodedHistory, HistoryEncoder, user_features_of
from slipstream.serving.engine.feature_rows import FeatureRows
from slipstream.serving.engine.items import ItemIds, whole_numbers
from slipstream.serving.engine.prefix import MIN_ROWS, KVShape, Prefix, PrefixBuffer
from slipstream.serving.engine.prefix_steps import layer_steps, run_layers
from slipstream.serving.engine.serving_rules import ServingRules
from slipstream.serving.request_errors import BadRequest

CANDIDATE_TILE = 256  # candidates scored at once
QUANTIZED_FROM = 50_000  # items from which the catalogue is searched by 8-bit codes first
CHUNK_TOKENS = 512  # tokens of one step of a prefill
SUFFIX_ROOM = 320  # tokens a ranking request may append to a prefix without copying it

Scores = dict[str, np.ndarray]


@dataclass(frozen=True)
class RankQuery:
    """A checked ranking request: cached past, new behaviours, rows to score, time of request."""

    past: Prefix | None
    new: EncodedHistory
    candidates_C: torch.Tensor
    request_time: int

    def with_candidates(self, rows_C: torch.Tensor) -> "RankQuery":
        """Return the same query for other rows of the catalogue."""
        return replace(self, candidates_C=rows_C)


class Engine:
    """A bundle's model and tables, ready to prefill, rank and retrieve."""

    def __init__(self, bundle: str | os.PathLike[str] | Bundle) -> None:
        bundle = bundle if isinstance(bundle, Bundle) else read_bundle(Path(bundle))
        recipe, sizes = bundle.description["recipe"], bundle.description["sizes"]
        self.version, self.rules = bundle.version, ServingRules.of(bundle)
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
            timed=bundle.timed,
        )
        self.model = build_model(
            self.config,
            recipe["task"],
            tasks=tuple(action_tasks),
            user_features=tuple(sizes["user_cardinalities"]),
            item_features=tuple(sizes["item_cardinalities"]),
        )
        self.model.load_state_dict(bundle.part("model"))
        self.model.requires_grad_(False).eval()
        self._heads = self.model.heads if isinstance(self.model, RankingModel) else None
        self._rows = FeatureRows(bundle)
        self._normalize = bool(recipe.get("loss", {}).get("normalize", True))
        self._catalogue_ND = (
            self._directions(self._rows.tables["item"]) if self.task == "retrieval" else None
        )
        large = self._catalogue_ND is not None and len(self._catalogue_ND) >= QUANTIZED_FROM
        self._quantized = quantize_rows(self.item_vectors_ND) if large else None
        self.shape = KVShape.of(self.config)
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

    def prefix_bytes(self, behaviours: int, room: int = SUFFIX_ROOM) -> int:
        """Return the bytes of the buffer of a prefix of so many behaviours."""
        return self.shape.nbytes(self.cached_tokens(behaviours) + room)

    # ---- prefill, rank, retrieve -----------------------------------------------------------------

    def encode(self, history: History | EncodedHistory | None) -> EncodedHistory:
        """Encode a history; an encoded one is returned as it is."""
        return history if isinstance(history, EncodedHistory) else self.encoder.encode(history)

    @torch.inference_mode()
    def prefill(self, history: History | EncodedHistory, past: Prefix | None = None) -> Prefix:
        """Compute the prefix of a history; with a shorter one as `past`, only what is missing."""
        encoded = self.encode(history)
        buffer = PrefixBuffer(self.shape, self.cached_tokens(len(encoded)) + SUFFIX_ROOM)
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
                None, encoded.part(at, stop), _NO_ROWS, self._time_after(encoded, stop)
            )
            for _ in layer_steps(
                self.model, self._stream([piece], bool(at)), buffer, self.tokens_of(at), fill=True
            ):
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
    ) -> Scores:
        """Score every candidate for every task, after the prefix's history and `recent`.

        The scores are exact with any prefix. Ranking bundles give probabilities, retrieval bundles
        one similarity called "score".
        """
        return self._rank_one(self.make_query(prefix, recent, candidates, request_time))

    @torch.inference_mode()
    def rank_batch(self, queries: Sequence[RankQuery]) -> list[Scores]:
        """Score each query as `rank` would; several share one pass over all their tokens."""
        if len(queries) == 1:
            return [self._rank_one(queries[0])]
        results: list[Scores] = [{} for _ in queries]
        for with_past in (False, True):
            places = [i for i, query in enumerate(queries) if (query.past is not None) == with_past]
            if places:
                found = self._full_pass([queries[i] for i in places])
                for place, scores in zip(places, found, strict=True):
                    results[place] = scores
        return results

    @torch.inference_mode()
    def retrieve(
        self,
        history: History | EncodedHistory,
        k: int,
        *,
        request_time: int | None = None,
        exclude_seen: bool | None = None,
        exclude: Any = (),
    ) -> tuple[list[int | str], list[float]]:
        """Return the exact `k` best items of the catalogue, best first, ties by row.

        Items of the history are left out where the bundle's `repeat` says so, or `exclude_seen`;
        those of `exclude` always. A ranking bundle orders the catalogue by its first task.
        """
        encoded = self.encode(history)
        if k < 1:
            raise BadRequest(f"k must be at least 1, got {k}")
        sent = self.items.find(exclude)
        excluded = torch.from_numpy(sent[sent >= 0])
        if self.rules.exclude_seen if exclude_seen is None else exclude_seen:
            excluded = torch.cat([excluded, encoded.rows_T])
        query = self.make_query(self.prefill(encoded), None, [], request_time)
        if self._catalogue_ND is None:
            scores_K, rows_K = self._best_ranked(query, k, excluded)
        else:
            scores_K, rows_K = top_k(
                self._query_vector_D(query),
                self._catalogue_ND,
                k,
                quantized=self._quantized,
                excluded=excluded,
            )
        return self.items.originals(rows_K), scores_K.tolist()

    @torch.inference_mode()
    def query_vectors(
        self, histories: Sequence[EncodedHistory], request_time: int | None = None
    ) -> torch.Tensor:
        """Return the vector of every history, which a retrieval bundle compares with items."""
        queries = [self.make_query(None, each, [], request_time) for each in histories]
        stream = self._stream(queries, False)
        hidden_SD, _ = self.model.backbone(stream.x_SD, stream.layout)
        ends_B = torch.tensor([len(query.new) for query in queries]).cumsum(0)
        return self._directions(stream.behaviours(hidden_SD)[ends_B - 1])

    @property
    def item_vectors_ND(self) -> torch.Tensor:
        """The vectors of all items: what queries are compared with, or a ranking model's rows."""
        return self._rows.tables["item"] if self._catalogue_ND is None else self._catalogue_ND

    @torch.inference_mode()
    def run_pass(
        self, behaviours: EncodedHistory, buffer: PrefixBuffer, past_tokens: int, *, fill: bool
    ) -> None:
        """Run one pass behind what the buffer holds (`fill`: as in a prefill), to time it."""
        piece = RankQuery(None, behaviours, _NO_ROWS, self._time_after(behaviours, len(behaviours)))
        for _ in layer_steps(
            self.model, self._stream([piece], True), buffer, past_tokens, fill=fill
        ):
            pass

    # ---- queries and passes ----------------------------------------------------------------------

    def make_query(
        self,
        prefix: Prefix | None,
        recent: History | EncodedHistory | None,
        candidates: Any,
        request_time: int | None = None,
    ) -> RankQuery:
        """Check a request and return it as the model reads it."""
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
        rows_C = self.items.rows(candidates)
        if request_time is not None:
            request_time = int(whole_numbers("request_time", [request_time])[0])
            request_time = request_time if self.encoder.timed else 0
        return RankQuery(
            prefix,
            new,
            rows_C,
            self._time_after(new, len(new)) if request_time is None else request_time,
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

    def _stream(self, queries: Sequence[RankQuery], has_past: bool) -> Stream:
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
        users = self._rows.of_users(self.encoder.features, [q.new.user_features for q in queries])
        given = ModelInput(
            rows=self._rows.of_items(rows_T) | users,
            offsets_B1=offsets_from_lengths(lengths_B),
            timestamps_T=torch.cat(times),
            next_timestamps_T=torch.cat(next_times),
            token_ids_T=torch.zeros_like(rows_T),
            labels_TA=torch.cat(labels) if self.task == "ranking" else None,
            num_candidates_B=counts_B if bool(counts_B.any()) else None,
        )
        return self.model.stream(given, [] if has_past else None)

    def _rank_one(self, query: RankQuery) -> Scores:
        if self.task == "retrieval":
            return self._similarity(self._query_vector_D(query), query.candidates_C)
        return self._full_pass([query])[0] if query.past is None else self._from_prefix(query)

    def _query_vector_D(self, q: RankQuery) -> torch.Tensor:
        """Return a retrieval bundle's query vector: the last behaviour's direction."""
        stream = self._stream([q.with_candidates(_NO_ROWS)], q.past is not None)
        if q.past is None:
            hidden_SD, _ = self.model.backbone(stream.x_SD, stream.layout)
            return self._directions(stream.behaviours(hidden_SD)[-1])
        buffer, _ = self._buffer_for(q.past, len(q.new), 0)
        return self._directions(run_layers(self.model, stream, buffer, q.past.tokens)[-1])

    def _full_pass(self, queries: Sequence[RankQuery]) -> list[Scores]:
        """Run the model's plain forward over all queries; either all have a past or none has."""
        ranking, has_past = self.task == "ranking", queries[0].past is not None
        streamed = [q if ranking else q.with_candidates(_NO_ROWS) for q in queries]
        stream = self._stream(streamed, has_past)
        past = _concatenate([q.past for q in queries if q.past is not None]) if has_past else None
        hidden_SD, _ = self.model.backbone(stream.x_SD, stream.layout, past)
        hidden_TD = stream.behaviours(hidden_SD)
        lengths = [len(q.new) + q.candidates_C.numel() for q in streamed]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        if self.task == "retrieval":
            queries_BD = self._directions(hidden_TD[torch.tensor(ends) - 1])
            return [
                self._similarity(query_D, q.candidates_C)
                for query_D, q in zip(queries_BD, queries, strict=True)
            ]
        return [
            self._probabilities(hidden_TD[end - q.candidates_C.numel() : end])
            for end, q in zip(ends, queries, strict=True)
        ]

    def _buffer_for(
        self, past: Prefix, behaviours: int, candidates: int
    ) -> tuple[PrefixBuffer, int]:
        """Return a buffer with the prefix and room behind it, and how many candidates fit there."""
        tokens = past.tokens + self.tokens_per_behaviour * behaviours
        if past.buffer.capacity >= tokens + min(candidates, MIN_ROWS):
            return past.buffer, past.buffer.capacity - tokens
        # Many recent behaviours: work in a copy.
        larger = PrefixBuffer(self.shape, tokens + candidates)
        larger.copy_tokens(past.buffer, past.tokens)
        return larger, candidates

    def _from_prefix(self, q: RankQuery) -> Scores:
        """Rank behind a prefix, in its own buffer: the new behaviours, then candidates in tiles."""
        assert q.past is not None
        buffer, room = self._buffer_for(q.past, len(q.new), CANDIDATE_TILE)
        tiles = torch.split(q.candidates_C, max(MIN_ROWS, min(CANDIDATE_TILE, room)))
        first = q.with_candidates(tiles[0])
        hidden_TD = run_layers(self.model, self._stream([first], True), buffer, q.past.tokens)
        parts = [hidden_TD[len(q.new) :]]
        nothing, tokens = q.new.part(0, 0), q.past.tokens + self.tokens_per_behaviour * len(q.new)
        for rows_C in tiles[1:]:
            padded_C = torch.cat([rows_C, rows_C[:1].expand(max(0, MIN_ROWS - rows_C.numel()))])
            later = RankQuery(q.past, nothing, padded_C, q.request_time)
            hidden_CD = run_layers(self.model, self._stream([later], True), buffer, tokens)
            parts.append(hidden_CD[: rows_C.numel()])
        return self._probabilities(torch.cat(parts))

    def _probabilities(self, hidden_CD: torch.Tensor) -> Scores:
        assert self._heads is not None
        rows = hidden_CD.shape[0]
        if 0 < rows < MIN_ROWS:  # few rows could round differently
            hidden_CD = torch.cat([hidden_CD, hidden_CD[:1].expand(MIN_ROWS - rows, -1)])
        scores_CA = self._heads(hidden_CD).sigmoid()[:rows].numpy()
        return {task: scores_CA[:, i].copy() for i, task in enumerate(self.tasks)}

    def _similarity(self, query_D: torch.Tensor, candidates_C: torch.Tensor) -> Scores:
        assert self._catalogue_ND is not None
        return {"score": (self._catalogue_ND[candidates_C] * query_D).sum(-1).numpy()}

    def _directions(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(x, dim=-1, eps=1e-6) if self._normalize else x

    def _best_ranked(
        self, query: RankQuery, k: int, excluded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and rows of the best items by the first task, every item a candidate."""
        allowed_N = torch.ones(len(self.items), dtype=torch.bool)
        allowed_N[excluded] = False
        rows_N = allowed_N.nonzero().squeeze(1)
        parts = [
            torch.from_numpy(self._rank_one(query.with_candidates(rows_C))[self.tasks[0]])
            for rows_C in torch.split(rows_N, CANDIDATE_TILE)
        ]
        scores_N = torch.cat(parts) if parts else torch.empty(0)
        order = torch.sort(scores_N, descending=True, stable=True).indices[:k]
        return scores_N[order], rows_N[order]


_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _concatenate(prefixes: Sequence[Prefix]) -> list[KV]:
    """Return several prefixes' keys and values end to end, as the model takes them."""
    offsets_B1 = offsets_from_lengths(torch.tensor([prefix.tokens for prefix in prefixes]))
    pasts = [prefix.past() for prefix in prefixes]
    times_S = torch.cat([past[0].timestamps_S for past in pasts])
    return [
        KV(
            torch.cat([kv.k_SHK for kv in layer]),
            torch.cat([kv.v_SHV for kv in layer]),
            times_S,
            offsets_B1,
        )
        for layer in zip(*pasts, strict=True)
    ]
