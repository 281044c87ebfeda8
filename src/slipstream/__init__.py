"""Slipstream trains and serves generative recommenders.

Touch this when a name of `import slipstream as ss` is added. Names and rooms (`ss.ops`, `ss.tables`
…) are loaded when first used, so that the command line starts fast.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("Slipstream runs on Linux and macOS; on Windows use WSL 2")

from slipstream._lazy import exporter
from slipstream.machine import wait_passively_where_crowded

if TYPE_CHECKING:
    from slipstream import data as data
    from slipstream import history as history
    from slipstream import models as models
    from slipstream import ops as ops
    from slipstream import pipeline as pipeline
    from slipstream import serving as serving
    from slipstream import tables as tables
    from slipstream import training as training
    from slipstream.api import BundleModel as BundleModel
    from slipstream.api import Figures as Figures
    from slipstream.api import Run as Run
    from slipstream.api import compare as compare
    from slipstream.api import load as load
    from slipstream.api import prepare as prepare
    from slipstream.api import train as train
    from slipstream.api import tune as tune
    from slipstream.data.store import SequenceStore as SequenceStore
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.history.user_history import History as History
    from slipstream.serving.engine.engine import Engine as Engine
    from slipstream.training.recipe import Recipe as Recipe

__version__ = "0.1.0"

__all__ = [
    "BundleModel",
    "Engine",
    "Figures",
    "History",
    "Recipe",
    "Run",
    "SequenceStore",
    "SlipstreamError",
    "__version__",
    "compare",
    "data",
    "history",
    "load",
    "models",
    "ops",
    "pipeline",
    "prepare",
    "serving",
    "tables",
    "train",
    "training",
    "tune",
]

_ROOMS = ("data", "history", "models", "ops", "pipeline", "serving", "tables", "training")
_load, _ = exporter(
    __name__,
    {
        "BundleModel": "api.bundle_model",
        "Figures": "api.trained_run",
        "History": "history.user_history",
        "Engine": "serving.engine.engine",
        "Recipe": "training.recipe",
        "Run": "api.trained_run",
        "SequenceStore": "data.store",
        "SlipstreamError": "errors",
        "compare": "api.functions",
        "load": "api.functions",
        "prepare": "api.preparing",
        "train": "api.functions",
        "tune": "api.functions",
    },
)


def __getattr__(name: str) -> Any:
    if name in ("Run", "train", "tune"):
        wait_passively_where_crowded()  # before torch is imported
    return importlib.import_module(f"slipstream.{name}") if name in _ROOMS else _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
