"""The rules of a request as rows of a catalogue: which may be found, what is added, which are left.

Which items match a condition is found once and kept, up to `MASK_BYTES`. Touch this when a rule is
read in another way; the rules themselves are in item_rules.py.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream.ops.topk import SearchLimits
from slipstream.serving.engine.item_columns import ItemColumn
from slipstream.serving.engine.item_rules import Condition, ItemRules, NumberRange
from slipstream.serving.engine.items import ItemIds
from slipstream.serving.request_errors import BadRequest

MASK_BYTES = 64 << 20  # of conditions whose items are known


class ItemSelector:
    """The rules of requests as rows of one catalogue."""

    def __init__(self, items: ItemIds) -> None:
        self.items = items
        self._masks: OrderedDict[tuple[str, Condition], np.ndarray] = OrderedDict()

    def check(self, rules: ItemRules) -> None:
        """Refuse features that the catalogue lacks, and conditions that do not fit their kind."""
        self.items.check_features(rules.most_per)
        for conditions in rules.conditions:
            self.items.check_features(conditions)
            for name, condition in conditions.items():
                number = self.items.column(name).is_number
                if number != isinstance(condition, NumberRange):
                    wanted = '{"from": …, "to": …}' if number else '["label", …]'
                    raise BadRequest(
                        f"item feature '{name}' is {'a number' if number else 'no number'}; "
                        f"write its condition like {wanted}"
                    )

    def limits(self, rules: ItemRules) -> SearchLimits:
        """Return which rows of the catalogue may be found, and their boosts.

        It is called by one thread: what matches a condition is kept for the next request.
        """
        excluded = self.items.find(rules.exclude)
        return SearchLimits(
            torch.from_numpy(excluded[excluded >= 0]),
            _tensor(self._allowed(rules, None)),
            _tensor(self._boosts(rules, None)),
        )

    def allowed(self, rules: ItemRules, rows_C: np.ndarray) -> np.ndarray:
        """Return which of these rows pass the rules."""
        passes_C = ~np.isin(rows_C, self.items.find(rules.exclude))
        allowed_C = self._allowed(rules, rows_C)
        return passes_C if allowed_C is None else passes_C & allowed_C

    def boosts(self, rules: ItemRules, rows_C: np.ndarray) -> np.ndarray:
        """Return what is added to the scores of these rows."""
        known_C = rows_C < len(self.items)
        boosts_C = self._boosts(rules, np.where(known_C, rows_C, 0))
        if boosts_C is None:
            return np.zeros(len(rows_C), dtype=np.float32)
        return np.where(known_C, boosts_C, np.float32(0))

    def within_caps(self, rules: ItemRules, rows: Sequence[int], count: int) -> list[int]:
        """Return the places of the first `count` rows that the caps leave.

        An item is left out where one of its labels has its most items already. An item without a
        label counts for none.
        """
        if not rules.most_per:
            return list(range(min(count, len(rows))))
        # Items that the catalogue lacks, behind its last row, count for no label.
        chosen = np.asarray(rows, dtype=np.int64)
        new = chosen >= len(self.items)
        chosen = np.where(new, 0, chosen)
        labels = {
            name: self.items.column(name).take(chosen).labels_by_item() for name in rules.most_per
        }
        taken: Counter[tuple[str, Any]] = Counter()
        places: list[int] = []
        for place in range(len(rows)):
            if len(places) == count:
                break
            keys = [(name, label) for name in labels for label in labels[name][place]]
            keys = [] if new[place] else keys
            if all(taken[key] < rules.most_per[key[0]] for key in keys):
                taken.update(keys)
                places.append(place)
        return places

    def _allowed(self, rules: ItemRules, rows_C: np.ndarray | None) -> np.ndarray | None:
        """Return which of these rows lists and filters leave; of all rows where none are given.

        None stands for all of them.
        """
        parts = [self._matches(each, rows_C) for each in rules.where.items()]
        parts += [~self._matches(each, rows_C) for each in rules.exclude_where.items()]
        if rules.allow is not None:
            parts.append(self._listed(rules.allow, rows_C))
        return np.logical_and.reduce(parts) if parts else None

    def _boosts(self, rules: ItemRules, rows_C: np.ndarray | None) -> np.ndarray | None:
        if not rules.boosts:
            return None
        total = np.zeros(len(self.items) if rows_C is None else len(rows_C), dtype=np.float32)
        for boost in rules.boosts:
            parts = [self._matches(each, rows_C) for each in boost.where.items()]
            if boost.items:
                parts.append(self._listed(boost.items, rows_C))
            if parts:
                total[np.logical_and.reduce(parts)] += boost.add
        return total

    def _listed(self, ids: Any, rows_C: np.ndarray | None) -> np.ndarray:
        """Return which rows stand for one of these items."""
        rows = self.items.find(ids)
        if rows_C is not None:
            return np.isin(rows_C, rows[rows >= 0])
        listed_N = np.zeros(len(self.items), dtype=bool)
        listed_N[rows[rows >= 0]] = True
        return listed_N

    def _matches(self, condition: tuple[str, Condition], rows_C: np.ndarray | None) -> np.ndarray:
        """Return which rows match the condition of a feature."""
        name, wanted = condition
        if rows_C is not None:
            return _match(self.items.column(name).take(rows_C), wanted)
        if condition not in self._masks:
            self._masks[condition] = _match(self.items.column(name), wanted)
            while len(self._masks) > max(1, MASK_BYTES // max(1, len(self.items))):
                self._masks.popitem(last=False)
        self._masks.move_to_end(condition)
        return self._masks[condition]


def _match(column: ItemColumn, wanted: Condition) -> np.ndarray:
    if isinstance(wanted, NumberRange):
        return column.within(wanted.least, wanted.most)
    return column.has_one_of(wanted)


def _tensor(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)
