"""From a request's message to the rules of its items. Touch this when a message gets a rule."""

from collections.abc import Mapping

import numpy as np

from slipstream.serving.engine.item_rules import Boost, Condition, ItemRules, NumberRange
from slipstream.serving.http import messages as m
from slipstream.serving.id_arrays import id_array
from slipstream.serving.request_errors import BadRequest


def read_rules(request: m.RecommendRequest, seen: np.ndarray | None) -> ItemRules:
    """Return the rules of a request; items in `seen` are excluded too."""
    exclude = id_array(request.exclude)
    if seen is not None:
        exclude = np.concatenate([exclude, seen]) if len(exclude) else seen
    return ItemRules(
        exclude,
        None if request.allow is None else id_array(request.allow),
        _conditions(request.where),
        _conditions(request.exclude_where),
        tuple(_boost(each) for each in request.boosts),
        request.most_per,
    )


def _boost(message: m.BoostMessage) -> Boost:
    if not message.items and not message.where:
        raise BadRequest("a boost is of some items; send its `items`, its `where`, or both")
    return Boost(message.add, tuple(message.items), _conditions(message.where))


def _conditions(message: Mapping[str, list[str] | m.NumberCondition]) -> dict[str, Condition]:
    return {
        name: NumberRange(wanted.least, wanted.most)
        if isinstance(wanted, m.NumberCondition)
        else tuple(sorted(set(wanted)))
        for name, wanted in message.items()
    }
