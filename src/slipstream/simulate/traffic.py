"""Traffic: who asks when, how long their histories are, and what goes wrong meanwhile.

Sessions begin at an even rate; each is one user's pages, with gaps between them and new behaviours
on every page. A run is a window of this stationary traffic, so most of its sessions have begun
before it. Touch this when users behave in another way.
"""

from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from slipstream.simulate.workload import LengthLaw


class Traffic(BaseModel):
    """Requests a second, and the sessions they come from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(gt=0, le=1e6, description="ranking requests a second, all instances")
    requests: int = Field(default=10_000, ge=1, le=10_000_000)
    pages: float = Field(default=8.0, ge=1, description="requests of a session, the mean; 1: none")
    gap_seconds: float = Field(default=40.0, gt=0, description="between two pages, the median")
    gap_sigma: float = Field(default=1.0, ge=0, le=3)
    behaviours: int = Field(default=6, ge=0, description="new ones on every page")
    lengths: LengthLaw = LengthLaw(median=512, sigma=0.0, shortest=16, longest=6144)
    candidates: int = Field(default=100, ge=1, le=10_000)
    before_ms: float = Field(default=120.0, ge=0, description="stages before ranking, the mean")
    before_spread: float = Field(default=0.3, ge=0, le=2, description="their variation")


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order of their arrival."""

    at_R: np.ndarray  # seconds
    user_R: np.ndarray
    length_R: np.ndarray  # behaviours stored when the request comes
    before_R: np.ndarray  # seconds until ranking is asked for


def draw_arrivals(traffic: Traffic, seed: int) -> Arrivals:
    """Draw the requests of a run; the same seed gives the same ones."""
    rng = np.random.default_rng([seed, 17])
    count = traffic.requests
    at_R = np.cumsum(rng.exponential(1 / traffic.rate, count))
    user_R, page_R = _sessions(traffic, at_R, rng)
    users = int(user_R.max()) + 1
    law = traffic.lengths
    drawn_U = np.exp(law.sigma * rng.standard_normal(users)) * law.median
    drawn_U = np.clip(np.rint(drawn_U), law.shortest, law.longest).astype(np.int64)
    length_R = drawn_U[user_R] + traffic.behaviours * page_R
    shape = 1 / max(traffic.before_spread, 1e-3) ** 2
    before_R = rng.gamma(shape, traffic.before_ms / 1e3 / shape, count)
    return Arrivals(at_R, user_R, length_R, np.minimum(before_R, 4 * traffic.before_ms / 1e3))


def _sessions(
    traffic: Traffic, at_R: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the user and the page of every arrival: the n-th arrival takes the n-th page."""
    count, span = at_R.size, float(at_R[-1])
    if traffic.pages <= 1:
        return np.arange(count), np.zeros(count, dtype=np.int64)
    gap = traffic.gap_seconds * np.exp(traffic.gap_sigma**2 / 2)
    lead = 4 * traffic.pages * gap  # sessions that began before the window
    number = max(8, int(1.2 * (span + lead) * traffic.rate / traffic.pages) + 8)
    pages_S = rng.geometric(1 / traffic.pages, number)
    begin_S = np.sort(rng.uniform(-lead, span, number))
    session_P = np.repeat(np.arange(number), pages_S)
    first_P = np.repeat(np.cumsum(pages_S) - pages_S, pages_S)
    page_P = np.arange(session_P.size) - first_P
    gaps_P = traffic.gap_seconds * np.exp(traffic.gap_sigma * rng.standard_normal(session_P.size))
    gaps_P[page_P == 0] = 0.0
    since_P = np.cumsum(gaps_P)
    since_P -= np.repeat(since_P[np.cumsum(pages_S) - pages_S], pages_S)
    time_P = begin_S[session_P] + since_P
    inside_P = np.flatnonzero((time_P >= 0) & (time_P < span))
    order = inside_P[np.argsort(time_P[inside_P], kind="stable")]
    if order.size < count:  # a short window: begin further sessions where pages are missing
        more = np.arange(count - order.size)
        users = np.concatenate([session_P[order], number + more])
        return users, np.concatenate([page_P[order], np.zeros(more.size, dtype=np.int64)])
    kept = np.sort(rng.choice(order.size, count, replace=False))
    return session_P[order[kept]], page_P[order[kept]]


class Trouble(BaseModel):
    """What goes wrong during a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deaths: int = Field(default=0, ge=0, description="instances that die, at even times")
    restart_seconds: float = Field(default=5.0, ge=0, description="until a new process is ready")
    slow_instances: int = Field(default=0, ge=0, description="instances that are slow throughout")
    slow_factor: float = Field(default=3.0, ge=1)
    rolling_restart: bool = Field(
        default=False, description="drain and restart one instance after the other"
    )
