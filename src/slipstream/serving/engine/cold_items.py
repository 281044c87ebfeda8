"""Items that a bundle does not know, told by their features: candidates of a ranking bundle.

Such an item has the mean of the catalogue's item rows as its own, and the rows of its features.
Touch this when new items are read in another way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.bundle import Bundle
from slipstream.models.number_bins import bin_numbers
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.request_errors import BadRequest


@dataclass(frozen=True)
class ColdItems:
    """New items of one request: the codes of each by feature; their rows follow the catalogue's."""

    codes: Mapping[str, Sequence[tuple[int, ...]]]
    count: int


class ColdItemEncoder:
    """Encodes the features of new items as the model was trained with them; code 0 is unknown."""

    def __init__(self, bundle: Bundle, items: ItemIds) -> None:
        self._items = items
        edges = bundle.description.get("number_edges", {})
        self._names = tuple(bundle.description["sizes"]["item_cardinalities"])
        self._edges = {name: edges.get(f"item.{name}") for name in self._names}

    def encode(self, described: Sequence[Mapping[str, Any]]) -> ColdItems:
        """Return the codes of items; a `BadRequest` names a feature that the model lacks."""
        if not self._names:
            raise BadRequest("this bundle reads no item features, so new items cannot be ranked")
        for each in described:
            for name in each:
                if name not in self._names:
                    raise BadRequest(
                        f"this bundle reads no item feature '{name:.80}'; it reads "
                        f"{', '.join(self._names)}"
                    )
        codes = {
            name: [self._code(name, each.get(name)) for each in described] for name in self._names
        }
        return ColdItems(codes, len(described))

    def _code(self, name: str, value: Any) -> tuple[int, ...]:
        if value is None:
            return (0,)
        edges = self._edges[name]
        if edges is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadRequest(f"item feature '{name}' must be a number, got {value!r:.80}")
            return (int(bin_numbers(np.array([float(value)]), edges)[0]),)
        labels = {text: code for code, text in enumerate(self._items.column(name).labels)}
        several = value if isinstance(value, list) else [value]
        return tuple(labels.get(str(each), 0) for each in several) or (0,)


def cold_rows(table_rows: Any, codes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Return the mean row of each item's codes; `table_rows` reads rows of the feature's table."""
    return torch.stack([table_rows(torch.tensor(each)).mean(0) for each in codes])
