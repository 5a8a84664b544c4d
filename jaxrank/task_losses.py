"""Registry of the losses that training minimises: `config.task_losses` selects one for each task.

A loss maps the outputs of a task and its labels to a loss of each example:

    @register("expected_cost", kinds=("binary",))
    def expected_cost(outputs, labels, *, miss: float = 2.0):
        p = jax.nn.sigmoid(outputs)
        return miss * labels * (1 - p) + (1 - labels) * p

Settings are keyword arguments, or fields of a frozen dataclass with `__call__`. A task without an
entry has the loss of its kind. Metrics do not depend on the loss that is minimised.

A loss of requests is a `RequestLoss`, and compares the examples of each request.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrank import extensions, losses, request_losses
from jaxrank.errors import InputError
from jaxrank.features import KINDS, RANKED_KINDS, Task
from jaxrank.validate import check_choice, field, parse, require

Code = TypeVar("Code", bound=Callable[..., Any])

LOSS = "loss"  # kind of the registered objects; see `extensions`
_SECTION = "task_losses"
_NAME = "name"  # key of the loss in an entry of the section
_POSITIONAL = 2  # outputs and labels
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Registered(NamedTuple):
    """A registered loss.

    settings: a frozen dataclass, whose instances are the loss with these settings.
    kinds: of the tasks that it is for.
    """

    settings: type
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TaskLoss:
    """The loss of one task. function: (outputs, labels) -> losses, elementwise."""

    name: str
    function: Any

    def __call__(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        each = self.function(outputs, labels)
        if getattr(each, "shape", None) != outputs.shape:
            # Not the repr of an array, which is a tracer.
            value = f"shape {list(each.shape)}, {each.dtype}" if hasattr(each, "dtype") else each
            raise InputError(
                f"loss {self.name!r} must return one number per label, of shape"
                f" {list(outputs.shape)}: found {value}."
            )
        return each


@dataclasses.dataclass(frozen=True)
class RequestLoss:
    """A loss that compares the candidates of each request; see `request_losses`."""

    pointwise: float = field(
        0.0,
        at_least=0,
        help="factor of the loss of the kind of the task, which is added so that scores are"
        " probabilities or counts; 0: scores have an order alone, and no calibration",
    )

    def weights(self, labels: jax.Array, requests: request_losses.Requests) -> jax.Array:
        """Returns the weight of each example's loss in the mean over requests, f[B]."""
        raise NotImplementedError

    def each(
        self, outputs: jax.Array, labels: jax.Array, requests: request_losses.Requests
    ) -> jax.Array:
        """Returns the loss of each example, f[B]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TaskRequestLoss:
    """The loss of requests of one task. pointwise: the loss of the kind of the task."""

    name: str
    loss: RequestLoss
    pointwise: losses.Elementwise

    def __call__(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the part of the loss that does not compare examples, elementwise."""
        return self.loss.pointwise * self.pointwise(outputs, labels)

    def weights(self, labels: jax.Array, requests: request_losses.Requests) -> jax.Array:
        """Returns `RequestLoss.weights`, whose shape is checked."""
        return self._checked("weights", self.loss.weights(labels, requests), labels)

    def each(
        self, outputs: jax.Array, labels: jax.Array, requests: request_losses.Requests
    ) -> jax.Array:
        """Returns `RequestLoss.each`, whose shape is checked."""
        return self._checked("each", self.loss.each(outputs, labels, requests), labels)

    def _checked(self, method: str, result: Any, labels: jax.Array) -> jax.Array:
        if getattr(result, "shape", None) != labels.shape:
            raise InputError(
                f"loss {self.name!r}: {method} must return one number per example, of shape"
                f" {list(labels.shape)}: found {list(getattr(result, 'shape', [])) or result!r}."
            )
        return result


_LOSSES: dict[str, Registered] = {}


