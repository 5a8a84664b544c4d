"""Tables split by row over the mesh: their state, the lookup and the update.

Every device holds an equal share of each stack's rows. A lookup sends all ids of a replica to all
its devices, each reads the rows that it owns, and the sum over devices, in which all terms but one
are zero, brings every vector to the device that asked. An update sends all ids and gradients of the
global batch to all devices, in the order of the examples, and each applies those it owns: the sums
are the same, in the same order, on any number of devices.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank.embedding.combine import combine, spread
from jaxrank.embedding.duplicates import sum_by_scratch, sum_by_sort
from jaxrank.embedding.rules import Rule
from jaxrank.embedding.storage import GROUPS, LANES, Storage, storage
from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch, Layout, Lists, Stack

Vectors = dict[str, dict[str, jax.Array]]


class StackState(NamedTuple):
    """One stack on the devices, split along the first axis.

    rows: f[rows * width / 128, 128], see `storage`.
    slots: of the row optimizer, f[rows * width / 128, 128] or, one a row, f[rows].
    """

    rows: jax.Array
    slots: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Embedding:
    """Reads and updates the tables of a layout on a mesh.

    Args:
        layout: the stacks.
        mesh: tables are split along its `shard` axis.
        rule: the row optimizer.
        init_std: standard deviation of the normal distribution that rows start from.
        l2: adds l2 * row to the gradient of a row, once a step.
        l2_scope: "read" regularises the rows that a step reads. "table" regularises and updates
            all rows in every step, as the published CTR benchmarks do: the cost of a step then
            grows with the rows.
        clip_norm: longest gradient of one row after summing; 0 for no limit.
    """

    layout: Layout
    mesh: Mesh
    rule: Rule
    init_std: float = 0.01
    l2: float = 0.0
    l2_scope: str = "read"
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        if GROUPS % self.shards:
            raise InputError(
                f"tables can be split over a number of devices that divides {GROUPS}:"
                f" found {self.shards}. Set mesh.devices or mesh.replicas."
            )

    @functools.cached_property
    def storages(self) -> dict[str, Storage]:
        return {s.name: storage(s) for s in self.layout.stacks}

    @property
    def shards(self) -> int:
        return self.mesh.shape[meshes.SHARD]

    @property
    def uses_scratch(self) -> bool:
        """Whether duplicates are found through a scratch array; see `duplicates`."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return on_cpu and self.l2_scope == "read"

    def init(self, key: jax.Array) -> dict[str, StackState]:
        """New tables; the same values on any mesh."""
        tables = {}
        for number, (name, shape) in enumerate(self.storages.items()):
            slots = {
                slot: jnp.full(shape.shape if wide else (shape.rows,), value, jnp.float32)
                for slot, (wide, value) in self.rule.slots.items()
            }
            rows = jax.shard_map(
                functools.partial(self._init_share, shape),
                mesh=self.mesh,
                in_specs=P(),
                out_specs=P(meshes.SHARD),
                check_vma=False,
            )(jax.random.fold_in(key, number))
            tables[name] = StackState(rows, slots)
        return tables

    def _init_share(self, shape: Storage, key: jax.Array) -> jax.Array:
        """This device's rows, group by group: random numbers of a whole table at once take
        several times its memory."""
        groups = GROUPS // self.shards
        first = jax.lax.axis_index(meshes.SHARD) * groups
        # Columns beyond the dimension are zero and stay so.
        real = jnp.arange(shape.width) < shape.dim

        def one_group(group: jax.Array) -> jax.Array:
            size = (shape.rows // GROUPS, shape.width)
            rows = jax.random.normal(jax.random.fold_in(key, group), size, jnp.float32)
            return jnp.where(real[None, :], self.init_std * rows, 0.0).reshape(-1, LANES)

        return jax.lax.map(one_group, first + jnp.arange(groups)).reshape(-1, LANES)

    def init_scratch(self) -> dict[str, jax.Array]:
        """What `update` needs besides the tables; its values never matter between steps."""
        if not self.uses_scratch:
            return {}
        return {name: jnp.zeros(s.rows, jnp.int32) for name, s in self.storages.items()}

    def sharding(self) -> NamedSharding:
        """Of every array of tables and scratch."""
        return meshes.by_row(self.mesh)

    def lookup(self, rows: dict[str, jax.Array], batch: Batch) -> Vectors:
        """The vectors of a batch.

        Args:
            rows: `StackState.rows` of each stack.
            batch: only its ids and lists are read.

        Returns:
            {stack: {"ids": f[B, columns, dim], "lists": f[B, lists, dim]}}, each where the stack
            has such features. PAD reads zeros, an empty list too.
        """
        examples = batch.labels.shape[0] // self.mesh.size
        return jax.shard_map(
            functools.partial(self._lookup_on_device, examples=examples),
            mesh=self.mesh,
            in_specs=(P(meshes.SHARD), P(meshes.EXAMPLES), P(meshes.EXAMPLES)),
            out_specs=P(meshes.EXAMPLES),
            check_vma=False,
        )(rows, batch.ids, batch.lists)

    def _lookup_on_device(self, rows: Any, ids: Any, lists: Any, *, examples: int) -> Vectors:
        vectors: Vectors = {}
        for stack in self.layout.stacks:
            found = vectors[stack.name] = {}
            if stack.name in ids:
                columns = ids[stack.name]
                read = self._read(stack.name, rows[stack.name], columns.reshape(-1))
                found["ids"] = read.reshape(*columns.shape, stack.dim)
            if stack.name in lists:
                packed = lists[stack.name]
                read = self._read(stack.name, rows[stack.name], packed.ids.reshape(-1))
                combined = combine(read, packed, examples * len(stack.lists))
                found["lists"] = combined.reshape(examples, len(stack.lists), stack.dim)
        return vectors

    def _read(self, name: str, stored: jax.Array, ids: jax.Array) -> jax.Array:  # f[n, dim]
        shape = self.storages[name]
        position = shape.position(ids)
        if self.shards > 1:
            position = jax.lax.all_gather(position, meshes.SHARD, tiled=True)
            position = self._local(shape, position)
        read = shape.view(stored).at[position].get(mode="fill", fill_value=0)[:, : shape.dim]
        if self.shards > 1:
            read = jax.lax.psum_scatter(read, meshes.SHARD, scatter_dimension=0, tiled=True)
        return read

    def _local(self, shape: Storage, position: jax.Array) -> jax.Array:
        """Positions -> positions in this device's share; PAD where another device owns the row."""
        share = shape.rows // self.shards
        local = position - jax.lax.axis_index(meshes.SHARD) * share
        return jnp.where((local >= 0) & (local < share), local, PAD)

    def update(
        self,
        tables: dict[str, StackState],
        scratch: dict[str, jax.Array],
        batch: Batch,
        grads: Vectors,
        *,
        rate: jax.Array,
        step: jax.Array,
    ) -> tuple[dict[str, StackState], dict[str, jax.Array]]:
        """One step of the row optimizer on the rows that `batch` reads.

        Gradients of a row that is read many times are summed before the rule sees them, so the
        result is that of the dense update at the cost of the rows read.

        Args:
            grads: the loss gradient of what `lookup` returned, in the same structure.
            rate: f[], learning rate.
            step: i32[], steps done before this one.

        Returns:
            The tables and the scratch array after the step.
        """
        return jax.shard_map(
            self._update_on_device,
            mesh=self.mesh,
            in_specs=(
                P(meshes.SHARD), P(meshes.SHARD), P(meshes.EXAMPLES), P(meshes.EXAMPLES),
                P(meshes.EXAMPLES), P(), P(),
            ),
            out_specs=P(meshes.SHARD),
            check_vma=False,
        )(tables, scratch, batch.ids, batch.lists, grads, rate, step)  # fmt: skip

    def _update_on_device(self, tables, scratch, ids, lists, grads, rate, step):
        new_tables, new_scratch = {}, {}
        for stack in self.layout.stacks:
            name = stack.name
            position, gradient = self._per_id(stack, ids.get(name), lists.get(name), grads[name])
            change = self._change_table if self.l2_scope == "table" else self._change_rows
            new_tables[name], used = change(
                self.storages[name], tables[name], scratch.get(name), position, gradient, rate, step
            )
            if used is not None:
                new_scratch[name] = used
        return new_tables, new_scratch

    def _per_id(
        self, stack: Stack, ids: jax.Array | None, lists: Lists | None, grads: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Local position i32[n] and gradient f[n, dim] of each id of the global batch, in order."""
        pieces = []
        if ids is not None:
            pieces.append((ids.reshape(-1), grads["ids"].reshape(-1, stack.dim)))
        if lists is not None:
            by_list = grads["lists"].reshape(-1, stack.dim)
            pieces.append((lists.ids.reshape(-1), spread(by_list, lists)))
        shape = self.storages[stack.name]
        pieces = [(shape.position(i), g) for i, g in pieces]
        if self.mesh.size > 1:
            pieces = [
                jax.tree.map(lambda x: jax.lax.all_gather(x, meshes.EXAMPLES, tiled=True), piece)
                for piece in pieces
            ]
            pieces = [(self._local(shape, p), g) for p, g in pieces]
        if len(pieces) == 1:
            return pieces[0]
        return jnp.concatenate([p for p, _ in pieces]), jnp.concatenate([g for _, g in pieces])

    def _change_rows(self, shape, state, scratch, position, gradient, rate, step):
        """Updates the rows read; see `update`."""
        if self.uses_scratch:
            unique, gradient, scratch = sum_by_scratch(position, gradient, scratch)
        else:
            unique, gradient = sum_by_sort(position, gradient)

        def view(array):
            return shape.view(array) if array.ndim == 2 else array

        def write(array, found, change):
            # Not `.at[].add(change)`: nothing would then say that the rows are read before they
            # are written, and the compiler copies the whole array in every step.
            if array.ndim == 2 and shape.width != shape.dim:
                change = jnp.pad(change, ((0, 0), (0, shape.width - shape.dim)))
            return view(array).at[unique].set(found + change, mode="drop").reshape(array.shape)

        found = jax.tree.map(
            lambda array: view(array).at[unique].get(mode="fill", fill_value=0), state
        )
        rows = found.rows[:, : shape.dim]
        slots = {n: a[:, : shape.dim] if a.ndim == 2 else a for n, a in found.slots.items()}
        gradient = self._regularised(rows, gradient)
        change = StackState(*self.rule.change(rows, slots, gradient, rate, step))
        return jax.tree.map(write, state, found, change), scratch

    def _change_table(self, shape, state, scratch, position, gradient, rate, step):
        """Updates all rows, those that were not read with their regularisation alone."""

        def view(array):
            return shape.view(array)[:, : shape.dim] if array.ndim == 2 else array

        def add(array, change):
            if array.ndim == 2:
                change = jnp.pad(change, ((0, 0), (0, shape.width - shape.dim)))
            return array + change.reshape(array.shape)

        seen = jax.tree.map(view, state)
        gradient = jnp.zeros_like(seen.rows).at[position].add(gradient, mode="drop")
        gradient = self._regularised(seen.rows, gradient)
        change = StackState(*self.rule.change(seen.rows, seen.slots, gradient, rate, step))
        return jax.tree.map(add, state, change), scratch

    def _regularised(self, rows: jax.Array, gradient: jax.Array) -> jax.Array:
        if self.l2:
            gradient = gradient + self.l2 * rows
        if self.clip_norm:
            norm = jnp.linalg.norm(gradient, axis=1, keepdims=True)
            gradient = gradient * jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-12))
        return gradient
