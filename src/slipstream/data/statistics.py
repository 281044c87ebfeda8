"""The facts and plots of `slipstream data inspect`. Touch this to show more about a store."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from slipstream.data.store import Feature, SequenceStore
from slipstream.files import atomic_file

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99)
BLOCK_ROWS = 1 << 20


def tie_share(store: SequenceStore) -> float:
    """Return the share of behaviours whose user has another one at the same time."""
    if store.num_behaviours == 0:
        return 0.0
    same_T = np.diff(store.timestamps_N) == 0
    borders = store.offsets_U1[1:-1]
    same_T[borders[(borders > 0) & (borders < store.num_behaviours)] - 1] = False
    tied_N = np.zeros(store.num_behaviours, dtype=bool)
    tied_N[1:] |= same_T
    tied_N[:-1] |= same_T
    return float(tied_N.mean())


def repeat_shares(store: SequenceStore) -> tuple[float, float]:
    """Return the share of behaviours whose item the user had before, and that of last ones."""
    repeats = last_repeats = 0
    offsets_U1, users = store.offsets_U1, store.num_users
    first = 0
    while first < users:  # blocks of users, so that memory is bounded
        last = int(np.searchsorted(offsets_U1, offsets_U1[first] + BLOCK_ROWS, side="right")) - 1
        last = min(users, max(first + 1, last))
        begin, end = int(offsets_U1[first]), int(offsets_U1[last])
        users_T = np.repeat(np.arange(last - first), np.diff(offsets_U1[first : last + 1]))
        pairs_T = users_T * store.num_items + store.items_N[begin:end]
        order_T = np.argsort(pairs_T, kind="stable")
        repeat_T = np.zeros(end - begin, dtype=bool)
        repeat_T[order_T[1:]] = np.diff(pairs_T[order_T]) == 0
        repeats += int(repeat_T.sum())
        last_repeats += int(repeat_T[offsets_U1[first + 1 : last + 1] - begin - 1].sum())
        first = last
    return repeats / max(1, store.num_behaviours), last_repeats / max(1, users)


def figures(store: SequenceStore) -> dict[str, Any]:
    """Return facts by name, for machines."""
    lengths_U = store.lengths_U
    counts_V = np.sort(np.bincount(store.items_N, minlength=store.num_items))[::-1]
    top = max(1, store.num_items // 100)
    repeats, last_repeats = repeat_shares(store)
    return summary(store) | {
        "density": store.num_behaviours / (store.num_users * store.num_items),
        "length": {
            "mean": float(lengths_U.mean()),
            "min": int(lengths_U.min()),
            "max": int(lengths_U.max()),
        }
        | {f"p{p}": float(np.percentile(lengths_U, p)) for p in PERCENTILES},
        "unsplittable_users": int((lengths_U < 3).sum()),
        "ties": tie_share(store) if store.timed else None,
        "repeats": repeats,
        "repeats_at_the_end": last_repeats,
        "time": [int(store.timestamps_N.min()), int(store.timestamps_N.max())]
        if store.timed
        else None,
        "top_items": top,
        "top_items_share": float(counts_V[:top].sum() / store.num_behaviours),
        "action_values": {
            name: {
                "mean": float(values_N.mean(dtype=np.float64)),
                "min": float(values_N.min()),
                "max": float(values_N.max()),
            }
            for name, values_N in sorted(store.actions.items())
        },
        "context_known": {name: float(each.known_V.mean()) for name, each in store.context.items()},
    }


def summary(store: SequenceStore) -> dict[str, Any]:
    """Return what a store holds and where it came from, for machines; reads no behaviour."""
    return {
        "store": str(store.directory),
        "users": store.num_users,
        "items": store.num_items,
        "behaviours": store.num_behaviours,
        "timed": store.timed,
        "actions": sorted(store.actions),
        "context": {name: each.cardinality - 1 for name, each in store.context.items()},
        "item_features": {name: _feature(each) for name, each in store.item_features.items()},
        "user_features": {name: _feature(each) for name, each in store.user_features.items()},
        "titles": store.items.titled,
        "order": store.meta.get("order"),
        "filters": store.meta.get("filters", {}),
        "rows_read": store.meta.get("rows_read"),
        "source": store.meta.get("source", {}),
        "digest": store.digest,
    }


def _feature(feature: Feature) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": feature.kind,
        "known": float(feature.known_V.mean()) if feature.known_V.size else 0.0,
    }
    if feature.values is None:
        bars = pa.compute.match_substring(feature.labels, "|").sum().as_py() or 0
        return found | {"values": feature.cardinality - 1, "bars": bars}  # labels with a bar
    known = feature.values[feature.known_V]
    if not known.size:
        return found
    return found | {"min": float(known.min()), "max": float(known.max())}


def statistics(store: SequenceStore) -> dict[str, str]:
    """Return readable facts by name."""
    found = figures(store)
    length = found["length"]
    facts = {
        "users": f"{found['users']:,}",
        "items": f"{found['items']:,}",
        "behaviours": f"{found['behaviours']:,}",
        "density": f"{found['density']:.4%}",
        "length": f"mean {length['mean']:,.1f}, min {length['min']:,}, max {length['max']:,}",
        "length percentiles": ", ".join(f"p{p} {length[f'p{p}']:,.0f}" for p in PERCENTILES),
        "too short to split": f"{found['unsplittable_users']:,} users (fewer than 3 behaviours; "
        "they only train)",
        "repeats": f"{found['repeats']:.1%} of behaviours are of an item the user had before, "
        f"{found['repeats_at_the_end']:.1%} of the last ones",
        "time": "none: the order of the log's rows is the order",
        "popularity": f"the top 1 % of items ({found['top_items']:,}) have "
        f"{found['top_items_share']:.1%} of the behaviours",
    }
    if store.timed:
        first, last = found["time"]
        facts["time"] = f"{_day(first)} to {_day(last)}"
        facts["ties"] = (
            f"{found['ties']:.1%} of behaviours share their time with another of the same user"
        )
    for name, values in found["action_values"].items():
        facts[f"action {name}"] = (
            f"mean {values['mean']:.4f}, min {values['min']:g}, max {values['max']:g}"
        )
    for name, known in found["context_known"].items():
        facts[f"context {name}"] = f"{found['context'][name]:,} categories, known for {known:.1%}"
    for noun in ("item", "user"):
        for name, feature in found[f"{noun}_features"].items():
            facts[f"{noun} feature {name}"] = feature_words(feature)
    filters = ", ".join(f"{key} {value}" for key, value in found["filters"].items() if value > 1)
    return facts | {
        "order": str(found["order"]),
        "filters": filters or "none",
        "digest": store.digest,
    }


def feature_words(feature: dict[str, Any]) -> str:
    """Say what a feature of `summary` is."""
    known = f"known for {feature['known']:.1%}"
    if feature["kind"] == "number":
        span = f" from {feature['min']:g} to {feature['max']:g}" if "min" in feature else ""
        return f"a number{span}, {known}"
    several = ", several a row" if feature["kind"] == "categories" else ""
    return f"{feature['values']:,} categories{several}, {known}"


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%d %H:%M")


def draw_plots(store: SequenceStore, target: Path) -> Path:
    """Draw the length histogram and the popularity curve as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths_U = store.lengths_U
    counts_V = np.sort(np.bincount(store.items_N, minlength=store.num_items))[::-1]
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    edges = np.unique(np.geomspace(1, max(2, lengths_U.max() + 1), 60).astype(np.int64))
    left.hist(lengths_U, bins=edges, color="#2a6f97")
    left.axvline(
        np.median(lengths_U),
        color="#c1121f",
        linewidth=1,
        label=f"median {np.median(lengths_U):,.0f}",
    )
    left.set(
        xscale="log", xlabel="behaviours of a user", ylabel="users", title="Length of the logs"
    )
    left.legend(frameon=False)
    right.plot(np.arange(1, counts_V.size + 1), counts_V, color="#2a6f97")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="rank of the item",
        ylabel="behaviours",
        title="Popularity",
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    with atomic_file(target) as path:
        figure.savefig(path, format="png", dpi=120)
    return target
