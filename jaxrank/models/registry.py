"""Registry of models: `config.model.name` selects a registered model.

A model is registered by an installed package through the entry point group `jaxrank.models`, by a
file on the command line, or by the file of a config. A name imports nothing, so a name in a workdir
can only select a registered model.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import flax.linen as nn

from jaxrank.errors import InputError
from jaxrank.validate import nearest, require

Module = TypeVar("Module", bound=type[nn.Module])

RANKER = "ranker"
FACTORIZATION_MACHINE = "factorization_machine"
GROUP = "jaxrank.models"  # of entry points

_MODULES: dict[str, type[nn.Module]] = {}


def register(name: str) -> Callable[[Module], Module]:
    """Registers a Flax module under a name. Its dataclass fields are fields of `config.model`.

    A file that is executed again replaces its modules.

    Raises:
        InputError: another module has the name.
    """

    def registered(module: Module) -> Module:
        known = _MODULES.setdefault(name, module)
        if _origin(known) != _origin(module):
            raise InputError(
                f"model {name!r} must be registered once: found {' and '.join(_origin(known))},"
                f" {' and '.join(_origin(module))}."
            )
        _MODULES[name] = module
        return module

    return registered


def names() -> list[str]:
    """Returns the names of all registered models."""
    return sorted(_MODULES)


def _origin(module: type[nn.Module]) -> tuple[str, str]:
    """Returns the name of a module and the file that defines it."""
    code = getattr(inspect.unwrap(module.__call__), "__code__", None)
    return module.__qualname__, code.co_filename if code else module.__module__


def module_of(name: str) -> type[nn.Module]:
    """Returns the module registered under a name.

    Raises:
        InputError: the name is not a text or not registered, or a package with models cannot be
            imported.
    """
    require(isinstance(name, str), "model.name", "text", name)
    if name not in _MODULES:
        _load_packages()
    if name not in _MODULES:
        raise InputError(
            f"model.name must be one of {', '.join(sorted(_MODULES))}: found {name!r}"
            f"{nearest(str(name), _MODULES)}. A file that registers a model is given by"
            " --models=FILE.py."
        )
    return _MODULES[name]


@functools.cache
def _load_packages() -> None:
    """Imports the models of all installed packages."""
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
    """Executes a Python file that registers models.

    Raises:
        InputError: the file does not exist, or it raises. The error names the line.
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise InputError(f"--models: no such file: {path}. It must be a Python file.")
    name = f"jaxrank_models_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Annotations of a dataclass that are strings are resolved in this module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it is the user's program
        text = " ".join(str(error).split())
        where = f"--models: {path}, line {_line(error, path)}"
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{where}: {kind}{text}") from error


def _line(error: BaseException, path: Path) -> int:
    """Returns the last line of a file in the traceback of an error."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return (frames[-1].lineno or 0) if frames else 0
