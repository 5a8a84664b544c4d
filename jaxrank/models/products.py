"""Matrix products of a stated precision, and the dense layers made of them.

Every product of a model is made here. Its precision is always stated, because float32 products on
TPU are bfloat16 ones by default.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrank import native
from jaxrank.apart import apart
from jaxrank.models import native_products

PRECISIONS = ("default", "high", "highest", "bfloat16")

KERNEL_INIT = nn.initializers.glorot_normal()
# Of kernels [layers, in, out]: as many layers of `in` and `out`, not one of a larger fan.
STACKED_KERNEL_INIT = nn.initializers.glorot_normal(batch_axis=(0,))

_WIDE = 32  # of kernels, from which on it pays to turn examples over for their gradient
_NARROW, _SMALL = 16, 2**17  # code in C++ multiplies on CPU if no side is less, nor their product


def compiler_options(precision: str, platform: str) -> dict[str, str]:
    """XLA's options for programs that make products of this precision on such devices.

    On CPU XLA hands products to one of two libraries, by default YNNPACK. In float32 the other one,
    Eigen, multiplies examples by kernels at 1.4 times its rate; in bfloat16 at 0.6 to 0.7 of it. A
    jaxlib that does not know the option refuses to compile: those of JAX 0.10.2 to 0.12.0 do.
    """
    if platform == "cpu" and precision != "bfloat16":
        return {"xla_cpu_experimental_ynn_fusion_type": ""}
    return {}


def param_dtype(x: ArrayLike) -> jnp.dtype:
    """The dtype of parameters for this input: its own, but never less than float32."""
    return jnp.promote_types(jnp.float32, jnp.result_type(x))


def product(x: jax.Array, kernel: jax.Array, precision: str) -> jax.Array:
    """f[..., n, in] x f[..., in, out] -> f[..., n, out]; leading axes are equal, one product each.

    precision: a name of `jax.lax.Precision`, or "bfloat16": both factors are rounded to bfloat16,
    and their products added up in float32, on every backend. The result is float32. The products
    of the gradient are of the same kind, and gradients float32: the gradient that comes in is
    rounded, the one that goes out is not.
    """
    dtype = jnp.float32 if precision == "bfloat16" else jnp.result_type(x, kernel)
    return _product(x.astype(dtype), kernel.astype(dtype), precision)


def _contract(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision: str) -> jax.Array:
    """f[..., m, n]: the sum over one of the last two axes of both."""
    whole = functools.partial(_whole, axis_a=axis_a, axis_b=axis_b, precision=precision)
    part = _part(a.shape[-3 - axis_a], b.shape[-3 - axis_b])
    is_split = a.dtype != jnp.bfloat16 or axis_a == axis_b == -2  # see `_of_kernel`
    if not is_split or a.shape[axis_a] <= part:
        return whole(a, b)

    def in_parts(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = jnp.moveaxis(a, axis_a, -2), jnp.moveaxis(b, axis_b, -2)
        count, rest = divmod(a.shape[-2], part)
        end = count * part

        def parts(x: jax.Array) -> jax.Array:
            return x[..., :end, :].reshape(*x.shape[:-2], count, part, x.shape[-1])

        sums = _whole(parts(a), parts(b), -2, -2, precision).sum(-3)
        if rest:
            sums = sums + _whole(a[..., end:, :], b[..., end:, :], -2, -2, precision)
        return sums

    return jax.lax.platform_dependent(a, b, cpu=in_parts, default=whole)


def _part(m: int, n: int) -> float:
    """The longest sum of which XLA on CPU makes no parts, one for each of its threads, when as many
    are taken as a matrix of m x n has numbers.

    Its bits would depend on how many threads there are. By the rules of Eigen's contraction, and
    tried on 2 to 64 threads; with one thread also longer sums than 512 are added otherwise.
    """
    if min(m, n) == 1 or m * n >= 2**17:
        return math.inf
    if m * n >= 2**15:
        return 512
    return 128 if min(m, n) >= 8 else 64


def _whole(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision: str) -> jax.Array:
    batch = tuple(range(a.ndim - 2))
    axes = ((axis_a % a.ndim,), (axis_b % b.ndim,))
    as_float32 = jnp.float32 if a.dtype == jnp.bfloat16 else None
    return jax.lax.dot_general(
        a, b, (axes, (batch, batch)), precision=precision, preferred_element_type=as_float32
    )


# JAX's own gradient in bfloat16 would be a product of float32 by bfloat16, rounded to bfloat16 at
# the end.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, precision: str) -> jax.Array:
    return _forward(x, kernel, precision)[0]


class _Factors(NamedTuple):
    """Factors as they are, which code in C++ rounds by itself, and as XLA multiplies them. What a
    platform does not read costs nothing: XLA removes it."""

    given: tuple[jax.Array, jax.Array]
    rounded: tuple[jax.Array, jax.Array]


def _factors(x: jax.Array, kernel: jax.Array, precision: str) -> _Factors:
    if precision != "bfloat16":
        return _Factors((x, kernel), (x, kernel))
    return _Factors((x, kernel), (x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)))


def _forward(x: jax.Array, kernel: jax.Array, precision: str) -> tuple[jax.Array, _Factors]:
    factors = _factors(x, kernel, precision)
    by_xla = functools.partial(_contract, axis_a=-1, axis_b=-2, precision=_of_xla(precision))
    is_native = _is_native(x, kernel, precision)
    return _either(native_products.of_rows, by_xla, factors, is_native=is_native), factors


def _backward(precision: str, factors: _Factors, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (x_rounded, kernel_rounded) = factors
    is_native = _is_native(x, kernel, precision)
    rounded = _factors(grad, grad, precision).rounded[0]
    of_x = _either(
        functools.partial(native_products.of_rows, is_transposed=True),
        functools.partial(_contract, axis_a=-1, axis_b=-1, precision=_of_xla(precision)),
        _Factors((grad, kernel), (rounded, kernel_rounded)),
        is_native=is_native,
    )
    of_kernel = _either(
        native_products.of_columns,
        functools.partial(_of_kernel, precision=_of_xla(precision)),
        _Factors((x, grad), (x_rounded, rounded)),
        is_native=is_native,
    )
    return of_x, of_kernel


_product.defvjp(_forward, _backward)


def _of_xla(precision: str) -> str:
    """For factors that are rounded already."""
    return "default" if precision == "bfloat16" else precision


def _either(
    by_native: Callable[..., jax.Array],
    by_xla: Callable[..., jax.Array],
    factors: _Factors,
    *,
    is_native: bool,
) -> jax.Array:
    """The product of the factors, on CPU by code in C++ if `is_native`."""
    if not is_native:
        return by_xla(*factors.rounded)

    def cpu(given: tuple[jax.Array, jax.Array], rounded: Any) -> jax.Array:
        a, b = (x.reshape(-1, *x.shape[-2:]) for x in given)
        found = by_native(a, b)
        return found.reshape(*given[0].shape[:-2], *found.shape[1:])

    return jax.lax.platform_dependent(
        *factors, cpu=cpu, default=lambda given, rounded: by_xla(*rounded)
    )


def _is_native(x: jax.Array, kernel: jax.Array, precision: str) -> bool:
    """Whether code in C++ makes these products on CPU: of bfloat16, XLA has float32 as fast."""
    sides = x.shape[-2], *kernel.shape[-2:]
    is_worth_it = min(sides) >= _NARROW and math.prod(sides) >= _SMALL
    is_cpu = precision == "bfloat16" and jax.default_backend() == "cpu"
    return is_worth_it and is_cpu and native.has_products()


def _of_kernel(x: jax.Array, grad: jax.Array, precision: str) -> jax.Array:
    """f[..., n, in], f[..., n, out] -> f[..., in, out]: the sum over n examples."""
    if x.dtype == jnp.bfloat16 and grad.shape[-1] >= _WIDE:
        # XLA on CPU has no bfloat16 product over the first axis of both, and converts to float32.
        return _contract(apart(jnp.matrix_transpose, x), grad, -1, -2, precision)
    return _contract(x, grad, -2, -2, precision)


class Dense(nn.Module):
    """x W + b. Parameters: `kernel` W [in, width] (Glorot normal) and `bias` b [width] (zero)."""

    width: int
    precision: str
    use_bias: bool = True
    kernel_init: Callable[..., jax.Array] = KERNEL_INIT

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # f[B, in] -> f[B, width]
        dtype = param_dtype(x)
        kernel = self.param("kernel", self.kernel_init, (x.shape[1], self.width), dtype)
        y = product(x, kernel, self.precision)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.width,), dtype)
        return y + bias[None, :]


class StackedDense(nn.Module):
    """Dense layers of one width side by side, as one product however many they are.

    Parameters: `kernel` [layers, in, width] (Glorot normal, the fan of one layer) and `bias`
    [layers, width] (zero).
    """

    layers: int
    width: int
    precision: str
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """f[B, layers, width] of x f[B, in], which every layer reads, or of x f[B, groups, in],
        of which the first layers / groups layers read the first, and so on."""
        dtype, size = param_dtype(x), x.shape[-1]
        shape = (self.layers, size, self.width)
        kernel = self.param("kernel", STACKED_KERNEL_INIT, shape, dtype)
        groups = 1 if x.ndim == 2 else x.shape[1]
        # The layers of a group beside each other make one wide kernel. Written out, because a
        # product over the middle axis of a kernel takes XLA on CPU nearly twice as long.
        wide = kernel.reshape(groups, self.layers // groups, size, self.width)
        wide = jnp.moveaxis(wide, 2, 1).reshape(groups, size, -1)
        if groups == 1:
            y = product(x.reshape(-1, size), wide[0], self.precision)
        else:
            y = jnp.moveaxis(product(jnp.moveaxis(x, 1, 0), wide, self.precision), 0, 1)
        y = y.reshape(-1, self.layers, self.width)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.layers, self.width), dtype)
        return y + bias[None, :, :]
