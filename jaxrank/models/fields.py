"""The section `model` of a config: the fields of a registered module."""

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrank.errors import InputError
from jaxrank.models.registry import find_module, names
from jaxrank.validate import field, field_default, is_supported, parse

# Fields of a module that the framework sets, and that are not fields of a config.
_OF_FRAMEWORK = ("parent", "name", "tasks", "parents", "initial_bias")


@functools.cache
def make_section(module: Any) -> type:
    """Makes the section of a Flax module: a dataclass with its fields and those of all models.

    A field whose type a config cannot hold keeps its default and is not in the section. A static
    method `check_fields(fields, where)` of the module checks rules about several fields, before any
    data is read. `fields` has them as attributes, `where` is the path of the section.

    Raises:
        InputError: a field has no default.
    """
    kinds = typing.get_type_hints(module)
    entries: list[tuple[str, Any, Any]] = [
        (
            "name",
            str,
            field(
                "",
                help="name of a registered model; empty: ranker if one of its fields is set, or"
                " else by the size of the data",
            ),
        )
    ]
    for model_field in dataclasses.fields(module):
        if model_field.name in _OF_FRAMEWORK:
            continue
        if field_default(model_field) is dataclasses.MISSING:
            raise InputError(
                f"{module.__name__}.{model_field.name} must have a default: found none."
            )
        if is_supported(kinds[model_field.name]):
            factory: Any = functools.partial(field_default, model_field)
            entry: Any = dataclasses.field(default_factory=factory, metadata=model_field.metadata)
            entries.append((model_field.name, kinds[model_field.name], entry))
    parents = field(
        {}, help="task -> parent task without which it cannot be positive (ESMM), by name"
    )
    entries.append(("parents", Mapping[str, str], parents))
    initial_bias = field(
        {},
        help="task -> its output at the start of training, when all raw logits are 0: log-odds, log"
        " of a count, or number. Without an entry: the base rate of the training labels",
    )
    entries.append(("initial_bias", Mapping[str, float], initial_bias))
    check_fields = getattr(module, "check_fields", None)
    methods = {} if check_fields is None else {"check": check_fields}
    section = dataclasses.make_dataclass(module.__name__, entries, namespace=methods, frozen=True)
    section.__doc__ = module.__doc__
    return section


class _Sections(Mapping[str, type]):
    """{name of a registered model: its section}."""

    def __getitem__(self, name: str) -> type:
        module: Any = find_module(name)
        return make_section(module)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())


SECTIONS: Mapping[str, type] = _Sections()


def check(module: Any, tasks: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a module, given those of the config.

    Raises:
        InputError: a field is invalid.
    """
    if not _whole(tasks) or tasks < 1:
        raise InputError(f"a model needs a whole number of tasks, at least 1: found {tasks!r}.")
    model_fields = {name: value for name, value in values.items() if name not in _OF_FRAMEWORK}
    section: Any = make_section(module)
    parsed: Any = parse(section, model_fields, "model")
    fields = {
        entry.name: getattr(parsed, entry.name)
        for entry in dataclasses.fields(section)
        if entry.name not in _OF_FRAMEWORK
    }
    return {**fields, "tasks": tasks}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
