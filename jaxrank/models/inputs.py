"""Inputs of a model: features of a batch, one by one or all features of a kind side by side."""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.features import PAD
from jaxrank.validate import nearest

Value = TypeVar("Value")


def _same(x: jax.Array) -> jax.Array:
    return x


class Share(NamedTuple):
    """The share of the global batch that a model sees. By default it is the whole batch.

    first: i32[], the index of its first example.
    mean: averages an array over the shares of all devices. Differentiable.
    weights: f[B], weights of examples in means over the global batch: 0 for an example that counts
        for no task, equal for all others, 1 on average over the global batch. None: all 1.
    counted: f[], number of examples of the global batch that count. None: all.
    """

    first: Any = 0
    mean: Callable[[jax.Array], jax.Array] = _same
    weights: Any = None
    counted: Any = None

    def batch_mean(self, x: jax.Array) -> jax.Array:
        """Returns f[...], the mean of x f[B, ...] over the examples of the global batch that count.

        0 where no example counts.
        """
        if self.weights is not None:
            x = x * self.weights.astype(x.dtype).reshape(-1, *([1] * (x.ndim - 1)))
        return self.mean(x.mean(axis=0))


class Group(enum.Enum):
    """All features of a kind, in the order of `Inputs.features`."""

    DENSE = "dense"
    VECTORS = "vectors"
    SEQUENCES = "sequences"


DENSE, VECTORS, SEQUENCES = Group

# Parts along an axis of an array, in order. A part is all features of a kind, one feature by its
# name, or a number of columns that the model computes.
Parts: TypeAlias = tuple[Group | str | int, ...]

# Dependence of an array of a model on the features: {axis: its parts}, the name of the feature that
# the array belongs to, the names of several that it mixes in this order, or None if it depends on
# features in another way.
Reading: TypeAlias = Mapping[int, Parts] | str | tuple[str, ...] | None


class Columns(NamedTuple):
    """The first vectors of a looked-up array.

    read: index of the array.
    features: feature of each vector. A feature with several places occurs several times.
    """

    read: int
    features: tuple[str, ...]


class Span(NamedTuple):
    """A list that is not combined: `length` places of a looked-up array, starting at `first`.

    sequence: see `features.Ragged`.
    """

    feature: str
    read: int
    first: int
    length: int
    sequence: str = ""


class Names(NamedTuple):
    """Names of the features in `Inputs`.

    dense: feature of each column of `Inputs.all_dense`.
    vectors: features of each array of `Inputs.all_vectors`.
    sequences: feature of each of `Inputs.all_sequences`.
    """

    dense: tuple[str, ...]
    vectors: tuple[Columns, ...]
    sequences: tuple[Span, ...]


