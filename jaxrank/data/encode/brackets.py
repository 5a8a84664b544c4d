"""Reads text cells that hold a list in brackets: "[1, 2]", "['a']", "{1,2}" or "List(1, 2)"."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# In one pair of brackets, or in quotes. Neither "(a)|(b)" nor "a[1]" is such a list.
_NAMES = (
    r"(?:array|Array|(?:mutable\.)?(?:WrappedArray|ArrayBuffer|ArraySeq)|List|list|Seq|Set|set"
    r"|Vector|tuple|frozenset)"
)
_WORD = r"[A-Za-z_][\w.]*!?"  # a name in a program
_BRACKETS = (
    r"\[[^\[\]]*(\[.*)?\]|\([^()]*(\(.*)?\)|\{[^{}]*(\{.*)?\}"
    rf"|{_NAMES}\(.*\)"
    # A name and brackets around several parts, or around other brackets. Not "Alien(1979)".
    rf"|{_WORD}[\[({{][^\[\](){{}}]*,[^\[\](){{}}]*[\])}}]|(?:{_WORD})?<[^<>]*,[^<>]*>"
    rf"|{_WORD}\(\s*[\[({{].*[\])}}](?:\s*,\s*\w+=[^()]*)?\)"
    # An end is missing, as in a text that was cut, or the brackets are of two kinds.
    r"|[\[({][^\])}]*|[^\[({]*[\]}]|[\[({][^\[({]*[\])}]"
    r"""|[bBuU]?'[^']*'(\s*[^\w\s'"]\s*[bBuU]?'[^']*')*"""
    r"""|[bBuU]?"[^"]*"(\s*[^\w\s'"]\s*[bBuU]?"[^"]*")*"""
)
_WHOLE = rf"(?s)^\s*({_BRACKETS})\s*$"
# Of a cell for one id: a number, nothing, other brackets or several parts. A word such as "(none)"
# or "{3F25-4F89}" is an id.
_LIST = (
    rf"(?s)^\s*(?:{_WORD})?[\[({{<]\s*(?:[-+]?[0-9][0-9.]*|[\[({{].*|.*[,'\"].*)?\s*[\])}}>]\s*$"
)
_OPENED, _CLOSED = r"^\s*[\[({][^\])}]*$", r"^[^\[({]*[\])}]\s*$"
_FIRST, _LAST = (
    np.isin(np.arange(256), list(letters)) for letters in (b"[({<'\" \t\n\f\r", b"])}>'\" \t\n\f\r")
)
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_LEFT_OUT = ("...", "\u2026")  # in place of ids
_NULLS = ("NULL", "null", "None")  # without quotes
_NAMED = re.compile(rf"{_WORD}(\(.*\)|\[.*\]|\{{.*\}}|<.*>)|(?=<)(<.*>)", re.ASCII | re.DOTALL)
_KEYWORD = re.compile(r"\s*\w+=[^,()\[\]{}]*", re.ASCII)
_CODE = re.compile(r"""[bBuUrR]{1,2}['"]|\w+(\.\w+)+\(""", re.ASCII)
# A float of ast.literal_eval has lost the digits of a larger whole number.
_MAX_EXACT_INTEGER = 2**53


def bracketed(cells: pa.Array) -> np.ndarray:
    """Returns bool[n]: True where a text is a bracketed list or a quoted id, False if missing."""
    if not _may_be(cells):
        return np.zeros(len(cells), bool)
    matches = pc.match_substring_regex(cells, _WHOLE)
    return pc.fill_null(matches, False).to_numpy(zero_copy_only=False)


def lists(cells: pa.Array) -> np.ndarray:
    """Returns bool[n]: True where a text for a single id is a bracketed list of ids or numbers."""
    if not (result := bracketed(cells)).any():
        return result
    matches = pc.match_substring_regex(cells, _LIST)
    return result & pc.fill_null(matches, False).to_numpy(zero_copy_only=False)


