"""Matrix products with an explicit precision, and dense layers.

All products of a model are made here. Their precision is explicit, because by default TPUs compute
float32 products in bfloat16.

A program has the trained form of layers or, within `plain_layers`, the plain form.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxrank import native
from jaxrank.models import native_layers
from jaxrank.native.fusion import fusion_barrier

PRECISIONS = ("default", "high", "highest", "bfloat16", "mixed_bfloat16")
_MIXED = "mixed_bfloat16"
_ROUNDING = ("bfloat16", _MIXED)  # precisions whose factors are rounded

KERNEL_INIT = nn.initializers.glorot_normal()
# For kernels [layers, in, out]: separate layers of `in` and `out`, not one with a larger fan.
STACKED_KERNEL_INIT = nn.initializers.glorot_normal(batch_axis=(0,))

_WIDE = 32  # width of kernels from which on transposing the examples for their gradient pays off
_ALIGNED = 8  # multiple of bfloat16 numbers that a GPU's matrix units need
_SMALL = 2**17  # multiplications from which on C++ code computes them on CPU

_is_plain = contextvars.ContextVar("jaxrank plain layers", default=False)


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Gives layers their plain form: `jnp` in the dtype of the parameters, at precision "highest".

    The plain form has no gradient of its own, no branch for a platform, no custom call, and no
    comparison of shapes. A program with a symbolic number of examples can be exported from it, for
    other platforms and other libraries. Precisions that round to bfloat16 are ignored.
    """
    token = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(token)


def is_plain() -> bool:
    """Returns True within `plain_layers`."""
    return _is_plain.get()


def compiler_options(precision: str, platform: str) -> dict[str, str | bool]:
    """Returns XLA options for programs that train models of this precision on a platform.

    On CPU XLA calls one of two libraries for products, by default YNNPACK. In float32 the other
    one, Eigen, multiplies examples by kernels at 1.4 times its speed; in bfloat16 at 0.6 to 0.7
    times. A jaxlib without the option fails to compile. The jaxlibs of JAX 0.10.2 to 0.12.0 have
    it.

    On GPU float32 numbers are added to memory by one instruction only if numbers below 1e-38 may
    become zero, as on TPU. Otherwise a loop reads, adds, and repeats after a collision with another
    thread. Collisions are frequent for duplicates of an id and for bins of the AUC.
    """
    if platform == "cpu" and precision not in _ROUNDING:
        return {"xla_cpu_experimental_ynn_fusion_type": ""}
    if platform == "gpu":
        return {"xla_gpu_ftz": True}
    return {}


def param_dtype(x: ArrayLike) -> jnp.dtype:
    """Returns the dtype of parameters for an input: its dtype, but at least float32."""
    return jnp.promote_types(jnp.float32, jnp.result_type(x))


def kept(x: jax.Array, precision: str) -> jax.Array:
    """Converts x to the dtype between layers: bfloat16 with "mixed_bfloat16"."""
    is_rounded = precision == _MIXED and not _is_plain.get()
    return x.astype(jnp.bfloat16) if is_rounded else x


def unrounded(precision: str) -> str:
    """Returns the precision of products whose results are not rounded, such as logits and gates."""
    return "bfloat16" if precision == _MIXED else precision


def product(x: jax.Array, kernel: jax.Array, precision: str) -> jax.Array:
    """f[..., n, in] x f[..., in, out] -> f[..., n, out]. Leading axes are equal batch axes.

    precision: a name of `jax.lax.Precision`, "bfloat16" or "mixed_bfloat16". With "bfloat16" both
    factors are rounded to bfloat16 and sums are float32, on every backend. The result is float32.
    Products of the gradient are of the same kind: the incoming gradient is rounded, the outgoing
    one is float32. With "mixed_bfloat16" the result and the gradient of x are rounded as well. Sums
    and gradients of kernels remain float32.
    """
    return layer(x, kernel, None, precision)


def layer(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    precision: str,
    form: str = "plain",
    *,
    x0: jax.Array | None = None,
    past: jax.Array | None = None,
) -> Any:
    """Computes a dense layer: `product` of x and `kernel`, bias and activation. f[..., n, out].

    On CPU, C++ code computes the whole layer at once if the layer is large enough and a compiler is
    installed.

    Args:
        bias: f[..., out], or None.
        form: "plain": y = x kernel + bias; "relu": its positive part; "cross": (x0 * y + past, x0).
            Later layers should read the x0 that a cross layer returns. The gradients of x0 are then
            accumulated layer by layer, and not all at the end.
        x0: f[..., n, out], of a cross layer. It may be x (the same object), or None for x.
        past: f[..., n, out], of a cross layer; None for x itself.
    """
    x0 = None if x0 is x else x0
    if _is_plain.get():
        return _finished(jnp.matmul(x, kernel, precision="highest"), x, bias, x0, past, form)
    x, (x0, past) = kept(x, precision), jax.tree.map(lambda a: kept(a, precision), (x0, past))
    dtype = jnp.float32 if precision in _ROUNDING else jnp.result_type(x, kernel)
    is_rounded = precision in _ROUNDING and x.dtype == jnp.bfloat16
    operands = x if is_rounded else x.astype(dtype), kernel.astype(dtype), bias, x0, past
    by_xla = functools.partial(_layer, precision=precision, form=form)
    if not _is_native(*operands):
        return by_xla(*operands)

    def cpu(*operands: Any) -> Any:
        shape = jax.eval_shape(by_xla, *operands)
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), operands)
        results = native_layers.layer(*wide, precision in _ROUNDING, form)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), results, shape)

    return jax.lax.platform_dependent(*operands, cpu=cpu, default=by_xla)