class _Lazy(Mapping[str, Value], Generic[Value]):
    """Mapping that computes the value of a feature at its first use."""

    def __init__(self, kind: str, names: Sequence[str], read: Callable[[str], Value]):
        self._kind, self._names, self._read = kind, tuple(dict.fromkeys(names)), read

    def __getitem__(self, name: str) -> Value:
        if name not in self._names:
            raise InputError(
                f"model: inputs.{self._kind} must have a feature {name!r}: found"
                f" {', '.join(self._names) or 'none'}{nearest(str(name), self._names)}."
            )
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def masked_mean(vectors: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f[B, dim], the mean of the vectors f[B, L, dim] where bool[B, L] `mask` is True.

    It is 0 without any.
    """
    count = jnp.maximum(mask.sum(axis=1, keepdims=True), 1).astype(vectors.dtype)
    return jnp.where(mask[:, :, None], vectors, 0).sum(axis=1) / count


def flat_events(x: jax.Array) -> jax.Array:
    """Returns f[B * L, dim], the vectors of f[B, L, dim] one after another."""
    return x.reshape(-1, x.shape[-1])


@jax.tree_util.register_pytree_node_class
class Inputs:
    """The features of a batch, or of one device's share of it.

    Features are computed when they are read by name, so an unread feature costs nothing.

    - `inputs.dense[name]`: f[B].
    - `inputs.vectors[name]`: f[B, dim] of a feature of one id and of a combined list;
      f[B, places, dim] of a feature of several ids.
    - `inputs.sequences[name]`: (f[B, L, dim], bool[B, L] which places are filled).
    - `inputs.features`: f[B, n], all of them side by side.

    Models that read every feature use all features of a kind: `all_dense`, `all_vectors` and
    `all_sequences`.

    share: the share of the global batch, for dropout and batch normalisation.

    It is a pytree, so it passes through `jax.jit` and `jax.eval_shape`.

    Args:
        names: of the features.
        dense: f[B, n].
        reads: pairs of looked-up vectors f[B, n_i, dim_i] and, if they include sequences, their ids
            i32[B, n_i] or a mask bool[B, n_i]; otherwise None.
    """

    def __init__(
        self,
        names: Names,
        dense: jax.Array,
        reads: Sequence[tuple[jax.Array, jax.Array | None]],
        share: Share = Share(),  # noqa: B008  a NamedTuple of constants
    ):
        self.names, self._dense, self._reads, self.share = names, dense, tuple(reads), share

    @classmethod
    def from_arrays(
        cls,
        dense: Mapping[str, jax.Array],
        vectors: Mapping[str, jax.Array],
        sequences: Mapping[str, tuple[jax.Array, jax.Array]] | None = None,
        members: Mapping[str, str] | None = None,
    ) -> "Inputs":
        """Makes inputs from features by name, in this order, with the shapes listed above.

        Args:
            members: name of the sequence that each of `sequences` is part of; see
                `features.Ragged`. Without a name it is part of none.

        >>> import numpy as np
        >>> floats = np.ones(2, np.float32)
        >>> inputs = Inputs.from_arrays({"age": floats}, {"user": np.ones((2, 4), np.float32)})
        >>> inputs.features.shape
        (2, 5)
        """
        sequences, members = sequences or {}, members or {}
        arrays = [v if v.ndim == 3 else v[:, None] for v in vectors.values()]
        places = zip(vectors, arrays, strict=True)
        columns = [Columns(i, (name,) * v.shape[1]) for i, (name, v) in enumerate(places)]
        spans = [
            Span(name, len(arrays) + i, 0, sequence[0].shape[1], members.get(name, ""))
            for i, (name, sequence) in enumerate(sequences.items())
        ]
        every = [*dense.values(), *arrays, *(v for v, _ in sequences.values())]
        rows = every[0].shape[0] if every else 0
        matrix = jnp.stack([*dense.values()], axis=1) if dense else jnp.zeros((rows, 0))
        return cls(
            Names(tuple(dense), tuple(columns), tuple(spans)),
            matrix,
            [*((v, None) for v in arrays), *sequences.values()],
        )

    @property
    def all_dense(self) -> jax.Array:
        """Dense features f[B, n], with the names `names.dense`."""
        return self._dense

    @property
    def all_vectors(self) -> tuple[jax.Array, ...]:
        """Vectors (f[B, n_i, dim_i], ...): per dimension one array of ids and one of lists."""
        return tuple(self._reads[c.read][0][:, : len(c.features)] for c in self.names.vectors)

    @property
    def all_reads(self) -> tuple[tuple[jax.Array, jax.Array | None], ...]:
        """The pairs of arrays `reads` that the features are parts of."""
        return self._reads

    @property
    def all_sequences(self) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Sequences ((f[B, L_i, dim_i], bool[B, L_i] which places are filled), ...)."""
        return tuple(map(self._sequence, self.names.sequences))

    @property
    def dense(self) -> Mapping[str, jax.Array]:
        """{dense feature: f[B]}."""
        return _Lazy(
            "dense", self.names.dense, lambda name: self._dense[:, self.names.dense.index(name)]
        )

    @property
    def vectors(self) -> Mapping[str, jax.Array]:
        """{feature: f[B, dim]} of one id or a combined list, f[B, places, dim] of several ids."""
        columns = {name: c for c in self.names.vectors for name in c.features}

        def read(name: str) -> jax.Array:
            column = columns[name]
            first, count = column.features.index(name), column.features.count(name)
            array = self._reads[column.read][0]
            return array[:, first] if count == 1 else array[:, first : first + count]

        return _Lazy("vectors", tuple(columns), read)

    @property
    def sequences(self) -> Mapping[str, tuple[jax.Array, jax.Array]]:
        """{list that is not combined: (f[B, L, dim], bool[B, L] which places are filled)}."""
        spans = {span.feature: span for span in self.names.sequences}
        return _Lazy("sequences", tuple(spans), lambda name: self._sequence(spans[name]))

    def _sequence(self, span: Span) -> tuple[jax.Array, jax.Array]:
        vectors, ids = self._reads[span.read]
        assert ids is not None
        places = slice(span.first, span.first + span.length)
        mask = ids[:, places]
        return vectors[:, places], mask if mask.dtype == bool else mask != PAD

    @property
    def features(self) -> jax.Array:
        """Dense features, vectors and the mean of each sequence's filled places, f[B, n].

        The order is `all_dense`, `all_vectors`, `all_sequences`. An empty sequence is 0.
        """
        flat = [v.reshape(v.shape[0], -1) for v in self.all_vectors]
        means = []
        for vectors, mask in self.all_sequences:
            means.append(masked_mean(vectors, mask))
        return jnp.concatenate([self._dense, *flat, *means], axis=1)

    @property
    def size(self) -> int:
        """Number of columns of `features`."""
        dims = [read[0].shape[2] for read in self._reads]
        vectors = sum(len(c.features) * dims[c.read] for c in self.names.vectors)
        return len(self.names.dense) + vectors + sum(dims[s.read] for s in self.names.sequences)

    def shapes(self, examples: int) -> "Inputs":
        """Returns the same features of a number of examples, as jax.ShapeDtypeStruct."""

        def shape(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype)

        return Inputs(self.names, *jax.tree.map(shape, (self._dense, self._reads)))

    def zeros(self) -> "Inputs":
        """Returns inputs of the same shapes with zeros."""
        arrays = self._dense, self._reads
        return Inputs(self.names, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays))

    def tree_flatten(self) -> tuple[Any, Any]:
        share = self.share
        arrays = share.first, share.weights, share.counted
        return (self._dense, self._reads, *arrays), (self.names, share.mean)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Inputs":
        (names, mean), (dense, reads, first, weights, counted) = static, arrays
        self = object.__new__(cls)
        self.names, self._dense, self._reads = names, dense, reads
        self.share = Share(first, mean, weights, counted)
        return self
