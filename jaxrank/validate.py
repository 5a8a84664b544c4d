"""Declares config fields, and checks a section of a config against its declarations.

A section is a frozen dataclass whose fields are made by `field`:

    @dataclasses.dataclass(frozen=True)
    class Mesh:
        replicas: int = field(1, help="copies of each split table", at_least=1)

`parse` checks the section of a config and returns an instance.
"""

import dataclasses
import difflib
import fnmatch
import math
import numbers
import os
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from jaxrank import renames
from jaxrank.errors import InputError

Value = TypeVar("Value")
Entry = TypeVar("Entry")

COMPRESSIONS = ("", "lz4", "zstd")  # data.compression; empty: none
ORDERS = ("shuffled", "days")  # data.order
OVERFLOWS = ("error", "truncate")  # data.on_overflow
PLACEMENTS = ("auto", "rows", "replicated")  # embedding.placement
ON_ERROR = ("error", "skip")  # --on-error
EXPORT_FORMATS = ("bundle", "files")  # --format of export
TABLE_DTYPES = ("float32", "bfloat16", "int8")  # --tables of export
GROWTH = ("strong", "weak")  # --scaling: the batch stays, or grows with the devices
MIN_EPS = 1e-37  # minimum eps of Adam: smaller numbers are 0 in float32
MAX_DECAY = 0.99999  # maximum b1 and b2 of Adam: above it 1 - b has an error over 1% in float32
_SIMILARITY = 0.5  # minimum similarity of a name that `nearest` suggests, from 0 to 1


class Variants(NamedTuple):
    """Sections that a field may hold, by name.

    chosen_by: path of the field that names one of them, relative to the section of this field.
    sections: dataclasses by name.
    default: the name if that field is missing or empty. Empty: the name must be given.
    """

    chosen_by: str
    sections: Mapping[str, type]
    default: str | None = None


class Rules(NamedTuple):
    """Declaration of a field; see `field`."""

    help: str = ""
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    read_when: tuple[str, tuple[str, ...]] | None = None
    or_when: tuple[str, tuple[str, ...]] | None = None
    non_empty: bool = False
    single: bool = False
    patterns: bool = False
    hint: str = ""
    variants: Variants | None = None
    partial: bool = False

    @property
    def bounds(self) -> str:
        """Returns the bounds as text, such as "at least 0 and below 1". Empty: no bounds."""
        stated = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        return " and ".join(
            f"{word} {limit}" for word, limit in stated.items() if limit is not None
        )

    def admits(self, number: float) -> bool:
        """Returns True if a number is within the bounds."""
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


_NO_RULES = Rules()


def field(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Iterable[str] = (),
    read_when: tuple[str, tuple[str, ...]] | None = None,
    or_when: tuple[str, tuple[str, ...]] | None = None,
    non_empty: bool = False,
    single: bool = False,
    patterns: bool = False,
    hint: str = "",
    variants: Variants | None = None,
    partial: bool = False,
) -> Any:
    """Declares a field of a dataclass that is a section of the config.

    Bounds and choices apply to each value of a tuple or of a mapping.

    Args:
        default: if absent, the field must be given.
        help: the meaning of the field, for the command line and the docs.
        unit: of its numbers, such as "examples".
        read_when: (other, values): the field is read only where the field `other` has one of the
            values. Elsewhere it must keep its default.
        or_when: a second such condition. One of the two is enough.
        non_empty: a tuple or mapping must have an entry.
        single: a tuple may be given as its only entry.
        patterns: the names of a mapping are patterns. The last one that matches wins.
        hint: a sentence that ends each error.
        variants: sections that the field may hold. By default only the section of its type.
        partial: a section whose fields may be left out. If the default is None, a section with only
            empty values becomes None.
    """
    rules = Rules(
        help,
        unit,
        at_least,
        at_most,
        above,
        below,
        tuple(choices),
        read_when,
        or_when,
        non_empty,
        single,
        patterns,
        hint,
        variants,
        partial,
    )
    metadata = {"rules": rules}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def field_rules(field: dataclasses.Field) -> Rules:
    """Returns the declaration of a field, without any rules if `field` did not make it."""
    return field.metadata.get("rules", _NO_RULES)


