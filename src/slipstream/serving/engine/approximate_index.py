"""An approximate index of a catalogue (extra `faiss`): HNSW or IVF over 8-bit codes.

It finds most of the best rows, faster than the exact search of a very large catalogue; its recall
is measured when it is built and stated with every answer. The rows it finds are scored exactly.
Requests with filters or boosts are searched exactly, without it. Touch this for another index.
"""

from typing import Any

import numpy as np
import torch

from slipstream.ops.row_readers import RowReader
from slipstream.ops.topk import QuantizedRows, SearchLimits, top_k

RECALL_AT, RECALL_QUERIES = 100, 100
_LINKS, _BREADTH = 32, 80  # of HNSW: neighbours of a row, candidates while it is built
_TRAINING_ROWS = 64  # a list, to find the centres of IVF


class FaissIndex:
    """Rows of a catalogue in an index of Faiss, by inner product."""

    def __init__(self, kind: str, rows: RowReader, quantized: QuantizedRows | None = None) -> None:
        """Build the index `hnsw` or `ivf`; it is measured against a search by the codes."""
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        self.name, self._count = kind, rows.shape[0]
        self._index = self._make(faiss, kind, rows)
        for _, rows_CD in rows.tiles():
            self._index.add(_array(rows_CD))
        self.recall = self._measure(rows, quantized)

    def candidates(self, query_D: torch.Tensor, k: int, limits: SearchLimits) -> torch.Tensor:
        """Return rows that are probably the k best, excluded ones left out."""
        wanted = min(self._count, 2 * k + limits.excluded.numel())
        if self.name == "hnsw":
            self._index.hnsw.efSearch = max(256, 2 * wanted)
        _, rows = self._index.search(_array(query_D[None]), wanted)
        found = torch.from_numpy(np.unique(rows[rows >= 0]))
        return found[~torch.isin(found, limits.excluded)]

    def serves(self, limits: SearchLimits) -> bool:
        """Return whether it answers a request: one without filters and boosts."""
        return limits.allowed_N is None and limits.boosts_N is None

    def _make(self, faiss: Any, kind: str, rows: RowReader) -> Any:
        """Return an empty index whose codes fit these rows."""
        count, width = rows.shape
        code, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        lists = max(1, min(65_536, int(4 * count**0.5)))
        chosen = np.random.default_rng(0).choice(
            count, min(count, _TRAINING_ROWS * lists), replace=False
        )
        sample = _array(rows.take(torch.from_numpy(np.sort(chosen))))
        if kind == "hnsw":
            index = faiss.IndexHNSWSQ(width, code, _LINKS, metric)
            index.hnsw.efConstruction = _BREADTH
        else:
            self._centres = faiss.IndexFlatIP(width)
            index = faiss.IndexIVFScalarQuantizer(self._centres, width, lists, code, metric)
            index.nprobe = max(1, lists // 4)
        index.train(sample)
        return index

    def _measure(self, rows: RowReader, quantized: QuantizedRows | None) -> float:
        """Return how many of the best rows it finds: queries are rows with noise, one by one."""
        generator = torch.Generator().manual_seed(0)
        k = min(RECALL_AT, self._count)
        chosen_Q = torch.randint(0, self._count, (RECALL_QUERIES,), generator=generator)
        found = 0
        for row_D in rows.take(chosen_Q):
            noise_D = torch.randn(row_D.shape, generator=generator)
            query_D = row_D + 0.5 * row_D.norm() * noise_D / noise_D.norm()
            _, best_K = top_k(query_D, rows, k, quantized=quantized)
            mine_C = self.candidates(query_D, k, SearchLimits())
            found += int(torch.isin(best_K, mine_C).sum())
        return found / (RECALL_QUERIES * k)


def _array(rows_CD: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(rows_CD.float().numpy())
