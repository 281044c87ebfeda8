"""Rows and claims: what the samples of a contest add up to.

Touch this when a column or a claim changes; benchmarks/protocols/arena.md defines them.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from benchmarks.arena.cells import FIGURES
from benchmarks.arena.contenders import CONTENDERS
from benchmarks.arena.contest import Entry, Sample
from benchmarks.arena.data_sets import DATA_SETS

Row = dict[str, Any]
Claims = dict[str, float]
QUALITY = "NDCG@10"
ORDER = {name: place for place, name in enumerate([*DATA_SETS, *(c.name for c in CONTENDERS)])}
FIRSTS = {  # what one can be first in; a compiled model of a peer counts as the peer
    "time": ("seconds_to_quality",),
    "memory": ("peak_bytes",),
    "p99": ("recommend_ms_p99", "compiled recommend_ms_p99"),
}
RECTOOLS = "rectools-hstu"
RECTOOLS_MALLOC = "rectools-hstu-malloc"  # the same with the default allocator: slower, smaller
DEFAULT = "slipstream-default"
ML_1M = "ml-1m"


def make_rows(entries: Sequence[Entry], recorded: Sequence[Row] = (), **made: Any) -> list[Row]:
    """Return a row for every contender on every data set, those that failed too.

    A row that is `recorded` stays unless its contender was run again. `made` says of the new rows
    when, where and of which commit they are.
    """
    found = {_place(row): row for row in recorded}
    found |= {_place(row): {**row, **made} for row in map(_row, entries)}
    rows = [found[place] for place in sorted(found)]
    for name in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == name]
        bar = quality_bar(mine)
        for row in mine:
            if row["samples"]:
                row["seconds_to_quality"] = (
                    None if bar is None else _mean(row["samples"], partial(seconds_to, quality=bar))
                )
    return rows


def _place(row: Row) -> tuple[tuple[int, str], ...]:
    """Return where a row stands: by its data set, then by its contender, others at the end."""
    names = row["data"], row["variant"]
    return tuple((ORDER.get(name, len(ORDER)), name) for name in names)


def quality_bar(rows: Sequence[Row]) -> float | None:
    """Return the best validation NDCG@10 of the first peer that has figures."""
    for row in rows:
        if row["samples"] and not row["own"]:
            return best_of(row["samples"][0])
    return None


def best_of(sample: Sample) -> float:
    """Return the best validation NDCG@10 of a run."""
    return max(float(line["validation"][QUALITY]) for line in sample["curve"])


def seconds_to(sample: Sample, quality: float) -> float | None:
    """Return the training seconds at which validation NDCG@10 first reached a quality."""
    for line in sample["curve"]:
        if line["validation"][QUALITY] >= quality:
            return float(line["training_seconds"])
    return None


def _row(entry: Entry) -> Row:
    row: Row = {
        "variant": entry.contender.name,
        "data": entry.data.name,
        "own": entry.contender.own,
        "request_time": entry.contender.request_time and entry.timed,
        "failure": entry.failure,
    }
    samples = list(entry.samples)
    if not samples:
        return {**row, "samples": []}
    for name in samples[0]["test"]:
        values = [sample["test"][name] for sample in samples]
        row[name] = statistics.fmean(values)
        row[f"sd {name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    row[f"validation {QUALITY}"] = _mean(samples, best_of)
    for name in FIGURES:
        row[name] = _mean(samples, itemgetter(name))
    compiled = samples[0].get("compiled") or {}
    for name in ("recommend_ms_p50", "recommend_ms_p99"):
        row[f"compiled {name}"] = compiled.get(name)
    return {**row, "samples": samples}


def _mean(samples: Sequence[Sample], figure: Callable[[Sample], float | None]) -> float | None:
    """Return the mean over the seeds; None where one of them lacks the figure."""
    values = [figure(sample) for sample in samples]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def make_claims(rows: Sequence[Row]) -> Claims:
    """Return the headline figures of all rows that have figures."""
    claims: Claims = {}
    for name in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == name and row["samples"]]
        claims |= _data_claims(name.replace("-", ""), mine)
        if name == ML_1M:
            claims |= _ml_1m_claims(mine) | _rectools_claims(mine)
    return claims


def _data_claims(name: str, rows: Sequence[Row]) -> Claims:
    claims: Claims = {}
    peers = [row[QUALITY] for row in rows if not row["own"]]
    for row in rows:
        if row["variant"] == DEFAULT:
            claims |= {f"ndcg_{name}": row[QUALITY], f"sd_ndcg_{name}": row[f"sd {QUALITY}"]}
    if peers:
        claims[f"ndcg_{name}_best_peer"] = max(peers)
    if peers and len(peers) < len(rows):
        for claim, columns in FIRSTS.items():
            known = [
                (row[column], row["own"])
                for row in rows
                for column in columns
                if row[column] is not None
            ]
            if known:
                claims[f"first_{claim}_{name}"] = float(min(known)[1])
    return claims


def _ml_1m_claims(rows: Sequence[Row]) -> Claims:
    """Return our best figures on MovieLens-1M, chosen on validation, with and without time."""
    claims: Claims = {}
    for ending, timed in (("", True), ("_no_time", False)):
        ours = [row for row in rows if row["own"] and row["request_time"] is timed]
        if ours:
            best = max(ours, key=lambda row: row[f"validation {QUALITY}"])
            for claim, column in (("hr10", "HR@10"), ("ndcg10", "NDCG@10")):
                claims[f"{claim}_ml1m{ending}"] = best[column]
                claims[f"sd_{claim}_ml1m{ending}"] = best[f"sd {column}"]
    return claims


def _rectools_claims(rows: Sequence[Row]) -> Claims:
    """Return our time to RecTools HSTU's quality and our memory, each divided by its own."""
    peer = next((row for row in rows if row["variant"] == RECTOOLS), None)
    if peer is None:
        return {}
    quality = best_of(peer["samples"][0])
    reached = []
    for row in rows:
        if row["own"] and row["request_time"]:
            seconds = _mean(row["samples"], lambda sample: seconds_to(sample, quality))
            if seconds is not None:
                reached.append((seconds, row))
    if not reached:
        return {}
    seconds, fastest = min(reached, key=lambda each: each[0])
    memory = min(row["peak_bytes"] for row in rows if row["variant"] in (RECTOOLS, RECTOOLS_MALLOC))
    return {
        "time_vs_rectools_ml1m": seconds / peer["seconds_to_best"],
        "memory_vs_rectools_ml1m": fastest["peak_bytes"] / memory,
    }
