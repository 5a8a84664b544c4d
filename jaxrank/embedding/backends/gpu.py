"""Vector layout of GPU: like `xla`, with sums of sorted ids by the kernel of `gpu_kernel`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends import gpu_kernel
from jaxrank.embedding.backends.lazy import IndexedVectors, indices, scales
from jaxrank.embedding.backends.xla import RowLayout


@dataclasses.dataclass(frozen=True)
class GpuRowLayout(RowLayout):
    """A `VectorLayout`. XLA handles dtypes other than float32 and dims that the kernel rejects.

    interpret: runs the kernel without a GPU, for tests.
    """

    interpret: bool = False

    def supports(self, dtype: Any) -> bool:
        return dtype == jnp.float32 and gpu_kernel.fits(self.dim) and self.width == self.dim

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        if scale is not None or not self.supports(source.dtype):
            return super().take(source, index, scale)
        return gpu_kernel.take(source, index, interpret=self.interpret)

    def sum_sorted(self, rank: jax.Array, block: jax.Array, order: jax.Array) -> jax.Array:
        if not self.supports(block.dtype):
            return super().sum_sorted(rank, block, order)
        inputs = gpu_kernel.KernelInputs(rank, rank, (block,), order)
        zeros = jnp.zeros_like(block)
        return gpu_kernel.change_rows(
            zeros, inputs, lambda stored, sums, learning_rate: sums, interpret=self.interpret
        )

    def change_read(
        self,
        arrays: Any,
        row: jax.Array,
        local_row_of: Callable[[jax.Array], jax.Array],
        grads: Sequence[IndexedVectors],
        change: gpu_kernel.Change,
        row_learning_rate: Callable[[jax.Array], jax.Array],
        scalars: tuple[jax.Array, ...],
    ) -> Any:
        """Changes rows like `change`, for ids that may occur several times. Sums their gradients.

        Args:
            arrays: as in `change`, float32.
            row: i32[k], the rows that gradients are summed by. Rows change in this order. PAD is
                ignored.
            local_row_of: maps rows i32[k] to their index in the arrays, i32[k].
            grads: the gradients of these ids.
            change: as in `gpu_kernel.change_rows`.
            row_learning_rate: maps rows i32[k] to f[] or f[k, 1].
            scalars: further arguments of `change`.
        """
        grads = [g for g in grads if g.count]
        index, scale = indices(grads), scales(grads)
        if scale is None:
            row, index = jax.lax.sort_key_val(row, index)
        else:
            row, order = jax.lax.sort_key_val(row, jnp.arange(row.shape[0], dtype=jnp.int32))
            index, scale = index[order], scale[order]
        learning_rate = row_learning_rate(row)
        inputs = gpu_kernel.KernelInputs(
            key=row,
            local_row=local_row_of(row),
            sources=tuple(g.source for g in grads),
            index=index,
            scale=scale,
            learning_rate=learning_rate[:, 0] if learning_rate.ndim else learning_rate,
            scalars=scalars,
        )
        viewed = jax.tree.map(self._rows, arrays)
        new = gpu_kernel.change_rows(viewed, inputs, change, interpret=self.interpret)
        return jax.tree.map(lambda a, n: n.reshape(a.shape), arrays, new)
