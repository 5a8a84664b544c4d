"""Models, losses and metrics of users: the files that register them, and where each comes from.

A file on the command line, an installed package (entry points of the group `jaxrank.models`) or the
file of a config registers them. A name imports nothing, so a name in a workdir can only select what
is registered. A run records a checksum of the code of each; see `workdir.user_code`.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank.errors import InputError

GROUP = "jaxrank.models"  # of entry points

_OWN_PACKAGE = str(Path(__file__).parent)


class Origin(NamedTuple):
    """The code that registered an object.

    name: of the class or function.
    file: that defines it, an absolute path. Empty if there is no such file.
    checksum: of the code of the file. Empty without a file and for the program's own code.
    """

    name: str
    file: str
    checksum: str


_ORIGINS: dict[tuple[str, str], Origin] = {}


def add(registry: dict[str, Any], kind: str, name: str, value: Any, code: Any) -> None:
    """Adds an object to a registry. A file that is executed again replaces its objects.

    Args:
        kind: of the objects, such as "model".
        code: the class or function that the user wrote.

    Raises:
        InputError: another object has the name, or the name is not a text.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of a {kind} must be a text: found {name!r}.")
    origin = _origin(code)
    known = _ORIGINS.get((kind, name))
    if name in registry and known and known[:2] != origin[:2]:
        raise InputError(
            f"{kind} {name!r} must be registered once: found {known.name} of {known.file},"
            f" {origin.name} of {origin.file}."
        )
    registry[name] = value
    _ORIGINS[kind, name] = origin


def origins() -> dict[tuple[str, str], Origin]:
    """Returns {(kind, name): origin} of all objects that are not the program's own."""
    return {key: origin for key, origin in _ORIGINS.items() if origin.checksum}


def _origin(code: Any) -> Origin:
    module = sys.modules.get(code.__module__)
    path = Path(getattr(module, "__file__", None) or "")
    if not path.is_file():
        return Origin(code.__qualname__, "", "")
    is_shipped = path.is_relative_to(_OWN_PACKAGE)
    return Origin(code.__qualname__, str(path.resolve()), "" if is_shipped else checksum(path))


def checksum(path: Path) -> str:
    """Returns the SHA-256 of the statements of a file, without `get_config` of a config.

    Comments between statements and fields that the config sets do not change it.
    """
    text = path.read_text(encoding="utf-8")
    statements = [
        ast.get_source_segment(text, node) or ""
        for node in ast.parse(text).body
        if getattr(node, "name", "") != "get_config"
    ]
    return hashlib.sha256("\n".join(statements).encode()).hexdigest()


@functools.cache
def load_packages() -> None:
    """Imports what installed packages register.

    Raises:
        InputError: a package cannot be imported.
    """
    import importlib.metadata  # takes as long as all other imports of this module

    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except InputError:
            raise
        except Exception as error:  # it is not our program
            raise InputError(
                f"the entry point {entry.name} = {entry.value} of {GROUP} must be importable:"
                f" {type(error).__name__}: {error}."
            ) from error


def load(path: str | Path) -> None:
    """Executes a Python file that registers models, losses or metrics.

    It may import files of its own directory.

    Raises:
        InputError: the file does not exist, or it raises. The error names the line.
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise InputError(f"--models: no such file: {path}. It must be a Python file.")
    # Files of several directories may have one name.
    number = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    name = f"jaxrank_models_{path.stem}_{number}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Annotations of a dataclass that are strings are resolved in this module.
    sys.modules[name] = module
    try:
        with importing_from(path.absolute().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it is the user's program
        text = " ".join(str(error).split())
        where = f"--models: {path}, line {_line(error, path)}"
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{where}: {kind}{text}") from error


@contextlib.contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Lets a user's file import the files of its folder. The file may change `sys.path` itself."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def user_code_line(error: BaseException) -> str:
    """Returns the last line of user code in the traceback of an error, such as "FILE, line 3".

    User code is the files that registered something. Empty if the error is not of them.
    """
    frames = _frames(error, {origin.file for origin in origins().values()})
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _line(error: BaseException, path: Path) -> int:
    """Returns the last line of a file in the traceback of an error."""
    file = str(path.resolve())
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or 0
    frames = _frames(error, {file})
    return (frames[-1].lineno or 0) if frames else 0


def _frames(error: BaseException, files: Collection[str]) -> list[traceback.FrameSummary]:
    """Returns the frames of a traceback that are of some files, given by absolute paths."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if str(Path(frame.filename).resolve()) in files]


def hint(kind: str) -> str:
    """Returns a sentence about registering a kind of object."""
    return (
        f"A file that registers a {kind} is given by --models=FILE.py. In Python, import the file"
        " first."
    )