def field_default(field: dataclasses.Field) -> Any:
    """Returns the default of a field, or MISSING."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def parse(cls: type[Entry], section: Any, where: str, *, complete: bool = False) -> Entry:
    """Makes a dataclass from its section of the config.

    A method `check(where)` of the dataclass is called last, for rules about several fields.

    Args:
        cls: the dataclass.
        section: a ConfigDict or a dict.
        where: the path of the section, for errors; empty for the whole config.
        complete: fields with a default must be given too.

    Raises:
        InputError: a field is unknown or missing, or a value has a wrong type, is out of bounds or
            not among the choices, or is not read because of other values of the section.
    """
    if not _is_section(section):
        raise InputError(f"{where}: must be a dict: found {section!r}.")
    kinds = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in section:
        if key not in fields:
            raise no_such_field(where, key, fields)
    values: dict[str, Any] = {}
    for name, entry in fields.items():
        place, rules = _join(where, name), field_rules(entry)
        if name in section:
            may_be_none = rules.partial and field_default(entry) is None
            if may_be_none and _is_section(section[name]) and not _holds_any(section[name]):
                values[name] = None
            else:
                whole = complete and not rules.partial
                values[name] = _field_value(kinds[name], section, name, place, rules, whole)
        elif complete:
            raise InputError(f"config: {place} is missing. Start from config.default().")
        elif (default := field_default(entry)) is not dataclasses.MISSING:
            values[name] = default
        else:
            raise InputError(
                f"{place} is missing: found {sorted(section)}. It has no default and must be set."
            )
    for name, entry in fields.items():
        _check_read(values, name, field_default(entry), where, field_rules(entry))
    parsed = cls(**values)
    check = getattr(parsed, "check", None)
    if check is not None:
        check(where)
    return parsed


def require(condition: bool, where: str, must: str, value: Any, hint: str = "") -> None:
    """Raises InputError unless `condition`: "`where` must be `must`: found `value`"."""
    if not condition:
        raise InputError(f"{where}: must be {must}: found {value!r}.{hint and ' '}{hint}")


def check_choice(field: str, value: object, allowed: Iterable[str], hint: str = "") -> None:
    """Raises InputError with the nearest name unless `value` is one of `allowed`."""
    choices = list(allowed)
    if value not in choices:
        similar = difflib.get_close_matches(str(value), choices, 1)
        nearest = f"Did you mean {similar[0]!r}?" if similar else ""
        if new := renames.VALUES.get(field, {}).get(str(value)):
            nearest = f"{value!r} is now {new!r}."
        must = f"one of {', '.join(map(repr, choices))}"
        require(False, field, must, value, " ".join(filter(None, (nearest, hint))))


def no_such_field(where: str, name: str, fields: Iterable[str]) -> InputError:
    """Returns the error for an unknown field of a section.

    Args:
        fields: all declared fields of the section.
    """
    if new := renames.now(where, name):
        return InputError(f"{_join(where, name)} is now {_join(where, new)}.")
    known = sorted(fields)
    if name in known:
        path = _join(where, name)
        return InputError(
            f"{path}: must be set as a whole before a part of it: found no value. Set {path}, such"
            f" as {path} = dict(...)."
        )
    similar = difflib.get_close_matches(str(name), known, 1)
    hint = f"The fields are {', '.join(known)}." if known else "There are no fields."
    if similar:
        hint = f"Did you mean {_join(where, similar[0])}?"
    must = f"must be a field of {where or 'the config'}"
    return InputError(f"{_join(where, name)}: {must}: found no such field. {hint}")


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """Returns the known names near `name` as text, such as "; the nearest is 'b'".

    The text is empty if no name is near.
    """
    close = difflib.get_close_matches(name, sorted(known), n=count, cutoff=_SIMILARITY)
    if not close:
        return ""
    return f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(map(repr, close))}"


def matched(
    field: str, kind: str, names: Sequence[str], patterns: Mapping[str, Value]
) -> dict[str, Value]:
    """Returns the value of each name that a pattern matches. The last pattern that matches wins.

    Args:
        field: field of the config, for the error.
        kind: kind of the named objects, such as "table".
        patterns: {shell pattern with `*`, `?` and `[...]`: value}.

    Raises:
        InputError: a pattern matches no name.
    """
    by_name: dict[str, Value] = {}
    for pattern, value in patterns.items():
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise InputError(
                f"{field}: {pattern!r} must match a {kind}: they are {', '.join(names[:20])}"
                f"{' and more' if len(names) > 20 else ''}."
            )
        by_name |= dict.fromkeys(matches, value)
    return by_name


def is_supported(kind: Any) -> bool:
    """Returns True if a config can hold values of a type, because they can be checked."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return all(is_supported(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        entry, *rest = typing.get_args(kind)
        return rest == [...] and is_supported(entry)
    if typing.get_origin(kind) is Mapping:
        return is_supported(typing.get_args(kind)[1])
    return kind in _KINDS or kind is types.NoneType or dataclasses.is_dataclass(kind)


def is_mapping(kind: Any) -> bool:
    """Returns True if a field of that type maps arbitrary names to values."""
    return typing.get_origin(kind) is Mapping


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else str(name)


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping | ConfigDict)


