"""Learning rates, and the optimizer of the dense parameters. (Tables have their own, see
`embedding`.)"""

import inspect
import numbers
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import optax

from jaxrank import validate
from jaxrank.errors import InputError
from jaxrank.validate import LEAST_EPS, MOST_DECAY, check_choice

Schedule = Callable[[Any], Any]  # of an integer, traced or not, to a float
Optimizer: TypeAlias = optax.GradientTransformation

# Exponents p of rate = base_rate * (batch_size / base_batch)^p: up to base_batch, and above it.
SCALINGS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "sqrt": (0.5, 0.5),
    "linear": (1.0, 1.0),
    "sqrt_linear": (0.5, 1.0),
}
DECAYS = ("constant", "linear", "cosine", "polynomial")


def schedule(
    *,
    batch_size: int,
    num_steps: int,
    base_rate: float,
    base_batch: int,
    scaling: str,
    warmup_steps: int,
    decay: str,
    decay_steps: int,
    final_fraction: float,
    power: float = 1.0,
) -> Schedule:
    """The learning rate at step s = 0, 1, ...

    With p = 0 (scaling "none"), 1/2 ("sqrt"), 1 ("linear") or, by "sqrt_linear", 1/2 up to
    base_batch and 1 above it, W = warmup_steps, f = final_fraction and D = decay_steps, or
    num_steps - W (at least 1) where decay_steps is 0:

        rate = base_rate * (batch_size / base_batch)^p
        s < W:   rate * (s + 1) / W
        s >= W:  rate * (f + (1 - f) * left(t)),  t = min((s - W) / D, 1)
        left(t) = 1 (constant), 1 - t (linear), (1 + cos(pi t)) / 2 (cosine), (1 - t)^power
                  (polynomial)

    A run no longer than its warm-up never leaves it.

    Args:
        batch_size: examples a step over all devices.
        base_batch: the batch size for which base_rate was chosen.

    Raises:
        InputError: naming the field, what is allowed and what was found.

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, for
        linear scaling and gradual warm-up.
    """
    check_choice("scaling", scaling, SCALINGS)
    check_choice("decay", decay, DECAYS)
    _at_least("batch_size", batch_size, 1)
    _at_least("num_steps", num_steps, 1)
    _at_least("base_batch", base_batch, 1)
    _at_least("base_rate", base_rate, 0)
    _at_least("warmup_steps", warmup_steps, 0)
    _at_least("decay_steps", decay_steps, 0)
    if not 0 <= final_fraction <= 1:
        raise InputError(f"final_fraction must be in [0, 1]: found {final_fraction!r}.")
    if not power > 0:
        raise InputError(f"power must be above 0: found {power!r}.")

    below, above = SCALINGS[scaling]
    times = batch_size / base_batch
    rate = base_rate * times ** (below if times <= 1 else above)
    steps = decay_steps or max(1, num_steps - warmup_steps)
    if decay == "constant":
        after = optax.constant_schedule(rate)
    elif decay == "cosine":
        after = optax.cosine_decay_schedule(rate, steps, alpha=final_fraction)
    else:
        exponent = power if decay == "polynomial" else 1.0
        after = optax.polynomial_schedule(rate, rate * final_fraction, exponent, steps)
    if warmup_steps == 0:
        return after
    # From rate / W, not from 0: the first batch is a batch like any other.
    warmup = optax.linear_schedule(rate / warmup_steps, rate, warmup_steps - 1)
    return optax.join_schedules([warmup, after], [warmup_steps])


def _sgd(rate: Schedule, decay: Optimizer) -> optax.GradientTransformation:
    return optax.sgd(rate)


def _momentum(
    rate: Schedule, decay: Optimizer, *, momentum: float = 0.9, nesterov: bool = False
) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=momentum, nesterov=nesterov)


def _adagrad(
    rate: Schedule, decay: Optimizer, *, initial_accumulator: float = 0.1, eps: float = 1e-7
) -> optax.GradientTransformation:
    return optax.adagrad(rate, initial_accumulator_value=initial_accumulator, eps=eps)


def _adam(
    rate: Schedule, decay: Optimizer, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    return optax.adam(rate, b1=b1, b2=b2, eps=eps)


def _adamw(
    rate: Schedule, decay: Optimizer, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps), decay, optax.scale_by_learning_rate(rate)
    )


OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
}


