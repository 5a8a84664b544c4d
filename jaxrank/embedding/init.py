"""Initial values of rows: random, and a function of only the table and the row number in it.

A model therefore starts the same on any mesh and under any placement.
"""

import jax
import jax.numpy as jnp

from jaxrank import mesh as meshes
from jaxrank.embedding.storage import GROUPS, LANES, Storage, split_row
from jaxrank.layout import Stack, ToTables

_AT_ONCE = 2**16  # replicated rows


def first_rows(
    stack: Stack,
    shape: Storage,
    shards: int,
    std: float,
    keys: jax.Array,
) -> jax.Array:
    """Draws this device's rows of one part of a stack, f32[k, 128]. Runs in `shard_map`.

    Split rows are drawn one storage group at a time and replicated rows in chunks, because drawing
    the random numbers of a whole table at once takes several times its memory.

    Args:
        shape: the storage of the part.
        shards: number of devices that split rows are split over.
        std: standard deviation of the normal distribution that values are drawn from.
        keys: [tables of the stack], one key per table.
    """

    def values(row: jax.Array) -> jax.Array:  # i32[n] rows of the stack -> f32[.., 128]
        def row_values(key: jax.Array, table_row: jax.Array) -> jax.Array:
            row_key = jax.random.fold_in(key, table_row)
            return std * jax.random.normal(row_key, (stack.dim,), jnp.float32)

        table, table_row = origin(stack, row)
        rows = jax.vmap(row_values)(keys[table], table_row)
        # Columns beyond the dimension are zero and stay so.
        return jnp.pad(rows, ((0, 0), (0, shape.width - shape.dim))).reshape(-1, LANES)

    if not shape.is_split:
        size = min(shape.rows, _AT_ONCE)

        def fill(i: jax.Array, rows: jax.Array) -> jax.Array:
            # The last chunk may overlap the one before it.
            first = jnp.minimum(i * size, shape.rows - size).astype(jnp.int32)
            initial = values(first + jnp.arange(size, dtype=jnp.int32))
            return jax.lax.dynamic_update_slice(rows, initial, (shape.line(first), jnp.int32(0)))

        empty = jnp.zeros(shape.shape, jnp.float32)
        return jax.lax.fori_loop(0, -(-shape.rows // size), fill, empty)
    groups = GROUPS // shards
    first = jax.lax.axis_index(meshes.SHARD) * groups
    blocks = jnp.arange(shape.rows // GROUPS, dtype=jnp.int32)

    def one_group(group: jax.Array) -> jax.Array:
        return values(stack.replicated + split_row(jnp.full_like(blocks, group), blocks))

    return jax.lax.map(one_group, first + jnp.arange(groups)).reshape(-1, LANES)


def origin(stack: Stack, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps rows i32[k] of a stack to the index of the table in `stack.tables` and the table row.

    Equals `ToTables`, which does the same on the host.
    """
    to_tables = ToTables.from_stack(stack)
    run = jnp.searchsorted(to_tables.starts, row, side="right").astype(jnp.int32) - 1
    table, table_row = jnp.asarray(to_tables.tables)[run], row - jnp.asarray(to_tables.offsets)[run]
    if not stack.hot:
        return table, table_row
    place = row - to_tables.hot_start
    is_hot = (place >= 0) & (place < len(stack.hot))
    place = jnp.clip(place, 0, len(stack.hot) - 1)
    return (
        jnp.where(is_hot, jnp.asarray(to_tables.hot_tables)[place], table),
        jnp.where(is_hot, jnp.asarray(to_tables.hot_rows)[place], table_row),
    )
