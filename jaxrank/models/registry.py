"""Models by name: `config.model.name` chooses one of those that are registered."""

from collections.abc import Callable
from typing import TypeVar

import flax.linen as nn

from jaxrank.errors import InputError
from jaxrank.validate import nearest

Module = TypeVar("Module", bound=type[nn.Module])

RANKER = "ranker"  # the model of a config that names none

_MODULES: dict[str, type[nn.Module]] = {}


def register(name: str) -> Callable[[Module], Module]:
    """Registers a Flax module under a name; its dataclass fields are the fields of `config.model`.

    Raises:
        InputError: another module has the name.
    """

    def registered(module: Module) -> Module:
        known = _MODULES.setdefault(name, module)
        if known is not module:
            raise InputError(f"model {name!r} must be registered once: found {known} and {module}.")
        return module

    return registered


def names() -> list[str]:
    """The names of all registered models."""
    return sorted(_MODULES)


def module_of(name: str) -> type[nn.Module]:
    """The module of that name.

    Raises:
        InputError: none is registered under it.
    """
    if name not in _MODULES:
        raise InputError(
            f"model.name must be one of {', '.join(sorted(_MODULES))}: found {name!r}"
            f"{nearest(name, _MODULES)}."
        )
    return _MODULES[name]
