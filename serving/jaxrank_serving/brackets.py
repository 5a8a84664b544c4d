"""Reads text cells that hold a bracketed list, as JSON and Python write it: "[1, 2]", "['a']".

The same rules as in `jaxrank.data.encode.brackets`; a test of jaxrank compares both.
"""

import ast
import json
import re
from typing import Any

# RE2's \s, which has no vertical tab.
_SPACE = r"[\t\n\f\r ]"
_BRACKETS = (
    r"\[[^\[\]]*(\[.*)?\]|\([^()]*(\(.*)?\)|\{[^{}]*(\{.*)?\}|array\(.*\)"
    rf"""|'[^']*'({_SPACE}*[^\w\t\n\f\r '"]{_SPACE}*'[^']*')*"""
    rf"""|"[^"]*"({_SPACE}*[^\w\t\n\f\r '"]{_SPACE}*"[^"]*")*"""
)
_WHOLE = re.compile(rf"{_SPACE}*({_BRACKETS}){_SPACE}*", re.ASCII)
_FIRST = "[({'\" \t\n\f\ra"
_PAIRS = {"[": "]", "(": ")", "{": "}"}


def is_bracketed(cell: str) -> bool:
    """Returns True if a text is a bracketed list or a quoted id."""
    return cell[:1] in _FIRST and bool(cell) and _WHOLE.fullmatch(cell) is not None


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
            return None
        if isinstance(values, set):
            break
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
    if _PAIRS.get(text[:1]) == text[-1:]:
        text = text[1:-1].strip()
    if text.startswith(tuple(_PAIRS)):
        return None
    if not text:
        return []
    words = text.split(",") if "," in text else text.split()
    result: list[str | None] = []
    for word in map(str.strip, words):
        quote = word[:1] if word[:1] in ("'", '"') else ""
        if quote and (len(word) < 2 or word[-1] != quote):
            return None
        inner = word[1:-1] if quote else word
        result.append(inner or None)
    return result
