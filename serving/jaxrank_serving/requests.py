"""Checks a request and arranges its values by column."""

import datetime
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxrank_serving.errors import RequestError
from jaxrank_serving.signature import Column
from jaxrank_serving.values import Cells

# A dict of {column: value} for each candidate, or {column: values}.
Candidates: TypeAlias = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]

_EACH_CANDIDATE = "each candidate"
_PLACES = {
    "any": f"context or {_EACH_CANDIDATE}",
    "context": "context",
    "candidate": _EACH_CANDIDATE,
}


class _Values(NamedTuple):
    """Values of a column, and the indices of the candidates that lack it."""

    values: Sequence[Any]
    absent: list[int]


def cells_of_request(
    context: Mapping[str, Any], candidates: Candidates, columns: Mapping[str, Column]
) -> tuple[dict[str, Cells], int]:
    """Returns the values of every column, and the number of candidates.

    Args:
        context, candidates: see `Scorer.score`.
        columns: of the signature, by name.

    Raises:
        RequestError: see `Scorer.score`.
    """
    if not isinstance(context, Mapping):
        raise RequestError("context", None, "an object of features", f"{context!r:.80}")
    for name in context:
        if name not in columns:
            raise _unknown(name, columns)
    by_column, rows = _as_columns(candidates, columns)
    if not rows:
        return {}, 0
    return {name: _cells(column, context, by_column) for name, column in columns.items()}, rows


def _cells(column: Column, context: Mapping[str, Any], by_column: Mapping[str, _Values]) -> Cells:
    name = column.name
    if name in context and name in by_column:
        must = "given once, in the context or with the candidates"
        raise RequestError(name, None, must, "in both")
    if name in context:
        if column.source == "candidate":
            raise RequestError(name, None, "given with each candidate", "in the context")
        return Cells([context[name]], column, True)
    if name in by_column:
        if column.source == "context":
            raise RequestError(name, 0, "given in the context", "with the candidates")
        values, absent = by_column[name]
        if absent:
            if column.required:
                must = "given, or null if it is missing"
                raise RequestError(name, absent[0], must, "nothing")
            values = list(values)
            for i in absent:
                values[i] = column.default
        return Cells(values, column, False)
    if column.now:
        return Cells([datetime.datetime.now(datetime.UTC)], column, True)
    if column.required:
        must = "given, or null if it is missing"
        raise RequestError(name, None, must, "nothing", _PLACES[column.source])
    return Cells([column.default], column, True)


def _unknown(
    name: Any, columns: Mapping[str, Column], row: int | None = None, place: str = ""
) -> RequestError:
    actual = f"{name!r}, the features are {sorted(columns)}"
    return RequestError(str(name), row, "a feature of the model", f"{actual:.400}", place)


def _as_columns(
    candidates: Candidates, known: Mapping[str, Column]
) -> tuple[dict[str, _Values], int]:
    """Returns {column: values}, and the number of candidates.

    Unknown names are rejected before anything is made of them: there may be very many.
    """
    if isinstance(candidates, Mapping):
        for name in candidates:
            if name not in known:
                raise _unknown(name, known, place=_EACH_CANDIDATE)
        return _checked_columns(candidates)
    if isinstance(candidates, str | bytes) or not isinstance(candidates, Sequence):
        must = "a list of candidates, or columns of values"
        raise RequestError("candidates", None, must, f"{candidates!r:.80}")
    if set(map(type, candidates)) != {dict}:
        for i, candidate in enumerate(candidates):
            if not isinstance(candidate, Mapping):
                raise RequestError("candidate", i, "an object of features", f"{candidate!r:.80}")
    columns: dict[str, _Values] = {}
    names = list(candidates[0]) if candidates else []
    for name in names:
        if name not in known:
            is_first_only = any(name not in candidate for candidate in candidates)
            raise _unknown(name, known, *((0, "") if is_first_only else (None, _EACH_CANDIDATE)))
    try:
        if len(names) > 1:
            by_candidate = map(operator.itemgetter(*names), candidates)
            parts = zip(*by_candidate, strict=True)
            columns = {n: _Values(part, []) for n, part in zip(names, parts, strict=True)}
        else:
            columns = {n: _Values([candidate[n] for candidate in candidates], []) for n in names}
    except KeyError:
        columns = {n: _partly_absent(candidates, n) for n in names}
    if set(map(len, candidates)) != {len(columns)} and any(
        len(candidate) != len(columns) for candidate in candidates
    ):
        for i, candidate in enumerate(candidates):
            for name in candidate.keys() - columns.keys():
                if name not in known:
                    raise _unknown(name, known, i)
                columns[name] = _partly_absent(candidates, name)
    return columns, len(candidates)


def _partly_absent(candidates: Sequence[Mapping[str, Any]], name: str) -> _Values:
    absent = [i for i, candidate in enumerate(candidates) if name not in candidate]
    return _Values([candidate.get(name) for candidate in candidates], absent)


def _checked_columns(candidates: Mapping[str, Sequence[Any]]) -> tuple[dict[str, _Values], int]:
    columns: dict[str, _Values] = {}
    for name, values in candidates.items():
        values = values.tolist() if isinstance(values, np.ndarray) else values
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            actual = f"{values!r:.80}"
            raise RequestError(str(name), None, "a list of values", actual, _EACH_CANDIDATE)
        columns[name] = _Values(values, [])
    lengths = {len(column.values) for column in columns.values()}
    if len(lengths) > 1:
        raise RequestError(
            "candidates", None, "columns of one length", f"lengths {sorted(lengths)}"
        )
    return columns, max(lengths, default=0)
