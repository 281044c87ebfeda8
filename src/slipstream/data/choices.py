"""What can be chosen when data is prepared, besides the data itself.

Touch this when there is a new choice; its flag is in cli/data_commands.py.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.data.ingest import ORDER
from slipstream.data.raw_log import Columns
from slipstream.data.synthetic import Synthetic
from slipstream.errors import SlipstreamError, did_you_mean

# Paths, folders and patterns, or a frame: Polars, pandas, Arrow. The last cannot be typed here.
TableSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Any
NULLS, DUPLICATES = ("drop", "error"), ("drop", "keep")


@dataclass(frozen=True)
class FeatureFile:
    """Features of items or users: where they are, and which columns to take.

    Without `data` they are columns of the log itself. A feature is a column's name, perhaps with
    its kind: `price:number`, `year:category`, `tags:categories`. `separator` parts the categories
    of a text.
    """

    data: TableSource | None = None
    id: str | None = None  # the column of the ids; as in the log unless given
    features: tuple[str, ...] = ()
    title: str | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        named = (self.features,) if isinstance(self.features, str) else tuple(self.features)
        object.__setattr__(self, "features", named)


@dataclass(frozen=True)
class Choices:
    """What can be chosen besides the data; a choice that is None is the data's own.

    For a log of your own that is: the time unit found from the values, rows that lack a user, an
    item or a time dropped, exact duplicates dropped (kept in a log without times). A known data set
    keeps every row and refuses nulls.
    """

    source: Path | None = None
    columns: Columns = field(
        default_factory=lambda: Columns("user_id", "item_id", "timestamp", time_optional=True)
    )
    time_unit: str | None = None
    nulls: str | None = None
    duplicates: str | None = None
    action_values: Mapping[str, float] | None = None
    items: FeatureFile | None = None
    users: FeatureFile | None = None
    item_vectors: Mapping[str, Any] = field(default_factory=dict)  # sources by name
    sql: str | None = None
    database: Path | None = None
    order: str = ORDER
    min_item_count: int | None = None
    min_user_count: int | None = None
    k_core: int | None = None
    category: str = "All_Beauty"
    synthetic: Synthetic = field(default_factory=Synthetic)

    def __post_init__(self) -> None:
        for noun, chosen, known in (
            ("nulls", self.nulls, NULLS),
            ("duplicates", self.duplicates, DUPLICATES),
        ):
            if chosen is not None and chosen not in known:
                raise SlipstreamError(
                    f"unknown choice '{chosen}' of {noun}{did_you_mean(chosen, known)}"
                )
        if self.order != ORDER:
            raise SlipstreamError(
                f"unknown order '{self.order}'; the one order is '{ORDER}': by time, equal times "
                "in file order"
            )
        if self.database is not None and self.sql is None:
            raise SlipstreamError("--database needs --sql, the query to run in it")
