"""Row optimizers, which compute the change of a row from the sum of its gradients in one step.

A row optimizer is a pure function of arrays whose first axis is rows. The same code therefore
updates the few rows that a step read, or all rows for the whole-table regularisation of the
published benchmarks. It returns changes to be added. The platform decides how they are written
(see `backends.base`).

A row whose gradient is zero still counts as read: its moments may decay, as in Adam. A row that a
step did not read never reaches an optimizer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends import cpu_rows
from jaxrank.validate import MAX_DECAY, MIN_EPS, check_choice, field, parse

Slots = dict[str, jax.Array]


class RowOptimizer(NamedTuple):
    """A row optimizer.

    slots: {name: (True for one number per column or False for one per row, initial value)}.
    change: (rows f[n, dim], slots, gradients f[n, dim], learning_rate f[] or f[n, 1], step i32[])
        -> (the change of the rows, the changes of the slots). `step` counts from 0.
    native: (rows f32[n * width / 128, 128], slots, row i32[k], gradients f32[k, dim], learning_rate
        f32[] or f32[k, 1], width) -> the updated rows and slots, changed in place by code in C++.
        None for optimizers without such code.
    counts_steps: True if the change depends on the step.
    """

    slots: Mapping[str, tuple[bool, float]]
    change: Callable[..., tuple[jax.Array, Slots]]
    native: Callable[..., tuple[jax.Array, Slots]] | None = None
    counts_steps: bool = False


def _root_scale(total: jax.Array, eps: float) -> jax.Array:
    """Computes 1 / sqrt(total + eps), or 0 where total + eps is 0: nothing had a gradient yet."""
    return jnp.where(total + eps > 0, jax.lax.rsqrt(total + eps), jnp.zeros_like(total))


class Settings(Protocol):
    """Settings of a row optimizer."""

    def row_optimizer(self) -> RowOptimizer:
        """Makes the row optimizer with these settings."""
        ...


_START = "initial value of the sums of squared gradients"


@dataclasses.dataclass(frozen=True)
class Sgd:
    """w -= learning_rate * g."""

    def row_optimizer(self) -> RowOptimizer:
        def change(rows, slots, grads, learning_rate, step):
            return -learning_rate * grads, {}

        return RowOptimizer({}, change)


@dataclasses.dataclass(frozen=True)
class AdaGrad:
    """a += g^2; w -= learning_rate * g / sqrt(a + eps), element by element, as in optax.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011.
    """

    initial_accumulator: float = field(0.1, help=_START, at_least=0)
    eps: float = field(1e-7, help="added under the square root", at_least=0)

    def row_optimizer(self) -> RowOptimizer:
        def change(rows, slots, grads, learning_rate, step):
            squares = grads * grads
            scale = _root_scale(slots["accumulator"] + squares, self.eps)
            return -learning_rate * grads * scale, {"accumulator": squares}

        return RowOptimizer({"accumulator": (True, self.initial_accumulator)}, change)


@dataclasses.dataclass(frozen=True)
class RowwiseAdaGrad:
    """a += mean(g^2) over the row; w -= learning_rate * g / sqrt(a + eps). One accumulator per row.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011; row-wise as in Mudigere et al.,
        Software-Hardware Co-design for Fast and Scalable Training of DLRMs, ISCA 2022.
    """

    initial_accumulator: float = field(0.1, help=_START, at_least=0)
    eps: float = field(1e-7, help="added under the square root", at_least=0)

    def row_optimizer(self) -> RowOptimizer:
        def change(rows, slots, grads, learning_rate, step):
            mean = jnp.mean(grads * grads, axis=1)
            scale = _root_scale(slots["accumulator"] + mean, self.eps)
            return -learning_rate * grads * scale[:, None], {"accumulator": mean}

        def native(rows, slots, row, grads, learning_rate, width):
            rows, accumulator = cpu_rows.rowwise_adagrad(
                rows, slots["accumulator"], row, grads, learning_rate, width=width, eps=self.eps
            )
            return rows, {"accumulator": accumulator}

        return RowOptimizer({"accumulator": (False, self.initial_accumulator)}, change, native)


@dataclasses.dataclass(frozen=True)
class ProximalAdaGrad:
    """AdaGrad with an L2 penalty of every step, those that did not read the row included.

    With k steps since the row was read last: a += g^2, r = rate / sqrt(a + eps) and
    w = (w - r g) / (1 + r l2 k), element by element. So the penalty does not depend on how often
    a row is read: with l2 = 1 / (variance * examples) and the mean loss of a batch, the fixed point
    is the mode of the posterior under a normal prior. Without it rare ids are overfitted.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011 (composite mirror descent), with the
        lazy updates of its section 5.
    """

    initial_accumulator: float = field(0.0, help=_START, at_least=0)
    eps: float = field(1e-12, help="added under the square root", at_least=0)
    l2: float = field(0.0, help="penalty of l2 / 2 * w^2 in every step", at_least=0)

    def row_optimizer(self) -> RowOptimizer:
        def change(rows, slots, grads, learning_rate, step):
            squares = grads * grads
            step_size = learning_rate * _root_scale(slots["accumulator"] + squares, self.eps)
            waited = (step + 1).astype(rows.dtype) - slots["read_at"]
            penalty = step_size * self.l2 * waited[:, None]
            new = (rows - step_size * grads) / (1 + penalty)
            return new - rows, {"accumulator": squares, "read_at": waited}

        slots = {"accumulator": (True, self.initial_accumulator), "read_at": (False, 0.0)}
        return RowOptimizer(slots, change, counts_steps=True)


@dataclasses.dataclass(frozen=True)
class LazyAdam:
    """Adam that updates moments only when their row is read. Bias correction uses the run's step.

    References:
        Kingma and Ba, Adam, ICLR 2015.
    """

    b1: float = field(0.9, help="decay of the mean of gradients", at_least=0, at_most=MAX_DECAY)
    b2: float = field(
        0.999, help="decay of the mean of squared gradients", at_least=0, at_most=MAX_DECAY
    )
    eps: float = field(
        1e-8,
        help="added to the square root",
        at_least=MIN_EPS,
        hint="A smaller eps gives NaN for a gradient of 0. Increase it.",
    )

    def row_optimizer(self) -> RowOptimizer:
        b1, b2, eps = self.b1, self.b2, self.eps

        def change(rows, slots, grads, learning_rate, step):
            count = (step + 1).astype(rows.dtype)
            change_m = (1 - b1) * (grads - slots["m"])
            change_v = (1 - b2) * (grads * grads - slots["v"])
            m = (slots["m"] + change_m) / (1 - b1**count)
            v = (slots["v"] + change_v) / (1 - b2**count)
            return -learning_rate * m / (jnp.sqrt(v) + eps), {"m": change_m, "v": change_v}

        return RowOptimizer({"m": (True, 0.0), "v": (True, 0.0)}, change, counts_steps=True)


@dataclasses.dataclass(frozen=True)
class Ftrl:
    """FTRL-proximal: w minimises z w + (s + l2) w^2 / 2 + l1 |w|.

    s = (beta + sqrt(n)) / learning_rate.

    n sums squared gradients. z sums g - (s - s_previous) w, where s_previous is s at the last step
    that read the coordinate, so the learning rate may follow any schedule. Without l1 and l2 the
    change is -g / s. A learning rate of 0 changes nothing.

    Where w is not 0, z equals -(s + l2) w - l1 sign(w), so z is computed from w and the current s.
    A running sum would lose w where s falls by orders of magnitude, for example when a decayed
    learning rate restarts. The published algorithm starts from 0. Computing z from w also keeps a
    random initial value, and rows from another optimizer or an average.

    References:
        McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
    """

    beta: float = field(
        1.0, help="added to the square root of the sum of squared gradients", at_least=0
    )
    l1: float = field(0.0, help="factor of |w|", at_least=0)
    l2: float = field(0.0, help="factor of w^2 / 2", at_least=0)

    def row_optimizer(self) -> RowOptimizer:
        beta, l1, l2 = self.beta, self.l1, self.l2

        def change(rows, slots, grads, learning_rate, step):
            n, z = slots["n"], slots["z"]
            divisor = jnp.where(learning_rate > 0, learning_rate, 1)
            squares = grads * grads
            strength = (beta + jnp.sqrt(n + squares)) / divisor
            at_rows = -rows * (strength + l2) - l1 * jnp.sign(rows)
            new_z = jnp.where(rows != 0, at_rows, z) + grads
            shrunk = new_z - jnp.sign(new_z) * l1
            solved = jnp.where(jnp.abs(new_z) > l1, -shrunk / (strength + l2), jnp.zeros_like(rows))
            # Without a gradient so far, n is 0 and cannot show that the coordinate was read.
            moves = (n + squares > 0) & (learning_rate > 0)

            def where_it_moves(new):
                return jnp.where(moves, new, jnp.zeros_like(new))

            return where_it_moves(solved - rows), {
                "n": where_it_moves(squares),
                "z": where_it_moves(new_z - z),
            }

        return RowOptimizer({"n": (True, 0.0), "z": (True, 0.0)}, change)


ROW_OPTIMIZERS: Mapping[str, type[Settings]] = {
    "sgd": Sgd,
    "adagrad": AdaGrad,
    "rowwise_adagrad": RowwiseAdaGrad,
    "proximal_adagrad": ProximalAdaGrad,
    "lazy_adam": LazyAdam,
    "ftrl": Ftrl,
}


def make_row_optimizer(name: str, **settings: Any) -> RowOptimizer:
    """Makes the row optimizer with this name.

    Raises:
        InputError: the name or a setting is unknown.
    """
    check_choice("optim.tables.name", name, ROW_OPTIMIZERS)
    return parse(ROW_OPTIMIZERS[name], settings, "optim.tables.settings").row_optimizer()
