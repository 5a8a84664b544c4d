"""GPU kernel that sums the vectors of equal keys and changes a row by each sum.

XLA on GPU adds the gradients of sorted ids to memory one by one. It uses an array with as many rows
as there are ids, most of them unused, which it clears before and reads again after. In this kernel
each of many programs reads a chunk of the sorted ids and adds their vectors up in registers. At the
end of a run of equal ids it changes the row at once. A gradient is therefore read once, a row is
read and written once, and there is no array between them.

A run that extends beyond a chunk leaves a piece per chunk. Pieces are sorted like the ids, so the
kernel runs on them in turn, until one chunk holds all. The ids alone therefore determine the order
of every sum: there are no atomic additions, and runs repeat to the bit.

`take` reads rows in the same way, for vectors that must be in memory.

The kernel uses Triton through Pallas, which some later JAX will not have. `is_here` checks for it.
`duplicates` and `xla` keep the implementation in XLA.
"""

import dataclasses
import functools
import importlib.util
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.features import PAD

CHUNK = 64  # ids per chunk, read one after another
PIECES = 32  # pieces per chunk in the later passes, which have few pieces
UNROLLED = 4  # ids whose vectors are loaded at the same time
_TILE = 128  # numbers that a warp reads at once
_WARPS = 8  # maximum per program
_TAKEN = 4096  # numbers that a program of `take` reads
_CAPABILITY = 8.0  # lowest CUDA capability for which XLA has Triton: A100

# Computes the change from: rows of each array f[k, dim] or f[k], sums f[k, dim], the learning rate,
# scalars.
Change = Callable[..., Any]


def is_here(device: Any) -> bool:
    """Returns True if JAX has Pallas with Triton, and XLA has Triton for this NVIDIA GPU."""
    capability = getattr(device, "compute_capability", "")  # not a number on other GPUs
    is_number = re.fullmatch(r"\d+\.\d+", capability) is not None
    return is_number and float(capability) >= _CAPABILITY and _has_triton()


@functools.cache
def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    except ModuleNotFoundError:  # no Pallas at all
        return False


def fits(dim: int) -> bool:
    """Returns True if the kernel works on vectors of this dimension."""
    return dim & (dim - 1) == 0 and dim <= _TILE * _WARPS


@dataclasses.dataclass(frozen=True)
class KernelInputs:
    """The input of the kernel, sorted by key.

    key: i32[n], rising, with PAD behind the last.
    local_row: i32[n], the index of the row that each key changes. Equal for equal keys.
    sources: f32[m, dim] each.
    index: i32[n], the index of each vector in the concatenated sources, or PAD for zeros. None: in
        order.
    scale: f32[n], the factor of each vector.
    learning_rate: f32[] or f32[n], an argument of `change`. Equal for equal keys.
    scalars: further arguments of `change`, arrays of one number.
    """

    key: jax.Array
    local_row: jax.Array
    sources: tuple[jax.Array, ...]
    index: jax.Array | None = None
    scale: jax.Array | None = None
    learning_rate: jax.Array | None = None
    scalars: tuple[jax.Array, ...] = ()


def change_rows(
    arrays: Any,
    inputs: KernelInputs,
    change: Change,
    *,
    chunk: int = CHUNK,
    pieces: int = PIECES,
    interpret: bool = False,
) -> Any:
    """Changes the rows of the arrays that are the local row of a key.

    Args:
        arrays: a tree of f32[rows, width] and f32[rows], changed in place.
        change: (rows of each array f32[k, dim] or f32[k], the sums f32[k, dim], learning rate
            f32[] or f32[k, 1] or None, *scalars) -> the numbers to add. It is traced in the kernel.
        interpret: runs without a GPU.
    """
    while inputs.key.shape[0]:
        arrays, inputs = _pass(arrays, inputs, change, chunk, interpret)
        chunk = pieces
    return arrays