def in_lists(cells: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """Returns bool[n]: True for a list within a list, and for the ends of a text "[1, 2]" that was
    split.

    Args:
        cells: texts, those of one list after the other.
        lengths: of the lists, i64[lists].
    """
    if not _may_be(cells):
        return np.zeros(len(cells), bool)
    result = lists(cells)
    several = lengths > 1
    last = np.cumsum(lengths)[several] - 1
    first = last + 1 - lengths[several]
    opens, closes = (
        pc.fill_null(pc.match_substring_regex(cells.take(pa.array(places)), pattern), False)
        for places, pattern in ((first, _OPENED), (last, _CLOSED))
    )
    is_split = pc.and_(opens, closes).to_numpy(zero_copy_only=False)
    result = result.copy()
    result[first[is_split]] = True
    return result


def _may_be(cells: pa.Array) -> bool:
    """Returns False if no text can be such a cell by its first and last byte, which is cheap."""
    _, offsets, data = cells.buffers()
    if data is None:
        return False
    ends = np.frombuffer(offsets, np.int32)[cells.offset : cells.offset + len(cells) + 1]
    is_text = np.diff(ends) > 0
    letters = np.frombuffer(data, np.uint8)
    first, last = letters[ends[:-1][is_text]], letters[ends[1:][is_text] - 1]
    return bool(_FIRST[first].any() or _LAST[last].any())


def read(cell: str, separator: str = ",") -> list[str | None] | None:
    """Parses a bracketed cell into ids as text, None for a missing id. Returns None if it is
    invalid.

    Args:
        separator: of the ids in cells without brackets. Unquoted ids in brackets may be between it,
            commas or spaces, but not between two of them.
    """
    text = _without_name(cell.strip())
    for parse in (_parse_json, ast.literal_eval):
        try:
            values = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(values, dict):
            return None if values else []  # for example ids and weights
        if isinstance(values, set):
            break  # a set, which has no stable order
        if isinstance(values, str):
            # A list may have been written as text twice.
            return read(values, separator) if values != text and _holds_list(values) else [values]
        if isinstance(values, list | tuple):
            if _holds_fractions(values):
                break  # NumPy's "[1. 2.]" is no Python, and its ids must be spelled like those
            return _texts(values)
        if isinstance(values, bytes):
            return None
    return _words(text, separator)


def _holds_list(text: str) -> bool:
    return bool(lists(pa.array([text], pa.string()))[0])


def _holds_fractions(values: Sequence[Any]) -> bool:
    """Returns True for numbers that Python does not print as they are written."""
    floats = [value for value in values if isinstance(value, float)]
    return bool(floats) and all(abs(value) < _MAX_EXACT_INTEGER for value in floats)


def _without_name(text: str) -> str:
    """Returns the list within "array([1, 2], dtype=int64)", "ARRAY[1,2]" or "<1,2>"."""
    if not (named := _NAMED.fullmatch(text)):
        return text
    inner = named[1] or named[2]
    if inner[0] in "(<":
        inner = _without_keywords(inner[1:-1]).strip()
    return inner


def _without_keywords(text: str) -> str:
    """Returns "[1, 2]" of "[1, 2], dtype=int64"."""
    end = len(text)
    while (comma := text.rfind(",", 0, end)) >= 0 and _KEYWORD.fullmatch(text, comma + 1, end):
        end = comma
    return text[:end]


def _parse_json(text: str) -> Any:
    """Parses JSON whose numbers stay as they are written, so that none is rounded."""
    return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)


def _texts(values: Any) -> list[str | None] | None:
    result: list[str | None] = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            return None
        if isinstance(value, float) and abs(value) >= _MAX_EXACT_INTEGER:
            return None
        try:
            result.append(None if value in (None, "") else str(value))
        except ValueError:  # a hexadecimal number with more digits than Python prints
            return None
    return result


def _words(text: str, separator: str) -> list[str | None] | None:
    """Parses a list that is neither JSON nor Python: "{3, 4}", "[a, b]" or NumPy's "[1 2]"."""
    if _PAIRS.get(text[:1]) == text[-1:]:
        text = text[1:-1].strip()
    elif text.endswith(tuple(_PAIRS.values())):
        return None  # the beginning is missing
    if text.startswith(tuple(_PAIRS)):
        return None  # a nested list, or one whose end is missing
    if not text:
        return []
    if separator.strip(", ") and separator in text:
        if "," in text:
            return None  # either may be part of an id
        words = text.split(separator)
    else:
        words = text.split(",") if "," in text else text.split()
    result: list[str | None] = []
    for word in map(str.strip, words):
        quote = word[:1] if word[:1] in ("'", '"') else ""
        if quote and (len(word) < 2 or word[-1] != quote):
            return None  # a separator within quotes
        inner = word[1:-1] if quote else word
        if (quote and quote in inner) or _CODE.match(word):
            return None  # another separator between quotes, or values as a program prints them
        if inner in _LEFT_OUT:
            return None  # NumPy prints "[1 2 ... 8 9]" in place of a long array
        result.append(None if inner == "" or word in _NULLS else inner)
    return result
