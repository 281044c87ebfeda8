"""Searches of a catalogue: the time of each beyond its prefill, and whether it is brute force.

    python -m benchmarks.recommend.searches BUNDLE USERS     # prints the largest resident memory

Touch this when the protocol asks for other queries.
"""

import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from slipstream.history.user_history import History
from slipstream.ops.row_readers import RowReader
from slipstream.ops.topk import SearchLimits, score_rows
from slipstream.serving.engine.engine import Engine
from slipstream.serving.engine.passes import run_steps
from slipstream.serving.engine.rank_query import RankQuery

BEST, BEHAVIOURS, WARM_UP = 100, 64, 10
_MARGIN = 20  # rows beyond the best that brute force scores exactly


@dataclass
class Searched:
    """Seconds of each search, with what was found for which query."""

    seconds: list[float] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    found: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def prepared_queries(engine: Engine, users: int) -> list[RankQuery]:
    """Return the queries of users behind their prefixes."""
    generator, queries = np.random.default_rng(2), []
    for _ in range(users):
        items = generator.integers(0, len(engine.items), BEHAVIOURS)
        prefix = engine.prefill(History(items, np.arange(BEHAVIOURS)))
        queries.append(engine.make_query(prefix, None, []))
    return queries


def search_users(engine: Engine, users: int) -> Searched:
    """Search for users: held behaviours, search, exact scores, original ids; the prefill not."""
    result = Searched()
    for query in prepared_queries(engine, users):
        begin = time.perf_counter()
        found = run_steps(engine.retrieve_steps(query, BEST, SearchLimits()))
        engine.items.originals(found.rows_K)
        result.seconds.append(time.perf_counter() - begin)
        with torch.inference_mode():
            result.queries.append(engine.passes.query_vector_D(query))
        result.found.append((torch.from_numpy(found.scores["score"]), found.rows_K))
    return result


def search_near_rows(engine: Engine, queries: int) -> Searched:
    """Search for queries near rows, whose best scores lie close together."""
    assert engine.search is not None
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(0, len(engine.items), (queries,), generator=generator)
    result = Searched()
    for row_D in engine.search.rows.take(chosen):
        noise_D = torch.randn(row_D.shape, generator=generator)
        query_D = row_D + 0.5 * noise_D
        begin = time.perf_counter()
        found = run_steps(engine.search.best_steps(query_D, BEST, SearchLimits()))
        result.seconds.append(time.perf_counter() - begin)
        result.queries.append(query_D)
        result.found.append(found)
    return result


def count_different(searched: Searched, rows: RowReader) -> int:
    """Count the queries whose rows or scores are not those of brute force."""
    queries_QD = torch.stack(searched.queries).double()
    best_QK = torch.full((len(queries_QD), 0), -torch.inf, dtype=torch.float64)
    rows_QK = torch.empty(len(queries_QD), 0, dtype=torch.int64)
    for begin, rows_CD in rows.tiles():
        scores_QC = queries_QD @ rows_CD.double().T
        numbers_C = torch.arange(begin, begin + len(rows_CD)).expand(len(queries_QD), -1)
        both, numbers = torch.cat([best_QK, scores_QC], 1), torch.cat([rows_QK, numbers_C], 1)
        best_QK, places = both.topk(min(BEST + _MARGIN, both.shape[1]))
        rows_QK = numbers.gather(1, places)
    different = 0
    for query_D, rows_K, (scores, found) in zip(
        searched.queries, rows_QK.sort().values, searched.found, strict=True
    ):
        exact_K = score_rows(query_D, rows.take(rows_K))
        order = torch.sort(exact_K, descending=True, stable=True).indices[:BEST]
        same = torch.equal(rows_K[order], found) and torch.equal(exact_K[order], scores)
        different += not same
    return different


def main(bundle: str, users: int) -> None:
    """Search for users in a process of its own and print its largest resident memory."""
    torch.set_num_threads(1)
    search_users(Engine(Path(bundle)), users)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    print(1024 * int(peak.group(1)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
