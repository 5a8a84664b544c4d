"""Reads rows of tables, sums their gradients and updates them on CPU, in C++ (`native/rows.cc`).

The code prefetches rows. Vectors and sums equal XLA's to the bit. Vectors are float32. Nothing is
read or added where an id or an index is PAD.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.embedding.backends.lazy import IndexedVectors


def take(source: jax.Array, index: jax.Array) -> jax.Array:
    """Reads rows i32[k] of f32[rows, width] or f32[rows]: f32[k, width] or f32[k]. Zero for PAD."""
    if source.ndim == 1:
        return take(source[:, None], index)[:, 0]
    out = jax.ShapeDtypeStruct((index.shape[0], source.shape[1]), source.dtype)
    return jax.ffi.ffi_call("JaxrankTake", out)(source, index)


def add(
    block: jax.Array, at: jax.Array, vectors: IndexedVectors, *, rising: bool = False
) -> jax.Array:
    """Adds a vector per id to the block f32[n, dim] at i32[ids], in the order of ids.

    Args:
        rising: `at` rises, with PAD behind the last.
    """
    if not vectors.count:
        return block
    out = jax.ShapeDtypeStruct(block.shape, block.dtype)
    call = jax.ffi.ffi_call("JaxrankAdd", out, input_output_aliases={0: 0})
    return call(block, at, *_operands(vectors), rising=rising)


def sum_by_id(
    ids: jax.Array, grads: Sequence[IndexedVectors], rows: int, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of each distinct id.

    Args:
        ids: i32[n], each below `rows`, or PAD.

    Returns:
        The distinct ids i32[n] in no particular order, with PAD behind the last, and the sums of
        their gradients f32[n, dim]. Sums behind the last id are undefined.
    """
    count = ids.shape[0]
    outs = (
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((count, dim), jnp.float32),
        jax.ShapeDtypeStruct((5 * count,), jnp.int32),  # work memory
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
    """Applies `optimizers.RowwiseAdaGrad` to rows and accumulators f32[n] in place.

    The result equals the optimizer's up to rounding.

    Args:
        rows: f32[n * width / 128, 128], as stored. XLA would copy another shape of them.
        row: i32[k], distinct rows with PAD behind the last.
        sums: f32[k, dim], their gradients.
        learning_rate: f32[] or, one per row, f32[k, 1].
    """
    outs = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (rows, accumulator))
    call = jax.ffi.ffi_call("JaxrankRowwiseAdagrad", outs, input_output_aliases={0: 0, 1: 1})
    learning_rates = learning_rate.astype(jnp.float32).reshape(-1)
    settings = dict(stride=np.int64(width), eps=np.float32(eps))
    rows, accumulator = call(rows, accumulator, row, sums, learning_rates, **settings)
    return rows, accumulator


def _operands(vectors: IndexedVectors) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (vectors, index, scale), with an empty array for None."""
    index = jnp.zeros(0, jnp.int32) if vectors.index is None else vectors.index
    scale = jnp.zeros(0, jnp.float32) if vectors.scale is None else vectors.scale
    return vectors.source, index, scale
