"""Vector layout of CPU with `native`. Equals `xla` to the bit."""

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends import cpu_rows
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.embedding.backends.xla import RowLayout


class CpuRowLayout(RowLayout):
    """A `VectorLayout`. XLA handles dtypes other than float32."""

    def add(
        self,
        block: jax.Array,
        at: jax.Array,
        source: jax.Array,
        index: jax.Array | None = None,
        *,
        scale: jax.Array | None = None,
        rising: bool = False,
    ) -> jax.Array:
        if block.dtype != jnp.float32:
            return super().add(block, at, source, index, scale=scale, rising=rising)
        return cpu_rows.add(
            block, at, IndexedVectors(at.shape[0], source, index, scale), rising=rising
        )

    def _gather(self, array: jax.Array, row: jax.Array) -> jax.Array:
        if array.dtype != jnp.float32:
            return super()._gather(array, row)
        return cpu_rows.take(array, row)
