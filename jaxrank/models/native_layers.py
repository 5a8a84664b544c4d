"""Dense layers on CPU by code in C++ (`native/layers.cc`): float32, or bfloat16 with float32 sums.

While its numbers are in the cache, a layer also adds the bias and applies the ReLU or the product
of a cross layer. The backward pass does the same for gradients. Factors are float32 arrays, which
are rounded while they are read for bfloat16. Sums are split by shape alone, so the bits do not
depend on the number of threads.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

FORMS = ("plain", "relu", "cross")  # in the order of the enum in `native/layers.cc`
_PANEL = 32  # maximum number of adjacent columns
_LINE = 16  # numbers per cache line
_MAX_PARTS, _PART = 8, 2048  # maximum parts of a sum over examples, minimum examples of a part


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def layer(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    x0: jax.Array | None,
    past: jax.Array | None,
    is_bfloat16: bool,
    form: str,
) -> Any:
    """Computes `products.layer` of float32 arrays.

    Args:
        x0: None for x itself.
        is_bfloat16: whether both factors and the incoming gradient are rounded.
    """
    return _layer(x, kernel, bias, x0, past, is_bfloat16, form, keeps=False)[0]


def _layer(x, kernel, bias, x0, past, is_bfloat16, form, keeps):
    """Returns the output and, with `keeps`, the factor of x0."""
    shape = (*x.shape[:-1], kernel.shape[-1])
    batch, (n, width) = math.prod(shape[:-2]), shape[-2:]
    operands = [_joined(a, 2) for a in (x, kernel)]
    operands += [_joined(bias, 1), _joined(x0, 2), _joined(past, 2)]
    kept = _floats(batch, n, -(-width // _LINE) * _LINE) if keeps else _floats(0)
    outs = (_floats(batch, n, width), kept, _floats(_panels(batch, x.shape[-1], width)))
    y, multiplied, _ = _call("JaxrankLayer", outs)(
        *operands, is_bfloat16=is_bfloat16, form=FORMS.index(form)
    )
    y = y.reshape(shape)
    return (y if form != "cross" else (y, x if x0 is None else x0)), multiplied


def _forward(x, kernel, bias, x0, past, is_bfloat16, form):
    keeps = form == "cross"
    out, multiplied = _layer(x, kernel, bias, x0, past, is_bfloat16, form, keeps)
    factor = {"plain": None, "relu": out, "cross": x0}[form]
    return out, (x, kernel, bias, factor, past, multiplied)


def _backward(is_bfloat16, form, kept, grad):
    x, kernel, bias, factor, past, multiplied = kept
    is_x0 = form == "cross" and factor is None
    factor = x if is_x0 else factor
    grad, x0_grad = grad if form == "cross" else (grad, None)
    batch, (n, width), size = math.prod(grad.shape[:-2]), grad.shape[-2:], x.shape[-1]
    parts = min(max(n // _PART, 1), _MAX_PARTS)
    sums = parts * batch * (size + 1) * width if parts > 1 else 0
    outs = (
        _floats(batch, n, size),
        _floats(batch, size, width),
        _floats(0 if bias is None else batch, width),
        _floats(0 if x0_grad is None else batch, n, width),
        _floats(max(_panels(batch, width, size), sums)),
    )
    operands = [_joined(a, 2) for a in (grad, x, kernel, factor)] + [
        multiplied,
        _joined(x0_grad, 2),
    ]
    aliases = {} if x0_grad is None else {5: 3}  # the gradient of x0 is updated in place
    of_x, of_kernel, of_bias, of_x0, _ = _call("JaxrankLayerGradient", outs, aliases)(
        *operands,
        adds_grad=form == "cross" and past is None,
        adds_x0=is_x0,
        parts=parts,
        is_bfloat16=is_bfloat16,
        form=FORMS.index(form),
    )
    return (
        of_x.reshape(x.shape),
        of_kernel.reshape(kernel.shape),
        None if bias is None else of_bias.reshape(bias.shape),
        None if x0_grad is None or is_x0 else of_x0.reshape(x0_grad.shape),
        None if past is None else grad,
    )


layer.defvjp(_forward, _backward)


def _call(name: str, outs: Any, aliases: dict[int, int] | None = None) -> Callable[..., Any]:
    return jax.ffi.ffi_call(name, outs, vmap_method="sequential", input_output_aliases=aliases)


def _joined(x: jax.Array | None, last: int) -> jax.Array:
    """Joins all axes except the `last` ones. None becomes an empty array."""
    if x is None:
        return jnp.zeros(0, jnp.float32)
    return x.reshape(-1, *x.shape[-last:])


def _panels(batch: int, size: int, width: int) -> int:
    """Returns the size of kernels [batch, size, width] in panels, in numbers."""
    return batch * size * -(-width // _PANEL) * _PANEL


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
