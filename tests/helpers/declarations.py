"""Compares JSON with the records that declare it."""

import re
import types
import typing

from jaxrank.records import steps
from jaxrank.records.verbs import VERBS

_PLAIN = {int: int, float: int | float, str: str, bool: bool}


def mismatches(value, kind, where="$"):
    """Returns what of a JSON value differs from its declared type: keys, both ways, and types."""
    if kind is typing.Any:
        return []
    if typing.is_typeddict(kind):
        return _of_object(value, kind, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Annotated, typing.NotRequired):
        return mismatches(value, arguments[0], where)
    if origin in (typing.Union, types.UnionType):
        errors = [mismatches(value, part, where) for part in arguments]
        return [] if [] in errors else max(errors, key=len)
    if origin is typing.Literal:
        return [] if value in arguments else [f"{where}: {value!r} is none of {arguments}"]
    if origin is list and isinstance(value, list):
        parts = [mismatches(v, arguments[0], f"{where}[{i}]") for i, v in enumerate(value)]
        return [error for part in parts for error in part]
    if origin is dict and isinstance(value, dict):
        parts = [mismatches(v, arguments[1], f"{where}.{k}") for k, v in value.items()]
        return [error for part in parts for error in part]
    if kind is type(None) and value is None:
        return []
    is_plain = kind in _PLAIN and isinstance(value, _PLAIN[kind])
    is_plain = is_plain and isinstance(value, bool) == (kind is bool)
    return [] if is_plain else [f"{where}: {value!r:.80} is not {kind}"]


def _of_object(value, kind, where):
    if not isinstance(value, dict):
        return [f"{where}: {value!r:.80} is no {kind.__name__}"]
    declared = typing.get_type_hints(kind, include_extras=True)
    # The pattern with the fewest free names is the key's own: <task>/weight before <task>/<metric>.
    patterns = sorted((key for key in declared if "<" in key), key=lambda key: key.count("<"))
    missing = kind.__required_keys__ - {*patterns} - value.keys()
    errors = [f"{where}: has no {key}" for key in sorted(missing)]
    for key, inside in value.items():
        name = key if key in declared else next((p for p in patterns if fits(key, p)), None)
        if name is None:
            errors.append(f"{where}.{key}: is not declared by {kind.__name__}")
        else:
            errors += mismatches(inside, declared[name], f"{where}.{key}")
    return errors


def fits(key, pattern):
    """Whether a key is that of a pattern such as "<task>/<metric>"."""
    parts = re.split(r"<\w+>", pattern)
    return re.fullmatch("[^/]+".join(map(re.escape, parts)), key)


def check_verb(verb, result):
    """Raises AssertionError unless an object of --json is one of the records of its verb."""
    errors = [mismatches(result, kind) for kind in VERBS[verb]]
    assert [] in errors, f"{verb} --json: {min(errors, key=len)}"


def check_line(line):
    """Raises AssertionError unless a line of metrics.jsonl is as its kind is declared."""
    kind = steps.TrainStep if line["kind"] == "train" else steps.ValidStep
    assert not (errors := mismatches(line, kind)), errors
