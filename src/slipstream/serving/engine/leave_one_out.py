"""Why an item has its score: the change of the score when each behaviour is left out, measured.

Leaving out behaviour j changes nothing before j, so the keys and values before it are taken from
one prefill of the whole history, and only the behaviours after j are computed again: half of what
scoring every shortened history from its start would cost. The tokens of all shortened histories
are those of the whole one, so they are made once and taken by their places. The scores are those
of `Engine.rank` on the shortened histories at the same moment. Touch this when explanations are
computed in another way.
"""

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slipstream.models.jagged import offsets_from_lengths
from slipstream.models.stream import Stream
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import CachedTokens, Prefix
from slipstream.serving.engine.rank_query import NO_ROWS, RankQuery
from slipstream.serving.request_errors import BadRequest

STEP_TOKENS = 2_048  # tokens of one step; between steps the compute thread may do other work


@dataclass(frozen=True)
class Explanation:
    """The score of one item for one task, and its score without each explained behaviour."""

    task: str
    score: float
    first: int  # place of the first explained behaviour in the history
    without: list[float | None]  # None where nothing would be left to score on


def explain_steps(
    engine: Engine, query: RankQuery, task: str, behaviours: int
) -> Generator[int, None, Explanation]:
    """Explain the one candidate of a query without past by its newest `behaviours`.

    Every step yields the tokens it computed; the last returns the explanation.
    """
    history = query.new
    if query.past is not None or query.candidates_C.numel() != 1:
        raise ValueError("an explanation takes the whole history and one item")
    if not len(history):
        raise BadRequest("an empty history explains nothing; send at least one behaviour")
    buffer = engine.shape.buffer(engine.cached_tokens(len(history)))
    yield from engine.prefill_steps(history, buffer)
    prefix = engine.prefix_of(history, buffer, b"")
    [found] = engine.rank_batch(
        [replace(query, past=prefix if prefix.tokens else None, new=prefix.held)]
    )
    yield len(prefix.held)
    first = max(0, len(history) - behaviours)
    without: dict[int, float | None] = {}
    shortened = _ShortenedHistories(engine, query, prefix)
    for places in shortened.batches(range(first, len(history))):
        without |= zip(places, shortened.scores(places, task), strict=True)
        yield shortened.tokens(places)
    values = [without[place] for place in range(first, len(history))]
    return Explanation(task, float(found[task][0]), first, values)


class _ShortenedHistories:
    """A query's history without one of its behaviours, for every place, behind one prefix."""

    def __init__(self, engine: Engine, query: RankQuery, prefix: Prefix) -> None:
        self.engine, self.query, self.prefix = engine, query, prefix
        shown = query if engine.search is None else query.with_candidates(NO_ROWS)
        with torch.inference_mode():
            self._whole: Stream = engine.passes.stream([shown], has_past=True)

    def kept(self, place: int) -> int:
        """Return how many behaviours before a place keep their keys and values.

        A token that looks back from the next one's time changes with the next one, so it is
        computed again.
        """
        kept = place - self.engine.model.held_back_behaviours
        return max(0, min(kept, self.prefix.cached_behaviours))

    def tokens(self, places: Sequence[int]) -> int:
        """Return the tokens that are computed without each of these places."""
        per, count = self.engine.tokens_per_behaviour, len(self.query.new)
        return sum(per * (count - 1 - self.kept(place)) + 1 for place in places)

    def batches(self, places: Sequence[int]) -> Iterator[list[int]]:
        """Yield places in batches of about `STEP_TOKENS`; all have a past, or none has."""
        for _, group in itertools.groupby(places, lambda place: self.kept(place) > 0):
            batch: list[int] = []
            tokens = 0
            for place in group:
                more = self.tokens([place])
                if batch and tokens + more > STEP_TOKENS:
                    yield batch
                    batch, tokens = [], 0
                batch.append(place)
                tokens += more
            yield batch

    @torch.inference_mode()
    def scores(self, places: Sequence[int], task: str) -> list[float | None]:
        """Return the item's score without each of these places.

        None where nothing would be left of a history that must not be empty.
        """
        if not self.kept(places[0]):
            return self._scores_from_start(places, task)
        pasts = [
            CachedTokens(self.prefix.buffer, self.engine.tokens_of(self.kept(place)))
            for place in places
        ]
        passes = self.engine.passes
        found = passes.score_one_item(self._stream(places), pasts, self.query.candidates_C)
        scores: list[float | None] = found[task].tolist()
        return scores

    def _scores_from_start(self, places: Sequence[int], task: str) -> list[float | None]:
        history, empty = self.query.new, len(self.query.new) == 1
        if empty and self.engine.task == "retrieval":
            return [None for _ in places]
        queries = [replace(self.query, new=_without(history, place)) for place in places]
        return [float(scores[task][0]) for scores in self.engine.rank_batch(queries)]

    def _stream(self, places: Sequence[int]) -> Stream:
        """Return the tokens behind the past of each place, without those of the place itself."""
        per, whole = self.engine.tokens_per_behaviour, self._whole.layout
        end, parts, lengths = whole.timestamps_T.numel(), [], []
        for place in places:
            before = np.arange(per * self.kept(place), per * place)
            parts += [before, np.arange(per * (place + 1), end)]
            lengths.append(before.size + parts[-1].size)
        taken_T = torch.from_numpy(np.concatenate(parts))
        offsets_B1 = offsets_from_lengths(torch.tensor(lengths))
        looks_T = whole.query_timestamps_T[taken_T]
        if self.engine.config.time_bias == "next":
            # The token before a gap looks back from the moment that the gap's last one did.
            places_B = torch.tensor(places)
            kept_B = torch.tensor([self.kept(place) for place in places])
            last_B = offsets_B1[:-1] + per * (places_B - kept_B) - 1
            looks_T[last_B] = whole.query_timestamps_T[per * (places_B + 1) - 1]
        counts_B = whole.num_candidates_B
        layout = replace(
            whole,
            offsets_B1=offsets_B1,
            timestamps_T=whole.timestamps_T[taken_T],
            query_timestamps_T=looks_T,
            token_ids_T=whole.token_ids_T[taken_T],
            num_candidates_B=None if counts_B is None else counts_B.repeat(len(places)),
        )
        return Stream(self._whole.x_SD[taken_T], layout, None)


def _without(history: EncodedHistory, place: int) -> EncodedHistory:
    """Return a history without the behaviour at a place."""
    before, after = history.part(0, place), history.part(place + 1)
    return before.then(after) if len(before) else after
