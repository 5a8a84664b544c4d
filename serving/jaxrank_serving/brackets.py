"""Reads text cells that hold a list in brackets: "[1, 2]", "['a']", "{1,2}" or "List(1, 2)".

The same rules as in `jaxrank.data.encode.brackets`; a test of jaxrank compares both.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

# RE2's \s, which has no vertical tab.
_SPACE = r"[\t\n\f\r ]"
_NAMES = (
    r"(?:array|Array|(?:mutable\.)?(?:WrappedArray|ArrayBuffer|ArraySeq)|List|list|Seq|Set|set"
    r"|Vector|tuple|frozenset)"
)
_WORD = r"[A-Za-z_][\w.]*!?"  # a name in a program
_BRACKETS = (
    r"\[[^\[\]]*(\[.*)?\]|\([^()]*(\(.*)?\)|\{[^{}]*(\{.*)?\}"
    rf"|{_NAMES}\(.*\)"
    # A name and brackets around several parts. Not "Alien(1979)".
    rf"|{_WORD}[\[({{][^\[\](){{}},]*,[^\[\](){{}}]*[\])}}]|(?:{_WORD})?<[^<>,]*,[^<>]*>"
    # An end is missing, as in a text that was cut, or the brackets are of two kinds.
    r"|[\[({][^\])}]*|[^\[({]*[\]}]|[\[({][^\[({]*[\])}]"
    rf"""|[bBuU]?'[^']*'({_SPACE}*[^\w\t\n\f\r '"]{_SPACE}*[bBuU]?'[^']*')*"""
    rf"""|[bBuU]?"[^"]*"({_SPACE}*[^\w\t\n\f\r '"]{_SPACE}*[bBuU]?"[^"]*")*"""
)
# Matched without the spaces around a cell. All patterns take time in proportion to its length, so
# that no cell stops a server: two repeats of the same letter have another letter between them.
_WHOLE = re.compile(_BRACKETS, re.ASCII | re.DOTALL)
# A name and brackets around other brackets, and the last of these with a keyword after it.
_CALL = re.compile(rf"{_WORD}\({_SPACE}*+[\[({{]", re.ASCII)
_ARGUMENT = re.compile(rf"[\])}}]{_SPACE}*+,{_SPACE}*+\w++=", re.ASCII)
_OPENING = re.compile(rf"(?:{_WORD})?[\[({{<]{_SPACE}*", re.ASCII)
_DIGITS = re.compile(r"[-+]?[0-9][0-9.]*")
# The ends of a list in brackets that was split.
_OPENED = re.compile(rf"{_SPACE}*+[\[({{][^\])}}]*")
_CLOSED = re.compile(rf"[^\[({{]*[\])}}]{_SPACE}*+")
_SPACES = "\t\n\f\r "
_FIRST = "[({<'\" \t\n\f\r"
_LAST = "])}>'\" \t\n\f\r"
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_LEFT_OUT = ("...", "\u2026")  # in place of ids
_NULLS = ("NULL", "null", "None")
_NAMED = re.compile(rf"{_WORD}(\(.*\)|\[.*\]|\{{.*\}}|<.*>)|(?=<)(<.*>)", re.ASCII | re.DOTALL)
_KEYWORD = re.compile(r"\s*\w+=[^,()\[\]{}]*", re.ASCII)
_CODE = re.compile(r"""[bBuUrR]{1,2}['"]|\w+(\.\w+)+\(""", re.ASCII)
# A float of ast.literal_eval has lost the digits of a larger whole number.
_MAX_EXACT_INTEGER = 2**53


def is_bracketed(cell: str) -> bool:
    """Returns True if a text is a bracketed list or a quoted id."""
    may_be = bool(cell) and (cell[0] in _FIRST or cell[-1] in _LAST)
    if not may_be:
        return False
    text = cell.strip(_SPACES)
    return _WHOLE.fullmatch(text) is not None or _is_call(text)


def _is_call(text: str) -> bool:
    """Returns True for a name and brackets around other brackets, such as "f([1, 2], n=1)"."""
    opening = _CALL.match(text)
    if opening is None or text[-1] != ")":
        return False
    start, end = opening.end(), len(text) - 1
    if start < end and text[end - 1] in "])}":
        return True
    # No keyword has round brackets, so that the last of them comes before it.
    last = max(text.rfind("(", start, end), text.rfind(")", start, end), start)
    return _ARGUMENT.search(text, last, end) is not None


def may_have_list(text: str) -> bool:
    """Returns False if joined cells have no closing bracket, as in most requests. It is cheap."""
    return any(letter in text for letter in "])}>")


def find_list(cells: Sequence[Any]) -> int | None:
    """Returns the index of the first text for a single id that is a bracketed list, or None."""
    if not may_have_list("".join(cell for cell in cells if isinstance(cell, str))):
        return None
    lists = (i for i, cell in enumerate(cells) if isinstance(cell, str) and _is_list(cell))
    return next(lists, None)


def find_part(cells: Sequence[Any], lengths: Sequence[int]) -> int | None:
    """Returns the index of the first id of a list that is a list in brackets or begins one that
    was split, such as "[1" of ["[1", "2]"], or None.

    Args:
        cells: ids, those of one list after the other.
        lengths: of the lists.
    """
    if not may_have_list("".join(cell for cell in cells if isinstance(cell, str))):
        return None
    start, places = 0, []
    for length in lengths:
        first, last = cells[start : start + 1], cells[start + length - 1 : start + length]
        start += length
        if length < 2 or not isinstance(first[0], str) or not isinstance(last[0], str):
            continue
        if _OPENED.fullmatch(first[0]) and _CLOSED.fullmatch(last[0]):
            places.append(start - length)
            break
    whole = find_list(cells)
    return min([*places, *([] if whole is None else [whole])], default=None)


def _is_list(cell: str) -> bool:
    """Returns True for brackets around a number, nothing, other brackets or several parts."""
    text = cell.strip(_SPACES)
    opening = _OPENING.match(text)
    if opening is None or text[-1] not in "])}>" or not is_bracketed(cell):
        return False
    inner = text[opening.end() : -1].rstrip(_SPACES)
    has_parts = inner[:1] in ("", *_PAIRS) or any(letter in inner for letter in ",'\"")
    return has_parts or _DIGITS.fullmatch(inner) is not None


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
            return read(values, separator) if values != text and _is_list(values) else [values]
        if isinstance(values, list | tuple):
            if _holds_fractions(values):
                break  # NumPy's "[1. 2.]" is no Python, and its ids must be spelled like those
            return _texts(values)
        if isinstance(values, bytes):
            return None
    return _words(text, separator)


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
