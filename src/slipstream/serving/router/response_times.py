"""How long an instance took for its latest requests. Touch this to tell more of them."""

from collections import deque

HORIZON_SECONDS = 60.0
MOST = 1_024  # requests remembered


class ResponseTimes:
    """The times of the requests of the last minute, at most `MOST` of them."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, now: float, seconds: float) -> None:
        """Note one answered request."""
        self._times.append((now, seconds))

    def recent(self, now: float) -> list[float]:
        """Return the seconds of each request of the last minute, ascending."""
        return sorted(seconds for at, seconds in self._times if now - at <= HORIZON_SECONDS)


def percentile(ordered: list[float], share: float) -> float | None:
    """Return the smallest value that `share` of ascending values do not exceed; None of none."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
