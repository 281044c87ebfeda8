"""What a request asks of the items it is answered with: lists, filters, boosts, caps.

    rules = ItemRules(where={"genre": ("Comedy",), "year": NumberRange(1990, None)})

Rules name items and features as the catalogue does; `ItemSelector` turns them into rows. Touch this
when a request may ask for something else. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NumberRange:
    """Numbers from `least` to `most`, both included; None: no bound on that side."""

    least: float | None = None
    most: float | None = None


Condition = tuple[str, ...] | NumberRange  # one of these labels, or a number within the range


@dataclass(frozen=True)
class Boost:
    """What is added to the score by which some items are ordered."""

    add: float
    items: tuple[int | str, ...] = ()
    where: Mapping[str, Condition] = field(default_factory=dict)


@dataclass(frozen=True)
class ItemRules:
    """The rules of one request; an item must pass all of them."""

    exclude: Any = ()  # ids
    allow: Any = None  # ids; None: all
    where: Mapping[str, Condition] = field(default_factory=dict)  # all of them must hold
    exclude_where: Mapping[str, Condition] = field(default_factory=dict)  # none of them may hold
    boosts: tuple[Boost, ...] = ()
    most_per: Mapping[str, int] = field(default_factory=dict)  # items that share a label

    @property
    def conditions(self) -> list[Mapping[str, Condition]]:
        """All conditions on features."""
        return [self.where, self.exclude_where, *(boost.where for boost in self.boosts)]
