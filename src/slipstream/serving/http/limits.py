"""The limits of a server: API keys, body sizes, rates and deadlines. Every limit is finite.

Touch this when a server accepts or refuses callers in another way.
"""

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import SlipstreamError

MAX_CALLERS = 10_000  # rate buckets kept; the least recently used one leaves first
MIN_KEY_CHARACTERS = 16


@dataclass(frozen=True)
class Limits:
    """The limits of one server. Rates are per API key where keys are set, else per address."""

    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 10.0
    deadline_ms: float = 1_000.0
    max_deadline_ms: float = 60_000.0
    requests_per_second: float | None = None
    burst: int = 100


class Keys:
    """The API keys a server accepts; without any, it accepts every request (on loopback)."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        if any(len(key) < MIN_KEY_CHARACTERS for key in keys):
            raise SlipstreamError(
                f"an API key has at least {MIN_KEY_CHARACTERS} characters; make one with `openssl "
                "rand -hex 16`"
            )
        self._keys = tuple(key.encode() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def accept(self, offered: bytes | None) -> int | None:
        """The number of the key offered, or None; every key is compared, in constant time."""
        found = None
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(key, offered or b""):
                found = number
        return found


@dataclass
class TokenBucket:
    """Lets up to `burst` requests pass at once, and `rate` per second in the long run."""

    rate: float
    burst: float
    level: float
    filled_at: float

    def take(self, now: float) -> float:
        """Take one token: 0 when the request may pass, else the seconds to wait."""
        self.level = min(self.burst, self.level + (now - self.filled_at) * self.rate)
        self.filled_at = now
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return (1 - self.level) / self.rate


class RateLimit:
    """Limits the rate of each caller with a token bucket."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._buckets: OrderedDict[object, TokenBucket] = OrderedDict()

    def take(self, caller: object) -> float:
        """Count a request of a caller: 0 when it may pass, else the seconds to wait."""
        rate = self._limits.requests_per_second
        if rate is None:
            return 0.0
        now = self._clock()
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = TokenBucket(
                rate, self._limits.burst, self._limits.burst, now
            )
            if len(self._buckets) > MAX_CALLERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(caller)
        return bucket.take(now)