def _holds_any(section: Any) -> bool:
    values = [section[key] for key in section]
    return any(len(v) > 0 if _is_section(v) else bool(v) for v in values)


def _ordered_names(section: Any) -> Collection[str]:
    """Returns the names of a section's fields in the order in which they were set."""
    return section._fields if isinstance(section, ConfigDict) else section


def _check_read(
    values: Mapping[str, Any], name: str, default: Any, where: str, rules: Rules
) -> None:
    if rules.read_when is None:
        return
    conditions = [rules.read_when, *([rules.or_when] if rules.or_when else [])]
    if values[name] != default and all(values[other] not in known for other, known in conditions):
        hint = f" {rules.hint}" if rules.hint else ""
        must = " or ".join(
            f"{_join(where, other)} is one of {known}" for other, known in conditions
        )
        others = ", ".join(f"{_join(where, other)} {values[other]!r}" for other, _ in conditions)
        raise InputError(
            f"{_join(where, name)} is read only where {must}: found {values[name]!r}, {others}."
            f" Leave it at {default!r}.{hint}"
        )


def _field_value(
    kind: Any, section: Any, name: str, where: str, rules: Rules, complete: bool
) -> Any:
    """Returns the checked value of a field of a section."""
    value = section[name]
    if rules.variants is None:
        return _value(kind, value, where, rules, complete)
    if not _is_section(value):
        raise InputError(f"{where}: must be a dict: found {value!r}.")
    chosen_by = rules.variants.chosen_by.split(".")
    chosen: Any = section
    for part in chosen_by:
        chosen = chosen.get(part) if _is_section(chosen) else None
    if chosen is None or (chosen == "" and rules.variants.default):
        chosen = rules.variants.default
    siblings = where.removesuffix(name).removesuffix(".")
    # A lookup may find a name that iteration does not list: models of packages.
    if not isinstance(chosen, str) or chosen not in rules.variants.sections:
        check_choice(_join(siblings, rules.variants.chosen_by), chosen, rules.variants.sections)
    return parse(rules.variants.sections[chosen], value, where, complete=complete)


def _value(kind: Any, value: Any, where: str, rules: Rules, complete: bool = False) -> Any:
    """Returns the checked value, converted to the declared type."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        options = typing.get_args(kind)
        if value is None and types.NoneType in options:
            return None
        mappings = [option for option in options if typing.get_origin(option) is Mapping]
        others = [option for option in options if option not in (*mappings, types.NoneType)]
        suits = mappings if _is_section(value) or not others else others
        return _value((suits or others)[0], value, where, rules)
    if dataclasses.is_dataclass(kind):
        return parse(typing.cast(type, kind), value, where, complete=complete)
    if typing.get_origin(kind) is tuple:
        return _sequence(typing.get_args(kind)[0], value, where, rules)
    if typing.get_origin(kind) is Mapping:
        return _mapping(typing.get_args(kind)[1], value, where, rules)
    return _scalar(kind, value, where, rules) if kind in _KINDS else value


def _sequence(kind: Any, value: Any, where: str, rules: Rules) -> tuple[Any, ...]:
    if rules.single and isinstance(value, str | os.PathLike):
        value = [value]
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    require(is_list, where, "a list", value, rules.hint)
    require(bool(value) or not rules.non_empty, where, "a list with an entry", value, rules.hint)
    return tuple(_value(kind, v, f"{where}[{i}]", rules) for i, v in enumerate(value))


def _mapping(kind: Any, value: Any, where: str, rules: Rules) -> dict[str, Any]:
    require(_is_section(value), where, "a dict", value, rules.hint)
    require(len(value) > 0 or not rules.non_empty, where, "a dict with an entry", {}, rules.hint)
    return {
        str(key): _value(kind, value[key], _join(where, key), rules)
        for key in _ordered_names(value)
    }


# In Python a bool is an int, but in a config it never stands for a number.
_KINDS: Mapping[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("True or False", (bool,)),
    int: ("a whole number", (numbers.Integral,)),
    float: ("a number", (numbers.Real,)),
    str: ("text", (str, os.PathLike)),
}


def _scalar(kind: Any, value: Any, where: str, rules: Rules) -> Any:
    must, accepted = _KINDS[kind]
    condition = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    require(condition, where, must, value, rules.hint)
    if kind in (int, float):
        require(_is_finite(value), where, "a finite number", value, rules.hint)
        if kind is int:
            require(-(2**63) <= value < 2**63, where, "a number of 64 bits", value, rules.hint)
        require(rules.admits(value), where, rules.bounds, value, rules.hint)
    value = os.fspath(value) if kind is str else kind(value)
    if rules.choices:
        check_choice(where, value, rules.choices, rules.hint)
    return value


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of float
        return False
