"""The searched rows of a retrieval bundle: exact scores of items, the best items of a query.

A small catalogue is held as directions; a large one is read where it lies and searched by its
8-bit codes first. Touch this when items are compared with queries in another way; the search itself
is in ops/topk.py.
"""

from collections.abc import Callable, Generator
from typing import Protocol

import torch

from slipstream.bundle import Bundle
from slipstream.ops.row_readers import NormalizedRows, RowReader, TensorRows, normalize_rows
from slipstream.ops.topk import (
    QUANTIZED_FROM,
    QuantizedRows,
    SearchLimits,
    quantize_rows,
    score_rows,
    search_steps,
)

Best = tuple[torch.Tensor, torch.Tensor]  # scores and rows, best first
BestSteps = Generator[None, None, Best]


class ApproximateIndex(Protocol):
    """An index that finds most of the best rows, see approximate_index.py."""

    name: str
    recall: float

    def candidates(self, query_D: torch.Tensor, k: int, limits: SearchLimits) -> torch.Tensor:
        """Return rows that may be among the k best."""
        ...

    def serves(self, limits: SearchLimits) -> bool:
        """Return whether it answers a search with these limits."""
        ...


class ItemSearch:
    """The directions of all items of a retrieval bundle."""

    def __init__(self, bundle: Bundle, rows: RowReader, *, normalize: bool) -> None:
        self._normalize = normalize
        self.rows: RowReader
        self.quantized: QuantizedRows | None = None
        self.index: ApproximateIndex | None = None  # None: every search is exact
        if rows.shape[0] < QUANTIZED_FROM:
            parts = [tile_CD for _, tile_CD in rows.tiles()]
            self.rows = TensorRows(self.directions(torch.cat(parts)))
        else:
            self.rows = NormalizedRows(rows) if normalize else rows
            self.quantized = bundle.search_codes() or quantize_rows(self.rows)

    def build_index(self, kind: str) -> None:
        """Build an approximate index, which takes a while; `exact` is none."""
        if kind != "exact":
            from slipstream.serving.engine.approximate_index import FaissIndex

            self.index = FaissIndex(kind, self.rows, self.quantized)

    def index_for(self, limits: SearchLimits) -> ApproximateIndex | None:
        """Return the index that answers a search with these limits; None: it is exact."""
        return self.index if self.index is not None and self.index.serves(limits) else None

    def directions(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors as the model compares them."""
        return normalize_rows(x) if self._normalize else x

    def scores(self, query_D: torch.Tensor, rows_C: torch.Tensor) -> torch.Tensor:
        """Return the exact scores of rows, the same as those of a search."""
        return score_rows(query_D, self.rows.take(rows_C))

    def best_steps(
        self,
        query_D: torch.Tensor,
        k: int,
        limits: SearchLimits,
        enough: Callable[[torch.Tensor], bool] | None = None,
    ) -> BestSteps:
        """Search the `k` best rows in steps; `enough` says whether rows suffice, else more follow.

        Scores are exact and without boosts, the order is by boosted scores.
        """
        index = self.index_for(limits)
        while True:
            if index is None:
                _, rows_K = yield from search_steps(
                    query_D, self.rows, k, quantized=self.quantized, limits=limits
                )
            else:
                rows_K = self._indexed(index, query_D, k, limits)
                yield
            if rows_K.numel() < k or enough is None or enough(rows_K):
                return self.scores(query_D, rows_K), rows_K
            k *= 4

    def _indexed(
        self, index: ApproximateIndex, query_D: torch.Tensor, k: int, limits: SearchLimits
    ) -> torch.Tensor:
        """Return the best rows among those that the index finds, in their exact order."""
        rows_C = index.candidates(query_D, k, limits).sort().values
        scores_C = limits.boost(self.scores(query_D, rows_C), rows_C)
        return rows_C[torch.sort(scores_C, descending=True, stable=True).indices[:k]]
