"""The exchange of split rows between the devices that read them and the devices that own them.

Each device sorts the ids that it reads once. This removes duplicates and brings the ids of one
owner together. The ids travel to each owner in a buffer of static size, and their vectors return
the same way. Gradients are summed per distinct id and follow the same path.

Nothing is dropped when a buffer is too small: the exchange runs in rounds. A round serves the local
rows [low, high) of every owner. `high` is the largest bound for which all buffers of all devices
suffice. All devices therefore request a row in the same round, and its gradients meet in one
update.

In this module an id is identified by its key. The key of a split row is its position in the whole
split array. Keys behind the last owner's keys belong to replicated rows. These ids do not travel,
but they are sorted with the others and their gradients are summed with them.

All functions in this module run in `shard_map`, as the program of one device. n: number of devices
that the rows are split over. m: number of ids that a device reads. C: capacity, the number of ids
in a buffer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrank import mesh as meshes
from jaxrank.embedding.backends.base import VectorLayout
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.embedding.duplicates import sort_ids
from jaxrank.features import PAD

Carry = TypeVar("Carry")


class Round(NamedTuple):
    """One round of an exchange.

    low, high: i32[], the bounds of the local rows [low, high) that every owner serves.
    begin, end: i32[n], the bounds [begin, end) of this device's ids that each owner serves.
    asked: i32[n, C], local rows of this device that each device requests, PAD behind the last.
    """

    low: jax.Array
    high: jax.Array
    begin: jax.Array
    end: jax.Array
    asked: jax.Array


class Route(NamedTuple):
    """The route of one device's ids. It depends on the ids alone, and lookup and update share it.

    key: i32[m], the key of each id, or PAD.
    distinct_index: i32[m], the distinct index of each key. PAD for PAD.
    order: i32[m], the permutation that sorts the keys.
    rank: i32[m], `distinct_index` in that order.
    unique: i32[m], the distinct keys, rising, with PAD behind the last.
    starts: i32[n + 1], the begin of each owner's keys in `unique`, then the end of the last.
    first: the first round.
    """

    key: jax.Array
    distinct_index: jax.Array
    order: jax.Array
    rank: jax.Array
    unique: jax.Array
    starts: jax.Array
    first: Round


class ExchangeStats(NamedTuple):
    """The cost of one exchange for a device, i32[] each.

    rounds: number of rounds, equal on all devices.
    unique: number of distinct ids that the device requested.
    served: number of ids that other devices requested from it.
    """

    rounds: jax.Array
    unique: jax.Array
    served: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges the rows of one stack.

    Args:
        vector_layout: the layout of the blocks of vectors.
        owners: n.
        share: number of rows that each device owns.
        capacity: C.
        by_scatter: sums duplicates by a scatter-add in the order of the ids (CPU), instead of in
            the order of the sorted ids.
    """

    vector_layout: VectorLayout
    owners: int
    share: int
    capacity: int
    by_scatter: bool

    def route(self, key: jax.Array) -> Route:
        """Computes the route of ids from their keys i32[m]."""
        order, rank, unique = sort_ids(key)
        distinct_index = jnp.zeros_like(rank).at[order].set(rank, unique_indices=True)
        edges = jnp.arange(self.owners + 1, dtype=jnp.int32) * self.share
        starts = jnp.searchsorted(unique, edges).astype(jnp.int32)
        first = self._round(unique, starts, jnp.zeros_like(edges[:-1]), jnp.zeros((), jnp.int32))
        return Route(key, distinct_index, order, rank, unique, starts, first)

    def _round(self, unique: Any, starts: Any, begin: jax.Array, low: jax.Array) -> Round:
        owner = jnp.arange(self.owners, dtype=jnp.int32)[:, None]
        # One more than fits, to find the first row that does not fit.
        offset = jnp.arange(self.capacity + 1, dtype=jnp.int32)[None, :]
        index = (starts[:-1] + begin)[:, None] + offset
        local = unique.at[index].get(mode="fill", fill_value=PAD) - owner * self.share
        local = jnp.where(index < starts[1:, None], local, PAD)
        high = jnp.minimum(jnp.min(local[:, self.capacity]), self.share)
        high = jax.lax.pmin(high, meshes.EXAMPLES)
        local = local[:, : self.capacity]
        is_sent = local < high
        asked = jax.lax.all_to_all(jnp.where(is_sent, local, PAD), meshes.SHARD, 0, 0, tiled=True)
        return Round(low, high, begin, begin + jnp.sum(is_sent, axis=1, dtype=jnp.int32), asked)

    def scan_rounds(
        self, route: Route, body: Callable[[Round, Carry], Carry], carry: Carry
    ) -> Carry:
        """Repeats carry = body(round, carry) over the rounds until every id is served."""

        def is_left(state: Any) -> jax.Array:
            return state[1] < self.share

        # The loop holds the only copy of the body: a program with a second copy for the first round
        # takes twice as long to compile.
        def serve(state: Any) -> Any:
            begin, low, carry = state
            current = jax.lax.cond(
                low == 0,
                lambda: route.first,
                lambda: self._round(route.unique, route.starts, begin, low),
            )
            return current.end, current.high, body(current, carry)

        start = jnp.zeros_like(route.first.begin), jnp.zeros((), jnp.int32), carry
        return jax.lax.while_loop(is_left, serve, start)[2]

    def _buffer_index(self, route: Route, current: Round) -> jax.Array:
        """Computes the buffer index of each id in a round, i32[m]. PAD for ids not served in it."""
        owner = jnp.minimum(route.key // self.share, self.owners - 1)
        local = route.key - owner * self.share
        is_served = (local >= current.low) & (local < current.high)
        offset = route.distinct_index - (route.starts[:-1] + current.begin)[owner]
        return jnp.where(is_served, owner * self.capacity + offset, PAD)

    def lookup(
        self, route: Route, read: Callable[[jax.Array], jax.Array], dtype: Any
    ) -> tuple[jax.Array, ExchangeStats]:
        """Reads the vectors of a route's ids.

        Args:
            read: reads local rows i32[k] and returns their block, zero for PAD.

        Returns:
            The block of the vectors, zero for ids that do not travel, and the cost of the exchange.
        """

        def serve(current: Round, carry: Any) -> Any:
            vectors, stats = carry
            asked = _as_bits(read(current.asked.reshape(-1)))
            back = jax.lax.bitcast_convert_type(self._sent(asked), dtype)
            vectors = vectors + self.vector_layout.take(back, self._buffer_index(route, current))
            served = stats.served + jnp.sum(current.asked != PAD, dtype=jnp.int32)
            return vectors, stats._replace(rounds=stats.rounds + 1, served=served)

        nothing = jnp.zeros((), jnp.int32)
        stats = ExchangeStats(rounds=nothing, unique=route.starts[-1], served=nothing)
        zeros = self.vector_layout.zeros(route.key.shape[0], dtype)
        return self.scan_rounds(route, serve, (zeros, stats))

    def _sent(self, block: jax.Array) -> jax.Array:
        """Sends the buffers [n * C] of this device and returns the buffers that it receives."""
        return jax.lax.all_to_all(block, meshes.SHARD, 0, 0, tiled=True)

    def sums(self, route: Route, grads: jax.Array) -> jax.Array:
        """Sums the gradients of a route's ids for each distinct key. Both are blocks of m."""
        if self.by_scatter:
            return self.vector_layout.add(jnp.zeros_like(grads), route.distinct_index, grads)
        return self.vector_layout.sum_sorted(route.rank, grads, route.order)

    def collect(self, route: Route, current: Round, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Collects the gradients that arrive at this device in a round.

        Arrivals of its r replicas are included, in the same order on all of them. A row occurs at
        most once per device that reads it.

        Args:
            sums: the result of `sums`.

        Returns:
            Local rows i32[r * n * C] and the block of their gradients.
        """
        offset = jnp.arange(self.capacity, dtype=jnp.int32)[None, :]
        index = (route.starts[:-1] + current.begin)[:, None] + offset
        is_sent = offset < (current.end - current.begin)[:, None]
        arrived = self._sent(
            self.vector_layout.take(sums, jnp.where(is_sent, index, PAD).reshape(-1))
        )
        return jax.lax.all_gather((current.asked.reshape(-1), arrived), meshes.REPLICA, tiled=True)

    def scan_arrivals(
        self,
        route: Route,
        sums: jax.Array,
        body: Callable[[Carry, jax.Array, list[IndexedVectors]], Carry],
        carry: Carry,
    ) -> Carry:
        """Repeats carry = body(carry, row, gradients) for the arrivals of each round.

        See `collect`.
        """

        def serve(current: Round, carry: Carry) -> Carry:
            row, block = self.collect(route, current, sums)
            return body(carry, row, [IndexedVectors(row.shape[0], block)])

        return self.scan_rounds(route, serve, carry)

    def kept(self, route: Route, rows: int, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the sums of the ids that do not travel.

        Args:
            rows: maximum number of replicated rows.
            sums: the result of `sums`.

        Returns:
            The replicated rows i32[rows], rising, with PAD behind the last, and the block of their
            sums.
        """
        begin = route.starts[-1]
        padded = jnp.pad(route.unique, (0, rows), constant_values=PAD)
        key = jax.lax.dynamic_slice(padded, (begin,), (rows,))
        positions = begin + jnp.arange(rows, dtype=jnp.int32)
        local_key = jnp.where(key == PAD, PAD, key - self.owners * self.share)
        return local_key, self.vector_layout.take(sums, jnp.where(key == PAD, PAD, positions))


def _as_bits(vectors: jax.Array) -> jax.Array:
    # The TPU compiler takes arrays that travel as floats for inputs of a bfloat16 product. It would
    # convert the whole table to bfloat16 before the rows are read, in every step.
    integer = jnp.int64 if vectors.dtype == jnp.float64 else jnp.int32
    return jax.lax.bitcast_convert_type(vectors, integer)
