"""Embedding tables: rows with their optimizer state, in memory, on disk or hashed; shared by ranks.

Touch this room for another kind of table, another row optimizer, or another exchange between ranks.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.tables.collection import TableCollection as TableCollection
    from slipstream.tables.communicator import Communicator as Communicator
    from slipstream.tables.disk_table import DiskTable as DiskTable
    from slipstream.tables.embedding_table import EmbeddingTable as EmbeddingTable
    from slipstream.tables.embedding_table import Rows as Rows
    from slipstream.tables.exchange import Exchange as Exchange
    from slipstream.tables.exchange import Lookup as Lookup
    from slipstream.tables.exchange import Lookups as Lookups
    from slipstream.tables.factory import make_table as make_table
    from slipstream.tables.hashed_table import HashedTable as HashedTable
    from slipstream.tables.memory_table import MemoryTable as MemoryTable
    from slipstream.tables.replicas import AveragedWeights as AveragedWeights
    from slipstream.tables.replicas import SummedGradients as SummedGradients
    from slipstream.tables.row_optimizers import DenseAdamW as DenseAdamW
    from slipstream.tables.row_optimizers import RowOptimizer as RowOptimizer
    from slipstream.tables.row_optimizers import RowwiseAdagrad as RowwiseAdagrad
    from slipstream.tables.row_optimizers import RowwiseAdam as RowwiseAdam
    from slipstream.tables.row_optimizers import make_row_optimizer as make_row_optimizer
    from slipstream.tables.slices import Placement as Placement

__all__ = [
    "AveragedWeights",
    "Communicator",
    "DenseAdamW",
    "DiskTable",
    "EmbeddingTable",
    "Exchange",
    "HashedTable",
    "Lookup",
    "Lookups",
    "MemoryTable",
    "Placement",
    "RowOptimizer",
    "Rows",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SummedGradients",
    "TableCollection",
    "make_row_optimizer",
    "make_table",
]

__getattr__, __dir__ = exporter(
    __name__,
    {
        "AveragedWeights": "replicas",
        "Communicator": "communicator",
        "DenseAdamW": "row_optimizers",
        "DiskTable": "disk_table",
        "EmbeddingTable": "embedding_table",
        "Exchange": "exchange",
        "HashedTable": "hashed_table",
        "Lookup": "exchange",
        "Lookups": "exchange",
        "MemoryTable": "memory_table",
        "Placement": "slices",
        "RowOptimizer": "row_optimizers",
        "Rows": "embedding_table",
        "RowwiseAdagrad": "row_optimizers",
        "RowwiseAdam": "row_optimizers",
        "SummedGradients": "replicas",
        "TableCollection": "collection",
        "make_row_optimizer": "row_optimizers",
        "make_table": "factory",
    },
)
