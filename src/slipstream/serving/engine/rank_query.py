"""A ranking request as the model reads it. Touch this when a request brings something new."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from slipstream.serving.engine.cold_items import ColdItems
from slipstream.serving.engine.encoding import EncodedHistory
from slipstream.serving.engine.prefix import CachedTokens, Prefix

NO_ROWS = torch.empty(0, dtype=torch.int64)  # the candidates of a query that scores none


@dataclass(frozen=True)
class RankQuery:
    """A checked ranking request: cached past, new behaviours, rows to score, time of request.

    `kept` is a buffer that receives the keys and values of the first tokens, of a query without a
    past: a ranking that computes a whole history leaves its prefix behind.
    """

    past: Prefix | None
    new: EncodedHistory
    candidates_C: torch.Tensor
    request_time: int
    context: Mapping[str, int] = field(default_factory=dict)  # codes of the request; absent: 0
    cold: ColdItems | None = None  # whose rows follow the catalogue's
    kept: CachedTokens | None = None

    def with_candidates(self, rows_C: torch.Tensor) -> "RankQuery":
        """Return the same query for other rows of the catalogue."""
        return replace(self, candidates_C=rows_C)


def context_of_tokens(
    queries: Sequence[RankQuery], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the codes of context of new behaviours and candidates, in the order of the tokens.

    A candidate has the context of its request.
    """
    return {
        name: torch.cat(
            [
                part
                for query in queries
                for part in (
                    query.new.context[name],
                    torch.full_like(query.candidates_C, query.context.get(name, 0)),
                )
            ]
        )
        for name in names
    }
