"""Checks of fields: choices, types, bounds, and settings by pattern."""

import dataclasses
import difflib
import fnmatch
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrank.errors import InputError

Value = TypeVar("Value")


def matched(
    field: str, kind: str, names: Sequence[str], patterns: Mapping[str, Value]
) -> dict[str, Value]:
    """The value of each name that a pattern matches; of several patterns the last one counts.

    Args:
        field: of the config, for the error.
        kind: what the names are of: "table".
        patterns: of the shell's form, with `*`, `?` and `[...]`.

    Raises:
        InputError: a pattern matches no name.
    """
    found: dict[str, Value] = {}
    for pattern, value in patterns.items():
        those = fnmatch.filter(names, pattern)
        if not those:
            raise InputError(
                f"{field}: {pattern!r} must match a {kind}: they are {', '.join(names[:20])}"
                f"{' and more' if len(names) > 20 else ''}."
            )
        found |= dict.fromkeys(those, value)
    return found


COMPRESSIONS = ("", "lz4", "zstd")  # data.compression; empty: none


ORDERS = ("shuffled", "days")  # data.order


OVERFLOWS = ("error", "truncate")  # data.on_overflow


PLACEMENTS = ("auto", "rows", "replicated")  # embedding.placement


ON_ERROR = ("error", "skip")  # --on-error
GROWTH = ("strong", "weak")  # --scaling: the batch stays, or grows with the devices


LEAST_EPS = 1e-37  # of Adam, for layers and tables: less is 0 in float32


MOST_DECAY = 0.99999  # b1 and b2 of Adam: of more, float32 has 1 - b by more than 1% wrong, or 0


Entry = TypeVar("Entry")


def one_of(default: str, choices: Sequence[str]) -> Any:
    """A field of a dataclass that has one of these values."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """The known names most like `name`, as a sentence's end: "; the nearest is 'b'"."""
    close = difflib.get_close_matches(name, sorted(known), n=count, cutoff=0.0)
    if not close:
        return ""
    return f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(map(repr, close))}"


def check_keys(section: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses a key that nobody reads."""
    for key in section:
        if key not in known:
            raise InputError(f"{where}: has no field {key!r}{nearest(str(key), known)}.")


def parse(cls: type[Entry], section: Any, where: str) -> Entry:
    """A dataclass from its section of the config.

    Raises:
        InputError: an unknown or missing field, a wrong type, a value that is no choice.
    """
    if not isinstance(section, Mapping):
        raise InputError(f"{where}: must be a dict: found {section!r}.")
    types = typing.get_type_hints(cls)
    check_keys(section, list(types), where)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in section:
            place = f"{where}.{field.name}"
            value = _value(types[field.name], section[field.name], place)
            choices = field.metadata.get("choices")
            if choices:
                check_choice(place, value, choices)
            values[field.name] = value
        elif field.default is dataclasses.MISSING:
            raise InputError(f"{where}: must have a field {field.name!r}: found {sorted(section)}.")
    return cls(**values)


def plain(tree: Any) -> Any:
    """Dicts and tuples, as `dataclasses.asdict` gives them, as dicts and lists."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return [plain(value) for value in tree]
    return tree


def _value(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) is tuple:
        return _sequence(typing.get_args(kind)[0], value, where)
    # A bool is an int to Python, and never meant as one here.
    is_bool = isinstance(value, bool)
    if kind is float and isinstance(value, int) and not is_bool:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and is_bool):
        raise InputError(
            f"{where}: must be of type {kind.__name__}:"
            f" found {value!r}, of type {type(value).__name__}."
        )
    if kind is float and not math.isfinite(value):
        raise InputError(f"{where}: must be finite: found {value!r}.")
    return value


def _sequence(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if kind is str and isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(
            f"{where}: must be a list: found {value!r}, of type {type(value).__name__}."
        )
    places = [f"{where}[{i}]" for i in range(len(value))]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return tuple(parse(kind, v, place) for v, place in zip(value, places, strict=True))
    return tuple(_value(kind, v, place) for v, place in zip(value, places, strict=True))


def check_choice(field: str, value: object, allowed: Iterable[str]) -> None:
    """Raises InputError unless `value` is one of `allowed`, naming the nearest."""
    choices = list(allowed)
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"{field} must be one of {', '.join(map(repr, choices))}: found {value!r}.{hint}"
        )
