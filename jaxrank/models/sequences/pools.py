"""Pools of sequences: one vector from the vectors of an example's events.

The features of a sequence are read side by side: the vector of an event is the concatenation of the
vectors of its ids. Events are in the order of the stored lists, for a declared sequence the newest
event first.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.models.dot import AttentionPool
from jaxrank.models.inputs import Inputs, Reading, Span, masked_mean
from jaxrank.models.sequences.target_attention import TargetAttention
from jaxrank.models.sequences.transformer import Transformer
from jaxrank.validate import field, nearest, require

POOLS = ("target_attention", "mean", "learned_query", "transformer")
_TARGET = ("pool", ("target_attention",))
_TRANSFORMER = ("pool", ("transformer",))


@dataclasses.dataclass(frozen=True)
class SequencePool:
    """The pool of one sequence."""

    pool: str = field(
        choices=POOLS,
        help="pooling of the events. target_attention: a sum weighted by a tower that compares each"
        " event with the candidate (DIN); mean: their mean; learned_query: attention by a trained"
        " query; transformer: causal self-attention, read at the newest event",
    )
    candidate: Mapping[str, str] = field(
        {},
        read_when=_TARGET,
        help="feature of the events -> feature of the candidate that it is compared with, such as"
        " history_item: item. Both have one dimension",
    )
    mlp_units: tuple[int, ...] = field(
        (36,),
        at_least=1,
        at_most=1 << 20,
        non_empty=True,
        read_when=_TARGET,
        unit="units",
        help="widths of the tower of target_attention",
    )
    packed_length: float = field(
        0.0,
        at_least=0,
        read_when=_TARGET,
        unit="events per example",
        help="room for the events of a batch in target_attention, without the empty places of"
        " short lists. If they need more, all places are computed. 0: always all places",
    )
    layers: int = field(
        1,
        at_least=1,
        at_most=64,
        read_when=_TRANSFORMER,
        unit="layers",
        help="number of layers of the transformer",
    )
    heads: int = field(
        2,
        at_least=1,
        read_when=_TRANSFORMER,
        unit="heads",
        help="number of attention heads of the transformer; must divide the sum of the dimensions"
        " of the features",
    )
    positions: bool = field(
        True,
        read_when=_TRANSFORMER,
        help="adds a trained vector per position; for the ages of events set"
        " features.sequences.ages",
    )

    def check(self, where: str) -> None:
        needed = self.pool != "target_attention" or bool(self.candidate)
        must = "a feature of the events and the feature of the candidate"
        require(needed, f"{where}.candidate", must, dict(self.candidate))


class _Members(NamedTuple):
    """A sequence of a model: its name, and the numbers and spans of its features."""

    name: str
    numbers: tuple[int, ...]
    spans: tuple[Span, ...]


def pooled_sequences(
    pools: Mapping[str, SequencePool], inputs: Inputs, precision: str
) -> list[jax.Array]:
    """Returns f[B, dim] for each of `inputs.all_sequences`, within a module's `__call__`.

    A sequence that `pools` does not name has an `AttentionPool` per feature.

    Args:
        pools: by name of a sequence, or of a feature that is part of none.
    """
    sequences = inputs.all_sequences
    pooled: dict[int, jax.Array] = {}
    for members in _members(pools, inputs.names.sequences):
        parts = [sequences[i] for i in members.numbers]
        vectors = jnp.concatenate([vectors for vectors, _ in parts], axis=2)
        result = _pooled(pools[members.name], members, vectors, parts[0][1], inputs, precision)
        start = 0
        for i, (part, _) in zip(members.numbers, parts, strict=True):
            pooled[i] = result[:, start : start + part.shape[2]]
            start += part.shape[2]
    for i, sequence in enumerate(sequences):
        if i not in pooled:
            pooled[i] = AttentionPool(name=f"sequence_{i}")(*sequence)
    return [pooled[i] for i in range(len(sequences))]


def _pooled(
    pool: SequencePool,
    members: _Members,
    vectors: jax.Array,
    mask: jax.Array,
    inputs: Inputs,
    precision: str,
) -> jax.Array:
    name = f"sequence_{members.name}"
    if pool.pool == "target_attention":
        keys, candidate = _candidate(pool, members, inputs)
        units = tuple(pool.mlp_units)
        attention = TargetAttention(units, precision, pool.packed_length, name=name)
        return attention(vectors, mask, keys, candidate)
    if pool.pool == "transformer":
        return Transformer(pool.layers, pool.heads, pool.positions, precision, name=name)(
            vectors, mask
        )
    if pool.pool == "learned_query":
        return AttentionPool(name=name)(vectors, mask)
    return masked_mean(vectors, mask)


def _candidate(
    pool: SequencePool, members: _Members, inputs: Inputs
) -> tuple[jax.Array, jax.Array]:
    """Returns the compared parts of the events f[B, L, n] and of the candidate f[B, n]."""
    keys, candidates = [], []
    features = [span.feature for span in members.spans]
    for event, feature in pool.candidate.items():
        where = f"model.sequences.{members.name}.candidate"
        if event not in features:
            raise InputError(
                f"{where}: {event!r} must be a feature of the sequence, {', '.join(features)}"
                f"{nearest(event, features)}."
            )
        key, vector = inputs.sequences[event][0], inputs.vectors[feature]
        if vector.ndim != 2 or vector.shape[1] != key.shape[2]:
            raise InputError(
                f"{where}: {feature!r} must be one vector of dimension {key.shape[2]}, like the"
                f" vectors of {event!r}: found {list(vector.shape[1:])}. Let them share a table."
            )
        keys.append(key)
        candidates.append(vector)
    return jnp.concatenate(keys, axis=2), jnp.concatenate(candidates, axis=1)


def sequence_axes(pools: Mapping[str, SequencePool], spans: Sequence[Span]) -> dict[str, Reading]:
    """Returns how the arrays of the pools depend on the features; see `Model.input_axes`."""
    axes: dict[str, Reading] = {}
    pooled: set[int] = set()
    for members in _members(pools, spans):
        pooled |= set(members.numbers)
        pool, name = pools[members.name], f"sequence_{members.name}"
        features = tuple(span.feature for span in members.spans)
        if pool.pool == "target_attention":
            candidate = tuple(pool.candidate.values())
            axes[f"{name}/event/kernel"] = {0: (*features, *candidate)}
            axes[f"{name}/candidate/kernel"] = {0: candidate}
        elif pool.pool == "learned_query":
            axes[f"{name}/query"] = {0: features}
        elif pool.pool == "transformer":
            axes |= dict.fromkeys(_transformer_arrays(pool, name), features)
    for i, span in enumerate(spans):
        if i not in pooled:
            axes[f"sequence_{i}/query"] = span.feature
    return axes


def _transformer_arrays(pool: SequencePool, name: str) -> list[str]:
    """Returns the names of the arrays of a transformer, which mix all features of a sequence."""
    norms = [f"{name}/norm"]
    dense = []
    for i in range(pool.layers):
        norms += [f"{name}/block_{i}/norm_attention", f"{name}/block_{i}/norm_wide"]
        layers = ("query", "key", "value", "out", "wide", "narrow")
        dense += [f"{name}/block_{i}/{layer}" for layer in layers]
    arrays = [f"{norm}/{array}" for norm in norms for array in ("scale", "bias")]
    arrays += [f"{layer}/{array}" for layer in dense for array in ("kernel", "bias")]
    return [*arrays, *([f"{name}/position"] if pool.positions else [])]


def _members(pools: Mapping[str, SequencePool], spans: Sequence[Span]) -> list[_Members]:
    """Returns the sequences that `pools` names, with their features.

    Raises:
        InputError: a name is of no sequence.
    """
    names = [span.sequence or span.feature for span in spans]
    result = []
    for name in pools:
        numbers = tuple(i for i, known in enumerate(names) if known == name)
        if not numbers:
            known = ", ".join(dict.fromkeys(names)) or "none"
            raise InputError(
                f"model.sequences: {name!r} must be a sequence, or a ragged feature of combiner"
                f" 'none' that is in no sequence: found {known}{nearest(name, names)}."
            )
        result.append(_Members(name, numbers, tuple(spans[i] for i in numbers)))
    return result
