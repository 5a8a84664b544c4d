"""Learning rates and L2 per row, for stacks whose tables have different ones."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.layout import Stack, ToTables


class RowValues(NamedTuple):
    """A number for each row of a stack, as runs of rows with one number.

    starts: i32[runs], the first row of each run, rising, from 0.
    values: f32[runs], the number of each run.
    """

    starts: np.ndarray
    values: np.ndarray

    def gather(self, row: jax.Array) -> jax.Array:
        """Returns the numbers f[k, 1] of rows i32[k]. Any value for PAD."""
        run = jnp.searchsorted(jnp.asarray(self.starts), row, side="right") - 1
        return jnp.asarray(self.values).at[run].get(mode="clip")[:, None]


def row_values(stack: Stack, by_table: Mapping[str, float], default: float) -> RowValues | None:
    """Builds the numbers of a stack's rows from {table: number}. None if all are `default`."""
    of_table = np.array([by_table.get(name, default) for name in stack.tables], np.float32)
    if (of_table == np.float32(default)).all():
        return None
    to_tables = ToTables.from_stack(stack)
    starts = np.concatenate(
        [to_tables.starts, to_tables.hot_start + np.arange(len(to_tables.hot_tables))]
    )
    values = of_table[np.concatenate([to_tables.tables, to_tables.hot_tables])]
    # A table whose rows are all hot has an empty run, which begins where the next run begins.
    order = np.argsort(starts, kind="stable")
    starts, values = starts[order], values[order]
    last = np.append(starts[1:] != starts[:-1], True)
    starts, values = starts[last], values[last]
    changes = np.append(True, values[1:] != values[:-1])
    return RowValues(starts[changes].astype(np.int32), values[changes])