def _is_native(x: jax.Array, kernel: jax.Array, *others: jax.Array | None) -> bool:
    """Returns True if C++ code computes this layer on CPU."""
    sides = x.shape[-2], *kernel.shape[-2:]
    is_worth_it = kernel.shape[-2] > 1 and math.prod(sides) >= _SMALL
    no_more = (jnp.float32, jnp.bfloat16)
    is_float32 = all(a is None or a.dtype in no_more for a in (x, kernel, *others))
    is_cpu = jax.default_backend() == "cpu"
    return is_worth_it and is_float32 and is_cpu and native.has_layers()


def _layer(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    x0: jax.Array | None,
    past: jax.Array | None,
    precision: str,
    form: str,
) -> Any:
    """Computes `layer` by XLA. Without x0 it uses x."""
    y = _product(x, kernel, precision, x.dtype.name)
    return _finished(y, x, bias, x0, past, form, precision)


def _finished(
    y: jax.Array,
    x: jax.Array,
    bias: jax.Array | None,
    x0: jax.Array | None,
    past: jax.Array | None,
    form: str,
    precision: str = "highest",
) -> Any:
    """Adds the bias to a product y of x and applies the form of a layer."""
    if bias is not None:
        y = y + bias[..., None, :]
    if form == "relu":
        # In float32, because XLA on GPU emits comparisons of bfloat16 that do not assemble.
        y = nn.relu(y.astype(param_dtype(y)))
    y = kept(y, precision)
    if form != "cross":
        return y
    x0 = x if x0 is None else x0
    return x0 * y + (x if past is None else past), x0


def _contract(
    a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision: str, dtype: str | None = None
) -> jax.Array:
    """Contracts one of the last two axes of both arrays, f[..., m, n].

    dtype: dtype of the result of bfloat16 factors; None: float32.
    """
    whole = functools.partial(
        _whole, axis_a=axis_a, axis_b=axis_b, precision=precision, dtype=dtype
    )
    part = _part(a.shape[-3 - axis_a], b.shape[-3 - axis_b])
    is_split = a.dtype != jnp.bfloat16 or axis_a == axis_b == -2  # see `_kernel_gradient`
    on_gpu = {}
    if not _is_aligned(a, b):
        on_gpu = {"cuda": functools.partial(_filled, **whole.keywords)}
    if not is_split or a.shape[axis_a] <= part:
        return jax.lax.platform_dependent(a, b, **on_gpu, default=whole) if on_gpu else whole(a, b)

    def multiply_parts(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = jnp.moveaxis(a, axis_a, -2), jnp.moveaxis(b, axis_b, -2)
        count, rest = divmod(a.shape[-2], part)
        end = count * part

        def parts(x: jax.Array) -> jax.Array:
            return x[..., :end, :].reshape(*x.shape[:-2], count, part, x.shape[-1])

        sums = _whole(parts(a), parts(b), -2, -2, precision).sum(-3)
        if rest:
            sums = sums + _whole(a[..., end:, :], b[..., end:, :], -2, -2, precision)
        return sums

    return jax.lax.platform_dependent(a, b, cpu=multiply_parts, **on_gpu, default=whole)


def _filled(
    a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision: str, dtype: str | None = None
) -> jax.Array:
    """Computes `_whole` for GPU with sides padded by zeros, in the operation that rounds them."""
    m, n = a.shape[-3 - axis_a], b.shape[-3 - axis_b]

    def filled(x: jax.Array) -> jax.Array:
        sides = [(0, -side % _ALIGNED) for side in x.shape[-2:]]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + sides)

    return _whole(filled(a), filled(b), axis_a, axis_b, precision, dtype)[..., :m, :n]


def _is_aligned(*arrays: jax.Array) -> bool:
    """Returns True if padding would not speed up the product on a GPU."""
    sides = [side for x in arrays for side in x.shape[-2:]]
    return arrays[0].dtype != jnp.bfloat16 or all(
        side % _ALIGNED == 0 or side < _WIDE for side in sides
    )


def _part(m: int, n: int) -> float:
    """Returns the longest sum that XLA on CPU does not split over threads, for an m x n result.

    The bits of a split sum depend on the number of threads. The limits follow the rules of Eigen's
    contraction and were tested with 2 to 64 threads. With one thread, sums over 512 are also added
    in another order.
    """
    if min(m, n) == 1 or m * n >= 2**17:
        return math.inf
    if m * n >= 2**15:
        return 512
    return 128 if min(m, n) >= 8 else 64


