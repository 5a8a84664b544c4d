"""Row optimizers: how a row changes, given the sum of its gradients in one step.

A rule is a pure function of arrays whose first axis is rows, so the same code updates the few rows
that a step read or, for the whole-table regularisation of the published benchmarks, all of them.
It returns changes, to be added: how they are written is up to the platform (see `backends.base`).

A row whose gradient is zero is a row that was read: its moments may decay, as those of Adam do.
Rows that a step did not read never reach a rule.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends import cpu_rows
from jaxrank.errors import InputError
from jaxrank.validate import LEAST_EPS, MOST_DECAY, check_choice

Slots = dict[str, jax.Array]


class Rule(NamedTuple):
    """A row optimizer.

    slots: name -> (whether it has a number for each column or one a row, initial value).
    change: (rows f[n, dim], slots, gradients f[n, dim], rate f[] or f[n, 1], step i32[]) -> (the
        change of the rows, the changes of the slots). `step` counts from 0.
    native: (rows f32[n * width / 128, 128], slots, row i32[k], gradients f32[k, dim], rate f32[] or
        f32[k, 1], width) -> the rows and slots after it, in their place by code in C++, for rules
        that have such.
    counts_steps: whether what it does depends on the step.
    """

    slots: Mapping[str, tuple[bool, float]]
    change: Callable[..., tuple[jax.Array, Slots]]
    native: Callable[..., tuple[jax.Array, Slots]] | None = None
    counts_steps: bool = False


def _root_scale(total: jax.Array, eps: float) -> jax.Array:
    """1 / sqrt(total + eps), and 0 where that is no number, as for what never had a gradient."""
    return jnp.where(total + eps > 0, jax.lax.rsqrt(total + eps), jnp.zeros_like(total))


def sgd() -> Rule:
    """w -= rate * g."""

    def change(rows, slots, grads, rate, step):
        return -rate * grads, {}

    return Rule({}, change)


def adagrad(*, initial_accumulator: float = 0.1, eps: float = 1e-7) -> Rule:
    """a += g^2; w -= rate * g / sqrt(a + eps), element by element, as optax has it.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011.
    """

    def change(rows, slots, grads, rate, step):
        squares = grads * grads
        scale = _root_scale(slots["accumulator"] + squares, eps)
        return -rate * grads * scale, {"accumulator": squares}

    return Rule({"accumulator": (True, initial_accumulator)}, change)


def rowwise_adagrad(*, initial_accumulator: float = 0.1, eps: float = 1e-7) -> Rule:
    """a += mean(g^2) over the row; w -= rate * g / sqrt(a + eps): one accumulator a row.

    References:
        Duchi et al., Adaptive Subgradient Methods, JMLR 2011; row-wise as in Mudigere et al.,
        Software-Hardware Co-design for Fast and Scalable Training of DLRMs, ISCA 2022.
    """

    def change(rows, slots, grads, rate, step):
        mean = jnp.mean(grads * grads, axis=1)
        scale = _root_scale(slots["accumulator"] + mean, eps)
        return -rate * grads * scale[:, None], {"accumulator": mean}

    def native(rows, slots, row, grads, rate, width):
        rows, accumulator = cpu_rows.rowwise_adagrad(
            rows, slots["accumulator"], row, grads, rate, width=width, eps=eps
        )
        return rows, {"accumulator": accumulator}

    return Rule({"accumulator": (False, initial_accumulator)}, change, native)


def lazy_adam(*, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Rule:
    """Adam whose moments move only when their row is read; bias correction by the run's step.

    References:
        Kingma and Ba, Adam, ICLR 2015.
    """

    def change(rows, slots, grads, rate, step):
        count = (step + 1).astype(rows.dtype)
        change_m = (1 - b1) * (grads - slots["m"])
        change_v = (1 - b2) * (grads * grads - slots["v"])
        m = (slots["m"] + change_m) / (1 - b1**count)
        v = (slots["v"] + change_v) / (1 - b2**count)
        return -rate * m / (jnp.sqrt(v) + eps), {"m": change_m, "v": change_v}

    return Rule({"m": (True, 0.0), "v": (True, 0.0)}, change, counts_steps=True)


def ftrl(*, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> Rule:
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

    def change(rows, slots, grads, rate, step):
        n, z = slots["n"], slots["z"]
        divisor = jnp.where(rate > 0, rate, 1)
        squares = grads * grads
        strength = (beta + jnp.sqrt(n + squares)) / divisor
        at_rows = -rows * (strength + l2) - l1 * jnp.sign(rows)
        new_z = jnp.where(rows != 0, at_rows, z) + grads
        shrunk = new_z - jnp.sign(new_z) * l1
        solved = jnp.where(jnp.abs(new_z) > l1, -shrunk / (strength + l2), jnp.zeros_like(rows))
        # A coordinate without any gradient so far has no n to remember that it was met.
        moves = (n + squares > 0) & (rate > 0)

        def where_it_moves(new):
            return jnp.where(moves, new, jnp.zeros_like(new))

        return where_it_moves(solved - rows), {
            "n": where_it_moves(squares),
            "z": where_it_moves(new_z - z),
        }

    return Rule({"n": (True, 0.0), "z": (True, 0.0)}, change)


RULES: dict[str, Callable[..., Rule]] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "lazy_adam": lazy_adam,
    "ftrl": ftrl,
}


def make_rule(name: str, **settings: Any) -> Rule:
    """The rule of that name.

    Raises:
        InputError: no such rule, or it has no such setting.
    """
    check_choice("optim.tables.name", name, RULES)
    for field, value in settings.items():
        if not isinstance(value, int | float) or value < 0:
            raise InputError(
                f"optim.tables.settings.{field} must be a number, not negative: found {value!r}."
            )
        if field in ("b1", "b2") and value > MOST_DECAY:
            raise InputError(
                f"optim.tables.settings.{field} must be in [0, {MOST_DECAY}]: found {value!r}."
            )
        if name == "lazy_adam" and field == "eps" and value < LEAST_EPS:
            raise InputError(
                f"optim.tables.settings.eps must be at least {LEAST_EPS}, or a gradient of 0 gives"
                f" NaN: found {value!r}."
            )
    try:
        return RULES[name](**settings)
    except TypeError as error:
        raise InputError(f"optim.tables.settings: {error}.") from error
