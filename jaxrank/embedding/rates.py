"""Learning rates per row, for stacks whose tables have different learning rates."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.layout import Stack, ToTables


class LrMultipliers(NamedTuple):
    """Multipliers of the learning rate of a stack's rows, as runs of rows with one multiplier.

    starts: i32[runs], the first row of each run, rising, from 0.
    values: f32[runs], the multiplier of each run.
    """

    starts: np.ndarray
    values: np.ndarray

    def multipliers(self, row: jax.Array) -> jax.Array:
        """Returns the multipliers f[k, 1] of rows i32[k]. Any value for PAD."""
        run = jnp.searchsorted(jnp.asarray(self.starts), row, side="right") - 1
        return jnp.asarray(self.values).at[run].get(mode="clip")[:, None]


def stack_lr_multipliers(stack: Stack, by_table: Mapping[str, float]) -> LrMultipliers | None:
    """Builds the multipliers of a stack's rows from {table: multiplier}. None if all are 1."""
    of_table = np.array([by_table.get(name, 1.0) for name in stack.tables], np.float32)
    if (of_table == 1).all():
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
    return LrMultipliers(starts[changes].astype(np.int32), values[changes])
