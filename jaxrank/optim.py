"""Learning rate schedules, and optimizers of the dense parameters.

`embedding` has the optimizers of tables.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import jax
import optax

from jaxrank import validate
from jaxrank.validate import MAX_DECAY, MIN_EPS, field

Schedule = Callable[[Any], Any]  # maps an integer, traced or not, to a float
Optimizer: TypeAlias = optax.GradientTransformation

# Exponents p of learning_rate = base_learning_rate * (batch_size / base_batch)^p: first for batch
# sizes up to base_batch, then above it.
SCALINGS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "sqrt": (0.5, 0.5),
    "linear": (1.0, 1.0),
    "sqrt_linear": (0.5, 1.0),
}
DECAYS = ("constant", "linear", "cosine", "polynomial", "step")


def schedule(
    *,
    batch_size: int,
    num_steps: int,
    base_learning_rate: float,
    base_batch: int,
    scaling: str,
    warmup_steps: int,
    decay: str,
    decay_steps: int,
    final_fraction: float,
    power: float,
    decay_factor: float,
) -> Schedule:
    """Makes the schedule of the learning rate for steps s = 0, 1, ...

    p is 0 (scaling "none"), 1/2 ("sqrt"), 1 ("linear"), or with "sqrt_linear" 1/2 up to base_batch
    and 1 above it. W = warmup_steps and f = final_fraction. D = decay_steps, or if that is 0,
    num_steps - W (at least 1):

        learning_rate = base_learning_rate * (batch_size / base_batch)^p
        s < W:   learning_rate * (s + 1) / W
        s >= W:  learning_rate * (f + (1 - f) * left(t)),  t = min((s - W) / D, 1)
        left(t) = 1 (constant), 1 - t (linear), (1 + cos(pi t)) / 2 (cosine), (1 - t)^power
                  (polynomial)

    With decay "step" the learning rate is multiplied by `decay_factor` every D steps, but is never
    below f times its value after the warm-up:

        s >= W:  learning_rate * max(decay_factor^floor((s - W) / D), f)

    A run that is not longer than its warm-up never leaves it.

    Args:
        batch_size: examples per step over all devices.
        base_batch: the batch size that base_learning_rate was chosen for.

    References:
        Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, for
        linear scaling and gradual warm-up.
    """
    below, above = SCALINGS[scaling]
    times = batch_size / base_batch
    learning_rate = base_learning_rate * times ** (below if times <= 1 else above)
    steps = decay_steps or max(1, num_steps - warmup_steps)
    if decay == "constant":
        after = optax.constant_schedule(learning_rate)
    elif decay == "step":
        after = optax.exponential_decay(
            learning_rate,
            decay_steps,
            decay_factor,
            staircase=True,
            end_value=learning_rate * final_fraction,
        )
    elif decay == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, steps, alpha=final_fraction)
    else:
        exponent = power if decay == "polynomial" else 1.0
        after = optax.polynomial_schedule(
            learning_rate, learning_rate * final_fraction, exponent, steps
        )
    if warmup_steps == 0:
        return after
    # Starts at rate / W, not at 0: the first batch counts like any other.
    warmup = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, warmup_steps - 1)
    return optax.join_schedules([warmup, after], [warmup_steps])


class DenseOptimizer(Protocol):
    """An optax optimizer with its settings."""

    def make(self, learning_rate: Schedule, decay: Optimizer) -> Optimizer:
        """Makes the optimizer. `decay` decays weights, for optimizers that do it themselves."""
        ...


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent."""

    def make(self, learning_rate: Schedule, decay: Optimizer) -> Optimizer:
        return optax.sgd(learning_rate)


@dataclasses.dataclass(frozen=True)
class Momentum:
    """Stochastic gradient descent with momentum."""

    momentum: float = field(0.9, help="decay of the sum of gradients", at_least=0, below=1)
    nesterov: bool = field(False, help="use Nesterov momentum")

    def make(self, learning_rate: Schedule, decay: Optimizer) -> Optimizer:
        return optax.sgd(learning_rate, momentum=self.momentum, nesterov=self.nesterov)


