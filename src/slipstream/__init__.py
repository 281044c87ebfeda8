"""Slipstream trains and serves generative recommenders: the slow thing early, in the slipstream of
the work before it.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# What `import slipstream as ss` offers, loaded on first use so that the command line starts fast.
_OFFERED = {
    "prepare": "api",
    "train": "api",
    "Run": "api",
    "Recipe": "training.recipe",
    "SequenceStore": "data.store",
    "Engine": "serving.engine.engine",
    "History": "history.user_history",
    "ops": "ops",
}
__all__ = [
    "Engine",
    "History",
    "Recipe",
    "Run",
    "SequenceStore",
    "__version__",
    "ops",
    "prepare",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
    module = importlib.import_module(f"slipstream.{_OFFERED[name]}")
    return module if name == _OFFERED[name] else getattr(module, name)
