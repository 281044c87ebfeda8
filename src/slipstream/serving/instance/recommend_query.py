"""A request for recommendations, and its answer, as the cascade takes and gives them.

Touch this when the cascade is asked for something new. Nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.serving.engine.item_rules import ItemRules

# How a user without known behaviours was answered.
Cold = Literal["popularity", "features"]


@dataclass(frozen=True)
class RecommendQuery:
    """The best `count` items: of `candidates`, or of the `retrieve` best of the catalogue."""

    count: int
    deadline: float  # a moment of the instance's clock
    retrieve: int = 200
    by: str | None = None  # the task to order by; None: the first
    candidates: list[Any] | None = None
    rules: ItemRules = field(default_factory=ItemRules)
    allow_truncate: bool = False
    request_time: int | None = None
    context: Mapping[str, str | None] = field(default_factory=dict)
    popular_days: int | None = None  # of a user without behaviours; None: all of the log
    new_items: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # features by id


@dataclass(frozen=True)
class RetrievalReport:
    """How the retrieval bundle of a deployment took part in an answer."""

    version: str
    hit: str
    skipped: int  # behaviours whose items it lacks
    items: int  # that it retrieved


@dataclass(frozen=True)
class RecommendResult:
    """The best items with their scores by task, and how they were found."""

    items: list[int | str]
    scores: dict[str, list[float]]
    hit: str
    truncated: bool = False
    unknown: list[Any] = field(default_factory=list)  # candidates that the catalogue lacks
    skipped: int = 0  # behaviours whose items the ranking bundle lacks
    boosts: list[float] | None = None  # what was added to order each item, where there are boosts
    cold: Cold | None = None
    search: str = "exact"  # or the name of the index that found the items
    recall: float | None = None  # of that index, as measured at the start
    retrieval: RetrievalReport | None = None  # of two bundles
