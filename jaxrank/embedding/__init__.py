"""Embedding tables: where they lie, how vectors are read, and how the rows read are updated.

Tables live in the training state beside the parameters of the model, never inside a Flax module or
optax: a step touches a small share of their rows and must not read or write the rest. `lookup`
gives the vectors of a batch, the model's loss gives the gradient of those vectors, and `update`
changes the rows that were read.
"""

from jaxrank.embedding.exchange import ExchangeStats
from jaxrank.embedding.optimizers import ROW_OPTIMIZERS, RowOptimizer, make_row_optimizer
from jaxrank.embedding.storage import GROUPS, Storage, TableState, logical_rows, storage
from jaxrank.embedding.tables import Embedding, Lookup, check_row_shards, row_shapes

__all__ = [
    "GROUPS",
    "ROW_OPTIMIZERS",
    "Embedding",
    "ExchangeStats",
    "Lookup",
    "RowOptimizer",
    "Storage",
    "TableState",
    "check_row_shards",
    "logical_rows",
    "make_row_optimizer",
    "row_shapes",
    "storage",
]
