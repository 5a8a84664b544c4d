"""Converts raw values of a request by the type that their column had in training.

JSON has fewer types than Arrow: `36`, `"36.0"` and `true` mean what the trained column makes of
them. A value of another type than the column's is converted where only one meaning is possible.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxrank_serving.brackets import find_part, is_bracketed, read
from jaxrank_serving.errors import RequestError
from jaxrank_serving.signature import Column

TEXTS = ("text", "binary")
# From this value on, integers share a float.
EXACT_BELOW = {"float16": 2**11, "float32": 2**24, "float64": 2**53}
_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MAX_DIGITS = 400
_DIGITS = b"0123456789+-.eE"  # of these, Python reads the same texts as Arrow
_REMEMBERED, _LONG = 1 << 16, 32  # texts of numbers, and letters of each
_ID = "text or a whole number"


class Cells(NamedTuple):
    """Values of a column, one per candidate or a single one of the context.

    row: index of the candidate of each value; None: values are in order, or of the context.
    """

    values: Sequence[Any]
    column: Column
    is_context: bool
    rows: np.ndarray | None = None

    def reject(self, index: int, must: str) -> NoReturn:
        """Raises RequestError for a value."""
        row = None
        if not self.is_context:
            row = int(self.rows[index]) if self.rows is not None else index
        value = self.values[index]
        shown = "an empty value" if value is None or value == "" else f"{value!r:.80}"
        raise RequestError(self.column.name, row, must, shown)


def as_text(cells: Cells) -> Cells:
    """Returns the cells of a column of bytes as cells of text, as training reads them.

    Cells of other columns stay as they are.
    """
    if cells.column.type != "binary":
        return cells
    values = []
    for i, value in enumerate(cells.values):
        try:
            values.append(_decoded(value))
        except UnicodeDecodeError:
            cells.reject(i, "text in UTF-8")
    return cells._replace(values=values, column=dataclasses.replace(cells.column, type="text"))


def _decoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_decoded(part) for part in value]
    return value.decode() if isinstance(value, bytes) else value


def scalar(value: Any) -> Any:
    """Returns the Python object of a NumPy scalar, and other values as they are."""
    return value.item() if isinstance(value, np.generic) else value


def texts(cells: Cells) -> list[str | None]:
    """Returns ids as text, None where missing."""
    kind = cells.column.type
    values = list(cells.values)
    types = set(map(type, values))
    if types <= {str, type(None)} and kind in TEXTS:
        return [value or None for value in values] if "" in values else values
    if types == {int} and kind.startswith(("int", "uint")):
        return list(map(str, values))
    result: list[str | None] = []
    for i, value in enumerate(values):
        try:
            result.append(_text(value, kind))
        except (ValueError, TypeError, KeyError, OverflowError):
            cells.reject(i, f"{_ID}, of a column of type {kind}")
    return result


def _text(value: Any, kind: str) -> str | None:
    """Returns an id as text. Raises ValueError or TypeError if it is invalid."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == "" or value == b"":
        return None
    if kind in TEXTS:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError
        return value if isinstance(value, str) else repr(_finite(value))
    if kind == "bool":
        return str(int(_boolean(value)))
    return str(_whole(value, kind))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not np.isfinite(value):
        raise ValueError
    return value


def _boolean(value: Any) -> bool:
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
    if value not in (0, 1):
        raise ValueError
    return bool(value)


def _whole(value: Any, kind: str) -> int:
    """Returns a whole number of a column of numbers."""
    if isinstance(value, str):
        if len(value) > _MAX_DIGITS:
            raise ValueError
        if _WHOLE.fullmatch(value):
            value = int(value)
        elif _NUMBER.fullmatch(value):
            value = float(value)
    if isinstance(value, float):
        if not value.is_integer() or abs(value) >= 2**53 > EXACT_BELOW.get(kind, 0):
            raise ValueError
        value = int(value)
    if not isinstance(value, int):
        raise TypeError
    number = int(value)
    if kind in EXACT_BELOW and abs(number) >= EXACT_BELOW[kind]:
        raise ValueError
    return number


def row_numbers(cells: Cells) -> list[int | None]:
    """Returns ids that are row numbers, None where missing, of any size."""
    kind = cells.column.type
    values = list(cells.values)
    if set(map(type, values)) <= {int, type(None)} and kind.startswith(("int", "uint")):
        return values
    result: list[int | None] = []
    for i, value in enumerate(values):
        try:
            result.append(_row_number(value, kind))
        except (ValueError, TypeError, KeyError, OverflowError):
            cells.reject(i, "a whole number, or empty")
    return result


def _row_number(value: Any, kind: str) -> int | None:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == "":
        return None
    if kind in TEXTS:
        if isinstance(value, bool):
            raise TypeError
        if isinstance(value, str):
            if len(value) > _MAX_DIGITS or not _WHOLE.fullmatch(value):
                raise ValueError
            return int(value)
        return _whole(value, "int64")
    if kind == "bool":
        return int(_boolean(value))
    if isinstance(value, float):
        if not value.is_integer():  # also infinity and NaN
            raise ValueError
        return int(value)
    return _whole(value, "int64")


def numbers(cells: Cells, must: str = "a finite number or empty") -> np.ndarray:
    """Returns f64[n], NaN where missing."""
    kind = cells.column.type
    values = list(cells.values)
    types = set(map(type, values))
    result = None if kind == "bool" else _convert_all(values, types)
    if result is None:
        result = np.empty(len(values))
        for i, value in enumerate(values):
            try:
                result[i] = _number(value, kind)
            except (ValueError, TypeError, KeyError, OverflowError):
                cells.reject(i, must)
    if kind in ("float32", "float16"):
        with np.errstate(over="ignore"):
            result = result.astype(kind).astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(result))
    for i in bad.tolist():
        if not (values[i] is None or values[i] == ""):
            cells.reject(i, must)
    return result


