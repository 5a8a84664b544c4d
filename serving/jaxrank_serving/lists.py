"""The ids and weights of columns of lists, by the rules of training."""

import re
from typing import Any, NamedTuple

import numpy as np

from jaxrank_serving.errors import RequestError
from jaxrank_serving.signature import Column, Ragged
from jaxrank_serving.values import TEXTS, Cells, elements, numbers

_WHOLE = re.compile(r"-?[0-9]{1,20}")
_PADDING = re.compile(r"(-?[0-9]{1,20})(?:\.0*)?")
_MIN_WEIGHT = 1e-38
_MAX_WEIGHT = float(np.finfo(np.float32).max)
_MUST_WEIGHT = "0 or a finite number of at least 1e-38"


class Lists(NamedTuple):
    """Concatenated ids of lists, their lengths i64[n], weights f64[ids] if any, and counts of
    truncation.
    """

    ids: Cells
    lengths: np.ndarray
    weights: np.ndarray | None
    truncated: int
    truncated_lists: int


def lists(entry: Ragged, cells: Cells, weight_cells: Cells | None) -> Lists:
    """Returns the ids of a feature, without padding and truncated as the feature says."""
    ids, lengths = elements(cells, entry.separator, entry.brackets)
    weighing: list[Any] | None = None
    kind = "text"
    if weight_cells is not None:
        flat, weight_lengths = elements(weight_cells, entry.separator, entry.brackets)
        for i in np.flatnonzero(weight_lengths != lengths).tolist():
            must = f"as many weights as {entry.name} has ids, {lengths[i]}"
            row = None if weight_cells.is_context else i
            raise RequestError(entry.weights, row, must, str(weight_lengths[i]))
        weighing, kind = list(flat.values), weight_cells.column.type
    elif entry.weight_separator:
        names, weighing = _divided(entry, ids)
        ids = ids._replace(values=names)
    if entry.padding:
        keep = np.array([not is_padding(entry, v, ids.column.type) for v in ids.values], bool)
        if not keep.all():
            if weighing is not None:
                weighing = [w for w, k in zip(weighing, keep.tolist(), strict=True) if k]
            ids, lengths = _chosen(ids, lengths, keep)
    if not set(map(type, ids.values)) <= {int, float}:
        for i, value in enumerate(ids.values):
            if is_empty(value):
                ids.reject(i, "a list without empty ids")
    weights = None if weighing is None else _weights(ids, weighing, kind)
    overlong = find_overlong(entry, lengths, cells.is_context)
    if not overlong.any():
        return Lists(ids, lengths, weights, 0, 0)
    position = positions(lengths)
    if entry.keep == "last":
        position = np.repeat(lengths, lengths) - 1 - position
    keep = position < entry.max_length
    cut, cut_lengths = _chosen(ids, lengths, keep)
    kept = None if weights is None else weights[keep]
    return Lists(cut, cut_lengths, kept, int((~keep).sum()), int(overlong.sum()))


def positions(lengths: np.ndarray) -> np.ndarray:
    """Returns i64[ids], the position of each id in its list."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def find_overlong(entry: Ragged, lengths: np.ndarray, is_context: bool) -> np.ndarray:
    """Returns bool[n], True for lists that are longer than the `max_length` of a feature.

    Raises:
        RequestError: there is one, and the feature rejects it.
    """
    overlong = (lengths > entry.max_length) & (entry.max_length > 0)
    if entry.on_overlong == "error" and overlong.any():
        i = int(np.flatnonzero(overlong)[0])
        must = f"a list of at most max_length={entry.max_length} ids"
        raise RequestError(entry.name, None if is_context else i, must, str(lengths[i]))
    return overlong


def combiner_factors(combiner: str, lengths: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Returns f32[ids], the factor of each id's vector in the combined vector of its list.

    Args:
        lengths: of the lists, i64[n].
        weights: of the ids, f[ids], if they have any.
    """
    if combiner in ("sum", "none"):
        norm = np.ones(len(lengths))
    elif weights is None:
        norm = lengths.astype(np.float32)
    else:
        owner = np.repeat(np.arange(len(lengths)), lengths)
        single = weights.astype(np.float32).astype(np.float64)
        summed = single**2 if combiner == "sqrtn" else single
        norm = np.bincount(owner, summed, len(lengths)).astype(np.float64)
    if combiner == "sqrtn":
        norm = np.sqrt(norm)
    inverse = (1 / np.maximum(norm, 1e-38)).astype(np.float32)
    factors = np.repeat(inverse, lengths)
    return factors if weights is None else factors * weights.astype(np.float32)


def _chosen(ids: Cells, lengths: np.ndarray, keep: np.ndarray) -> tuple[Cells, np.ndarray]:
    """Selects the ids where bool[ids] `keep` is True."""
    assert ids.rows is not None
    values = [v for v, k in zip(ids.values, keep.tolist(), strict=True) if k]
    rows = ids.rows[keep]
    return ids._replace(values=values, rows=rows), np.bincount(rows, minlength=len(lengths))


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes) and not value)


def is_padding(entry: Ragged, value: Any, kind: str) -> bool:
    if is_empty(value):
        return "" in entry.padding
    if isinstance(value, bytes):
        return value in [p.encode() for p in entry.padding if p]
    if isinstance(value, str) and kind in TEXTS:
        return value in entry.padding
    try:
        number = _number(value) if isinstance(value, str) else value
        if number != number:  # NaN
            return kind.startswith("float") and "nan" in map(str.lower, entry.padding)
        matches = map(_PADDING.fullmatch, entry.padding)
        return any(number == int(match[1]) for match in matches if match)
    except (ValueError, TypeError, OverflowError):
        return False


def _number(text: str) -> int | float:
    """Returns the number that a text of a request stands for, without rounding a whole one."""
    return int(text) if _WHOLE.fullmatch(text) else float(text)


def _divided(entry: Ragged, ids: Cells) -> tuple[list[Any], list[Any]]:
    """Splits texts "id:weight" into ids and weights. Padding needs no weight."""
    names: list[Any] = []
    weights: list[Any] = []
    for i, value in enumerate(ids.values):
        if value is None or value == "":
            names.append(None)
            weights.append(None)
            continue
        if not isinstance(value, str):
            ids.reject(i, f"a text with {entry.weight_separator!r} between id and weight")
        name, separator, weight = value.rpartition(entry.weight_separator)
        if separator:
            names.append(name or None)
            weights.append(weight)
        elif entry.padding and value in entry.padding:
            names.append(value)
            weights.append(None)
        else:
            ids.reject(i, f"an id and a weight with {entry.weight_separator!r} between them")
    return names, weights


def _weights(ids: Cells, weighing: list[Any], kind: str) -> np.ndarray:
    column = Column(f"weights of {ids.column.name}", kind, True, "any", True, None, False)
    cells = ids._replace(values=weighing, column=column)
    weights = numbers(cells, _MUST_WEIGHT)
    with np.errstate(invalid="ignore"):
        valid = (weights == 0) | ((weights >= _MIN_WEIGHT) & (weights <= _MAX_WEIGHT))
    for i in np.flatnonzero(~valid).tolist():
        cells.reject(i, _MUST_WEIGHT)
    return weights
