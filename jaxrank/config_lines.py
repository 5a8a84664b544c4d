"""Records which line of a config file sets each field."""

import ast
import contextlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

_MAX_LISTED_LINES = 3  # lines that a message names
_LIBRARY = sys.modules[ConfigDict.__module__].__file__


class Place(NamedTuple):
    """The statement of a file that sets a field."""

    file: str
    line: int


class SetLines:
    """The statements that set the fields of sections, while `recording` is active."""

    def __init__(self, is_of_user: Callable[[str], bool]):
        self._is_of_user = is_of_user
        # By identity. The sections are kept, so that no other gets the same one.
        self._sections: dict[int, ConfigDict] = {}
        self._places: dict[tuple[int, Any], Place] = {}

    def note(self, section: ConfigDict, key: Any) -> None:
        """Notes the file and line of user code that sets a field; see `recording`."""
        frame = sys._getframe(2)
        while frame.f_back is not None and _is_inner(frame.f_code):
            if "copy" in frame.f_code.co_name:  # sets all fields of a new section
                return
            frame = frame.f_back
        file = frame.f_code.co_filename
        if self._is_of_user(file):
            self._sections[id(section)] = section
            self._places[id(section), key] = Place(file, frame.f_lineno)

    def by_path(self, section: ConfigDict, path: str = "") -> dict[str, Place]:
        """Returns the statement that set each field of a section last, as far as they are known."""
        places = {}
        for key, value in section._fields.items():
            below = f"{path}.{key}" if path else str(key)
            if (id(section), key) in self._places:
                places[below] = self._places[id(section), key]
            if isinstance(value, ConfigDict):
                places |= self.by_path(value, below)
        return places


def _is_inner(code: types.CodeType) -> bool:
    """Returns True for functions of ConfigDict and its subclasses."""
    return code.co_filename == _LIBRARY or code.co_name == "__setitem__"


@contextlib.contextmanager
def recording(is_of_user: Callable[[str], bool]) -> Iterator[SetLines]:
    """Notes the lines that set fields of any ConfigDict within the block.

    Args:
        is_of_user: returns True for files of user code. Lines of other files are not noted.
    """
    lines, original = SetLines(is_of_user), ConfigDict.__setitem__

    def noting(section: ConfigDict, key: Any, value: Any) -> None:
        original(section, key, value)
        lines.note(section, key)

    ConfigDict.__setitem__ = noting
    try:
        yield lines
    finally:
        ConfigDict.__setitem__ = original


class Sources(NamedTuple):
    """The files of user code that a config comes from.

    files: the config file, and the files that it imports.
    places: the statement that set each field last, by the path of the field.
    """

    files: tuple[str, ...]
    places: Mapping[str, Place]

    def lines(self, field: str) -> list[str]:
        """Returns FILE:LINE of the lines that set a field, such as "features.dense[0].log".

        If that is not known, they are lines with the name of the field.
        """
        names = re.findall(r"[^\W\d]\w*", field)
        if not names:
            return []
        word = re.compile(rf"\b{names[-1]}\b")
        ends = [match.start() for match in re.finditer(r"[.\[]|$", field)]
        for path in (field[:end] for end in reversed(ends)):
            if path in self.places:
                file, line = self.places[path]
                numbers = [n for n, text in _statement(file, line) if word.search(text)] or [line]
                return [f"{file}:{number}" for number in numbers[:_MAX_LISTED_LINES]]
        places = [
            f"{file}:{number}"
            for file in self.files
            for number, text in _code(file)
            if word.search(text)
        ]
        return places[:_MAX_LISTED_LINES]


def _code(file: str) -> list[tuple[int, str]]:
    """Returns the lines of a file with their numbers, without comments."""
    lines = Path(file).read_text(errors="replace").splitlines()
    return [(number, line.partition("#")[0]) for number, line in enumerate(lines, 1)]


def _statement(file: str, line: int) -> list[tuple[int, str]]:
    """Returns the lines of the innermost statement at a line of a file."""
    try:
        tree = ast.parse(Path(file).read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):  # it has changed since it was loaded
        return []
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    first, last = min(spans, key=lambda span: span[1] - span[0], default=(line, line))
    return _code(file)[first - 1 : last]
