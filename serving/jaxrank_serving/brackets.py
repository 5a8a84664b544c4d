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
    # A name and brackets around several parts, or around other brackets. Not "Alien(1979)".
    rf"|{_WORD}[\[({{][^\[\](){{}}]*,[^\[\](){{}}]*[\])}}]|(?:{_WORD})?<[^<>]*,[^<>]*>"
    rf"|{_WORD}\({_SPACE}*[\[({{].*[\])}}](?:{_SPACE}*,{_SPACE}*\w+=[^()]*)?\)"
    # An end is missing, as in a text that was cut, or the brackets are of two kinds.
    r"|[\[({][^\])}]*|[^\[({]*[\]}]|[\[({][^\[({]*[\])}]"
    rf"""|[bBuU]?'[^']*'({_SPACE}*[^\w\t\n\f\r '"]{_SPACE}*[bBuU]?'[^']*')*"""
    rf"""|[bBuU]?"[^"]*"({_SPACE}*[^\w\t\n\f\r '"]{_SPACE}*[bBuU]?"[^"]*")*"""
)
_WHOLE = re.compile(rf"{_SPACE}*({_BRACKETS}){_SPACE}*", re.ASCII | re.DOTALL)
# Of a cell for one id: a number, nothing, other brackets or several parts.
_LIST = re.compile(
    rf"{_SPACE}*(?:{_WORD})?[\[({{<]{_SPACE}*(?:[-+]?[0-9][0-9.]*|[\[({{].*|.*[,'\"].*)?{_SPACE}*[\])}}>]"
    rf"{_SPACE}*",
    re.ASCII | re.DOTALL,
)
_FIRST = "[({<'\" \t\n\f\r"
_LAST = "])}>'\" \t\n\f\r"
_PAIRS = {"[": "]", "(": ")", "{": "}"}
_NULLS = ("NULL", "null", "None")
_NAMED = re.compile(rf"{_WORD}(\(.*\)|\[.*\]|\{{.*\}}|<.*>)|(?=<)(<.*>)", re.ASCII | re.DOTALL)
_KEYWORDS = re.compile(r"(,\s*\w+=[^,()\[\]{}]*)+$", re.ASCII)
_CODE = re.compile(r"""[bBuUrR]{1,2}['"]|\w+(\.\w+)+\(""", re.ASCII)
# A float of ast.literal_eval has lost the digits of a larger whole number.
_MAX_EXACT_INTEGER = 2**53


def is_bracketed(cell: str) -> bool:
    """Returns True if a text is a bracketed list or a quoted id."""
    may_be = bool(cell) and (cell[0] in _FIRST or cell[-1] in _LAST)
    return may_be and _WHOLE.fullmatch(cell) is not None


def find_list(cells: Sequence[Any]) -> int | None:
    """Returns the index of the first text for a single id that is a bracketed list, or None."""
    joined = "".join(cell for cell in cells if isinstance(cell, str))
    if not any(letter in joined for letter in "])}>"):  # in most requests, and cheap
        return None
    lists = (i for i, cell in enumerate(cells) if isinstance(cell, str) and _is_list(cell))
    return next(lists, None)


def _is_list(cell: str) -> bool:
    return is_bracketed(cell) and _LIST.fullmatch(cell) is not None


def read(cell: str) -> list[str | None] | None:
    """Parses a bracketed cell into ids as text, None for a missing id. Returns None if it is
    invalid.
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
            values = [values]
        if isinstance(values, list | tuple):
            return _texts(values)
        if isinstance(values, bytes):
            return None
    return _words(text)


def _without_name(text: str) -> str:
    """Returns the list within "array([1, 2], dtype=int64)", "ARRAY[1,2]" or "<1,2>"."""
    if not (named := _NAMED.fullmatch(text)):
        return text
    inner = named[1] or named[2]
    if inner[0] in "(<":
        inner = _KEYWORDS.sub("", inner[1:-1]).strip()
    return inner


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
        result.append(None if value in (None, "") else str(value))
    return result


def _words(text: str) -> list[str | None] | None:
    """Parses a list that is neither JSON nor Python: "{3, 4}", "[a, b]" or NumPy's "[1 2]"."""
    if _PAIRS.get(text[:1]) == text[-1:]:
        text = text[1:-1].strip()
    elif text.endswith(tuple(_PAIRS.values())):
        return None  # the beginning is missing
    if text.startswith(tuple(_PAIRS)):
        return None  # a nested list, or one whose end is missing
    if not text:
        return []
    words = text.split(",") if "," in text else text.split()
    result: list[str | None] = []
    for word in map(str.strip, words):
        quote = word[:1] if word[:1] in ("'", '"') else ""
        if quote and (len(word) < 2 or word[-1] != quote):
            return None  # a separator within quotes
        inner = word[1:-1] if quote else word
        if (quote and quote in inner) or _CODE.match(word):
            return None  # another separator between quotes, or values as a program prints them
        result.append(None if inner == "" or word in _NULLS else inner)
    return result
