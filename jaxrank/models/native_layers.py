"""Dense layers on CPU by code in C++ (`native/layers.cc`): float32, or bfloat16 with float32 sums.

Besides its product a layer adds its bias, is cut at zero or multiplied by the input of a cross
network while its numbers are in the cache, and so is its gradient, forward and backward. Factors
are float32 arrays, rounded as they are read where bfloat16 is asked for. Sums are cut where the
shapes say, so the bits do not depend on the number of threads.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

FORMS = ("plain", "relu", "cross")  # as the file counts them
_PANEL = 32  # columns that lie together, at most
_LINE = 16  # numbers of a cache line
_MOST_PARTS, _PART = 8, 2048  # of a sum over examples, and the fewest examples of a part


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def layer(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    x0: jax.Array | None,
    past: jax.Array | None,
    is_bfloat16: bool,
    form: str,
) -> jax.Array:
    """`products.layer`, of float32 arrays.

    Args:
        is_bfloat16: both factors are rounded, and the gradient that comes in.
    """
    return _forward(x, kernel, bias, x0, past, is_bfloat16, form)[0]


def _forward(x, kernel, bias, x0, past, is_bfloat16, form):
    shape = (*x.shape[:-1], kernel.shape[-1])
    batch, (n, width) = math.prod(shape[:-2]), shape[-2:]
    given = [_joined(a, 2) for a in (x, kernel)]
    given += [_joined(bias, 1), _joined(x0, 2), _joined(past, 2)]
    of_cross = _floats(batch, n, -(-width // _LINE) * _LINE) if form == "cross" else _floats(0)
    outs = (_floats(batch, n, width), of_cross, _panels(batch, x.shape[-1], width))
    y, multiplied, _ = _call("JaxrankLayer", outs, is_bfloat16, form)(*given)
    y = y.reshape(shape)
    by = {"plain": None, "relu": y, "cross": x0}[form]
    return y, (x, kernel, bias, by, past, multiplied)


def _backward(is_bfloat16, form, kept, grad):
    x, kernel, bias, by, past, multiplied = kept
    batch, (n, width), size = math.prod(grad.shape[:-2]), grad.shape[-2:], x.shape[-1]
    factors = _joined(grad, 2), _joined(by, 2)
    call = functools.partial(_call, is_bfloat16=is_bfloat16, form=form)

    outs: tuple[Any, ...] = (_floats(batch, n, size), _panels(batch, width, size))
    adds_grad = form == "cross" and past is None
    of_input = call("JaxrankLayerOfInput", outs)(
        factors[0], _joined(kernel, 2), factors[1], adds_grad=adds_grad
    )[0].reshape(x.shape)

    parts = min(max(n // _PART, 1), _MOST_PARTS)
    outs = (
        _floats(batch, size, width),
        _floats(0 if bias is None else batch, width),
        _floats(parts if parts > 1 else 0, batch, size + 1, width),
    )
    of_kernel, of_bias, _ = call("JaxrankLayerOfKernel", outs)(_joined(x, 2), *factors)
    return (
        of_input,
        of_kernel.reshape(kernel.shape),
        None if bias is None else of_bias.reshape(bias.shape),
        grad * multiplied[..., :width].reshape(grad.shape) if form == "cross" else None,
        None if past is None else grad,
    )


layer.defvjp(_forward, _backward)


def _call(name: str, outs: Any, is_bfloat16: bool, form: str) -> Callable[..., Any]:
    call = jax.ffi.ffi_call(name, outs, vmap_method="sequential")
    return functools.partial(call, is_bfloat16=is_bfloat16, form=FORMS.index(form))


def _joined(x: jax.Array | None, last: int) -> jax.Array:
    """Its leading axes as one, before the last one or two; nothing for None."""
    if x is None:
        return jnp.zeros(0, jnp.float32)
    return x.reshape(-1, *x.shape[-last:])


def _panels(batch: int, size: int, width: int) -> jax.ShapeDtypeStruct:
    """Room for kernels [batch, size, width] in panels."""
    return _floats(batch * size * -(-width // _PANEL) * _PANEL)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
