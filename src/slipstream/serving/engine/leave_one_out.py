"""Why an item has its score: the change of the score when each behaviour is left out, measured.

Leaving out behaviour j changes nothing before j, so the keys and values before it are taken from
one prefill of the whole history, and only the behaviours after j are computed again: half of what
scoring every shortened history from its start would cost. The scores are those of `Engine.rank` on
the shortened histories at the same moment. Touch this when explanations are computed in another
way.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.prefix import Prefix
from slipstream.serving.engine.rank_query import RankQuery
from slipstream.serving.request_errors import BadRequest

STEP_TOKENS = 1_024  # tokens of one step; between steps the compute thread may do other work


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
    variants = [
        (place, _leave_out(engine, query, prefix, place)) for place in range(first, len(history))
    ]
    for places, queries in _batches(variants):
        answers = engine.rank_batch(queries)
        for place, scores in zip(places, answers, strict=False):
            without[place] = float(scores[task][0])
        yield sum(len(each.new) for each in queries)
    values = [without.get(place) for place in range(first, len(history))]
    return Explanation(task, float(found[task][0]), first, values)


def _leave_out(engine: Engine, query: RankQuery, prefix: Prefix, place: int) -> RankQuery | None:
    """Return the query without one behaviour, behind what the prefix holds of those before it.

    A token that looks back from the next one's time changes with the next one, so it is computed
    again. None where nothing would be left of a history that must not be empty.
    """
    history = query.new
    kept = max(0, min(place - engine.model.held_back_behaviours, prefix.cached_behaviours))
    new = _joined(history, kept, place)
    if not kept and not len(new) and engine.task == "retrieval":
        return None
    past = None
    if kept:
        nothing, tokens = history.part(0, 0), engine.tokens_of(kept)
        past = Prefix(prefix.version, kept, b"", tokens, nothing, prefix.buffer)
    return replace(query, past=past, new=new)


def _joined(history: EncodedHistory, kept: int, place: int) -> EncodedHistory:
    """Return the behaviours from `kept` on without the one at `place`."""
    before, after = history.part(kept, place), history.part(place + 1)
    return before.then(after) if len(before) else after


def _batches(
    variants: Sequence[tuple[int, RankQuery | None]],
) -> Iterator[tuple[list[int], list[RankQuery]]]:
    """Yield the queries in batches of about `STEP_TOKENS` tokens; all have a past, or none has."""
    for with_past in (False, True):
        places: list[int] = []
        queries: list[RankQuery] = []
        tokens = 0
        for place, query in variants:
            if query is None or (query.past is not None) != with_past:
                continue
            if queries and tokens + len(query.new) > STEP_TOKENS:
                yield places, queries
                places, queries, tokens = [], [], 0
            places.append(place)
            queries.append(query)
            tokens += len(query.new) + 1
        if queries:
            yield places, queries
