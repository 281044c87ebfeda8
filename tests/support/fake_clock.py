"""A clock that a test moves by hand."""

from slipstream.serving.clock import Clock


class FakeClock(Clock):
    """Tells `moment`, as monotonic and as wall time."""

    def __init__(self, moment: float = 0.0) -> None:
        self.moment = moment

    def now(self) -> float:
        return self.moment

    def wall_time(self) -> float:
        return self.moment
