"""Row optimizers: how a row changes, given the sum of its gradients in one step.

A rule is a pure function of arrays whose first axis is rows, so the same code updates the few rows
that a step read or, for the whole-table regularisation of the published benchmarks, all of them.
It returns changes, to be added: how they are written is up to the platform (see `backends.base`).

A row whose gradient is zero is a row that was read: its moments may decay, as those of Adam do.
Rows that a step did not read never reach a rule.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends import cpu_rows
from jaxrank.validate import LEAST_EPS, MOST_DECAY, check_choice, field, parse

SharedRing = dict[str, jax.Array]


class RowOptimizer(NamedTuple):
    """A row optimizer.

    slots: name -> (whether it has a number for each column or one a row, initial value).
    change: (rows f[n, dim], slots, gradients f[n, dim], learning_rate f[] or f[n, 1], step i32[])
        -> (the change of the rows, the changes of the slots). `step` counts from 0.
    native: (rows f32[n * width / 128, 128], slots, row i32[k], gradients f32[k, dim], rate f32[] or
        f32[k, 1], width) -> the rows and slots after it, in their place by code in C++, for rules
        that have such.
    counts_steps: whether what it does depends on the step.
    """

    slots: Mapping[str, tuple[bool, float]]
    change: Callable[..., tuple[jax.Array, SharedRing]]
    native: Callable[..., tuple[jax.Array, SharedRing]] | None = None
    counts_steps: bool = False


def _root_scale(total: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(total + eps), and 0 where that is no number, as for what never had a gradient."""
    return jnp.where(total + eps > 0, jax.lax.rsqrt(total + eps), jnp.zeros_like(total))


class Settings(Protocol):
    """A rule's settings."""

    def row_optimizer(self) -> RowOptimizer:
        """The rule with these settings."""
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
    """a += g^2; w -= learning_rate * g / sqrt(a + eps), element by element, as optax has it.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011.
    """

    initial_accumulator: float = field(0.1, help=_START, at_least=0)
    eps: float = field(1e-7, help="added under the root", at_least=0)

    def row_optimizer(self) -> RowOptimizer:
        def change(rows, slots, grads, learning_rate, step):
            squares = grads * grads
            scale = _root_scale(slots["accumulator"] + squares, self.eps)
            return -learning_rate * grads * scale, {"accumulator": squares}

        return RowOptimizer({"accumulator": (True, self.initial_accumulator)}, change)


@dataclasses.dataclass(frozen=True)
class RowwiseAdaGrad:
    """a += mean(g^2) over the row; w -= learning_rate * g / sqrt(a + eps): one accumulator a row.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011; row-wise as in Mudigere et al.,
        Software-Hardware Co-design for Fast and Scalable Training of DLRMs, ISCA 2022.
    """

    initial_accumulator: float = field(0.1, help=_START, at_least=0)
    eps: float = field(1e-7, help="added under the root", at_least=0)

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
class LazyAdam:
    """Adam whose moments move only when their row is read; bias correction by the run's step.

    References:
        Kingma and Ba, Adam, ICLR 2015.
    """

    b1: float = field(0.9, help="decay of the mean of gradients", at_least=0, at_most=MOST_DECAY)
    b2: float = field(
        0.999, help="decay of the mean of squared gradients", at_least=0, at_most=MOST_DECAY
    )
    eps: float = field(
        1e-8,
        help="added beside the root",
        at_least=LEAST_EPS,
        hint="Below the least eps a gradient of 0 gives NaN.",
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
    """FTRL-proximal: w minimises z w + (s + l2) w^2 / 2 + l1 |w|, s = (beta + sqrt(n)) / rate.

    n sums squared gradients; z sums g - (s - s before) w, where s before is that of the step that
    last met the coordinate, so the rate may follow any schedule: without l1 and l2 the change is
    -g / s. A rate of 0 changes nothing.

    Where w is not 0 it says what z is, -(s + l2) w - l1 sign(w), so z is made of it and the s of
    the step. Summed up instead it would lose w where s falls by orders of magnitude, as when a
    rate that has decayed begins anew. The algorithm has no initial value but 0: made so, z keeps
    a random start, and rows that another rule or an average has left.

    References:
        McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
    """

    beta: float = field(1.0, help="added to the root of the sum of squares", at_least=0)
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
            # A coordinate without any gradient so far has no n to remember that it was met.
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
    "lazy_adam": LazyAdam,
    "ftrl": Ftrl,
}


def make_row_optimizer(name: str, **settings: Any) -> RowOptimizer:
    """The rule of that name.

    Raises:
        InputError: no such rule, or it has no such setting.
    """
    check_choice("optim.tables.name", name, ROW_OPTIMIZERS)
    return parse(ROW_OPTIMIZERS[name], settings, "optim.tables.settings").row_optimizer()
