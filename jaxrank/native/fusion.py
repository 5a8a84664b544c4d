"""Work that XLA on CPU does not mix with what is around it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def fusion_barrier(function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """function(*operands), on CPU in a branch of its own, which is always taken.

    XLA on CPU fuses a gather with the arithmetic behind it, in loops of single numbers that take
    twice as long; computes an index anew in every gather and scatter by it; and takes a transpose
    into a product that it has no fast form of. It fuses nothing across a branch;
    `optimization_barrier` alone is removed before it fuses. Not for a `shard_map` that checks what
    varies over its mesh.
    """
    return jax.lax.platform_dependent(*operands, cpu=_branch(function), default=function)


def _branch(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def branched(*operands: jax.Array) -> jax.Array:
        always = jax.lax.optimization_barrier(jnp.bool_(True))
        out = jax.eval_shape(function, *operands)
        return jax.lax.cond(always, function, lambda *_: jnp.zeros(out.shape, out.dtype), *operands)

    return branched
