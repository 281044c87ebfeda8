"""The errors of a request; the apps turn each into its HTTP status.

Touch this when a request can fail in a new way.
"""

from slipstream.errors import SlipstreamError


class BadRequest(SlipstreamError):
    """The request cannot be answered (an unknown item, too long a history): 400."""


class OverloadError(SlipstreamError):
    """The instance has too much work; `reason` is one word, counted in the metrics: 429 or 503."""

    def __init__(self, reason: str, message: str | None = None) -> None:
        super().__init__(
            message or f"the instance refused the request ({reason}); try again later or elsewhere"
        )
        self.reason = reason


class DeadlineError(SlipstreamError):
    """The answer would come after the request's deadline: 504."""
