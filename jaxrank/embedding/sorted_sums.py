"""Sums of the vectors of equal keys, and what follows from each sum, in one kernel on GPU.

XLA on GPU adds the gradients of sorted ids to memory one by one, into an array of as many rows as
there are ids, most of them never needed, which it has to clear before and to read again behind.
Here each of many threads of work reads a chunk of the sorted ids, adds their vectors up in
registers and, where a run of equal ids ends, changes the row at once. So a gradient is read once, a
row read and written once, and nothing lies between.

A run that goes on beyond a chunk leaves a piece for each chunk. Pieces are sorted as the ids are,
so the same is done with them, until one chunk holds all. The order of every sum is thereby given by
the ids alone: there are no atomic additions, and runs repeat to the bit.

In Pallas, whose kernels of this kind (Triton's) some later JAX will not have: `is_here` says
whether this one has; `duplicates` and `by_row` keep the way by XLA.
"""

import dataclasses
import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.features import PAD

CHUNK = 64  # ids that are read one after another
UNROLLED = 8  # of them, whose vectors are under way at a time
_TILE = 128  # numbers that a warp reads at once
_WARPS = 8  # of a kernel, at most

# (rows of each array f[k, dim] or f[k], the sums f[k, dim], the rate, scalars) -> their change.
Change = Callable[..., Any]


