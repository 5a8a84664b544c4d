"""The exchange of split rows between the devices that read them and the devices that own them.

Each device sorts the ids that it reads, once: that removes duplicates and brings the ids of one
owner together. A buffer of static size for each owner takes them there, and their vectors come
back the same way; gradients are summed for each different id and follow the same path.

Nothing is dropped when a buffer is too small: the exchange runs in rounds. A round serves the local
rows [low, high) of every owner, with `high` the largest for which all buffers of all devices
suffice, so all devices ask for a row in the same round, and its gradients meet in one update.

All functions here run in `shard_map`, as the program of one device. n: devices that the rows are
split over; m: ids that a device reads; C: capacity, ids of a buffer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrank import mesh as meshes
from jaxrank.embedding.duplicates import running_count
from jaxrank.features import PAD

Carry = TypeVar("Carry")


class Round(NamedTuple):
    """One round of an exchange.

    low, high: i32[], the local rows [low, high) of every owner are served.
    begin, end: i32[n], which of this device's ids of each owner are served: [begin, end).
    asked: i32[n, C] local rows of this device that each device asks for, PAD behind the last.
    """

    low: jax.Array
    high: jax.Array
    begin: jax.Array
    end: jax.Array
    asked: jax.Array


class Route(NamedTuple):
    """Where the ids of one device go: made of the ids alone, used by lookup and update.

    position: i32[m] where each id lies in the whole split array; PAD for none.
    slot: i32[m] which of the different ids it is; without meaning where `position` is PAD.
    order: i32[m], the permutation that sorts the ids.
    unique: i32[m] the different positions, rising, PAD behind the last.
    starts: i32[n + 1] where the ids of each owner begin in `unique`.
    first: the first round.
    """

    position: jax.Array
    slot: jax.Array
    order: jax.Array
    unique: jax.Array
    starts: jax.Array
    first: Round


class Load(NamedTuple):
    """What one exchange cost a device, i32[] each.

    rounds: of all devices together.
    unique: different ids that it asked for.
    served: ids that it was asked for.
    """

    rounds: jax.Array
    unique: jax.Array
    served: jax.Array


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges the rows of one stack.

    Args:
        owners: n.
        share: rows that each owns.
        capacity: C.
        by_scatter: whether sums of duplicates are made by a scatter-add in the order of the ids
            (CPU) or in the order of the sorted ids.
    """

    owners: int
    share: int
    capacity: int
    by_scatter: bool

    def route(self, position: jax.Array) -> Route:
        """The route of positions i32[m] in the whole array, PAD for none."""
        count = position.shape[0]
        here = jnp.arange(count, dtype=jnp.int32)
        ordered, order = jax.lax.sort_key_val(position, here)
        is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        rank = running_count(is_first) - 1
        unique = jnp.full_like(position, PAD)
        unique = unique.at[jnp.where(is_first, rank, count)].set(ordered, mode="drop")
        slot = jnp.zeros_like(rank).at[order].set(rank, unique_indices=True)
        edges = jnp.arange(self.owners + 1, dtype=jnp.int32) * self.share
        starts = jnp.sum(unique[None, :] < edges[:, None], axis=1, dtype=jnp.int32)
        first = self._round(unique, starts, jnp.zeros_like(edges[:-1]), jnp.zeros((), jnp.int32))
        return Route(position, slot, order, unique, starts, first)

    def _round(self, unique: Any, starts: Any, begin: jax.Array, low: jax.Array) -> Round:
        owner = jnp.arange(self.owners, dtype=jnp.int32)[:, None]
        # One more than fits, to see which row is the first that does not.
        place = jnp.arange(self.capacity + 1, dtype=jnp.int32)[None, :]
        index = (starts[:-1] + begin)[:, None] + place
        local = unique.at[index].get(mode="fill", fill_value=PAD) - owner * self.share
        local = jnp.where(index < starts[1:, None], local, PAD)
        high = jnp.minimum(jnp.min(local[:, self.capacity]), self.share)
        high = jax.lax.pmin(high, meshes.EXAMPLES)
        local = local[:, : self.capacity]
        is_sent = local < high
        asked = jax.lax.all_to_all(jnp.where(is_sent, local, PAD), meshes.SHARD, 0, 0, tiled=True)
        return Round(low, high, begin, begin + jnp.sum(is_sent, axis=1, dtype=jnp.int32), asked)

    def over_rounds(
        self, route: Route, body: Callable[[Round, Carry], Carry], carry: Carry
    ) -> Carry:
        """carry = body(round, carry), for one round after another until every id is served."""

        def is_left(state: Any) -> jax.Array:
            return state[1] < self.share

        # The loop holds the only copy of the body: a program with another one for the first round
        # takes twice as long to compile.
        def serve(state: Any) -> Any:
            begin, low, carry = state
            this = jax.lax.cond(
                low == 0,
                lambda: route.first,
                lambda: self._round(route.unique, route.starts, begin, low),
            )
            return this.end, this.high, body(this, carry)

        start = jnp.zeros_like(route.first.begin), jnp.zeros((), jnp.int32), carry
        return jax.lax.while_loop(is_left, serve, start)[2]

    def _place(self, route: Route, this: Round) -> jax.Array:
        """i32[m]: where in the buffers [n * C] of a round each id is; PAD where in none."""
        owner = jnp.minimum(route.position // self.share, self.owners - 1)
        local = route.position - owner * self.share
        is_served = (route.position != PAD) & (local >= this.low) & (local < this.high)
        place = route.slot - (route.starts[:-1] + this.begin)[owner]
        return jnp.where(is_served, owner * self.capacity + place, PAD)

    def lookup(
        self, route: Route, read: Callable[[jax.Array], jax.Array], dim: int, dtype: Any
    ) -> tuple[jax.Array, Load]:
        """The vectors f[m, dim] of a route's ids, zero where there is none, and what it cost.

        Args:
            read: local rows i32[k] -> f[k, dim], zero for PAD.
        """

        def serve(this: Round, carry: Any) -> Any:
            vectors, load = carry
            rows = _as_bits(read(this.asked.reshape(-1))).reshape(self.owners, self.capacity, dim)
            back = _from_bits(jax.lax.all_to_all(rows, meshes.SHARD, 0, 0, tiled=True), dtype)
            place = self._place(route, this)
            here = back.reshape(-1, dim).at[place].get(mode="fill", fill_value=0)
            vectors = jnp.where((place == PAD)[:, None], vectors, here)
            served = load.served + jnp.sum(this.asked != PAD, dtype=jnp.int32)
            return vectors, load._replace(rounds=load.rounds + 1, served=served)

        nothing = jnp.zeros((), jnp.int32)
        load = Load(rounds=nothing, unique=route.starts[-1], served=nothing)
        return self.over_rounds(
            route, serve, (jnp.zeros((route.position.shape[0], dim), dtype), load)
        )

    def sums(self, route: Route, grads: jax.Array) -> jax.Array:
        """f[m, dim], of the vectors of a route's ids -> the sum for each different id f[m, dim]."""
        count = route.position.shape[0]
        slot = jnp.where(route.position == PAD, count, route.slot)
        if not self.by_scatter:
            slot, grads = slot[route.order], grads[route.order]
        sums = jnp.zeros_like(grads)
        return sums.at[slot].add(grads, mode="drop", indices_are_sorted=not self.by_scatter)

    def collect(self, route: Route, this: Round, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a round brings to this device: local rows i32[r * n * C] and a gradient for each.

        Those of its r replicas too, in the same order on all of them. A row occurs at most once for
        each device that reads it.

        Args:
            sums: f[m, dim], of `sums`.
        """
        place = jnp.arange(self.capacity, dtype=jnp.int32)[None, :]
        index = (route.starts[:-1] + this.begin)[:, None] + place
        is_sent = place < (this.end - this.begin)[:, None]
        sent = sums.at[jnp.where(is_sent, index, PAD)].get(mode="fill", fill_value=0)
        arrived = jax.lax.all_to_all(sent, meshes.SHARD, 0, 0, tiled=True)
        found = this.asked.reshape(-1), arrived.reshape(-1, sums.shape[1])
        return jax.lax.all_gather(found, meshes.REPLICA, tiled=True)


def _as_bits(vectors: jax.Array) -> jax.Array:
    # What travels as floats the TPU compiler takes for the input of a bfloat16 product, and then
    # converts the whole table to bfloat16 before the rows are read, in every step.
    integer = jnp.int64 if vectors.dtype == jnp.float64 else jnp.int32
    return jax.lax.bitcast_convert_type(vectors, integer)


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, dtype)
