"""HSTU, FuXi and SASRec, and the retrieval and ranking models built on them.

Models get embedding rows already looked up; they know nothing of tables, ranks or servers. Touch
this when a name of the models becomes public.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.models.backbone import KV as KV
    from slipstream.models.backbone import Backbone as Backbone
    from slipstream.models.build import build_model as build_model
    from slipstream.models.build import dense_parameters as dense_parameters
    from slipstream.models.flops import backbone_flops as backbone_flops
    from slipstream.models.flops import forward_flops as forward_flops
    from slipstream.models.flops import training_flops as training_flops
    from slipstream.models.inputs import Layout as Layout
    from slipstream.models.inputs import ModelInput as ModelInput
    from slipstream.models.model_config import ModelConfig as ModelConfig
    from slipstream.models.ranking import RankingModel as RankingModel
    from slipstream.models.retrieval import RetrievalModel as RetrievalModel

__all__ = [
    "KV",
    "Backbone",
    "Layout",
    "ModelConfig",
    "ModelInput",
    "RankingModel",
    "RetrievalModel",
    "backbone_flops",
    "build_model",
    "dense_parameters",
    "forward_flops",
    "training_flops",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "Backbone": "backbone",
        "KV": "backbone",
        "Layout": "inputs",
        "ModelConfig": "model_config",
        "ModelInput": "inputs",
        "RankingModel": "ranking",
        "RetrievalModel": "retrieval",
        "backbone_flops": "flops",
        "build_model": "build",
        "dense_parameters": "build",
        "forward_flops": "flops",
        "training_flops": "flops",
    },
)
