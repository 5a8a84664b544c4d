"""The tables of a model on a mesh: their state, the lookup and the update.

A stack has two parts, either of which may be absent. Replicated rows are on every device: a device
reads its own copy, and their gradients are summed over all devices like the model's. Split
rows are owned by one device of each replica, see `exchange`. A mesh of one device owns all rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank import native
from jaxrank.embedding.backends import gpu_kernel
from jaxrank.embedding.backends.base import VectorLayout, round_up
from jaxrank.embedding.backends.cpu import CpuRowLayout
from jaxrank.embedding.backends.gpu import GpuRowLayout
from jaxrank.embedding.backends.lazy import IndexedVectors, joined, split
from jaxrank.embedding.backends.one_hot import OneHot
from jaxrank.embedding.backends.tpu import TpuLayout
from jaxrank.embedding.backends.xla import RowLayout
from jaxrank.embedding.combine import combine, spread
from jaxrank.embedding.duplicates import add_squares, sum_of_rows, sum_once
from jaxrank.embedding.exchange import Exchange, ExchangeStats, Route
from jaxrank.embedding.init import first_rows
from jaxrank.embedding.optimizers import RowOptimizer
from jaxrank.embedding.rates import row_values
from jaxrank.embedding.storage import (
    GROUPS,
    Parts,
    Storage,
    TableState,
    padded_width,
    storage,
)
from jaxrank.embedding.update import Arrivals, RowUpdate
from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch, Lists
from jaxrank.layout import Layout, Stack, ids_of_device
from jaxrank.native.fusion import fusion_barrier

Vectors = dict[str, dict[str, jax.Array]]


class StackRoute(NamedTuple):
    """The ids of one stack that a device reads, and the positions of their rows.

    ids: i32[m], ids of each example's places, except places that are read by products, then ids of
        lists. PAD where a place has no id.
    split: a `Route`, or on a mesh of one device the positions i32[m] in the split array, or PAD.
        None without split rows or ids.
    """

    ids: jax.Array
    split: Route | jax.Array | None


Routes = dict[str, StackRoute]


def check_row_shards(shards: int) -> None:
    """Raises InputError unless split rows can be split over this number of devices."""
    if GROUPS % shards:
        raise InputError(
            f"tables must be split over a number of devices that divides {GROUPS}: found {shards}."
            " Set mesh.devices, or --devices of `plan`, or mesh.replicas."
        )


def row_shapes(layout: Layout) -> dict[str, Any]:
    """Returns {name of a part: its rows as jax.ShapeDtypeStruct}, the same on any mesh."""
    parts = [part for stack in layout.stacks for part in storage(stack) if part]
    return {part.name: jax.ShapeDtypeStruct(part.shape, jnp.float32) for part in parts}


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Reads the tables of a layout on a mesh.

    `route` and `lookup` are the program of one device and run in `shard_map` over the mesh. Arrays
    of a batch are this device's share, and arrays of split tables are its share of the rows.

    Args:
        layout: the stacks.
        mesh: split rows are split along its `shard` axis.
        room: {stack: number of ids that a device can send to another in one round of the exchange,
            as a fraction of all ids that it reads}. Required on a mesh of several devices.
    """

    layout: Layout
    mesh: Mesh
    room: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_row_shards(self.shards)
        for name, parts in self.parts.items():
            if self.exchanges and parts.split and name not in self.room:
                raise InputError(
                    f"stack {name}: its exchange must have a capacity above 0: found 0."
                )

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
        """True if split rows travel between devices."""
        return self.mesh.size > 1

    @property
    def platform(self) -> str:
        """The platform of the mesh, which selects the vector layout and the sums of duplicates."""
        return meshes.platform(self.mesh)

    @property
    def is_on_cpu(self) -> bool:
        return self.platform == "cpu"

    @functools.cached_property
    def is_native(self) -> bool:
        """True if code in C++ (`native`) reads and updates rows."""
        return self.is_on_cpu and not native.missing()

    @property
    def has_kernel(self) -> bool:
        """True if a GPU kernel sums gradients, see `gpu_kernel`."""
        return self.platform == "gpu" and gpu_kernel.is_here(self.mesh.devices.flat[0])

    def vector_layout(self, stack: Stack) -> VectorLayout:
        """Returns the vector layout of a stack's blocks on this platform."""
        if self.platform == "tpu":
            kind: Callable[[int, int], VectorLayout] = TpuLayout
        elif self.has_kernel:
            kind = GpuRowLayout
        else:
            kind = CpuRowLayout if self.is_native else RowLayout
        return kind(stack.dim, padded_width(stack.dim))

    @functools.cached_property
    def one_hot(self) -> dict[str, OneHot]:
        """{stack: its places that are read by products}. Empty for layouts of single rows."""
        rows_of = {table.name: table.rows for table in self.layout.schema.tables}
        return {s.name: OneHot(s, rows_of, self.vector_layout(s)) for s in self.layout.stacks}

    def exchange(self, name: str, ids: int) -> Exchange:
        """Makes the exchange of a stack's split rows. ids: number of ids that a device reads."""
        split = self.parts[name].split
        assert split is not None
        (stack,) = (s for s in self.layout.stacks if s.name == name)
        share = split.rows // self.shards
        capacity = min(round(self.room[name] * ids), ids, share)
        vector_layout = self.vector_layout(stack)
        return Exchange(
            vector_layout=vector_layout,
            owners=self.shards,
            share=share,
            capacity=round_up(max(1, capacity), vector_layout.buffer_unit),
            by_scatter=self.is_on_cpu,
        )

    def _make_exchange(self, stack: Stack, batch: Batch) -> Exchange:
        """Makes the exchange for this device's share of a batch."""
        return self.exchange(stack.name, ids_of_device(self.layout, batch, 1)[stack.name])

    def _adds_plainly(self, stack: Stack) -> bool:
        """Returns True if the weights of all ids in the stack's lists are 1."""
        return all(self.layout.schema.ragged[i].has_plain_sums for i in stack.lists)

    def specs(self) -> dict[str, P]:
        """Returns the sharding of each part. Its rows, slots and scratch array share it."""
        return {s.name: P(meshes.SHARD) if s.is_split else P() for s in self.storages}

    def route(self, batch: Batch) -> Routes:
        """Computes the routes of the ids in this device's share of a batch."""
        routes = {}
        for stack in self.layout.stacks:
            pieces = self._ids(stack, batch)
            if not pieces:
                continue
            ids = jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]
            route: Route | jax.Array | None = None
            if self.parts[stack.name].split and ids.size:
                if self.exchanges:
                    route = self._make_exchange(stack, batch).route(self._key(stack, ids))
                else:
                    route = self._position(stack, ids)
            routes[stack.name] = StackRoute(ids, route)
        return routes

    def _ids(self, stack: Stack, batch: Batch) -> list[jax.Array]:
        """Collects the ids of places and of lists, i32[m] each. See `StackRoute`."""
        pieces = []
        if stack.name in batch.ids:
            ids = self.one_hot[stack.name].others(batch.ids[stack.name])
            filling = round_up(ids.shape[1], self.vector_layout(stack).unit) - ids.shape[1]
            ids = jnp.pad(ids, ((0, 0), (0, filling)), constant_values=PAD)
            pieces.append(ids.reshape(-1))
        if stack.name in batch.lists:
            pieces.append(batch.lists[stack.name].ids.reshape(-1))
        return pieces

    def _routed(self, routes: Routes) -> list[tuple[Stack, StackRoute]]:
        """Lists the stacks that a batch reads, in the order of the layout."""
        return [(s, routes[s.name]) for s in self.layout.stacks if s.name in routes]

    def _position(self, stack: Stack, ids: jax.Array) -> jax.Array:
        """Computes the position of each id in the split array, i32[m]. PAD for replicated rows."""
        split = self.parts[stack.name].split
        assert split is not None

        def position(ids: jax.Array) -> jax.Array:
            if stack.replicated:
                is_split = (ids >= stack.replicated) & (ids != PAD)
                ids = jnp.where(is_split, ids - stack.replicated, PAD)
            return split.position(ids)

        return fusion_barrier(position, ids)

    def _key(self, stack: Stack, ids: jax.Array) -> jax.Array:
        """Computes the keys of ids for `exchange`, i32[m]."""
        position = self._position(stack, ids)
        split = self.parts[stack.name].split
        assert split is not None
        return jnp.where(ids < stack.replicated, split.rows + ids, position)

    def lookup(
        self, rows: Mapping[str, jax.Array], routes: Routes, batch: Batch
    ) -> tuple[Vectors, dict[str, ExchangeStats]]:
        """Looks up the vectors of a batch.

        Args:
            rows: `TableState.rows` of each part.
            routes: the routes of this batch.
            batch: only its ids and lists are read.

        Returns:
            {stack: {"ids": f[B, places, dim], "lists": f[B, lists, dim]}}, each key only if the
            stack has such features, and the cost of the exchange of each stack. PAD and empty
            lists read zeros.
        """
        vectors: Vectors = {}
        exchange_stats = {}
        examples = batch.labels.shape[0]
        for stack, route in self._routed(routes):
            vector_layout, replicated = self.vector_layout(stack), self.parts[stack.name].replicated
            read, stats = self._read(stack, rows, route, batch)
            if stats is not None:
                exchange_stats[stack.name] = stats
            of_stack = vectors[stack.name] = {}
            if stack.name in batch.lists:
                lists = batch.lists[stack.name]
                read, of_lists = split(vector_layout, read, route.ids.size - lists.ids.size)
                of_stack["lists"] = combine(
                    vector_layout,
                    of_lists,
                    lists,
                    examples,
                    len(stack.lists),
                    is_plain=self._adds_plainly(stack),
                )
            if stack.name in batch.ids:
                one_hot = self.one_hot[stack.name]
                of_stack["ids"] = one_hot.together(
                    rows[replicated.name] if replicated else None,
                    batch.ids[stack.name],
                    vector_layout.to_examples(
                        joined(vector_layout, [read]), examples, one_hot.num_others
                    ),
                )
        return vectors, exchange_stats

    def _read(
        self,
        stack: Stack,
        rows: Mapping[str, jax.Array],
        routed: StackRoute,
        batch: Batch,
    ) -> tuple[IndexedVectors, ExchangeStats | None]:
        """Reads the vectors of the ids, lazily from a single array or else as a block."""
        parts, vector_layout = self.parts[stack.name], self.vector_layout(stack)
        ids, route = routed
        views = {
            p.name: vector_layout.view(rows[p.name]) for p in (parts.split, parts.replicated) if p
        }
        replicated_ids = jnp.where(ids < stack.replicated, ids, PAD)
        if parts.split is None or route is None:  # route is None if products read all places
            assert parts.replicated
            return IndexedVectors(ids.size, views[parts.replicated.name], replicated_ids), None
        table, stats = views[parts.split.name], None
        if isinstance(route, Route):
            exchange = self._make_exchange(stack, batch)
            take = functools.partial(vector_layout.take, table)
            block, stats = exchange.lookup(route, take, table.dtype)
        elif parts.replicated:
            block = vector_layout.take(table, route)
        else:
            return IndexedVectors(ids.size, table, route), None
        if parts.replicated:
            # One sum per id, whichever part has its row: lists then add up the same on any mesh.
            block = block + vector_layout.take(views[parts.replicated.name], replicated_ids)
        return IndexedVectors(ids.size, block), stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding(Lookup):
    """Reads and updates the tables of a layout on a mesh.

    `update` is the program of one device, like `lookup`. Tables are {name of a part: TableState},
    see `storage`.

    Args:
        row_optimizer: the row optimizer.
        init_std: standard deviation of the normal distribution of initial rows.
        l2: adds l2 * row to the gradient of a row, once per step.
        l2s: {table: l2}, where it differs.
        l2_scope: "read" regularises the rows that a step reads. "table" regularises and updates
            all rows in every step, like the published CTR benchmarks. The cost of a step then grows
            with the number of rows.
        clip_norm: maximum norm of a row's summed gradient. 0: no limit.
        lr_multipliers: {table: multiplier of the learning rate of its rows}, 1 by default. At 0 the
            rows of a table keep their values, while its accumulators continue to change.
    """

    row_optimizer: RowOptimizer
    init_std: float
    l2: float
    l2s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    l2_scope: str
    clip_norm: float
    lr_multipliers: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def update_options(self) -> dict[str, int]:
        """XLA options for programs that call `update`.

        XLA on GPU computes values twice if it estimates that a program exceeds the memory. Its
        estimate counts a table again for every kernel that changes rows in place.
        """
        return {"xla_gpu_memory_limit_slop_factor": 10_000} if self.has_kernel else {}

    @property
    def uses_scratch(self) -> bool:
        """True if duplicates are detected with a scratch array, see `duplicates`."""
        return self.is_on_cpu and not self.is_native and self.l2_scope == "read"

    def init(self, key: jax.Array) -> dict[str, TableState]:
        """Makes new tables on the whole mesh.

        The values of a row depend only on its table and its number in it. They are the same on any
        mesh and under any placement.
        """
        tables = {}
        number_of = {t.name: i for i, t in enumerate(self.layout.schema.tables)}
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(number_of)))
        for stack in self.layout.stacks:
            numbers = [number_of[name] for name in stack.tables]
            for shape in filter(None, self.parts[stack.name]):
                slots = {
                    slot: jnp.full(shape.shape if wide else (shape.rows,), value, jnp.float32)
                    for slot, (wide, value) in self.row_optimizer.slots.items()
                }
                rows = jax.shard_map(
                    functools.partial(first_rows, stack, shape, self.shards, self.init_std),
                    mesh=self.mesh,
                    in_specs=P(),
                    out_specs=self.specs()[shape.name],
                    check_vma=False,
                )(keys[jnp.asarray(numbers)])
                tables[shape.name] = TableState(rows, slots)
        return tables

    def init_scratch(self) -> dict[str, jax.Array]:
        """Makes the scratch arrays of `update`, whose values never matter between steps."""
        if not self.uses_scratch:
            return {}
        return {s.name: jnp.zeros(s.rows, jnp.int32) for s in self.storages if s.is_split}

    def update(
        self,
        tables: dict[str, TableState],
        scratch: dict[str, jax.Array],
        routes: Routes,
        batch: Batch,
        grads: Vectors,
        *,
        learning_rate: jax.Array,
        step: jax.Array,
        applies: jax.Array | None = None,
    ) -> tuple[dict[str, TableState], dict[str, jax.Array]]:
        """Applies one step of the row optimizer to the rows that the global batch reads.

        Gradients of a row that is read several times are summed before the optimizer. The result
        equals the dense update, at the cost of the rows that were read.

        Args:
            grads: the gradient of the result of `lookup`, with the same structure, for the loss of
                the global batch.
            learning_rate: f[].
            step: i32[], number of steps before this one.
            applies: bool[]. If False, nothing changes and gradients may have any value. None
                means True.

        Returns:
            The tables and the scratch arrays after the step.
        """
        tables, scratch = dict(tables), dict(scratch)
        for stack, route in self._routed(routes):
            parts = self.parts[stack.name]
            of_replicated, arrivals = self._summed(stack, route, batch, grads[stack.name])
            rows = RowUpdate(
                vector_layout=self.vector_layout(stack),
                stack=stack,
                mesh=self.mesh,
                is_native=self.is_native,
                row_optimizer=self.row_optimizer,
                l2=self.l2,
                l2_scope=self.l2_scope,
                clip_norm=self.clip_norm,
                lr_multipliers=row_values(stack, self.lr_multipliers, 1.0),
                l2s=row_values(stack, self.l2s, self.l2),
                learning_rate=learning_rate,
                step=step,
                applies=applies,
            )
            if parts.replicated and of_replicated is not None:
                name = parts.replicated.name
                tables[name] = rows.replicated(tables[name], *of_replicated)
            if parts.split and route.split is not None:
                name = parts.split.name
                tables[name], used = rows.split(
                    parts.split, tables[name], scratch.get(name), arrivals
                )
                if used is not None:
                    scratch[name] = used
        return tables, scratch

    def squared_norm(self, routes: Routes, batch: Batch, grads: Vectors) -> jax.Array:
        """Computes f[], the sum of squares of the gradients of the rows that a global batch reads.

        Gradients of a row that is read several times are summed first. The program of one device,
        like `update`, whose sums are computed once more.

        Args:
            grads: as in `update`.
        """
        dtype = jnp.result_type(*jax.tree.leaves(grads)) if jax.tree.leaves(grads) else jnp.float32
        of_replicated = of_split = jnp.zeros((), dtype)
        for stack, route in self._routed(routes):
            parts, vector_layout = self.parts[stack.name], self.vector_layout(stack)
            replicated, arrivals = self._summed(stack, route, batch, grads[stack.name])
            if parts.replicated and replicated is not None:
                sums = meshes.total(self.mesh, replicated[0])
                of_replicated = of_replicated + jnp.sum(jnp.square(sums))
            if parts.split and route.split is not None:
                of_split = arrivals(functools.partial(add_squares, vector_layout), of_split)
        # Every replica of the split rows has the same sum.
        copies = self.mesh.shape[meshes.REPLICA]
        return of_replicated + meshes.total(self.mesh, of_split) / copies

    def _summed(
        self,
        stack: Stack,
        routed: StackRoute,
        batch: Batch,
        grads: dict[str, jax.Array],
    ) -> tuple[tuple[jax.Array, jax.Array] | None, Arrivals]:
        """Sums the gradients of a stack.

        Returns:
            For replicated rows, if any, their sums f[rows, dim] and number of reads f[rows] on this
            device. For split rows the gradients as they arrive.
        """
        vector_layout, replicated = self.vector_layout(stack), self.parts[stack.name].replicated
        rows, sums = replicated.rows if replicated else 0, None
        ids, route = routed
        grad = self._indexed_gradients(stack, ids.size, batch.lists.get(stack.name), grads)
        if isinstance(route, Route):
            exchange = self._make_exchange(stack, batch)
            of_owners = exchange.sums(route, joined(vector_layout, grad))
            arrivals = functools.partial(exchange.scan_arrivals, route, of_owners)
            if rows:
                sums = sum_once(vector_layout, *exchange.kept(route, rows, of_owners), rows)
        else:
            if not self.is_on_cpu and not self.has_kernel:
                grad = [IndexedVectors(ids.size, joined(vector_layout, grad))]
            of_split = jnp.where(ids < stack.replicated, PAD, ids) if stack.replicated else ids
            arrivals = functools.partial(_one_arrival, route, grad, of_split)
            if rows and ids.size:
                replicated_ids = jnp.where(ids < stack.replicated, ids, PAD)
                sums = sum_of_rows(
                    vector_layout, replicated_ids, grad, rows, by_scatter=self.is_on_cpu
                )
            elif rows:  # products read all places
                dtype = grads["ids"].dtype
                sums = vector_layout.zeros(rows, dtype), jnp.zeros(rows, dtype)
        if sums is not None and stack.name in batch.ids:
            sums = self.one_hot[stack.name].add_sums(*sums, batch.ids[stack.name], grads["ids"])
        return sums, arrivals

    def _indexed_gradients(
        self, stack: Stack, count: int, lists: Lists | None, grads: dict[str, jax.Array]
    ) -> list[IndexedVectors]:
        """Collects the gradients of the `count` ids of a `StackRoute`."""
        vector_layout, pieces = self.vector_layout(stack), []
        if "ids" in grads:
            of_lists = 0 if lists is None else lists.ids.size
            block = vector_layout.from_examples(self.one_hot[stack.name].others(grads["ids"]))
            pieces.append(IndexedVectors(count - of_lists, block))
        if lists is not None:
            is_plain = self._adds_plainly(stack)
            pieces.append(spread(vector_layout, grads["lists"], lists, is_plain=is_plain))
        return pieces


def _one_arrival(place, grads, row, body, carry):
    """Calls `body` once, like `Exchange.scan_arrivals`, on a mesh of one device."""
    return body(carry, place, grads, row)