@functools.cache
def is_here() -> bool:
    """Whether JAX has Pallas by Triton."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def fits(dim: int) -> bool:
    """Whether vectors of so many numbers are what the kernel works on."""
    return dim & (dim - 1) == 0 and dim <= _TILE * _WARPS


@dataclasses.dataclass(frozen=True)
class Given:
    """What is added up, in the order of the keys.

    key: i32[n], rising, PAD behind the last.
    place: i32[n], the row that each changes; the same of equal keys.
    source: f32[m, dim].
    index: i32[n], where in the source the vector of each is, PAD for zeros; None: in order.
    scale: f32[n], what each vector is multiplied by.
    rate: f32[] or f32[n], for `change`; that of equal keys is the same.
    scalars: more for it, arrays of one number.
    """

    key: jax.Array
    place: jax.Array
    source: jax.Array
    index: jax.Array | None = None
    scale: jax.Array | None = None
    rate: jax.Array | None = None
    scalars: tuple[jax.Array, ...] = ()


def change_rows(
    arrays: Any, given: Given, change: Change, *, chunk: int = CHUNK, interpret: bool = False
) -> Any:
    """The arrays with the rows changed that are the place of a key.

    Args:
        arrays: a tree of f32[rows, width] and f32[rows], which are changed where they are.
        change: (rows of each array f32[k, dim] or f32[k], the sums f32[k, dim], rate f32[] or
            f32[k, 1] or None, *scalars) -> what is added to them. It is traced in the kernel.
        interpret: without a GPU.
    """
    while given.key.shape[0]:
        arrays, given = _pass(arrays, given, change, chunk, interpret)
    return arrays


def _pass(
    arrays: Any, given: Given, change: Change, chunk: int, interpret: bool
) -> tuple[Any, Given]:
    """The arrays after the runs that lie within one chunk, and the pieces of the others."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    dim = given.source.shape[1]
    beside = max(1, _TILE // dim)  # chunks of a kernel
    count = given.key.shape[0]
    needed = math.ceil(count / chunk)
    chunks = math.ceil(needed / beside) * beside
    filling = chunks * chunk - count

    def filled(x: jax.Array, value: int = 0) -> jax.Array:
        return jnp.pad(x, (0, filling), constant_values=value)

    key, place = filled(given.key, PAD), filled(given.place)
    index = None if given.index is None else filled(given.index)
    scale = None if given.scale is None else filled(given.scale)
    rate = given.rate
    if rate is not None:
        rate = filled(rate) if rate.ndim else rate[None]
    around = jnp.pad(key, 1, constant_values=-1)
    leaves, tree = jax.tree.flatten(arrays)
    named = dict(
        around=around, place=place, source=given.source, index=index, scale=scale, rate=rate
    )
    read = {name: x for name, x in named.items() if x is not None}
    scalars = [x.reshape(1) for x in given.scalars]
    operands = [*read.values(), *scalars, *leaves]

    def kernel(*refs: Any) -> None:
        by_name = dict(zip(read, refs, strict=False))
        of_scalars = refs[len(read) : len(read) + len(scalars)]
        *changed, pieces = refs[len(operands) :]
        _work(
            by_name,
            of_scalars,
            changed,
            pieces,
            functools.partial(_changes, tree, change),
            dim=dim,
            beside=beside,
            chunk=chunk,
            is_per_id=rate is not None and rate.shape[0] > 1,
            loads=triton.load,
            stores=triton.store,
            number=pl.program_id(0),
        )

    piece = jax.ShapeDtypeStruct((2 * chunks, dim), given.source.dtype)
    with warnings.catch_warnings():  # see the top of the file
        warnings.filterwarnings("ignore", message="The Pallas Triton backend")
        *leaves, pieces = pl.pallas_call(
            kernel,
            grid=(chunks // beside,),
            out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves), piece],
            input_output_aliases={len(read) + len(scalars) + i: i for i in range(len(leaves))},
            compiler_params=triton.CompilerParams(
                num_warps=max(1, min(_WARPS, dim // _TILE)), num_stages=1
            ),
            interpret=interpret,
            name="change_rows",
        )(*operands)
    arrays = jax.tree.unflatten(tree, leaves)
    if needed == 1:
        return arrays, dataclasses.replace(given, key=key[:0])

    # The first run of a chunk that began before it, and the last that goes on behind it.
    first, last = key[::chunk], key[chunk - 1 :: chunk]
    before, behind = around[0 : chunks * chunk : chunk], around[chunk + 1 :: chunk]
    keys = jnp.stack(
        [jnp.where(before == first, first, PAD), jnp.where(last == behind, last, PAD)], axis=1
    )

    def of_ends(x: jax.Array) -> jax.Array:
        if x.shape[0] == 1:
            return x[0]
        return jnp.stack([x[::chunk], x[chunk - 1 :: chunk]], axis=1).reshape(-1)[: 2 * needed]

    return arrays, Given(
        key=keys.reshape(-1)[: 2 * needed],
        place=of_ends(place),
        source=pieces,
        rate=None if rate is None else of_ends(rate),
        scalars=given.scalars,
    )


def _changes(tree: Any, change: Change, found: Sequence[jax.Array], *given: Any) -> list[jax.Array]:
    return jax.tree.leaves(change(jax.tree.unflatten(tree, found), *given))


def _work(
    read: dict[str, Any],
    scalars: Sequence[Any],
    arrays: Sequence[Any],
    pieces: Any,
    change: Callable[..., list[jax.Array]],
    *,
    dim: int,
    beside: int,
    chunk: int,
    is_per_id: bool,
    loads: Callable[..., jax.Array],
    stores: Callable[..., None],
    number: Any,
) -> None:
    """The kernel: so many chunks beside each other, each on lines of its own of what it computes.

    Keys and whatever is of an id are [beside, 1], vectors [beside, dim].
    """
    column = jax.lax.broadcasted_iota(jnp.int32, (1, dim), 1)
    mine = number * beside + jax.lax.broadcasted_iota(jnp.int32, (beside, 1), 0)
    begin = mine * chunk
    plain = [s[0] for s in scalars]
    rate = read["rate"][0] if "rate" in read and not is_per_id else None

    def of_id(name: str, at: jax.Array, mask: jax.Array, other: int = 0) -> jax.Array:
        return loads(read[name].at[at], mask=mask, other=other)

    def step(i: jax.Array, carry: Any) -> Any:
        total, before, here, is_head = carry
        at = begin + i * UNROLLED
        keys = [before, here]
        keys += [loads(read["around"].at[at + j + 2]) for j in range(UNROLLED)]
        vectors, ends, heads = [], [], []
        for j in range(UNROLLED):
            is_id = keys[j + 1] != PAD
            where = at + j
            if "index" in read:
                where = of_id("index", where, is_id)
            is_there = is_id & (where != PAD)
            vector = loads(read["source"].at[where, column], mask=is_there, other=0.0)
            if "scale" in read:
                vector = vector * of_id("scale", at + j, is_id)
            vectors.append(vector)
            is_head = is_head * (keys[j] == keys[j + 1]).astype(jnp.int32)
            is_end = is_id & (keys[j + 1] != keys[j + 2])
            ends.append(is_end & (is_head == 0))
            heads.append(is_end & (is_head != 0))
        founds, places, rates = [], [], []
        for j in range(UNROLLED):
            place = of_id("place", at + j, ends[j], PAD)
            places.append(place)
            founds.append([_rows(loads, a, place, ends[j], column) for a in arrays])
            rates.append(of_id("rate", at + j, ends[j]) if is_per_id else rate)
        for j in range(UNROLLED):
            is_same = keys[j] == keys[j + 1]
            total = jnp.where(is_same, total + vectors[j], vectors[j])
            news = change(founds[j], total, rates[j], *plain)
            for a, found, new in zip(arrays, founds[j], news, strict=True):
                _store(stores, a, places[j], ends[j], column, found + new)
            stores(pieces.at[2 * mine, column], total, mask=heads[j])
        return total, keys[-2], keys[-1], is_head

    before, here = loads(read["around"].at[begin]), loads(read["around"].at[begin + 1])
    is_head = (before == here).astype(jnp.int32)
    zeros = jnp.zeros((beside, dim), jnp.float32)
    total, before, here, is_head = jax.lax.fori_loop(
        0, chunk // UNROLLED, step, (zeros, before, here, is_head)
    )
    goes_on = (before == here) & (before != PAD)
    is_whole = goes_on & (is_head != 0)
    stores(pieces.at[2 * mine, column], total, mask=is_whole)
    tail = jnp.where(is_head != 0, 0.0, total)
    stores(pieces.at[2 * mine + 1, column], tail, mask=goes_on)


def _rows(loads: Any, array: Any, place: jax.Array, mask: jax.Array, column: jax.Array) -> Any:
    if len(array.shape) == 1:
        return loads(array.at[place[:, 0]], mask=mask[:, 0], other=0.0)
    return loads(array.at[place, column], mask=mask, other=0.0)


def _store(
    stores: Any, array: Any, place: jax.Array, mask: jax.Array, column: jax.Array, new: jax.Array
) -> None:
    if len(array.shape) == 1:
        stores(array.at[place[:, 0]], new, mask=mask[:, 0])
    else:
        stores(array.at[place, column], new, mask=mask)
