"""The Python face: what `import slipstream as ss` offers for data, training and answers.

Touch this when a function of the face is added. Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

__all__ = [
    "BundleModel",
    "Figures",
    "Predictor",
    "Run",
    "compare",
    "load",
    "open_store",
    "prepare",
    "train",
    "train_recipe",
    "tune",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "BundleModel": "bundle_model",
        "Figures": "trained_run",
        "Predictor": "predictor",
        "Run": "trained_run",
        "compare": "functions",
        "load": "functions",
        "open_store": "functions",
        "prepare": "preparing",
        "train": "functions",
        "train_recipe": "functions",
        "tune": "functions",
    },
)

if TYPE_CHECKING:
    from slipstream.api.bundle_model import BundleModel as BundleModel
    from slipstream.api.functions import compare as compare
    from slipstream.api.functions import load as load
    from slipstream.api.functions import open_store as open_store
    from slipstream.api.functions import train as train
    from slipstream.api.functions import train_recipe as train_recipe
    from slipstream.api.functions import tune as tune
    from slipstream.api.predictor import Predictor as Predictor
    from slipstream.api.preparing import prepare as prepare
    from slipstream.api.trained_run import Figures as Figures
    from slipstream.api.trained_run import Run as Run
