"""Jagged data, from a raw log to batches. Touch this room for new logs, stores or samplers.

A log becomes a store (preparation, own_log, ingest, store), which may grow (append); samplers cut
batches from it (splits, sampler, windows, balance). The room knows no other.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.data.append import AppendReport as AppendReport
    from slipstream.data.append import append_log as append_log
    from slipstream.data.balance import Cost as Cost
    from slipstream.data.batch import JaggedBatch as JaggedBatch
    from slipstream.data.choices import Choices as Choices
    from slipstream.data.choices import FeatureFile as FeatureFile
    from slipstream.data.ingest import Filters as Filters
    from slipstream.data.preparation import prepare as prepare
    from slipstream.data.raw_log import Columns as Columns
    from slipstream.data.sampler import SamplerConfig as SamplerConfig
    from slipstream.data.sampler import TrainingSampler as TrainingSampler
    from slipstream.data.sampler import evaluation_batches as evaluation_batches
    from slipstream.data.splits import Split as Split
    from slipstream.data.store import Feature as Feature
    from slipstream.data.store import SequenceStore as SequenceStore
    from slipstream.data.store import Vocabulary as Vocabulary
    from slipstream.data.synthetic import Synthetic as Synthetic

__all__ = [
    "AppendReport",
    "Choices",
    "Columns",
    "Cost",
    "Feature",
    "FeatureFile",
    "Filters",
    "JaggedBatch",
    "SamplerConfig",
    "SequenceStore",
    "Split",
    "Synthetic",
    "TrainingSampler",
    "Vocabulary",
    "append_log",
    "evaluation_batches",
    "prepare",
]

__getattr__, __dir__ = exporter(
    __name__,
    {
        "AppendReport": "append",
        "Choices": "choices",
        "Columns": "raw_log",
        "Cost": "balance",
        "Feature": "store",
        "FeatureFile": "choices",
        "Filters": "ingest",
        "JaggedBatch": "batch",
        "SamplerConfig": "sampler",
        "SequenceStore": "store",
        "Split": "splits",
        "Synthetic": "synthetic",
        "TrainingSampler": "sampler",
        "Vocabulary": "store",
        "append_log": "append",
        "evaluation_batches": "sampler",
        "prepare": "preparation",
    },
)