def dense_optimizer(
    *,
    name: str,
    rate: Schedule,
    clip_norm: float = 0.0,
    weight_decay: float = 0.0,
    undecayed: Collection[str] = (),
    factors: Mapping[str, float] = MappingProxyType({}),
    **hyper: float,
) -> Optimizer:
    """The optimizer called `name`; its step counters start at 0 and work inside `lax.scan`.

    In this order, for gradient g and parameter x, biases included:

    1. clip_norm > 0: g <- g * min(1, clip_norm / |g|), |g| over all parameters together.
    2. weight_decay > 0: g <- g + weight_decay * x, except under adamw, and of the parameters whose
       names, as below, are in `undecayed`.
    3. The rule of `name`: sgd; momentum (`momentum`, `nesterov`); adagrad (Duchi et al. 2011:
       `initial_accumulator`, `eps` under the root); adam (Kingma and Ba 2015: `b1`, `b2`, `eps`
       beside the root); adamw (Loshchilov and Hutter 2019), which also takes
       rate * weight_decay * x from x.
    4. factors, {pattern: factor}: what is added to a parameter whose name matches is multiplied,
       as if its rate were; at 0 it stays as it is. Names are those of layers and arrays joined by
       "/", as "tower/layer_0/kernel"; * stands for any text. Of several patterns the last counts.
       InputError, when the state is made, if one matches nothing.

    Raises:
        InputError: naming the field, what is allowed and what was found.
    """
    check_choice("name", name, OPTIMIZERS)
    _at_least("clip_norm", clip_norm, 0)
    _at_least("weight_decay", weight_decay, 0)
    make = OPTIMIZERS[name]
    keywords = inspect.signature(make).parameters.values()
    allowed = [k.name for k in keywords if k.kind is k.KEYWORD_ONLY]
    for field, value in hyper.items():
        if field not in allowed:
            fields = f"only the fields {', '.join(allowed)}" if allowed else "no fields"
            raise InputError(f"optimizer {name} has {fields} of its own: found {field}.")
        _at_least(field, value, 0)
        if field == "momentum" and value >= 1:
            raise InputError(f"{field} must be in [0, 1): found {value!r}.")
        if field in ("b1", "b2") and value > MOST_DECAY:
            raise InputError(f"{field} must be in [0, {MOST_DECAY}]: found {value!r}.")
        if name in ("adam", "adamw") and field == "eps" and value < LEAST_EPS:
            raise InputError(
                f"eps must be at least {LEAST_EPS}, or a gradient of 0 gives NaN: found {value!r}."
            )

    for pattern, factor in factors.items():
        _at_least(f"factors[{pattern!r}]", factor, 0)
    decay = _decay(weight_decay, undecayed)
    parts = [optax.clip_by_global_norm(clip_norm)] if clip_norm > 0 else []
    if weight_decay > 0 and name != "adamw":
        parts.append(decay)
    parts.append(make(rate, decay, **hyper))
    if factors:
        parts.append(_scale_by_name(factors))
    return optax.chain(*parts)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _decay(weight: float, undecayed: Collection[str]) -> Optimizer:
    """Adds weight * x. Not optax's, whose mask changes the state, and so what a checkpoint has."""

    def decayed(path: Any, update: jax.Array, x: jax.Array) -> jax.Array:
        return update if _name(path) in undecayed else update + weight * x

    def update(updates: Any, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(decayed, updates, params)

    return optax.stateless(update)


def _scale_by_name(factors: Mapping[str, float]) -> optax.GradientTransformation:
    def by_name(params: Any) -> list[tuple[str, float]]:
        paths, _ = jax.tree.flatten_with_path(params)
        names = [_name(path) for path, _ in paths]
        found = validate.matched("factors", "parameter", names, factors)
        return [(name, found.get(name, 1.0)) for name in names]

    def init(params: Any) -> optax.EmptyState:
        by_name(params)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        scaled = [x * f for x, (_, f) in zip(leaves, by_name(updates), strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformation(init, update)


def is_schedule(node: Any) -> bool:
    """Whether a node of an optimizer's state is the place in the schedule of its rate."""
    return isinstance(node, optax.ScaleByScheduleState)


def _at_least(field: str, value: float, least: int) -> None:
    if not isinstance(value, numbers.Real):
        raise InputError(f"{field} must be a number: found {value!r}.")
    if not value >= least:
        raise InputError(f"{field} must be at least {least}: found {value!r}.")