def take(source: jax.Array, index: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Reads the rows of f32[rows, dim] at i32[k]: f32[k, dim], zero for PAD."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    count, dim = index.shape[0], source.shape[1]
    if not count:
        return jnp.zeros((0, dim), source.dtype)
    beside = max(1, _TAKEN // dim)

    def kernel(index: Any, source: Any, taken: Any) -> None:
        at = pl.program_id(0) * beside + jax.lax.broadcasted_iota(jnp.int32, (beside, 1), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (1, dim), 1)
        row = triton.load(index.at[at], mask=at < count, other=PAD)
        vectors = triton.load(source.at[row, column], mask=row != PAD, other=0.0)
        triton.store(taken.at[at, column], vectors, mask=at < count)

    return pl.pallas_call(
        kernel,
        grid=(math.ceil(count / beside),),
        out_shape=jax.ShapeDtypeStruct((count, dim), source.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="take_rows",
    )(index, source)


def _pass(
    arrays: Any, inputs: KernelInputs, change: Change, chunk: int, interpret: bool
) -> tuple[Any, KernelInputs]:
    """Changes the rows of runs that lie within one chunk. Returns the pieces of other runs too."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    sources, dim, count = inputs.sources, inputs.sources[0].shape[1], inputs.key.shape[0]
    beside = max(1, _TILE // dim)  # chunks per program
    chunks = math.ceil(count / chunk)
    leaves, tree = jax.tree.flatten(arrays)
    per_id = {
        "key": inputs.key,
        "local_row": inputs.local_row,
        "index": inputs.index,
        "scale": inputs.scale,
    }
    learning_rate = inputs.learning_rate
    if learning_rate is not None and learning_rate.ndim:
        per_id["learning_rate"] = learning_rate
    read = {name: x for name, x in per_id.items() if x is not None}
    scalars = [x.reshape(1) for x in inputs.scalars]
    if learning_rate is not None and not learning_rate.ndim:
        scalars.insert(0, learning_rate.reshape(1))
    operands = [*read.values(), *sources, *scalars, *leaves]
    before_scalars = len(read) + len(sources)

    def changes(
        stored: Sequence[jax.Array], sums: jax.Array, learning_rate: Any, scalars: Any
    ) -> Any:
        if "learning_rate" not in read:
            learning_rate, scalars = (
                (None, scalars) if inputs.learning_rate is None else (scalars[0], scalars[1:])
            )
        return jax.tree.leaves(
            change(jax.tree.unflatten(tree, stored), sums, learning_rate, *scalars)
        )

    def kernel(*refs: Any) -> None:
        program = _Kernel(
            read=dict(zip(read, refs, strict=False)),
            sources=refs[len(read) : before_scalars],
            scalars=[s[0] for s in refs[before_scalars : len(operands) - len(leaves)]],
            arrays=refs[len(operands) : -1],
            pieces=refs[-1],
            change=changes,
            load=triton.load,
            store=triton.store,
            when=pl.when,
            count=count,
            dim=dim,
            beside=beside,
            chunk=chunk,
        )
        program.run(pl.program_id(0))

    programs = math.ceil(chunks / beside)
    *leaves, pieces = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves),
            jax.ShapeDtypeStruct((2 * programs * beside, dim), sources[0].dtype),
        ],
        input_output_aliases={len(operands) - len(leaves) + i: i for i in range(len(leaves))},
        compiler_params=triton.CompilerParams(
            num_warps=max(1, min(_WARPS, dim // _TILE)), num_stages=1
        ),
        interpret=interpret,
        name="change_rows",
    )(*operands)
    left = inputs.key[:0] if chunks == 1 else _keys_of_pieces(inputs.key, chunk)
    at_ends = {name: _chunk_ends(x, chunk)[: left.shape[0]] for name, x in read.items()}
    return jax.tree.unflatten(tree, leaves), KernelInputs(
        key=left,
        local_row=at_ends["local_row"],
        sources=(pieces,),
        learning_rate=at_ends.get("learning_rate", learning_rate),
        scalars=inputs.scalars,
    )


def _chunk_ends(x: jax.Array, chunk: int) -> jax.Array:
    """Reads x [n] at the first and the last index of each chunk, [2 * chunks]."""
    first = jnp.arange(0, x.shape[0], chunk)
    ends = jnp.stack([first, jnp.minimum(first + chunk, x.shape[0]) - 1], axis=1)
    return x[ends.reshape(-1)]


def _keys_of_pieces(key: jax.Array, chunk: int) -> jax.Array:
    """Computes the keys of the two pieces of each chunk, i32[2 * chunks].

    The first piece is of a run that began before the chunk, the second of a run that extends beyond
    it. PAD where there is no piece.
    """
    beside = jnp.pad(key, 1, constant_values=PAD)
    first = jnp.arange(0, key.shape[0], chunk)
    other = jnp.stack([first, jnp.minimum(first + chunk, key.shape[0]) + 1], axis=1).reshape(-1)
    ends = _chunk_ends(key, chunk)
    return jnp.where(ends == beside[other], ends, PAD)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel of several chunks side by side, each in its own row of the computed arrays.

    Numbers per id are [beside, 1], vectors are [beside, dim].
    """

    read: dict[str, Any]
    sources: Sequence[Any]
    scalars: Sequence[jax.Array]
    arrays: Sequence[Any]
    pieces: Any
    change: Callable[..., list[jax.Array]]
    load: Callable[..., jax.Array]
    store: Callable[..., None]
    when: Callable[..., Any]
    count: int
    dim: int
    beside: int
    chunk: int

    def run(self, number: Any) -> None:
        chunk_number = number * self.beside + jax.lax.broadcasted_iota(
            jnp.int32, (self.beside, 1), 0
        )
        begin = chunk_number * self.chunk
        before, key = self._key(begin - 1), self._key(begin)
        is_head = (before == key).astype(jnp.int32)
        zeros = jnp.zeros((self.beside, self.dim), jnp.float32)

        def step(i: jax.Array, carry: Any) -> Any:
            return self._step(begin + i * UNROLLED, chunk_number, *carry)

        total, before, key, is_head = jax.lax.fori_loop(
            0, self.chunk // UNROLLED, step, (zeros, before, key, is_head)
        )
        continues = (before == key) & (before != PAD)
        # A chunk of one run is a head. Its tail adds nothing.
        self._put(self.pieces, 2 * chunk_number, continues & (is_head != 0), total)
        tail = jnp.where(is_head != 0, 0.0, total)
        self._put(self.pieces, 2 * chunk_number + 1, continues, tail)

    def _step(
        self,
        at: jax.Array,
        chunk_number: jax.Array,
        total: jax.Array,
        before: jax.Array,
        key: jax.Array,
        is_head: jax.Array,
    ) -> Any:
        """Processes the ids at, at + 1, ...: loads their vectors first, then adds them up."""
        keys = [before, key, *(self._key(at + j + 1) for j in range(UNROLLED))]
        vectors, ends, heads = [], [], []
        for j in range(UNROLLED):
            is_id = keys[j + 1] != PAD
            vectors.append(self._vector(at + j, is_id))
            is_head = is_head * (keys[j] == keys[j + 1]).astype(jnp.int32)
            is_end = is_id & (keys[j + 1] != keys[j + 2])
            ends.append(is_end & (is_head == 0))
            heads.append(is_end & (is_head != 0))
        rows = [None if self._branches else self._row(at + j, ends[j]) for j in range(UNROLLED)]
        for j in range(UNROLLED):
            total = jnp.where(keys[j] == keys[j + 1], total + vectors[j], vectors[j])

            def end(total: jax.Array = total, j: int = j) -> None:
                row = rows[j] or self._row(at + j, ends[j])
                self._change(row, ends[j], total)
                self._put(self.pieces, 2 * chunk_number, heads[j], total)

            if self._branches:
                self.when(jnp.max((ends[j] | heads[j]).astype(jnp.int32)) != 0)(end)
            else:
                end()
        return total, keys[-2], keys[-1], is_head

    @property
    def _branches(self) -> bool:
        """True if code for the end of a run is skipped elsewhere.

        With chunks side by side a run ends in nearly every step, so the rows of all chunks are
        loaded ahead instead.
        """
        return self.beside == 1

    def _row(self, at: jax.Array, is_end: jax.Array) -> tuple[jax.Array, list[jax.Array], Any]:
        """Loads the local row, the rows and the learning rate of ids that end a run."""
        local_row = self._load_field("local_row", at, is_end, PAD)
        rows = [self._get(array, local_row, is_end) for array in self.arrays]
        return (
            local_row,
            rows,
            self._load_field("learning_rate", at, is_end) if "learning_rate" in self.read else None,
        )

    def _change(self, row: Any, is_end: jax.Array, sums: jax.Array) -> None:
        local_row, rows, learning_rate = row
        changes = self.change(rows, sums, learning_rate, self.scalars)
        for array, before, change in zip(self.arrays, rows, changes, strict=True):
            self._put(array, local_row, is_end, before + change)

    def _key(self, at: jax.Array) -> jax.Array:
        return self._load_field("key", at, (at >= 0) & (at < self.count), PAD)

    def _vector(self, at: jax.Array, mask: jax.Array) -> jax.Array:
        where = self._load_field("index", at, mask, PAD) if "index" in self.read else at
        parts, begin = [], 0
        for source in self.sources:
            end = begin + source.shape[0]
            is_here = mask & (begin <= where) & (where < end)
            parts.append(self._get(source, where - begin, is_here))
            begin = end
        vector = functools.reduce(operator.add, parts)
        return vector * self._load_field("scale", at, mask) if "scale" in self.read else vector

    def _load_field(self, name: str, at: jax.Array, mask: jax.Array, other: Any = 0) -> jax.Array:
        return self.load(self.read[name].at[at], mask=mask, other=other)

    @property
    def _column(self) -> jax.Array:
        return jax.lax.broadcasted_iota(jnp.int32, (1, self.dim), 1)

    def _get(self, array: Any, row: jax.Array, mask: jax.Array) -> jax.Array:
        if len(array.shape) == 1:
            return self.load(array.at[row[:, 0]], mask=mask[:, 0], other=0.0)
        return self.load(array.at[row, self._column], mask=mask, other=0.0)

    def _put(self, array: Any, row: jax.Array, mask: jax.Array, new: jax.Array) -> None:
        if len(array.shape) == 1:
            self.store(array.at[row[:, 0]], new, mask=mask[:, 0])
        else:
            self.store(array.at[row, self._column], new, mask=mask)
