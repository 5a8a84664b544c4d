"""bfloat16 matrix products on CPU by code in C++ (`native/products.cc`), with float32 sums.

Factors are float32 arrays, rounded as they are read. In float32 XLA's products are as fast. Sums
are cut where the shapes say, so the bits do not depend on the number of threads. All arrays are
f32[batch, ...], a product for each of the batch.
"""

import functools

import jax
import jax.numpy as jnp

_PANEL = 32  # columns that lie together, at most
_MOST_PARTS, _PART = 8, 1024  # of a sum over examples, and the fewest examples of a part


def of_rows(x: jax.Array, kernel: jax.Array, *, is_transposed: bool = False) -> jax.Array:
    """f32[batch, n, in] x f32[batch, in, out] -> f32[batch, n, out].

    Args:
        is_transposed: `kernel` is f32[batch, out, in].
    """
    batch, n, size = x.shape
    width = kernel.shape[1 if is_transposed else 2]
    outs = (_floats(batch, n, width), _floats(batch * size * -(-width // _PANEL) * _PANEL))
    return _call("JaxrankProductOfRows", outs)(x, kernel, is_transposed=is_transposed)[0]


def of_columns(x: jax.Array, grad: jax.Array) -> jax.Array:
    """f32[batch, n, in], f32[batch, n, out] -> f32[batch, in, out]: the sum over n examples."""
    batch, n, size = x.shape
    width = grad.shape[2]
    parts = min(max(n // _PART, 1), _MOST_PARTS)
    outs = (_floats(batch, size, width), _floats(parts if parts > 1 else 0, batch, size, width))
    return _call("JaxrankProductOfColumns", outs)(x, grad)[0]


_call = functools.partial(jax.ffi.ffi_call, vmap_method="sequential")


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
