"""A vector per id, in order, that need not be written to memory before it is added to others.

The gradients of a list's ids are one vector times their weights. On CPU, writing this vector once
per id takes as long as adding all of them up.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends.base import VectorLayout
from jaxrank.features import PAD


@dataclasses.dataclass(frozen=True)
class IndexedVectors:
    """The vectors of `count` ids.

    They are the vectors at `index` i32[count] of a block or of a table's view, or a whole block,
    times `scale` f[count] if present.
    """

    count: int
    source: jax.Array
    index: jax.Array | None = None
    scale: jax.Array | None = None


def split(
    vector_layout: VectorLayout, vectors: IndexedVectors, count: int
) -> tuple[IndexedVectors, IndexedVectors]:
    """Splits vectors without scale into the first `count` and the rest."""
    source, index, others = vectors.source, vectors.index, vectors.count - count
    if index is None:
        begin = vector_layout.length(count)
        return IndexedVectors(count, source[:begin]), IndexedVectors(others, source[begin:])
    return IndexedVectors(count, source, index[:count]), IndexedVectors(
        others, source, index[count:]
    )


def joined(vector_layout: VectorLayout, pieces: Sequence[IndexedVectors]) -> jax.Array:
    """Concatenates the vectors of all pieces to one block."""
    blocks = [
        p.source if p.index is None else vector_layout.take(p.source, p.index, p.scale)
        for p in pieces
    ]
    return jnp.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def indices(pieces: Sequence[IndexedVectors]) -> jax.Array:
    """Computes i32[ids], the index of each vector in the concatenated sources of all pieces."""
    parts, begin = [], 0
    for p in pieces:
        index = jnp.arange(p.count, dtype=jnp.int32) if p.index is None else p.index
        parts.append(jnp.where(index == PAD, PAD, index + begin) if begin else index)
        begin += p.source.shape[0]
    return jnp.concatenate(parts)


def scales(pieces: Sequence[IndexedVectors]) -> jax.Array | None:
    """Concatenates the scales of all pieces, f[ids]. None if no piece has a scale."""
    if all(p.scale is None for p in pieces):
        return None
    ones = [jnp.ones(p.count, p.source.dtype) if p.scale is None else p.scale for p in pieces]
    return jnp.concatenate(ones)


def add(
    vector_layout: VectorLayout, block: jax.Array, at: jax.Array, pieces: Sequence[IndexedVectors]
) -> jax.Array:
    """Adds the vectors of all pieces to the block at i32[ids]."""
    begin = 0
    for p in pieces:
        target = at[begin : begin + p.count]
        block = vector_layout.add(block, target, p.source, p.index, scale=p.scale)
        begin += p.count
    return block
