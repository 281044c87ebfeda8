"""What a bundle says about its use: which items may come again, how much of a history counts.

They are keys of the recipe that trained the model, so that what is served is what was measured.
Touch this when a bundle carries another rule.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.history.window import window_start

if TYPE_CHECKING:  # the rules are used without torch, too
    from slipstream.bundle import Bundle


@dataclass(frozen=True)
class ServingRules:
    """The rules of one bundle."""

    exclude_seen: bool  # items of a user's whole history are not recommended
    window: str  # latest or stepped, see history.window
    max_len: int  # behaviours a request is scored on, at most

    @classmethod
    def of(cls, bundle: "Bundle") -> "ServingRules":
        """Read the rules of a bundle."""
        return cls(bundle.repeat == "exclude", bundle.window, bundle.max_len)

    def window_start(self, behaviours: int, oldest: int = 0) -> int:
        """Return the first of so many behaviours that a request is scored on."""
        return window_start(behaviours, self.max_len, oldest, self.window)
