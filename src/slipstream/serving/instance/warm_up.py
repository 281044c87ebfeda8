"""The first request of a newly opened version, before anybody's: it warms and it checks.

Touch this when a version must show something else before it is served.
"""

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.history.user_history import History
from slipstream.serving.engine.engine import Engine

BEHAVIOURS, CANDIDATES = 64, 32
TOLERANCE = 1e-4  # of a score behind a prefix against the full pass


def warm_up(engine: Engine) -> None:
    """Rank items of the catalogue in both ways; refuse a version whose scores are no numbers.

    Scores behind a prefix are those of the full pass, or the version is refused, too.
    """
    rows = np.arange(min(max(BEHAVIOURS, CANDIDATES), len(engine.items)))
    items = engine.items.originals(rows)
    length = min(BEHAVIOURS, engine.max_len, len(items))
    zeros = np.zeros(length, dtype=np.float32)
    history = History(
        np.array(items[:length], dtype=object if isinstance(items[0], str) else np.int64),
        np.arange(length, dtype=np.int64),
        {column: zeros for column, _ in engine.encoder.tasks.values()},
    )
    candidates = items[:CANDIDATES]
    behind = engine.rank(engine.prefill(history), None, candidates)
    whole = engine.rank(None, history, candidates)
    for task, scores in whole.items():
        if not np.isfinite(scores).all():
            raise SlipstreamError(
                f"version {engine.version[:16]} gives scores of '{task}' that are no numbers; it "
                "is not served: train and export it again"
            )
        if np.abs(scores - behind[task]).max() > TOLERANCE:
            raise SlipstreamError(
                f"version {engine.version[:16]} scores '{task}' differently behind a cached "
                "prefix; it is not served"
            )
