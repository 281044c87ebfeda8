"""The earlier format of the stores: records of fixed width with the actions of one model.

Touch this when stores of that format need no migration any more; then delete it.
"""

import numpy as np

from slipstream.history.user_history import History

SEPARATOR = "\x1f"  # between the names of the actions


def read_records(first: int, data: bytes, actions: str) -> History:
    """Return the history of records; `actions` are the names as the earlier store kept them."""
    names = actions.split(SEPARATOR) if actions else []
    record = np.dtype([("item", "<i8"), ("time", "<i8"), *((f"a:{name}", "<f4") for name in names)])
    table = np.frombuffer(data, dtype=record)
    columns = {name: table[f"a:{name}"].copy() for name in names}
    return History(table["item"].copy(), table["time"].copy(), columns, first=first)