@dataclasses.dataclass(frozen=True)
class AdaGrad:
    """AdaGrad (Duchi et al. 2011)."""

    initial_accumulator: float = field(
        0.1, help="initial value of the sums of squared gradients", at_least=0
    )
    eps: float = field(1e-7, help="added under the square root", at_least=0)

    def make(self, learning_rate: Schedule, decay: Optimizer) -> Optimizer:
        start = self.initial_accumulator
        return optax.adagrad(learning_rate, initial_accumulator_value=start, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015)."""

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

    def make(self, learning_rate: Schedule, decay: Optimizer) -> Optimizer:
        return optax.adam(learning_rate, b1=self.b1, b2=self.b2, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    def make(self, learning_rate: Schedule, decay: Optimizer) -> Optimizer:
        adam = optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)
        return optax.chain(adam, decay, optax.scale_by_learning_rate(learning_rate))


OPTIMIZERS: Mapping[str, type[DenseOptimizer]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adagrad": AdaGrad,
    "adam": Adam,
    "adamw": AdamW,
}


def dense_optimizer(
    optimizer: DenseOptimizer,
    *,
    learning_rate: Schedule,
    clip_norm: float,
    weight_decay: float,
    undecayed: Collection[str] = (),
    lr_multipliers: Mapping[str, float] = MappingProxyType({}),
) -> Optimizer:
    """Makes an optax optimizer. Its step counters start at 0 and work inside `lax.scan`.

    It applies these operations in order, for gradient g and parameter x, biases included:

    1. clip_norm > 0: g <- g * min(1, clip_norm / |g|), with |g| over all dense parameters. Under
       `optim.dense.clip_scope = "all"` the step does so before, see `step.push`.
    2. weight_decay > 0: g <- g + weight_decay * x, except for adamw, and except for parameters
       whose names are in `undecayed`.
    3. The optimizer: sgd; momentum (`momentum`, `nesterov`); adagrad (Duchi et al. 2011:
       `initial_accumulator`, `eps` under the root); adam (Kingma and Ba 2015: `b1`, `b2`, `eps`
       beside the root); adamw (Loshchilov and Hutter 2019), which also subtracts
       learning_rate * weight_decay * x from x.
    4. lr_multipliers, {pattern: multiplier}: multiplies the change of parameters whose name
       matches, like a multiplier of their learning rate. At 0 they do not change.

    Names join the names of layers and arrays by "/", such as "tower/layer_0/kernel". In a pattern
    * matches any text, and the last pattern that matches wins. A pattern that matches no parameter
    raises InputError when the state is made.

    Args:
        optimizer: of a class in OPTIMIZERS.
    """
    decay = _decay(weight_decay, undecayed)
    parts = [optax.clip_by_global_norm(clip_norm)] if clip_norm > 0 else []
    if weight_decay > 0 and not isinstance(optimizer, AdamW):
        parts.append(decay)
    parts.append(optimizer.make(learning_rate, decay))
    if lr_multipliers:
        parts.append(_scale_updates(lr_multipliers))
    return optax.chain(*parts)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _decay(weight: float, undecayed: Collection[str]) -> Optimizer:
    """Adds weight * x. The mask of optax's version would change the state, and so checkpoints."""

    def decayed(path: Any, update: jax.Array, x: jax.Array) -> jax.Array:
        return update if _name(path) in undecayed else update + weight * x

    def update(updates: Any, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(decayed, updates, params)

    return optax.stateless(update)


def match_multipliers(params: Any, lr_multipliers: Mapping[str, float]) -> list[float]:
    """Returns the multiplier of each parameter; see `dense_optimizer`.

    Args:
        params: parameters or their shapes.

    Raises:
        InputError: a pattern matches no parameter.
    """
    paths, _ = jax.tree.flatten_with_path(params)
    names = [_name(path) for path, _ in paths]
    matched = validate.matched("optim.dense.lr_multipliers", "parameter", names, lr_multipliers)
    return [matched.get(name, 1.0) for name in names]


def _scale_updates(lr_multipliers: Mapping[str, float]) -> optax.GradientTransformation:
    def init(params: Any) -> optax.EmptyState:
        match_multipliers(params, lr_multipliers)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        factors = match_multipliers(updates, lr_multipliers)
        scaled = [x * factor for x, factor in zip(leaves, factors, strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformation(init, update)


def is_schedule(node: Any) -> bool:
    """Returns True if a node of an optimizer's state is the step counter of its schedule."""
    return isinstance(node, optax.ScaleByScheduleState)
