"""One step of the row optimizer on the rows of one stack, from their gradients.

Gradients of a row that is read several times are summed before the optimizer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrank import mesh as meshes
from jaxrank.embedding.backends import cpu_rows
from jaxrank.embedding.backends.base import VectorLayout
from jaxrank.embedding.backends.gpu import GpuRowLayout
from jaxrank.embedding.backends.lazy import IndexedVectors, add
from jaxrank.embedding.duplicates import sum_by_scratch, sum_by_sort
from jaxrank.embedding.optimizers import RowOptimizer
from jaxrank.embedding.rates import RowValues
from jaxrank.embedding.storage import Storage, TableState
from jaxrank.features import PAD
from jaxrank.layout import Stack

# (body, carry) -> carry. Calls body(carry, local_row i32[m], [IndexedVectors of these rows], row)
# for each batch of gradients that arrives at this device. row: i32[m], the stack row of each local
# row, if known. See `Exchange.scan_arrivals`.
Arrivals: TypeAlias = Callable[[Callable[..., Any], Any], Any]


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """The row update of one stack: the program of one device.

    Args:
        vector_layout, stack, mesh, is_native, row_optimizer, l2, l2_scope, clip_norm: as in
            `Embedding`.
        lr_multipliers: multipliers of the learning rate of the stack's rows. None if all are 1.
        l2s: L2 of the stack's rows. None if all have `l2`.
        learning_rate: f[].
        step: i32[], number of steps before this one.
        applies: bool[]. If False, nothing changes. None means True.
    """

    vector_layout: VectorLayout
    stack: Stack
    mesh: Mesh
    is_native: bool
    row_optimizer: RowOptimizer
    l2: float
    l2_scope: str
    clip_norm: float
    lr_multipliers: RowValues | None
    l2s: RowValues | None
    learning_rate: jax.Array
    step: jax.Array
    applies: jax.Array | None

    def replicated(self, state: TableState, sums: jax.Array, reads: jax.Array) -> TableState:
        """Updates this device's copy of replicated rows, from the sums over all devices.

        Args:
            sums: f[rows, dim], sums of the gradients on this device, in the layout of
                `vector_layout`.
            reads: f[rows], number of reads of each row on this device.
        """
        sums, reads = meshes.total(self.mesh, (sums, reads))

        def change_if_read(stored, grads, local_row):
            changes = self._change(stored, grads, local_row)
            if self.l2_scope == "table":
                return changes
            is_read = reads[local_row] > 0
            return jax.tree.map(
                lambda c: jnp.where(is_read[:, None] if c.ndim == 2 else is_read, c, 0), changes
            )

        return self.vector_layout.change_all(state, sums, change_if_read)

    def split(
        self, shape: Storage, state: TableState, scratch: jax.Array | None, arrivals: Arrivals
    ) -> tuple[TableState, jax.Array | None]:
        """Updates the share of the rows that this device owns. Returns its scratch array too."""

        def change_share(stored, grads, local_row):
            return self._change(stored, grads, self._to_stack_row(shape, local_row))

        def change_read(carry, local_row, grads: list[IndexedVectors], row=None):
            state, scratch = carry
            if self.is_native and state.rows.dtype == jnp.float32:
                unique, sums = cpu_rows.sum_by_id(local_row, grads, self._share(shape), shape.dim)
                is_plain = not self.l2 and self.l2s is None and not self.clip_norm
                if self.row_optimizer.native and is_plain:
                    return self._update_by_native(shape, state, unique, sums), scratch
            elif (
                isinstance(self.vector_layout, GpuRowLayout)
                and self.vector_layout.supports(state.rows.dtype)
                and self.l2s is None  # the kernel has no number per row beside the learning rate
            ):
                if row is None:
                    row = self._to_stack_row(shape, local_row)
                return self._update_by_kernel(self.vector_layout, shape, state, row, grads), scratch
            elif scratch is not None:
                unique, sums, scratch = sum_by_scratch(
                    self.vector_layout, local_row, grads, scratch
                )
            else:
                unique, sums = sum_by_sort(self.vector_layout, local_row, grads)
            return self.vector_layout.change(state, unique, sums, change_share), scratch

        def sum_rows(sums, local_row, grads: list[IndexedVectors], row=None):
            if not isinstance(self.vector_layout, GpuRowLayout):
                return add(self.vector_layout, sums, local_row, grads)
            return self.vector_layout.add(
                sums, *sum_by_sort(self.vector_layout, local_row, grads), rising=True
            )

        if self.l2_scope == "read":
            return arrivals(change_read, (state, scratch))
        # All rows change. Rows that were not read change only by their regularisation.
        sums = arrivals(sum_rows, self.vector_layout.zeros(self._share(shape), state.rows.dtype))
        return self.vector_layout.change_all(state, sums, change_share), scratch

    def _share(self, shape: Storage) -> int:
        """Returns the number of rows of a split part that a device owns."""
        return shape.rows // self.mesh.shape[meshes.SHARD]

    def _to_stack_row(self, shape: Storage, local_row: jax.Array) -> jax.Array:
        """Maps local rows i32[k] of this device's share of a split part to rows of the stack.

        PAD stays PAD.
        """
        first = jax.lax.axis_index(meshes.SHARD) * self._share(shape)
        row = shape.row(jnp.where(local_row == PAD, PAD, first + local_row))
        return jnp.where(row == PAD, PAD, self.stack.replicated + row)

    def _to_local_row(self, shape: Storage, row: jax.Array) -> jax.Array:
        """Maps rows of the stack to local rows: the inverse of `_to_stack_row`."""
        first = jax.lax.axis_index(meshes.SHARD) * self._share(shape)
        position = shape.position(jnp.where(row == PAD, PAD, row - self.stack.replicated))
        return jnp.where(row == PAD, PAD, position - first)

    def _change(self, stored: TableState, gradient: jax.Array, row: jax.Array) -> TableState:
        """Computes the change of rows i32[k] and their slots from summed gradients f[k, dim]."""
        learning_rate = self._row_learning_rate(row)
        if self.l2s is not None:
            gradient = gradient + self.l2s.gather(row) * stored.rows
        return self._compute_change(stored, gradient, learning_rate, self.step, self.applies)

    def _compute_change(
        self,
        stored: TableState,
        gradient: jax.Array,
        learning_rate: jax.Array,
        step: jax.Array,
        applies: jax.Array | None,
    ) -> TableState:
        """Computes `_change` from arguments alone, as a kernel requires."""
        if self.l2 and self.l2s is None:
            gradient = gradient + self.l2 * stored.rows
        if self.clip_norm:
            norm = jnp.linalg.norm(gradient, axis=1, keepdims=True)
            gradient = gradient * jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-12))
        changes = TableState(
            *self.row_optimizer.change(stored.rows, stored.slots, gradient, learning_rate, step)
        )
        if applies is None:
            return changes
        return jax.tree.map(lambda c: jnp.where(applies, c, 0), changes)

    def _update_by_kernel(
        self,
        vector_layout: GpuRowLayout,
        shape: Storage,
        state: TableState,
        row: jax.Array,
        grads: list[IndexedVectors],
    ) -> TableState:
        """Updates this device's share of a split part from gradients of stack rows i32[k]."""
        scalars = [self.step]
        if self.applies is not None:
            scalars.append(self.applies.astype(jnp.int32))

        def change(stored, gradient, learning_rate, step, applies=None):
            is_applied = None if applies is None else applies != 0
            return self._compute_change(stored, gradient, learning_rate, step, is_applied)

        # Sorted by rows, not by local rows: the gradients of one feature are then read one after
        # another and stay in the cache.
        local_row_of = functools.partial(self._to_local_row, shape)
        return vector_layout.change_read(
            state, row, local_row_of, grads, change, self._row_learning_rate, tuple(scalars)
        )

    def _update_by_native(
        self, shape: Storage, state: TableState, local_row: jax.Array, sums: jax.Array
    ) -> TableState:
        """Updates this device's share of a split part by the native code of `row_optimizer`.

        `l2` and `clip_norm` must be 0.

        Args:
            local_row: i32[k], local rows, with PAD behind the last.
            sums: f32[k, dim], their summed gradients.
        """
        assert self.row_optimizer.native
        learning_rate = self._row_learning_rate(self._to_stack_row(shape, local_row))
        if self.applies is not None:
            local_row = jnp.where(self.applies, local_row, PAD)
        return TableState(
            *self.row_optimizer.native(*state, local_row, sums, learning_rate, shape.width)
        )

    def _row_learning_rate(self, row: jax.Array) -> jax.Array:
        """Returns the learning rate f[], or f[k, 1] of rows i32[k] of the stack."""
        return (
            self.learning_rate * self.lr_multipliers.gather(row)
            if self.lr_multipliers
            else self.learning_rate
        )
