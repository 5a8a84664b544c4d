"""A vector for each id, in order, that need not be made before it is added to others.

The gradients of a list's ids are one vector times their weights. On CPU to write it once for each
id takes as long as to add them all up.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends.base import VectorLayout
from jaxrank.features import PAD


@dataclasses.dataclass(frozen=True)
class IndexedVectors:
    """Of `count` ids: the vectors at `index` i32[count] of a block or of a table's view, or a whole
    block, times `scale` f[count] if given."""

    count: int
    source: jax.Array
    index: jax.Array | None = None
    scale: jax.Array | None = None


def split(
    vector_layout: VectorLayout, vectors: IndexedVectors, count: int
) -> tuple[IndexedVectors, IndexedVectors]:
    """The first `count` of them, which have no scale, and those behind."""
    source, index, others = vectors.source, vectors.index, vectors.count - count
    if index is None:
        begin = vector_layout.length(count)
        return IndexedVectors(count, source[:begin]), IndexedVectors(others, source[begin:])
    return IndexedVectors(count, source, index[:count]), IndexedVectors(
        others, source, index[count:]
    )


def joined(vector_layout: VectorLayout, pieces: Sequence[IndexedVectors]) -> jax.Array:
    """The block of the vectors of all pieces, one behind the other."""
    blocks = [
        p.source if p.index is None else vector_layout.take(p.source, p.index, p.scale)
        for p in pieces
    ]
    return jnp.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def indices(pieces: Sequence[IndexedVectors]) -> jax.Array:
    """i32[ids] of all pieces, one behind the other: where each vector is in their sources, one
    behind the other."""
    found, begin = [], 0
    for p in pieces:
        here = jnp.arange(p.count, dtype=jnp.int32) if p.index is None else p.index
        found.append(jnp.where(here == PAD, PAD, here + begin) if begin else here)
        begin += p.source.shape[0]
    return jnp.concatenate(found)


def scales(pieces: Sequence[IndexedVectors]) -> jax.Array | None:
    """f[ids] of all pieces, one behind the other; None where none has any."""
    if all(p.scale is None for p in pieces):
        return None
    ones = [jnp.ones(p.count, p.source.dtype) if p.scale is None else p.scale for p in pieces]
    return jnp.concatenate(ones)


def add(
    vector_layout: VectorLayout, block: jax.Array, at: jax.Array, pieces: Sequence[IndexedVectors]
) -> jax.Array:
    """The block with the vectors of all pieces added at i32[ids]."""
    begin = 0
    for p in pieces:
        here = at[begin : begin + p.count]
        block = vector_layout.add(block, here, p.source, p.index, scale=p.scale)
        begin += p.count
    return block
