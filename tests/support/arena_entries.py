"""Entries of the arena with figures by hand."""

from benchmarks.arena.contenders import CONTENDERS
from benchmarks.arena.contest import Entry
from benchmarks.arena.data_sets import DATA_SETS


def entry_of(name: str, curve: list[tuple[float, float]], ndcg: float, gigabytes: float) -> Entry:
    """An entry on MovieLens-1M: a curve of seconds and validation NDCG@10, and test figures."""
    contender = next(each for each in CONTENDERS if each.name == name)
    test = {f"{figure}@{k}": ndcg for figure in ("HR", "NDCG") for k in (10, 50, 200)}
    lines = [
        {"epoch": n, "training_seconds": seconds, "validation": {"NDCG@10": quality}}
        for n, (seconds, quality) in enumerate(curve, 1)
    ]
    figures = {
        "epochs": len(curve),
        "best_epoch": len(curve),
        "seconds_to_best": curve[-1][0],
        "seconds_per_epoch": curve[0][0],
        "peak_bytes": gigabytes * 1e9,
        "training_peak_bytes": gigabytes * 1e9,
        "recommend_ms_p50": 1.0,
        "recommend_ms_p99": gigabytes,
    }
    return Entry(DATA_SETS["ml-1m"], contender, [{"test": test, "curve": lines, **figures}])
