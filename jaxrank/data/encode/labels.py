"""Labels, weights and logit corrections of a chunk's examples, for each task."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.columns import numbers, read_column
from jaxrank.data.encode.times import seconds
from jaxrank.data.spec.entries import TaskSpec, instant
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.errors import InputError

_HOUR = 3600.0  # seconds
_MAX_REAL = 1e15  # whose square is a float32, also summed over a batch
_MAX_WEIGHT = 1e30  # whose sum over a batch is a float32
_MAX_COUNT = 1e12  # its log is below `losses.LOG_COUNT_LIMIT`


class Labels(NamedTuple):
    """The targets of each example, f32[n, tasks] each, as in `Examples`.

    weights, logit_correction and truth are None if no task has any.
    pending: i64[tasks], number of labels that are unknown because the attribution window is still
    open.
    """

    labels: np.ndarray
    weights: np.ndarray | None
    logit_correction: np.ndarray | None
    truth: np.ndarray | None
    pending: np.ndarray


def horizon(features: FeatureSpec, fitted: float | None = None) -> float | None:
    """Returns the time of the data snapshot, in seconds since 1970, or None if no task needs it.

    Args:
        fitted: the latest event of the training split, used if the spec has no `as_of`.
    """
    if not any(task.time for task in features.tasks):
        return None
    if features.as_of:
        return instant(features.as_of, "features.as_of")
    if fitted is None:
        raise InputError(
            "features.as_of: must be the time of the data snapshot, because a task has a `time`"
            " and there is no training split to take it from: found ''."
        )
    return fitted


def encode_labels(
    chunk: Chunk,
    tasks: Sequence[TaskSpec],
    time: str = "",
    as_of: float | None = None,
    time_format: str = "",
) -> Labels:
    """Returns the labels of a chunk with their weights and logit corrections.

    Args:
        time: the column of event times, for tasks with a `time`.
        as_of: see `horizon`.
        time_format: format of numbers in columns of times.

    Raises:
        BadRows: a value is invalid for its column, or a conversion is before its event.
    """
    shape = (chunk.batch.num_rows, len(tasks))
    labels = np.empty(shape, np.float32)
    weights = np.ones(shape)
    logit_correction = np.zeros(shape, np.float32)
    truth = np.full(shape, np.nan, np.float32)
    pending = np.zeros(len(tasks), np.int64)
    for i, task in enumerate(tasks):
        labels[:, i] = _known(chunk, task)
        if task.time:
            assert as_of is not None
            late, open_windows = _converted(chunk, task, time, as_of, time_format)
            pending[i] = np.count_nonzero(open_windows & ~np.isnan(labels[:, i]))
            labels[:, i] = np.where(np.isnan(labels[:, i]), np.nan, late)
        if task.weight:
            must = "a finite number, 0 or more and at most 1e30"
            column = read_column(chunk, task.weight)
            weights[:, i] = numbers(column, must, _weight, missing=False)
        if task.is_sampled:
            rate = _negative_rate(chunk, task)
            if task.is_shifted:
                logit_correction[:, i] = np.log(rate)
            else:
                with np.errstate(over="ignore"):
                    weights[:, i] /= np.where(labels[:, i] == 0, rate, 1)
                _check_corrected(chunk, task, weights[:, i])
        if task.truth:
            must = "a number from 0 to 1, or empty"
            truth[:, i] = numbers(read_column(chunk, task.truth), must, _probability)
    weighted = any(t.weight or (t.is_sampled and not t.is_shifted) for t in tasks)
    return Labels(
        labels,
        weights.astype(np.float32) if weighted else None,
        logit_correction if any(t.is_shifted for t in tasks) else None,
        truth if any(t.truth for t in tasks) else None,
        pending,
    )


def _known(chunk: Chunk, task: TaskSpec) -> np.ndarray:
    """Returns f64[n], NaN where the label is unknown, 0 where only a conversion time defines it."""
    if task.label:
        binary = task.kind == "binary"
        labels = numbers(read_column(chunk, task.label), *_LABELS[task.kind], booleans=binary)
    else:
        labels = np.full(chunk.batch.num_rows, 0 if task.time else np.nan)
    if task.mask:
        column, must = read_column(chunk, task.mask), "0, 1, true or false"
        mask = numbers(column, must, _zero_or_one, missing=False, booleans=True)
        labels = np.where(mask == 0, np.nan, labels)
    return labels


def _converted(
    chunk: Chunk, task: TaskSpec, time: str, as_of: float, time_format: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns f64[n] labels by the time of the conversion, and bool[n], True where one is pending.

    The label is NaN while the attribution window is open, even if the conversion is already known.
    Keeping only those positives would overestimate the conversion rate.
    """
    event = seconds(read_column(chunk, time), missing=False, time_format=time_format)
    column = read_column(chunk, task.time)
    conversion = seconds(column, time_format=time_format)
    early = np.flatnonzero(conversion < event)
    if len(early):
        column.reject(early, f"a time no earlier than the event's, in column {time}, or empty")
    window = task.window_hours * _HOUR
    still_open = event + window > as_of
    came = conversion - event <= window  # False without a conversion
    return np.where(still_open, np.nan, came), still_open


def _negative_rate(chunk: Chunk, task: TaskSpec) -> np.ndarray | float:
    if not task.negative_rate_column:
        return task.negative_rate
    column = read_column(chunk, task.negative_rate_column)
    return numbers(column, "a number above 0 and at most 1", _share, missing=False)


def _check_corrected(chunk: Chunk, task: TaskSpec, weights: np.ndarray) -> None:
    """Rejects rows whose weight divided by their sampling rate is too large."""
    bad = np.flatnonzero(~_weight(weights))
    if not len(bad):
        return
    if task.negative_rate_column:
        column, dividend = read_column(chunk, task.negative_rate_column), task.weight or "1"
        column.reject(bad, f"a rate by which {dividend} can be divided to give at most 1e30")
    must = f"a weight that is at most 1e30 after division by negative_rate={task.negative_rate}"
    read_column(chunk, task.weight).reject(bad, must)


def not_negative(values: np.ndarray) -> np.ndarray:
    """Maps f64[n] to bool[n]: True where a value is a finite float32, 0 or more."""
    with np.errstate(over="ignore"):
        return (values >= 0) & np.isfinite(values.astype(np.float32))


def _weight(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= _MAX_WEIGHT)


def _real(values: np.ndarray) -> np.ndarray:
    return np.abs(values) <= _MAX_REAL


def _count(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= _MAX_COUNT) & (values == np.floor(values))


def _zero_or_one(values: np.ndarray) -> np.ndarray:
    return (values == 0) | (values == 1)


def _probability(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= 1)


def _share(values: np.ndarray) -> np.ndarray:
    return (values > 0) & (values <= 1)


# Requirements on a label, by kind of task.
_LABELS = {
    "binary": ("0, 1, true, false or empty", _zero_or_one),
    "real": ("a finite number from -1e15 to 1e15, or empty", _real),
    "count": ("a whole number from 0 to 1e12, or empty", _count),
}
