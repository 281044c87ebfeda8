"""Numbers as categories: bins of about as many training values each, or even on a log scale.

Code 0 is "unknown", code 1 lies below the first edge, and so on; a value on an edge lies above it.
Training makes the edges, a bundle carries them, and serving bins a new value alike. Touch this when
a model reads numbers in another way.
"""

from collections.abc import Sequence

import numpy as np


def quantile_edges(values_V: np.ndarray, bins: int) -> list[float]:
    """The ascending edges between at most `bins` bins; each edge is one of the values.

    Values that are not finite do not count. Where many values are equal, fewer bins remain.
    """
    known_V = values_V[np.isfinite(values_V)].astype(np.float32)
    if not known_V.size:
        return []
    shares = np.arange(1, bins) / bins
    edges = np.unique(np.quantile(known_V, shares, method="higher"))
    return [float(edge) for edge in edges[edges > known_V.min()]]


def log_edges(values_V: np.ndarray, bins: int) -> list[float]:
    """The ascending edges between `bins` bins that are equally wide on a standardised log scale.

    The scale is sign(x) log(1 + |x|); the edges lie evenly within two deviations of its mean.
    Values that are not finite do not count, and equal values give no edge.
    """
    known_V = values_V[np.isfinite(values_V)].astype(np.float64)
    scaled_V = np.sign(known_V) * np.log1p(np.abs(known_V))
    deviation = float(scaled_V.std()) if scaled_V.size else 0.0
    if deviation == 0:
        return []
    inner = np.linspace(-2, 2, bins - 1) if bins > 2 else np.zeros(1)
    scaled = float(scaled_V.mean()) + deviation * inner
    edges = np.sign(scaled) * np.expm1(np.abs(scaled))
    return [float(edge) for edge in np.unique(edges.astype(np.float32))]


def bin_numbers(values_V: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """The int64 code of every value; one that is not finite is unknown."""
    values_V = np.asarray(values_V, dtype=np.float32)
    codes_V = 1 + np.searchsorted(np.asarray(edges, dtype=np.float32), values_V, side="right")
    return np.where(np.isfinite(values_V), codes_V, 0).astype(np.int64)


def bin_count(edges: Sequence[float]) -> int:
    """How many codes there are, 0 included."""
    return len(edges) + 2