def numbers_of_columns(columns: Sequence[Cells]) -> list[np.ndarray]:
    """Returns `numbers` of each column. Values of common types are converted together."""
    result = None
    if not any(cells.column.type in ("float32", "float16", "bool") for cells in columns):
        joined = list(itertools.chain.from_iterable(cells.values for cells in columns))
        result = _parse_all(joined)
    if result is None:
        return [numbers(cells) for cells in columns]
    ends = itertools.accumulate(len(cells.values) for cells in columns)
    return [result[end - len(cells.values) : end] for cells, end in zip(columns, ends, strict=True)]


def _parse_all(values: list[Any]) -> np.ndarray | None:
    """Returns f64[n] of texts, or of numbers. None if a value needs a check of its own."""
    if isinstance(next((value for value in values if value is not None), None), str):
        with contextlib.suppress(ValueError, TypeError):  # TypeError: a value has no hash
            return np.fromiter(map(_PARSED.__getitem__, values), np.float64, len(values))
        return None
    types = set(map(type, values))
    if types <= {int, float, type(None)}:
        with contextlib.suppress(OverflowError):
            result = np.array(values, np.float64)
            return result if types == {int} or _is_finite(values, result) else None
    return None


def _is_finite(values: list[Any], result: np.ndarray) -> bool:
    """Returns True if all values but None are finite."""
    return int(np.isfinite(result).sum()) == len(values) - values.count(None)


class _Parsed(dict[str | None, float]):
    """Numbers that texts stand for, NaN for a missing one. Remembers the first ones.

    Raises:
        ValueError: a value is not the text of a finite number.
    """

    def __missing__(self, text: Any) -> float:
        if text is not None and not isinstance(text, str):
            raise ValueError
        number = _number(text, "text")
        if text and not np.isfinite(number):
            raise ValueError
        if len(self) < _REMEMBERED and (not text or len(text) < _LONG):
            self[text] = number
        return number


_PARSED = _Parsed()


def _convert_all(values: list[Any], types: set[type]) -> np.ndarray | None:
    """Converts numbers, or texts of plain digits, without a check of each. None if it cannot."""
    try:
        if types <= {int, float, type(None)}:
            return np.array(values, np.float64)  # NaN for None
        if types <= {str, type(None)} and not _other_letters("".join(filter(None, values))):
            return np.array([float(value) if value else np.nan for value in values])
    except (ValueError, OverflowError):
        pass
    return None


def _other_letters(text: str) -> bytes:
    return text.encode(errors="replace").translate(None, _DIGITS)


def _number(value: Any, kind: str) -> float:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == "":
        return np.nan
    if kind == "bool":
        return float(_boolean(value))
    if isinstance(value, str):
        if len(value) > _MAX_DIGITS or not _NUMBER.fullmatch(value):
            raise ValueError
        return float(value)
    if not isinstance(value, int | float) or (isinstance(value, bool) and kind in TEXTS):
        raise TypeError
    return float(value)


def elements(
    cells: Cells, separator: str, brackets: str, must: str = "a list"
) -> tuple[Cells, np.ndarray]:
    """Returns the concatenated elements of a column of lists, and the lengths i64[n].

    A missing list has length 0. A list is accepted in place of a text with separators.
    """
    if set(map(type, cells.values)) == {list}:
        lengths = np.fromiter(map(len, cells.values), np.int64, len(cells.values))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        joined = list(itertools.chain.from_iterable(cells.values))
        result = Cells(joined, cells.column, cells.is_context, rows)
        if brackets != "keep":
            _check_parts(result, lengths, must)
        return result, lengths
    flat: list[Any] = []
    lengths = np.zeros(len(cells.values), np.int64)
    is_text = cells.column.type in TEXTS and not cells.column.is_list
    for i, cell in enumerate(cells.values):
        if cell is None or (isinstance(cell, str) and not cell):
            continue
        if isinstance(cell, np.ndarray):
            cell = cell.tolist()
        if isinstance(cell, list | tuple):
            part: Sequence[Any] = cell
        elif isinstance(cell, str) and is_text:
            part = _split(cells, i, cell, separator, brackets, must)
        else:
            cells.reject(i, must)
        flat.extend(part)
        lengths[i] = len(part)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    result = Cells(flat, cells.column, cells.is_context, rows)
    if brackets != "keep":
        _check_parts(result, lengths, must)
    return result, lengths


def _check_parts(cells: Cells, lengths: np.ndarray, must: str) -> None:
    """Rejects ids of lists that are lists in brackets, or the ends of one that was split."""
    index = find_part(cells.values, lengths.tolist())
    if index is not None:
        cells.reject(index, f"{must} whose parts have no brackets of a list")


def _split(
    cells: Cells, i: int, cell: str, separator: str, brackets: str, must: str
) -> Sequence[str | None]:
    if brackets != "keep" and is_bracketed(cell):
        if brackets == "error":
            cells.reject(i, "a list with only separators between its ids, not in brackets")
        values = read(cell, separator)
        if values is None:
            cells.reject(i, f"{must} of ids or numbers in brackets, between commas")
        return values
    if not separator:
        cells.reject(i, f"{must} in brackets")
    return cell.split(separator)
