"""The metrics of each kind of task: names, titles and directions.

Users register their own:

    @register("brier", higher_is_better=False, kinds=("binary",))
    def brier(predictions, labels):
        return (predictions - labels) ** 2
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxrank import extensions
from jaxrank.errors import InputError
from jaxrank.features import RANKED_KINDS
from jaxrank.validate import check_choice

Code = TypeVar("Code", bound=Callable[[Any, Any], Any])


class Metric(NamedTuple):
    """One metric.

    name: in `metrics.jsonl`, TensorBoard, JSON and `eval.metric`.
    title: in printed tables.
    higher_is_better: direction of the metric.
    mean: maps (predictions, labels), arrays of NumPy or JAX, to an array of their shape. The metric
        is its weighted mean over examples. None: `exact` and `sums` compute the metric themselves.
    needs_unequal_labels: whether the metric is undefined if all labels are equal.
    """

    name: str
    title: str
    higher_is_better: bool = False
    mean: Callable[[Any, Any], Any] | None = None
    needs_unequal_labels: bool = False


# By kind of task. The first metric is the loss of the task.
METRICS: dict[str, tuple[Metric, ...]] = {
    "binary": (
        Metric("logloss", "logloss"),
        Metric("auc", "AUC", higher_is_better=True, needs_unequal_labels=True),
        Metric("normalized_entropy", "norm. entropy", needs_unequal_labels=True),
    ),
    "real": (
        Metric("squared_error", "squared error"),
        Metric("normalized_squared_error", "normalized", needs_unequal_labels=True),
    ),
    "count": (
        Metric("deviance", "deviance"),
        Metric("normalized_deviance", "normalized", needs_unequal_labels=True),
    ),
}


def means(kinds: Sequence[str]) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Returns `Metric.mean` by name, for the metrics of these kinds of tasks that have one."""
    return {m.name: m.mean for kind in set(kinds) for m in METRICS[kind] if m.mean is not None}


# Every task has this metric. The best value is 1, so it has no direction.
CALIBRATION = "calibration"

# Losses over that of the best constant: above 1 a task is worse than a constant.
NORMALIZED = ("normalized_entropy", "normalized_squared_error", "normalized_deviance")

BY_NAME = {metric.name: metric for metrics in METRICS.values() for metric in metrics}
TITLES = {name: metric.title for name, metric in BY_NAME.items()} | {CALIBRATION: CALIBRATION}

# Metrics of requests (see `ranking`) by name without "@k", of the kinds of tasks that have them.
_RANKING = {
    "ndcg": Metric("ndcg", "NDCG", higher_is_better=True),
    "mrr": Metric("mrr", "MRR", higher_is_better=True),
    "recall": Metric("recall", "recall", higher_is_better=True),
    "gauc": Metric("gauc", "GAUC", higher_is_better=True, needs_unequal_labels=True),
}


def ranking_names(kind: str, k: int) -> tuple[str, ...]:
    """Returns the names of the metrics of requests of a kind of task, at the first `k` ranks."""
    if kind not in RANKED_KINDS:
        return ()
    names = (f"ndcg@{k}", "mrr", f"recall@{k}")
    return (*names, "gauc") if kind == "binary" else names


def probability_names(kind: str) -> tuple[str, ...]:
    """Returns the metrics that a score has no meaning for if it is trained by ranking alone."""
    return (METRICS[kind][0].name, *NORMALIZED, CALIBRATION)


def metric_named(name: str) -> Metric:
    """Returns the metric with a name such as "auc" or "ndcg@10".

    Raises:
        KeyError: there is none.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    base, _, k = name.partition("@")
    metric = _RANKING[base]
    return metric._replace(name=name, title=f"{metric.title}@{k}" if k else metric.title)


def title_of(name: str) -> str:
    """Returns the title of a metric, or of the calibration, in printed tables."""
    return TITLES[name] if name in TITLES else metric_named(name).title


METRIC = "metric"  # kind of the registered objects; see `extensions`
_RESERVED = {*TITLES, *_RANKING, "examples"}
_OWN: dict[str, Metric] = {}


def register(
    name: str,
    *,
    higher_is_better: bool,
    kinds: Sequence[str] = tuple(METRICS),
    title: str = "",
) -> Callable[[Code], Code]:
    """Registers a metric: the weighted mean over examples of a function of prediction and label.

    The function gets arrays of NumPy in float64 or of JAX, so it must use operators and methods
    that both have. Sampled negatives count as in all metrics.

    Args:
        higher_is_better: direction of the metric, by which `eval.metric` selects checkpoints.
        kinds: of the tasks that have the metric; see `features.Task`.
        title: in printed tables. Empty: the name.

    Raises:
        InputError: the name is taken, or a kind does not exist.
    """
    for kind in kinds:
        check_choice(f"kinds of metric {name!r}", kind, METRICS)
    if name in _RESERVED or not str(name).isidentifier():
        raise InputError(
            f"the name of a metric must be a word other than {', '.join(sorted(_RESERVED))}: found"
            f" {name!r}."
        )

    def registered(mean: Code) -> Code:
        metric = Metric(name, title or name, higher_is_better, mean)
        extensions.add(_OWN, METRIC, name, metric, mean)
        BY_NAME[name], TITLES[name] = metric, metric.title
        for kind in METRICS:
            others = tuple(m for m in METRICS[kind] if m.name != name)
            METRICS[kind] = (*others, metric) if kind in kinds else others
        return mean

    return registered


def check_means() -> None:
    """Checks that each registered metric returns one number per label.

    It may start the devices of JAX, so processes must have been connected before.

    Raises:
        InputError: a metric does not, or is not for both NumPy and JAX arrays.
    """
    for metric in BY_NAME.values():
        if metric.mean is not None:
            _check_mean(metric.name, metric.mean)


def _check_mean(name: str, mean: Callable[[Any, Any], Any]) -> None:
    """Checks the results for two examples of NumPy, and for the shape of a batch of JAX."""
    examples = np.array([0.25, 0.75]), np.array([0.0, 1.0])
    batch = jax.ShapeDtypeStruct((2, 3), np.float32)
    try:
        results = (mean(*examples), [2]), (jax.eval_shape(mean, batch, batch), [2, 3])
    except jax.errors.TracerArrayConversionError as error:
        raise InputError(
            f"metric {name!r} must use operators and methods that NumPy and JAX arrays both have:"
            " found a function of NumPy, which fails for JAX arrays. Write `x.clip(1e-7)` for"
            " `np.maximum(x, 1e-7)`, and functions such as log from jax.numpy."
        ) from error
    for result, shape in results:
        if list(getattr(result, "shape", [])) != shape:
            raise InputError(
                f"metric {name!r} must return one number per label, of shape {shape}: found"
                f" {list(getattr(result, 'shape', [])) or repr(result)}. The weighted mean is"
                " computed by jaxrank."
            )
