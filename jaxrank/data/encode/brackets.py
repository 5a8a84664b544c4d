"""Cells of text that hold a list in brackets, as JSON and Python write it: "[1, 2]", "['a']"."""

import ast
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# In one pair of brackets, or in quotes. "(a)|(b)" is no such list, and neither is "a[1]".
_BRACKETS = (
    r"\[[^\[\]]*(\[.*)?\]|\([^()]*(\(.*)?\)|\{[^{}]*(\{.*)?\}|array\(.*\)"
    r"""|'[^']*'(\s*[^\w\s'"]\s*'[^']*')*|"[^"]*"(\s*[^\w\s'"]\s*"[^"]*")*"""
)
_WHOLE = rf"^\s*({_BRACKETS})\s*$"
_FIRST = np.frombuffer(b"[({'\" \t", np.uint8)
_PAIRS = {"[": "]", "(": ")", "{": "}"}


def bracketed(cells: pa.Array) -> np.ndarray:
    """bool[n]: whether each text is a list in brackets, or ids in quotes; False where missing."""
    if not _may_be(cells):
        return np.zeros(len(cells), bool)
    matches = pc.match_substring_regex(cells, _WHOLE)
    return pc.fill_null(matches, False).to_numpy(zero_copy_only=False)


def _may_be(cells: pa.Array) -> bool:
    """Returns True where the first byte of some text could begin such a cell, in little time."""
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
    """The ids within a bracketed cell as text, None for one that is missing; None if it is none."""
    text = cell.strip()
    if text.startswith("array("):
        text = text[6:-1]
    for parse in (json.loads, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(values, dict):
            return None  # ids and weights, say
        if isinstance(values, set):
            break  # in an order of its own
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
    """Reads a list that is neither JSON nor Python, as "{3, 4}", "[a, b]" or NumPy's "[1 2]"."""
    if _PAIRS.get(text[:1]) == text[-1:]:
        text = text[1:-1].strip()
    if text.startswith(tuple(_PAIRS)):
        return None  # a list of lists
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
