"""What a request can be told instead of an answer; the apps turn each into its HTTP status."""

from slipstream.errors import SlipstreamError


class BadRequest(SlipstreamError):
    """The request itself cannot be answered (an unknown item, too long a history): 400."""


class Overloaded(SlipstreamError):
    """Refused to keep the promise to others; `reason` is one counted word: 429 or 503."""

    def __init__(self, reason: str, message: str | None = None) -> None:
        super().__init__(
            message or f"the instance refused the request ({reason}); try again later or elsewhere"
        )
        self.reason = reason


class DeadlinePassed(SlipstreamError):
    """The answer would come after the request's deadline: 504."""
