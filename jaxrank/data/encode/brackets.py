"""Reads text cells that hold a bracketed list, as JSON and Python write it: "[1, 2]", "['a']"."""

import ast
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# In one pair of brackets, or in quotes. Neither "(a)|(b)" nor "a[1]" is such a list.
_BRACKETS = (
    r"\[[^\[\]]*(\[.*)?\]|\([^()]*(\(.*)?\)|\{[^{}]*(\{.*)?\}|array\(.*\)"
    r"""|'[^']*'(\s*[^\w\s'"]\s*'[^']*')*|"[^"]*"(\s*[^\w\s'"]\s*"[^"]*")*"""
)
_WHOLE = rf"^\s*({_BRACKETS})\s*$"
_FIRST = np.frombuffer(b"[({'\" \t\n\f\r", np.uint8)
_PAIRS = {"[": "]", "(": ")", "{": "}"}


def bracketed(cells: pa.Array) -> np.ndarray:
    """Returns bool[n]: True where a text is a bracketed list or a quoted id, False if missing."""
    if not _may_be(cells):
        return np.zeros(len(cells), bool)
    matches = pc.match_substring_regex(cells, _WHOLE)
    return pc.fill_null(matches, False).to_numpy(zero_copy_only=False)


def _may_be(cells: pa.Array) -> bool:
    """Returns False if no text can be such a cell by its first byte. A cheap first check."""
    _, offsets, data = cells.buffers()
    if data is None:
        return False
    ends = np.frombuffer(offsets, np.int32)[cells.offset : cells.offset + len(cells) + 1]
    starts = ends[:-1][np.diff(ends) > 0]
    letters = np.frombuffer(data, np.uint8)
    first = letters[starts]
    if np.isin(first, _FIRST).any():
        return True
    names = starts[first == ord("a")] + len("array")
    return bool((letters[np.minimum(names, len(letters) - 1)] == ord("(")).any())


def read(cell: str) -> list[str | None] | None:
    """Parses a bracketed cell into ids as text, None for a missing id. Returns None if it is
    invalid.
    """
    text = cell.strip()
    if text.startswith("array("):
        text = text[6:-1]
    for parse in (json.loads, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(values, dict):
            return None  # for example ids and weights
        if isinstance(values, set):
            break  # a set, which has no stable order
        if isinstance(values, str):
            values = [values]
        if isinstance(values, list | tuple):
            return _texts(values)
    return _words(text)


def _texts(values: Any) -> list[str | None] | None:
    result: list[str | None] = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            return None
        result.append(None if value in (None, "") else str(value))
    return result


def _words(text: str) -> list[str | None] | None:
    """Parses a list that is neither JSON nor Python: "{3, 4}", "[a, b]" or NumPy's "[1 2]"."""
    if _PAIRS.get(text[:1]) == text[-1:]:
        text = text[1:-1].strip()
    if text.startswith(tuple(_PAIRS)):
        return None  # a nested list
    if not text:
        return []
    words = text.split(",") if "," in text else text.split()
    result: list[str | None] = []
    for word in map(str.strip, words):
        quote = word[:1] if word[:1] in ("'", '"') else ""
        if quote and (len(word) < 2 or word[-1] != quote):
            return None  # a separator within quotes
        inner = word[1:-1] if quote else word
        result.append(inner or None)
    return result
