"""The fields of a model's config: which there are, what they may be, and which are read when."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrank.errors import InputError
from jaxrank.models.products import PRECISIONS
from jaxrank.models.ranker import CROSSES, MULTITASKS, STRUCTURES, Ranker
from jaxrank.models.tower import ACTIVATIONS, NORMS
from jaxrank.validate import check_choice

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cross": CROSSES,
        "structure": STRUCTURES,
        "multitask": MULTITASKS,
        "activation": tuple(ACTIVATIONS),
        "norm": NORMS,
        "precision": PRECISIONS,
    }
)
_NUMBERS = ("cross_layers", "cross_rank", "cross_experts", "levels", "experts", "task_experts")
_WIDTHS = ("hidden", "bottom_hidden", "floats_hidden", "expert_hidden", "head_hidden")

# field -> the field that decides whether it is read, and at which of its values it is.
_READ_AT: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cross_layers": ("cross", ("matrix", "vector", "low_rank", "mix")),
        "cross_rank": ("cross", ("low_rank", "mix")),
        "cross_experts": ("cross", ("mix",)),
        "bottom_hidden": ("cross", ("dot",)),
        "floats_hidden": ("cross", tuple(cross for cross in CROSSES if cross != "dot")),
        "experts": ("multitask", ("mmoe", "ple")),
        "expert_hidden": ("multitask", ("mmoe", "ple")),
        "task_experts": ("multitask", ("ple",)),
        "levels": ("multitask", ("ple",)),
    }
)
# The floats' layers have a field for "dot" and one for all else.
_INSTEAD = MappingProxyType({"bottom_hidden": "floats_hidden", "floats_hidden": "bottom_hidden"})
_FIELDS = (*_CHOICES, *_NUMBERS, *_WIDTHS, "dropout", "parents")


def check(tasks: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Ranker`, lists as tuples; InputError names the first that is wrong."""
    if not _whole(tasks) or tasks < 1:
        raise InputError(f"a model needs a whole number of tasks, at least 1: found {tasks!r}.")
    checked = {field: _checked(field, value, tasks) for field, value in config.items()}
    fields = {name: checked.get(name, getattr(Ranker, name)) for name in _FIELDS}
    for field, (chooser, values) in _READ_AT.items():
        default = getattr(Ranker, field)
        if fields[chooser] not in values and fields[field] != default:
            other = _INSTEAD.get(field)
            hint = f" The floats' layers are model.{other} there." if other else ""
            raise InputError(
                f"model.{field} is read only where model.{chooser} is one of {values}: found"
                f" {fields[field]!r}, model.{chooser} {fields[chooser]!r}. Leave it at {default!r}."
                f"{hint}"
            )
    return {**fields, "tasks": tasks}


def _checked(field: str, value: Any, tasks: int) -> Any:
    if field not in _FIELDS:
        fields = ", ".join(sorted(_FIELDS))
        raise InputError(f"a model has only the fields {fields}: found {field}.")
    if field in _CHOICES:
        check_choice(f"model.{field}", value, _CHOICES[field])
    if field in _NUMBERS and not (_whole(value) and value >= 1):
        hint = " For no cross network set model.cross to 'none'." if field == "cross_layers" else ""
        raise InputError(
            f"model.{field} must be a whole number, at least 1: found {value!r}.{hint}"
        )
    if field in _WIDTHS:
        return _widths(field, value)
    if field == "parents":
        return _parents(value, tasks)
    if field == "dropout" and not (_number(value) and 0 <= value < 1):
        raise InputError(f"model.dropout must be in [0, 1): found {value!r}.")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value)


def _widths(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_whole(v) and v > 0 for v in value):
        raise InputError(f"model.{field} must be a tuple of widths above 0: found {value!r}.")
    if field == "expert_hidden" and not value:
        raise InputError(
            "model.expert_hidden must have at least one width, or all experts are the same: found"
            " ()."
        )
    return tuple(value)


def _parents(value: Any, tasks: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_whole(v) and -1 <= v < tasks for v in value):
        raise InputError(
            f"model.parents must be a tuple of numbers of tasks, from 0 to {tasks - 1}, or -1 for"
            f" no parent: found {value!r}."
        )
    if len(value) not in (0, tasks):
        raise InputError(
            f"model.parents must be empty or have one number a task: found {value!r}, {tasks}"
            " task(s)."
        )
    for task in range(len(value)):
        above = value[task]
        for _ in value:
            above = above if above < 0 else value[above]
        if above >= 0:
            raise InputError(
                f"model.parents must lead from each task to one without a parent: found {value!r},"
                f" where task {task} is below a ring."
            )
    return tuple(value)
