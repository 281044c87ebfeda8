"""What a bundle says about its use: which items may come again, how much of a history counts.

They are keys of the recipe that trained the model, so that what is served is what was measured.
Touch this when a bundle carries another rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.history.window import window_start


@dataclass(frozen=True)
class ServingRules:
    """The rules of one bundle; a bundle without them is served by the rules of its time."""

    exclude_seen: bool  # items of a user's whole history are not recommended
    window: str  # latest or stepped, see history.window
    max_len: int  # behaviours a request is scored on, at most

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> "ServingRules":
        """Read the rules from a bundle's recipe."""
        exclude_seen = recipe.get("repeat", "exclude") == "exclude"
        longest = int(recipe["model"]["max_len"])
        if "window" not in recipe:
            return cls(exclude_seen, "stepped", longest)
        served = recipe.get("sampler", {}).get("max_len", longest)
        return cls(exclude_seen, str(recipe["window"]), min(int(served), longest))

    def window_start(self, behaviours: int, oldest: int = 0) -> int:
        """Return the first of so many behaviours that a request is scored on."""
        return window_start(behaviours, self.max_len, oldest, self.window)
