"""The facts and plots of `slipstream data inspect`. Touch this to show more about a store."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from slipstream.data.store import SequenceStore
from slipstream.files import atomic_file

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99)


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


def statistics(store: SequenceStore) -> dict[str, str]:
    """Return readable facts by name."""
    lengths_U = store.lengths_U
    counts_V = np.sort(np.bincount(store.items_N, minlength=store.num_items))[::-1]
    top = max(1, store.num_items // 100)
    percentiles = np.percentile(lengths_U, PERCENTILES)
    facts = {
        "users": f"{store.num_users:,}",
        "items": f"{store.num_items:,}",
        "behaviours": f"{store.num_behaviours:,}",
        "density": f"{store.num_behaviours / (store.num_users * store.num_items):.4%}",
        "length": f"mean {lengths_U.mean():,.1f}, min {lengths_U.min():,}, max {lengths_U.max():,}",
        "length percentiles": ", ".join(
            f"p{p} {value:,.0f}" for p, value in zip(PERCENTILES, percentiles, strict=True)
        ),
        "too short to split": f"{int((lengths_U < 3).sum()):,} users (fewer than 3 behaviours; "
        "they only train)",
        "ties": f"{tie_share(store):.1%} of behaviours share their time with another of the same "
        "user",
        "time": f"{_day(store.timestamps_N.min())} to {_day(store.timestamps_N.max())}",
        "popularity": f"the top 1 % of items ({top:,}) have "
        f"{counts_V[:top].sum() / store.num_behaviours:.1%} of the behaviours",
    }
    for name in sorted(store.actions):
        values_N = store.actions[name]
        facts[f"action {name}"] = (
            f"mean {values_N.mean(dtype=np.float64):.4f}, min {values_N.min():g}, max "
            f"{values_N.max():g}"
        )
    for noun, features in (("item", store.item_features), ("user", store.user_features)):
        for name, feature in features.items():
            known = int((feature.codes > 0).sum())
            facts[f"{noun} feature {name}"] = (
                f"{feature.cardinality - 1:,} values, known for "
                f"{known / max(1, feature.codes.size):.1%}"
            )
    filters = ", ".join(
        f"{key} {value}" for key, value in store.meta.get("filters", {}).items() if value > 1
    )
    return facts | {
        "order": str(store.meta.get("order")),
        "filters": filters or "none",
        "digest": store.digest,
    }


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
