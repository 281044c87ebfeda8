"""What users did, as it arrives: the history type, stores to append to and read, the window rule.

Touch this room when histories are kept or cut in another way; it knows nothing of models.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.history.history_store import AppendError as AppendError
    from slipstream.history.history_store import HistoryStore as HistoryStore
    from slipstream.history.history_store import HistoryStoreError as HistoryStoreError
    from slipstream.history.history_store import open_history_store as open_history_store
    from slipstream.history.user_history import History as History
    from slipstream.history.window import window_start as window_start

__all__ = [
    "AppendError",
    "History",
    "HistoryStore",
    "HistoryStoreError",
    "open_history_store",
    "window_start",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "AppendError": "history_store",
        "History": "user_history",
        "HistoryStore": "history_store",
        "HistoryStoreError": "history_store",
        "open_history_store": "history_store",
        "window_start": "window",
    },
)
