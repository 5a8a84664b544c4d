"""Metrics per value of a column, for example per country or per day."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank import json_files
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import Task
from jaxrank.metrics import exact, intervals

MOST = 100_000  # maximum number of distinct values
DAY = "day"  # column of a split that is stored by day
_MOST_ERRORS = 1_000  # slices, the largest ones, whose metrics have standard errors


class Slices(NamedTuple):
    """Metrics per value of a column.

    column: name of the column.
    values: [{"value": the value, "metrics": by task, "errors": by task}] in descending order of
        rows. A missing value is None. Floats that are not finite are text: "nan", "inf", "-inf".
        The errors are standard errors of the metrics; only the largest slices have them.
    gauc: of each binary task, the mean AUC over values with both labels, weighted by the weights of
        their examples. NaN if there are no such values. Zhou et al., Deep Interest Network for
        Click-Through Rate Prediction, KDD 2018.
    """

    column: str
    values: list[dict[str, Any]]
    gauc: dict[str, float]


class Groups(NamedTuple):
    """The examples of a split, grouped by the value of a column.

    code: i64[n], the index in `values` of each example, in stored order.
    """

    column: str
    values: list[Any]
    code: np.ndarray

    def members(self) -> list[np.ndarray]:
        """Returns the indices of the examples of each value, ascending."""
        order = np.argsort(self.code, kind="stable")
        counts = np.bincount(self.code, minlength=len(self.values))
        return np.split(order, np.cumsum(counts)[:-1])


def sort_by_size(members: Sequence[np.ndarray]) -> list[int]:
    """Returns the indices of groups in descending order of examples, without empty groups.

    Groups of equal size keep their order.
    """
    order = sorted(range(len(members)), key=lambda i: -len(members[i]))
    return [i for i in order if len(members[i])]


def groups_of(split: Split, column: str) -> Groups:
    """Reads one column.

    Raises:
        InputError: the column is absent, holds lists, or has more than MOST distinct values.
    """
    kept = [b.kept for b in split.blocks() if b.kept is not None]
    names = kept[0].schema.names if kept else []
    if column in names:
        coded = _coded([batch.column(column) for batch in kept], column)
        if len(coded.dictionary) > MOST:
            raise InputError(
                f"--by: column {column!r} must have at most {MOST:,} different values: found"
                f" {len(coded.dictionary):,}."
            )
        values = json_files.plain(coded.dictionary.to_pylist(), non_finite="text")
        code = coded.indices.to_numpy(zero_copy_only=False)
    elif column == DAY and split.days:
        values = [day for day, _ in split.days]
        blocks = np.repeat(np.arange(len(values)), [count for _, count in split.days])
        code = np.repeat(blocks, split.block_rows)
    else:
        days = f" or {DAY!r}" if split.days else ""
        raise InputError(
            f"--by: must be one of the columns that {split.path} keeps, {names or 'none'}{days}:"
            f" found {column!r}. Name it in features.keep and prepare the data again."
        )
    return Groups(column, values, code.astype(np.int64))


def _coded(parts: list[pa.Array], column: str) -> pa.DictionaryArray:
    """Encodes a column with a dictionary of its distinct values, including the missing value.

    Values of types that JSON does not have are converted to text.
    """
    kind = parts[0].type
    if pa.types.is_dictionary(kind):
        parts = [part.dictionary_decode() for part in parts]
        kind = parts[0].type
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    try:
        column_values = pa.chunked_array(parts)
        if pa.types.is_floating(kind):
            wide = pa.float32() if pa.types.is_float16(kind) else kind
            column_values = pc.add(
                column_values.cast(wide), pa.scalar(0, wide)
            )  # -0.0 becomes 0.0, and all NaN become one value
            column_values = pc.if_else(
                pc.is_nan(column_values), pa.scalar(math.nan, wide), column_values
            )
        elif not any(test(kind) for test in plain):
            column_values = column_values.cast(pa.string())
        return pc.dictionary_encode(column_values, null_encoding="encode").combine_chunks()
    except pa.ArrowException as error:
        raise InputError(
            f"--by: column {column!r} must hold one value per example, which can be text: found"
            f" {kind} ({error}). Name another column."
        ) from error


def group_metrics(
    groups: Groups,
    tasks: Sequence[Task],
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
) -> Slices:
    """Computes the metrics of each group of a split.

    Args:
        groups: of the examples.
        tasks: of the run.
        logits, labels, weights: f32[n, tasks], of all examples in stored order.
    """
    members = groups.members()
    values: list[dict[str, Any]] = [
        {
            "value": value,
            "metrics": {
                task.name: exact.exact(logits[of, i], labels[of, i], weights[of, i], task.kind)
                for i, task in enumerate(tasks)
            },
        }
        for value, of in zip(groups.values, members, strict=True)
    ]
    order = sort_by_size(members)
    for i in order[:_MOST_ERRORS]:
        of = members[i]
        values[i]["errors"] = {
            task.name: intervals.standard_errors(
                intervals.influences(logits[of, t], labels[of, t], weights[of, t], task.kind),
                weights[of, t],
            )
            for t, task in enumerate(tasks)
        }
    weight = np.array([weights[of].sum(axis=0, dtype=np.float64) for of in members])
    gauc = {
        task.name: _mean_auc([v["metrics"][task.name]["auc"] for v in values], weight[:, i])
        for i, task in enumerate(tasks)
        if task.kind == "binary"
    }
    return Slices(groups.column, [values[i] for i in order], gauc)


def _mean_auc(aucs: Sequence[float], weights: np.ndarray) -> float:
    defined = ~np.isnan(aucs)
    if not defined.any():
        return float("nan")
    return float(np.average(np.asarray(aucs)[defined], weights=weights[defined]))
