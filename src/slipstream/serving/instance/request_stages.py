"""What a request did when, and whether it may use the relay: kept with the request, not passed on.

A request that asks for its timeline gets the stages that ran for it; one that asks to be computed
in line finds and leaves no prefix, as if there were no relay. Touch this when a request should tell
more of its stages.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from slipstream.serving.clock import SYSTEM_CLOCK


@dataclass
class RequestStages:
    """The stages of one request: name, begin and end in seconds since it began."""

    started: float = field(default_factory=SYSTEM_CLOCK.now)
    found: list[tuple[str, float, float]] = field(default_factory=list)

    def now(self) -> float:
        """Return the seconds since the request began."""
        return SYSTEM_CLOCK.now() - self.started


_STAGES: ContextVar[RequestStages | None] = ContextVar("stages", default=None)
_IN_LINE: ContextVar[bool] = ContextVar("in_line", default=False)


@contextlib.contextmanager
def recorded_stages(in_line: bool = False) -> Iterator[RequestStages]:
    """Record the stages of the block, on every task it starts; `in_line`: without the relay.

    A block around it gets them, too.
    """
    stages, outer = RequestStages(), _STAGES.get()
    tokens = _STAGES.set(stages), _IN_LINE.set(in_line)
    try:
        yield stages
    finally:
        if outer is not None:
            later = stages.started - outer.started
            outer.found += [(name, at + later, end + later) for name, at, end in stages.found]
        _STAGES.reset(tokens[0])
        _IN_LINE.reset(tokens[1])


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Note when the block began and ended, where the request records its stages."""
    stages = _STAGES.get()
    begin = 0.0 if stages is None else stages.now()
    try:
        yield
    finally:
        if stages is not None:
            stages.found.append((name, begin, stages.now()))


def computed_in_line() -> bool:
    """Return whether the present request asks for no relay."""
    return _IN_LINE.get()
