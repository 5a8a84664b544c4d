"""A barrier against fusion by XLA on CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def fusion_barrier(function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Computes function(*operands), on CPU in a branch of its own, which is always taken.

    XLA on CPU does not fuse across a branch. Otherwise it fuses a gather with the arithmetic behind
    it, in scalar loops that take twice as long. It computes an index again in every gather and
    scatter that uses it. It fuses a transpose into a product that it has no fast form of.

    `optimization_barrier` alone is removed before fusion. Do not use this function in a `shard_map`
    with `check_vma`.
    """
    return jax.lax.platform_dependent(*operands, cpu=_branch(function), default=function)


def _branch(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def branched(*operands: jax.Array) -> jax.Array:
        true = jax.lax.optimization_barrier(jnp.bool_(True))
        out = jax.eval_shape(function, *operands)
        return jax.lax.cond(true, function, lambda *_: jnp.zeros(out.shape, out.dtype), *operands)

    return branched
