"""Compares both vector layouts with NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded import set_chunk

from jaxrank.embedding.backends import lazy
from jaxrank.embedding.backends.gpu import GpuRowLayout
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.embedding.backends.tpu import TpuLayout
from jaxrank.embedding.backends.xla import RowLayout
from jaxrank.embedding.storage import padded_width
from jaxrank.features import PAD

# Layout, dimension, and vectors per chunk: several chunks, the last not full, or one chunk.
SHAPES = [
    (RowLayout, 3, 8192),
    (RowLayout, 128, 250),
    (functools.partial(GpuRowLayout, interpret=True), 16, 8192),
    *((TpuLayout, dim, 640) for dim in (1, 16, 128, 160)),
    (TpuLayout, 3, 8192),
]


def _name(x):
    return getattr(getattr(x, "func", x), "__name__", str(x))


@pytest.fixture(params=SHAPES, ids=lambda s: "-".join(map(_name, s)))
def vector_layout(request, monkeypatch):
    kind, dim, chunk = request.param
    set_chunk(monkeypatch, chunk)
    return kind(dim, padded_width(dim))


def vectors(count, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)


def to_block(vector_layout, array):
    """Makes a block of vectors f[k, dim]. k is a multiple of the unit."""
    return vector_layout.from_examples(jnp.asarray(array)[None])


def block_vectors(vector_layout, block, count):
    assert len(block) == vector_layout.length(count)
    return np.asarray(vector_layout.to_examples(block, 1, count)[0])


def indices(count, below, seed=1):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.2, PAD, rng.integers(0, below, count)).astype(np.int32)


def picked(array, index, scale=1.0):
    result = np.where((index == PAD)[:, None], 0, array[np.where(index == PAD, 0, index)])
    return (result * np.broadcast_to(scale, len(index))[:, None]).astype(np.float32)


def test_vectors_are_taken_to_where_they_are_asked_for(vector_layout):
    array, index = vectors(256, vector_layout.dim), indices(1900, 256)
    block = to_block(vector_layout, array)
    result = block_vectors(vector_layout, vector_layout.take(block, index), len(index))
    np.testing.assert_array_equal(result, picked(array, index))
    scale = np.random.default_rng(2).random(len(index)).astype(np.float32)
    result = block_vectors(vector_layout, vector_layout.take(block, index, scale), len(index))
    np.testing.assert_allclose(result, picked(array, index, scale), rtol=1e-6)


@pytest.mark.parametrize("rising", [False, True])
def test_vectors_are_added_where_they_belong(vector_layout, rising):
    array, at = vectors(1920, vector_layout.dim), indices(1920, 256)
    index = np.random.default_rng(3).permutation(1920).astype(np.int32)
    scale = np.random.default_rng(2).random(1920).astype(np.float32)
    at = np.sort(at) if rising else at
    start = vectors(256, vector_layout.dim, seed=4)
    expected = start.astype(np.float64)
    for place, source, factor in zip(at, index, scale, strict=True):
        if place != PAD:
            expected[place] += factor * array[source]
    block = vector_layout.add(
        to_block(vector_layout, start),
        at,
        to_block(vector_layout, array),
        index,
        scale=scale,
        rising=rising,
    )
    np.testing.assert_allclose(
        block_vectors(vector_layout, block, 256), expected, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("places", [1, 5])
def test_vectors_of_examples_come_back_as_they_went(vector_layout, places):
    array = vectors(4 * places, vector_layout.dim).reshape(4, places, vector_layout.dim)
    block = vector_layout.from_examples(jnp.asarray(array))
    assert block.size >= array.size
    np.testing.assert_array_equal(vector_layout.to_examples(block, 4, places), array)


def negative(stored, sums, local_row):
    """Computes the change of each row to minus its sum, and of its number to its local row."""
    rows, numbers = stored
    return -sums - rows, local_row - numbers


@pytest.mark.parametrize("every", [False, True])
def test_rows_are_changed_and_no_others(vector_layout, every):
    rows = 1024
    stored = np.zeros((rows, vector_layout.width), np.float32)
    stored[:, : vector_layout.dim] = vectors(rows, vector_layout.dim)
    arrays = jnp.asarray(stored.reshape(-1, 128)), jnp.full(rows, -1.0)
    row = np.full(rows if every else 640, PAD, np.int32)
    if every:
        row[:] = np.arange(rows)
    else:
        row[:600] = np.sort(np.random.default_rng(5).choice(rows, 600, replace=False))
    sums = vectors(len(row), vector_layout.dim, seed=6)
    block = to_block(vector_layout, sums)
    if every:
        result, numbers = vector_layout.change_all(arrays, block, negative)
    else:
        result, numbers = jax.jit(lambda a, b: vector_layout.change(a, row, b, negative))(
            arrays, block
        )
    expected, expected_numbers = stored.copy(), np.full(rows, -1.0)
    is_row = row != PAD
    expected[row[is_row], : vector_layout.dim] = -sums[is_row]
    expected_numbers[row[is_row]] = row[is_row]
    np.testing.assert_allclose(np.reshape(result, (rows, -1)), expected, atol=1e-6)
    np.testing.assert_array_equal(numbers, expected_numbers)


def test_pieces_are_the_vectors_at_their_indices_in_all_sources():
    """Vectors come from a block and from lists, which have few vectors and many ids."""
    vector_layout = RowLayout(8, 8)
    few, scale = jnp.asarray(vectors(5, 8, seed=1)), np.random.default_rng(2).random(40)
    pieces = [
        IndexedVectors(30, jnp.asarray(vectors(30, 8))),
        IndexedVectors(40, few, jnp.asarray(indices(40, 5)), jnp.asarray(scale, jnp.float32)),
        IndexedVectors(20, -few, jnp.asarray(indices(20, 5, seed=3))),
    ]
    for some in (pieces, pieces[1:], pieces[::2], pieces[::-1], pieces[:1]):
        index, scale = lazy.indices(some), lazy.scales(some)
        assert len(index) == sum(p.count for p in some)
        source = jnp.concatenate([p.source for p in some])
        result = vector_layout.take(source, index, scale)
        np.testing.assert_array_equal(result, lazy.joined(vector_layout, some))
        assert (scale is None) == all(p.scale is None for p in some)
        pads = sum((p.index == PAD).sum() for p in some if p.index is not None)
        assert pads == (index == PAD).sum()