def _whole(
    a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, precision: str, dtype: str | None = None
) -> jax.Array:
    batch = tuple(range(a.ndim - 2))
    axes = ((axis_a % a.ndim,), (axis_b % b.ndim,))
    kind = dtype or "float32" if a.dtype == jnp.bfloat16 else None
    return jax.lax.dot_general(
        a, b, (axes, (batch, batch)), precision=precision, preferred_element_type=kind
    )


# In bfloat16 JAX's gradient would be a product of float32 by bfloat16 that is rounded to bfloat16.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, kernel: jax.Array, precision: str, dtype: str) -> jax.Array:
    """Computes `product`. dtype: the dtype of x."""
    return _forward(x, kernel, precision, dtype)[0]


def _forward(x: jax.Array, kernel: jax.Array, precision: str, dtype: str) -> tuple[jax.Array, Any]:
    factors = _rounded(x, precision), _rounded(kernel, precision)
    of_result = "bfloat16" if precision == _MIXED else None
    return _contract(*factors, -1, -2, _xla_precision(precision), of_result), factors


def _backward(
    precision: str, dtype: str, factors: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (x, kernel), grad = factors, _rounded(grad, precision)
    of_x = _contract(grad, kernel, -1, -1, _xla_precision(precision), dtype)
    return of_x, _kernel_gradient(x, grad, _xla_precision(precision))


_product.defvjp(_forward, _backward)


def _rounded(x: jax.Array, precision: str) -> jax.Array:
    return x.astype(jnp.bfloat16) if precision in _ROUNDING else x


def _xla_precision(precision: str) -> str:
    """Returns the precision of XLA for factors that are already rounded."""
    return "default" if precision in _ROUNDING else precision


def _kernel_gradient(x: jax.Array, grad: jax.Array, precision: str) -> jax.Array:
    """Returns the gradient of a kernel: f[..., n, in], f[..., n, out] -> f[..., in, out]."""
    plain = functools.partial(_contract, axis_a=-2, axis_b=-2, precision=precision)
    if x.dtype != jnp.bfloat16 or grad.shape[-1] < _WIDE:
        return plain(x, grad)

    def turned(x: jax.Array, grad: jax.Array) -> jax.Array:
        # XLA on CPU has no bfloat16 product over the first axis of both, and converts to float32.
        return _contract(fusion_barrier(jnp.matrix_transpose, x), grad, -1, -2, precision)

    if _is_aligned(x, grad):
        return turned(x, grad)
    return jax.lax.platform_dependent(x, grad, cuda=plain, default=turned)


class Dense(nn.Module):
    """Dense layer: x W + b, or another form of `layer`.

    Parameters: `kernel` W [in, width] (Glorot normal) and `bias` b [width] (zero). Several inputs x
    are treated as one concatenated input, without a copy. They need form "plain".

    form: see `layer`, which also describes x0 and past.
    """

    width: int
    precision: str
    use_bias: bool = True
    kernel_init: Callable[..., jax.Array] = KERNEL_INIT
    form: str = "plain"

    @nn.compact
    def __call__(self, x: jax.Array, *others: jax.Array, **more: jax.Array) -> Any:
        """Maps x f[B, in] to f[B, width]. Form "cross" returns x0 as well."""
        dtype, size = param_dtype(x), x.shape[1]
        total = size + sum(other.shape[1] for other in others)
        kernel = self.param("kernel", self.kernel_init, (total, self.width), dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.width,), dtype)
        y = layer(x, kernel[:size], bias, self.precision, self.form, **more)
        for other in others:
            y = y + product(other, kernel[size : size + other.shape[1]], self.precision)
            size += other.shape[1]
        return y


class StackedDense(nn.Module):
    """Dense layers of one width side by side, computed as one product.

    Parameters: `kernel` [layers, in, width] (Glorot normal, the fan of one layer) and `bias`
    [layers, width] (zero).

    form: "plain" or "relu"; see `layer`.
    """

    layers: int
    width: int
    precision: str
    use_bias: bool = True
    form: str = "plain"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x f[B, in], or one input per group of layers f[B, groups, in], to
        f[B, layers, width].

        Each group has layers / groups consecutive layers.
        """
        dtype, size = param_dtype(x), x.shape[-1]
        shape = (self.layers, size, self.width)
        kernel = self.param("kernel", STACKED_KERNEL_INIT, shape, dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.layers, self.width), dtype)
        groups = 1 if x.ndim == 2 else x.shape[1]
        # The layers of a group are joined to one wide kernel. This is explicit, because a product
        # over the middle axis of a kernel takes XLA on CPU nearly twice as long.
        wide = kernel.reshape(groups, self.layers // groups, size, self.width)
        wide = jnp.moveaxis(wide, 2, 1).reshape(groups, size, -1)
        biases = None if bias is None else bias.reshape(groups, -1)
        if groups == 1:
            first_bias = None if biases is None else biases[0]
            y = layer(x.reshape(-1, size), wide[0], first_bias, self.precision, self.form)
        else:
            y = layer(jnp.moveaxis(x, 1, 0), wide, biases, self.precision, self.form)
            y = jnp.moveaxis(y, 0, 1)
        return y.reshape(-1, self.layers, self.width)
