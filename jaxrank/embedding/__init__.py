"""Embedding tables: their storage, the lookup of vectors and the update of the rows that were read.

Tables live in the training state beside the parameters of the model, never inside a Flax module or
optax. A step touches a small share of their rows and must not read or write the rest.

`lookup` returns the vectors of a batch. The model's loss gives the gradients of these vectors, and
`update` changes the rows that were read.
"""

from jaxrank.embedding.exchange import ExchangeStats
from jaxrank.embedding.optimizers import ROW_OPTIMIZERS, RowOptimizer, make_row_optimizer
from jaxrank.embedding.storage import GROUPS, Storage, TableState, logical_rows, storage
from jaxrank.embedding.tables import Embedding, Lookup, Routes, check_row_shards, row_shapes

__all__ = [
    "GROUPS",
    "ROW_OPTIMIZERS",
    "Embedding",
    "ExchangeStats",
    "Lookup",
    "Routes",
    "RowOptimizer",
    "Storage",
    "TableState",
    "check_row_shards",
    "logical_rows",
    "make_row_optimizer",
    "row_shapes",
    "storage",
]
