"""The tables of a model on a mesh: their state, the lookup and the update.

A stack has two parts, each of which may be missing. Replicated rows are on every device: a device
reads its own copy, and their gradients are summed over all devices as those of the model are. Split
rows are owned by one device of each replica; see `exchange`. A mesh of one device owns all rows.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank.embedding import access
from jaxrank.embedding.combine import combine, spread
from jaxrank.embedding.duplicates import sum_by_scratch, sum_by_sort, sum_of_rows
from jaxrank.embedding.exchange import Exchange, Load, Route
from jaxrank.embedding.factors import factors_of
from jaxrank.embedding.first_rows import first_rows
from jaxrank.embedding.rules import Rule
from jaxrank.embedding.storage import ALIGNMENT, GROUPS, Parts, Storage, storage
from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch, Layout, Lists, Stack

Vectors = dict[str, dict[str, jax.Array]]
Routes = dict[str, Route]


class TableState(NamedTuple):
    """One part of a stack on the devices.

    rows: f[rows * width / 128, 128], see `storage`.
    slots: of the row optimizer, f[rows * width / 128, 128] or, one a row, f[rows].
    """

    rows: jax.Array
    slots: dict[str, jax.Array]


def check_shards(shards: int) -> None:
    """Raises InputError unless split rows can be split over so many devices."""
    if GROUPS % shards:
        raise InputError(
            f"tables can be split over a number of devices that divides {GROUPS}: found {shards}."
            " Set mesh.devices or mesh.replicas."
        )


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Reads and updates the tables of a layout on a mesh.

    `route`, `lookup` and `update` are the program of one device and run in `shard_map` over the
    mesh: arrays of a batch are this device's share, arrays of split tables its share of the rows.
    Tables are {name of a part: TableState}; see `storage`.

    Args:
        layout: the stacks.
        mesh: split rows are split along its `shard` axis.
        rule: the row optimizer.
        room: {stack: ids that a device can send to another in one round of the exchange, over all
            ids that it reads}; needed where the mesh has more than one device.
        init_std: standard deviation of the normal distribution that rows start from.
        l2: adds l2 * row to the gradient of a row, once a step.
        l2_scope: "read" regularises the rows that a step reads. "table" regularises and updates
            all rows in every step, as the published CTR benchmarks do: the cost of a step then
            grows with the rows.
        clip_norm: longest gradient of one row after summing; 0 for no limit.
        rate_factors: {table: what the learning rate of its rows is multiplied by}; 1 where none is
            given. At 0 a table keeps its rows, while accumulators go on.
    """

    layout: Layout
    mesh: Mesh
    rule: Rule
    room: Mapping[str, float] = dataclasses.field(default_factory=dict)
    init_std: float = 0.01
    l2: float = 0.0
    l2_scope: str = "read"
    clip_norm: float = 0.0
    rate_factors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_shards(self.shards)
        for name, parts in self.parts.items():
            if self.exchanges and parts.split and name not in self.room:
                raise InputError(f"stack {name}: its exchange must have room: found none.")

    @functools.cached_property
    def parts(self) -> dict[str, Parts]:
        return {s.name: storage(s) for s in self.layout.stacks}

    @property
    def storages(self) -> list[Storage]:
        return [part for parts in self.parts.values() for part in parts if part]

    @property
    def shards(self) -> int:
        return self.mesh.shape[meshes.SHARD]

    @property
    def exchanges(self) -> bool:
        """Whether split rows travel between devices."""
        return self.mesh.size > 1

    @property
    def on_cpu(self) -> bool:
        return meshes.platform(self.mesh) == "cpu"

    @property
    def by_line(self) -> bool:
        """Whether rows are read and written as TPU does it; see `access`."""
        return meshes.platform(self.mesh) == "tpu"

    @property
    def uses_scratch(self) -> bool:
        """Whether duplicates are found through a scratch array; see `duplicates`."""
        return self.on_cpu and self.l2_scope == "read"

    def exchange(self, name: str, ids: int) -> Exchange:
        """The exchange of a stack's split rows for a batch of which a device reads so many ids."""
        split = self.parts[name].split
        assert split is not None
        share = split.rows // self.shards
        capacity = min(round(self.room[name] * ids), ids, share)
        return Exchange(
            owners=self.shards,
            share=share,
            capacity=ALIGNMENT * max(1, math.ceil(capacity / ALIGNMENT)),
            by_scatter=self.on_cpu,
        )

    def specs(self) -> dict[str, P]:
        """How each part lies on the mesh; its rows, slots and scratch all alike."""
        return {s.name: P(meshes.SHARD) if s.is_split else P() for s in self.storages}

    def init(self, key: jax.Array) -> dict[str, TableState]:
        """New tables, on the whole mesh. The values of a row depend on its table and its number in
        it alone: they are the same on any mesh, under any placement."""
        tables = {}
        number_of = {t.name: i for i, t in enumerate(self.layout.schema.tables)}
        for stack in self.layout.stacks:
            numbers = [number_of[name] for name in stack.tables]
            for shape in filter(None, self.parts[stack.name]):
                slots = {
                    slot: jnp.full(shape.shape if wide else (shape.rows,), value, jnp.float32)
                    for slot, (wide, value) in self.rule.slots.items()
                }
                rows = jax.shard_map(
                    functools.partial(
                        first_rows, stack, numbers, shape, self.shards, self.init_std
                    ),
                    mesh=self.mesh,
                    in_specs=P(),
                    out_specs=self.specs()[shape.name],
                    check_vma=False,
                )(key)
                tables[shape.name] = TableState(rows, slots)
        return tables

    def init_scratch(self) -> dict[str, jax.Array]:
        """What `update` needs besides the tables; its values never matter between steps."""
        if not self.uses_scratch:
            return {}
        return {s.name: jnp.zeros(s.rows, jnp.int32) for s in self.storages if s.is_split}

    def route(self, batch: Batch) -> Routes:
        """Where the ids of this device's share of a batch go; {} where nothing travels."""
        if not self.exchanges:
            return {}
        return {
            stack.name: self.exchange(stack.name, ids.size).route(self._split_position(stack, ids))
            for stack, ids in self._ids(batch)
            if self.parts[stack.name].split
        }

    def _ids(self, batch: Batch) -> list[tuple[Stack, jax.Array]]:
        """All ids of each stack that the batch reads, i32[m]."""
        found = []
        for stack in self.layout.stacks:
            pieces = []
            if stack.name in batch.ids:
                pieces.append(batch.ids[stack.name].reshape(-1))
            if stack.name in batch.lists:
                pieces.append(batch.lists[stack.name].ids.reshape(-1))
            if pieces:
                found.append((stack, jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]))
        return found

    def _split_position(self, stack: Stack, ids: jax.Array) -> jax.Array:
        """i32[m]: where each id lies in the whole split array; PAD for replicated rows."""
        split = self.parts[stack.name].split
        assert split is not None
        if stack.replicated:
            is_split = (ids >= stack.replicated) & (ids != PAD)
            ids = jnp.where(is_split, ids - stack.replicated, PAD)
        return split.position(ids)

    def lookup(
        self, rows: Mapping[str, jax.Array], routes: Routes, batch: Batch
    ) -> tuple[Vectors, dict[str, Load]]:
        """The vectors of a batch, and what it cost to bring them here, by stack.

        Args:
            rows: `TableState.rows` of each part.
            routes: of this batch.
            batch: only its ids and lists are read.

        Returns:
            {stack: {"ids": f[B, places, dim], "lists": f[B, lists, dim]}}, each where the stack
            has such features. PAD reads zeros, an empty list too.
        """
        vectors: Vectors = {}
        loads = {}
        examples = batch.labels.shape[0]
        for stack, ids in self._ids(batch):
            read, load = self._read(stack, rows, routes, ids)
            if load is not None:
                loads[stack.name] = load
            found = vectors[stack.name] = {}
            single = batch.ids[stack.name].size if stack.name in batch.ids else 0
            if single:
                found["ids"] = read[:single].reshape(examples, -1, stack.dim)
            if stack.name in batch.lists:
                lists = batch.lists[stack.name]
                combined = combine(read[single:], lists, examples * len(stack.lists))
                found["lists"] = combined.reshape(examples, -1, stack.dim)
        return vectors, loads

    def _read(
        self, stack: Stack, rows: Mapping[str, jax.Array], routes: Routes, ids: jax.Array
    ) -> tuple[jax.Array, Load | None]:  # i32[m] -> f[m, dim]
        parts = self.parts[stack.name]
        load = None
        vectors = None
        if parts.split:
            stored = rows[parts.split.name]
            read = functools.partial(self._read_rows, parts.split, stored)
            if self.exchanges:
                vectors, load = self.exchange(stack.name, ids.size).lookup(
                    routes[stack.name], read, stack.dim, stored.dtype
                )
            else:
                vectors = read(self._split_position(stack, ids))
        if parts.replicated:
            is_replicated = ids < stack.replicated
            own = self._read_rows(
                parts.replicated,
                rows[parts.replicated.name],
                jnp.where(is_replicated, ids, PAD),
            )
            vectors = own if vectors is None else jnp.where(is_replicated[:, None], own, vectors)
        assert vectors is not None
        return vectors, load

    def _read_rows(self, shape: Storage, stored: jax.Array, row: jax.Array) -> jax.Array:
        return access.read(stored, row, shape.width, by_line=self.by_line)[:, : shape.dim]

    def update(
        self,
        tables: dict[str, TableState],
        scratch: dict[str, jax.Array],
        routes: Routes,
        batch: Batch,
        grads: Vectors,
        *,
        rate: jax.Array,
        step: jax.Array,
    ) -> tuple[dict[str, TableState], dict[str, jax.Array]]:
        """One step of the row optimizer on the rows that the global batch reads.

        Gradients of a row that is read many times are summed before the rule sees them, so the
        result is that of the dense update at the cost of the rows read.

        Args:
            grads: the gradient of what `lookup` returned, in the same structure, of the loss of the
                global batch.
            rate: f[], learning rate.
            step: i32[], steps done before this one.

        Returns:
            The tables and the scratch array after the step.
        """
        tables, scratch = dict(tables), dict(scratch)
        for stack, ids in self._ids(batch):
            gradient = self._per_id(stack, batch.lists.get(stack.name), grads[stack.name])
            parts = self.parts[stack.name]
            rule = functools.partial(self._change, stack=stack, rate=rate, step=step)
            if parts.replicated:
                name = parts.replicated.name
                own = jnp.where(ids < stack.replicated, ids, PAD)
                tables[name] = self._update_replicated(
                    parts.replicated, tables[name], own, gradient, rule
                )
            if parts.split:
                name = parts.split.name
                position = None if self.exchanges else self._split_position(stack, ids)
                tables[name], used = self._update_split(
                    parts.split, tables[name], scratch.get(name), routes.get(name), position,
                    gradient, rule,
                )  # fmt: skip
                if used is not None:
                    scratch[name] = used
        return tables, scratch

    def _per_id(
        self, stack: Stack, lists: Lists | None, grads: dict[str, jax.Array]
    ) -> jax.Array:  # f[m, dim]
        pieces = []
        if "ids" in grads:
            pieces.append(grads["ids"].reshape(-1, stack.dim))
        if lists is not None:
            pieces.append(spread(grads["lists"].reshape(-1, stack.dim), lists))
        return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def _update_replicated(self, shape, state, ids, gradient, rule):
        """Updates every device's copy, from the sum over all devices."""
        sums, reads = sum_of_rows(ids, gradient, shape.rows, by_scatter=self.on_cpu)
        sums, reads = meshes.total(self.mesh, (sums, reads))
        seen = self._seen(shape, state)
        change = rule(seen, sums, row=jnp.arange(shape.rows, dtype=jnp.int32))
        if self.l2_scope == "read":
            is_read = reads > 0
            change = jax.tree.map(
                lambda x: jnp.where(is_read[:, None] if x.ndim == 2 else is_read, x, 0), change
            )
        return self._added(shape, state, change)

    def _update_split(self, shape, state, scratch, route, position, gradient, rule):
        """Updates the share of the rows that this device owns."""
        if self.l2_scope == "table":
            return self._update_all(shape, state, route, position, gradient, rule), scratch
        if route is None:
            return self._change_rows(shape, state, scratch, position, gradient, rule)
        exchange = self.exchange(shape.name, gradient.shape[0])
        sums = exchange.sums(route, gradient)

        def serve(this, carry):
            row, arrived = exchange.collect(route, this, sums)
            state, scratch = carry
            return self._change_rows(shape, state, scratch, row, arrived, rule)

        return exchange.over_rounds(route, serve, (state, scratch))

    def _change_rows(self, shape, state, scratch, row, gradient, rule):
        """Changes local rows i32[k], PAD or not, by their gradients f[k, dim]."""
        if scratch is not None:
            unique, gradient, scratch = sum_by_scratch(row, gradient, scratch)
        else:
            unique, gradient = sum_by_sort(row, gradient)
        read = functools.partial(access.read, row=unique, by_line=self.by_line)
        found = jax.tree.map(lambda array: read(array, width=shape.width), state)
        rows = found.rows[:, : shape.dim]
        slots = {n: a[:, : shape.dim] if a.ndim == 2 else a for n, a in found.slots.items()}
        change = rule(TableState(rows, slots), gradient, row=self._row_of(shape, unique))

        def write(array, found, change):
            change = _padded(shape, change)
            return access.write(array, unique, found, change, by_line=self.by_line)

        return jax.tree.map(write, state, found, change), scratch

    def _update_all(self, shape, state, route, position, gradient, rule):
        """Updates all rows, those that were not read with their regularisation alone."""
        seen = self._seen(shape, state)
        sums = jnp.zeros_like(seen.rows)
        if route is None:
            sums = sums.at[position].add(gradient, mode="drop")
        else:
            exchange = self.exchange(shape.name, gradient.shape[0])
            by_id = exchange.sums(route, gradient)

            def serve(this, sums):
                row, arrived = exchange.collect(route, this, by_id)
                return sums.at[row].add(arrived, mode="drop")

            sums = exchange.over_rounds(route, serve, sums)
        here = jnp.arange(len(sums), dtype=jnp.int32)
        return self._added(shape, state, rule(seen, sums, row=self._row_of(shape, here)))

    def _row_of(self, shape: Storage, place: jax.Array) -> jax.Array:
        """Which row of the stack lies at each place i32[k] of this device's share of a split part;
        PAD stays PAD."""
        first = jax.lax.axis_index(meshes.SHARD) * (shape.rows // self.shards)
        row = shape.row(jnp.where(place == PAD, PAD, first + place))
        (stack,) = (s for s in self.layout.stacks if s.name == shape.name)
        return jnp.where(row == PAD, PAD, stack.replicated + row)

    def _change(
        self, found: TableState, gradient: jax.Array, *, row, stack, rate, step
    ) -> TableState:
        """The change of rows and slots whose summed gradients f[k, dim] are given."""
        if self.l2:
            gradient = gradient + self.l2 * found.rows
        if self.clip_norm:
            norm = jnp.linalg.norm(gradient, axis=1, keepdims=True)
            gradient = gradient * jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-12))
        factors = factors_of(stack, self.rate_factors)
        if factors:
            rate = rate * factors.at(row)
        return TableState(*self.rule.change(found.rows, found.slots, gradient, rate, step))

    def _seen(self, shape: Storage, state: TableState) -> TableState:
        """All rows and slots that a device has, f[rows, dim] or f[rows]."""
        return jax.tree.map(
            lambda a: a.reshape(-1, shape.width)[:, : shape.dim] if a.ndim == 2 else a, state
        )

    def _added(self, shape: Storage, state: TableState, change: TableState) -> TableState:
        return jax.tree.map(lambda a, c: a + _padded(shape, c).reshape(a.shape), state, change)


def _padded(shape: Storage, change: jax.Array) -> jax.Array:
    """f[k, dim] -> f[k, width]; f[k] as it is."""
    if change.ndim == 1 or shape.width == shape.dim:
        return change
    return jnp.pad(change, ((0, 0), (0, shape.width - shape.dim)))
