"""Reads rows of tables, adds up their gradients and changes them on CPU, by code in C++
(`native/rows.cc`).

It asks for rows before it needs them. Vectors and sums are those of XLA to the bit. Vectors are
float32. Where an id or an index is PAD, nothing is read or added.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.embedding.backends.lazy import IndexedVectors


def take(source: jax.Array, index: jax.Array) -> jax.Array:
    """f32[k, width] or f32[k]: rows of f32[rows, width] or f32[rows] at i32[k]; zero for PAD."""
    if source.ndim == 1:
        return take(source[:, None], index)[:, 0]
    out = jax.ShapeDtypeStruct((index.shape[0], source.shape[1]), source.dtype)
    return jax.ffi.ffi_call("JaxrankTake", out)(source, index)


def add(
    block: jax.Array, at: jax.Array, vectors: IndexedVectors, *, rising: bool = False
) -> jax.Array:
    """f32[n, dim]: the block with a vector for each id added at i32[ids], in the order of ids.

    Args:
        rising: `at` is so, with PAD behind the last.
    """
    if not vectors.count:
        return block
    out = jax.ShapeDtypeStruct(block.shape, block.dtype)
    call = jax.ffi.ffi_call("JaxrankAdd", out, input_output_aliases={0: 0})
    return call(block, at, *_operands(vectors), rising=rising)


def sum_by_id(
    ids: jax.Array, grads: Sequence[IndexedVectors], rows: int, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Each id i32[n] below `rows` once, not rising, with PAD behind the last; and the sums of their
    gradients f32[n, dim] in the order of ids, of which those behind the last can be anything."""
    count = ids.shape[0]
    outs = (
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((count, dim), jnp.float32),
        jax.ShapeDtypeStruct((5 * count,), jnp.int32),  # memory to work in
    )
    pieces = [operand for piece in grads if piece.count for operand in _operands(piece)]
    unique, sums, _ = jax.ffi.ffi_call("JaxrankSumById", outs)(ids, *pieces, rows=np.int64(rows))
    return unique, sums


def rowwise_adagrad(
    rows: jax.Array,
    accumulator: jax.Array,
    row: jax.Array,
    sums: jax.Array,
    learning_rate: jax.Array,
    *,
    width: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Rows and their accumulators f32[n] after `optimizers.rowwise_adagrad`, in their place, but
    for rounding.

    Args:
        rows: f32[n * width / 128, 128], as they are stored: of another shape of them XLA makes a
            copy.
        row: i32[k], each row once, with PAD behind the last.
        sums: f32[k, dim], their gradients.
        learning_rate: f32[] or, one of each, f32[k, 1].
    """
    outs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (rows, accumulator))
    call = jax.ffi.ffi_call("JaxrankRowwiseAdagrad", outs, input_output_aliases={0: 0, 1: 1})
    learning_rates = learning_rate.astype(jnp.float32).reshape(-1)
    settings = dict(stride=np.int64(width), eps=np.float32(eps))
    rows, accumulator = call(rows, accumulator, row, sums, learning_rates, **settings)
    return rows, accumulator


def _operands(vectors: IndexedVectors) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(vectors, index, scale), which are empty where there are none."""
    index = jnp.zeros(0, jnp.int32) if vectors.index is None else vectors.index
    scale = jnp.zeros(0, jnp.float32) if vectors.scale is None else vectors.scale
    return vectors.source, index, scale
