"""Registry of models: `config.model.name` selects a registered model."""

from collections.abc import Callable
from typing import TypeVar

import flax.linen as nn

from jaxrank import extensions
from jaxrank.errors import InputError
from jaxrank.validate import nearest, require

Module = TypeVar("Module", bound=type[nn.Module])

RANKER = DEFAULT = "ranker"  # DEFAULT: an empty name stands for it
FACTORIZATION_MACHINE = "factorization_machine"
MODEL = "model"  # kind of the registered objects; see `extensions`

_MODULES: dict[str, type[nn.Module]] = {}


def register(name: str) -> Callable[[Module], Module]:
    """Registers a Flax module under a name. Its dataclass fields are fields of `config.model`.

    A file that is executed again replaces its modules.

    Raises:
        InputError: another module has the name.
    """

    def registered(module: Module) -> Module:
        extensions.add(_MODULES, MODEL, name, module, module)
        return module

    return registered


def names() -> list[str]:
    """Returns the names of all registered models."""
    return sorted(_MODULES)


def find_module(name: str) -> type[nn.Module]:
    """Returns the module registered under a name. Empty: that of `DEFAULT`.

    Raises:
        InputError: the name is not a text or not registered, or a package with models cannot be
            imported.
    """
    require(isinstance(name, str), "model.name", "text", name)
    name = name or DEFAULT
    if name not in _MODULES:
        extensions.load_packages()
    if name not in _MODULES:
        raise InputError(
            f"model.name: must be one of {', '.join(sorted(_MODULES))}: found {name!r}"
            f"{nearest(str(name), _MODULES)}. {extensions.hint(MODEL)}"
        )
    return _MODULES[name]