def register(name: str, *, kinds: Sequence[str] = KINDS) -> Callable[[Code], Code]:
    """Registers a loss under a name.

    Args:
        kinds: of the tasks that it is for; see `features.Task` for their outputs and labels.

    Raises:
        InputError: another loss has the name, a setting has no default, is positional or is called
            "name", or a class is no frozen dataclass.
    """
    for kind in kinds:
        check_choice(f"kinds of loss {name!r}", kind, KINDS)

    def registered(code: Code) -> Code:
        section = code if inspect.isclass(code) else _make_settings(code)
        parameters = getattr(section, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen:
            raise InputError(
                f"loss {name!r} must be a function or a frozen dataclass: found {code!r}."
            )
        if any(setting.name == _NAME for setting in dataclasses.fields(section)):
            raise InputError(
                f"loss {name!r}: a setting must not be called {_NAME!r}, which selects the loss in"
                f" {_SECTION}. Rename it."
            )
        extensions.add(_LOSSES, LOSS, name, Registered(section, tuple(kinds)), code)
        return code

    return registered


def _make_settings(function: Callable[..., Any]) -> type:
    """Makes a dataclass of the keyword arguments of a loss that is a function."""
    hints = typing.get_type_hints(function)
    entries: list[tuple[str, Any, Any]] = []
    for i, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            if i >= _POSITIONAL and parameter.kind not in _VARIADIC:
                raise InputError(
                    f"loss {function.__qualname__}: the setting {parameter.name} must be a keyword"
                    " argument: found a positional one. Put `*` before it."
                )
            continue
        if parameter.default is inspect.Parameter.empty:
            raise InputError(
                f"loss {function.__qualname__}: {parameter.name} must have a default: found none."
            )
        kind = hints.get(parameter.name, type(parameter.default))
        entries.append((parameter.name, kind, dataclasses.field(default=parameter.default)))

    def call(self: Any, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return function(outputs, labels, **{name: getattr(self, name) for name, *_ in entries})

    namespace = {"__call__": call, "__doc__": function.__doc__}
    return dataclasses.make_dataclass(function.__name__, entries, frozen=True, namespace=namespace)


@register("bce", kinds=("binary",))
@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross entropy of the smoothed label (1 - s) y + s / 2 (Szegedy et al. 2016)."""

    label_smoothing: float = field(
        0.0, at_least=0, below=1, help="s, which moves labels towards 1/2"
    )

    def __call__(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        s = self.label_smoothing
        return losses.logistic(outputs, labels * (1 - s) + s / 2 if s else labels)


@register("focal", kinds=("binary",))
@dataclasses.dataclass(frozen=True)
class Focal:
    """Focal loss: cross entropy times (1 - p of the label)^gamma (Lin et al. 2017).

    Its minimum is not at the probability of the label, so predictions are not calibrated.
    """

    gamma: float = field(
        2.0,
        at_least=0,
        help="exponent; above 0, examples that are predicted well count less; 0: bce",
    )
    alpha: float = field(
        0.0, at_least=0, below=1, help="weight of positives, 1 - alpha of negatives; 0: both 1"
    )

    def __call__(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        missed, wrong = jax.nn.softplus(-outputs), jax.nn.softplus(outputs)
        positive, negative = (self.alpha, 1 - self.alpha) if self.alpha else (1.0, 1.0)
        # 1 - p is exp(-softplus(x)), which stays exact where p is near 1.
        positives = positive * labels * jnp.exp(-self.gamma * wrong) * missed
        return positives + negative * (1 - labels) * jnp.exp(-self.gamma * missed) * wrong


@register("squared", kinds=("real",))
@dataclasses.dataclass(frozen=True)
class Squared:
    """Half of the squared error. Training divides it by the variance of the labels."""

    def __call__(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return losses.squared(outputs, labels)


@register("poisson", kinds=("count",))
@dataclasses.dataclass(frozen=True)
class Poisson:
    """Half of the Poisson deviance of the expected count, whose log is the output."""

    def __call__(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return losses.poisson(outputs, labels)


@register("listwise_softmax", kinds=RANKED_KINDS)
@dataclasses.dataclass(frozen=True)
class ListwiseSoftmax(RequestLoss):
    """Cross entropy of the labels of a request with the softmax of its scores (Cao et al. 2007)."""

    def weights(self, labels: jax.Array, requests: request_losses.Requests) -> jax.Array:
        return request_losses.listwise_weights(labels, requests)

    def each(
        self, outputs: jax.Array, labels: jax.Array, requests: request_losses.Requests
    ) -> jax.Array:
        return request_losses.listwise_softmax(outputs, requests)


@register("pairwise", kinds=RANKED_KINDS)
@dataclasses.dataclass(frozen=True)
class Pairwise(RequestLoss):
    """Logistic loss of the score differences of pairs in a request (RankNet, Burges et al. 2005).

    Needs as many numbers per example as a group has examples, up to 512.
    """

    def weights(self, labels: jax.Array, requests: request_losses.Requests) -> jax.Array:
        return request_losses.pair_weights(labels, requests)

    def each(
        self, outputs: jax.Array, labels: jax.Array, requests: request_losses.Requests
    ) -> jax.Array:
        return request_losses.pairwise(outputs, labels, requests)


def names() -> list[str]:
    """Returns the names of all registered losses."""
    return sorted(_LOSSES)


def loss_settings(name: str) -> type:
    """Returns the dataclass with the settings of a registered loss."""
    return _LOSSES[name].settings


def loss_name(entry: Any) -> str:
    """Returns the name of the loss in an entry of `config.task_losses`. Empty: of the kind."""
    return entry.get(_NAME, "") if isinstance(entry, Mapping) else entry


def request_tasks(chosen: Mapping[str, Any], *, alone: bool = False) -> tuple[str, ...]:
    """Returns the names of the tasks with a loss of requests.

    Args:
        chosen: see `select_losses`.
        alone: only those whose scores have an order alone.
    """
    tasks = []
    for task, entry in chosen.items():
        loss = _LOSSES.get(loss_name(entry))
        if loss is None or not issubclass(loss.settings, RequestLoss):
            continue
        pointwise = entry.get("pointwise", 0) if isinstance(entry, Mapping) else 0
        if not (alone and pointwise):
            tasks.append(task)
    return tuple(tasks)


def select_losses(
    chosen: Mapping[str, Any], tasks: Sequence[Task]
) -> tuple[losses.Elementwise, ...]:
    """Returns the loss of each task.

    Args:
        chosen: the section `task_losses` of a config, plain: {task: name}, or {task: {"name": name,
            ...settings}}.

    Raises:
        InputError: a task or loss does not exist, the loss is not for tasks of that kind, or a
            setting is invalid.
    """
    known = [task.name for task in tasks]
    for name in chosen:
        require(name in known, _SECTION, f"of tasks {', '.join(known)}", name)
    return tuple(_task_loss(task, chosen.get(task.name)) for task in tasks)


def check(chosen: Mapping[str, Any], tasks: Sequence[Task]) -> None:
    """Checks the section `task_losses` of a config.

    Args:
        chosen: see `select_losses`.
        tasks: of the config. Empty: they are not known, nor are their kinds.

    Raises:
        InputError: see `select_losses`.
    """
    if tasks:
        select_losses(chosen, tasks)
        return
    for task, entry in chosen.items():
        where = f"{_SECTION}.{task}"
        _check_entry(where, entry)
        if name := loss_name(entry):
            _parse(where, entry, _find(where, name))


def _task_loss(task: Task, entry: Any) -> losses.Elementwise:
    if entry is None:
        return losses.loss_of_kind(task.kind)
    where = f"{_SECTION}.{task.name}"
    _check_entry(where, entry)
    name = loss_name(entry) or losses.DEFAULT_OF_KIND[task.kind]
    loss = _find(where, name)
    if task.kind not in loss.kinds:
        suitable = [n for n in names() if task.kind in _LOSSES[n].kinds]
        check_choice(where, name, suitable, f"The task is of kind {task.kind!r}.")
    parsed = _parse(where, entry, loss)
    if isinstance(parsed, RequestLoss):
        return TaskRequestLoss(name, parsed, losses.loss_of_kind(task.kind))
    return TaskLoss(name, parsed)


def _check_entry(where: str, entry: Any) -> None:
    is_entry = isinstance(entry, str | Mapping)
    require(is_entry, where, "the name of a loss, or a dict with its name and settings", entry)


def _find(where: str, name: str) -> Registered:
    if name not in _LOSSES:
        extensions.load_packages()
    check_choice(where, name, names(), extensions.hint(LOSS))
    return _LOSSES[name]


def _parse(where: str, entry: Any, loss: Registered) -> Any:
    """Returns a loss with the settings of an entry."""
    settings = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != _NAME}
    return parse(loss.settings, settings, where)
