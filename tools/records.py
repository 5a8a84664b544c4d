"""Tables of records, from their declarations.

A page has them between `<!-- record: MODULE.NAME -->` and `<!-- end -->`, and a table of the
records inside others between `<!-- parts: MODULE.NAME, ... -->` and `<!-- end -->`. The modules
are the ones of `jaxrank.records`, and `protocol` of the server, which also has `<!-- routes -->`,
`<!-- answers -->` and `<!-- metrics -->`.
"""

import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrank_serving.server import metrics, protocol

from jaxrank.records import checks, common, files, runs, steps

MODULES = {
    "checks": checks,
    "common": common,
    "files": files,
    "runs": runs,
    "steps": steps,
    "protocol": protocol,
}
MARK = re.compile(
    r"(<!-- (record|parts|routes|answers|metrics)(?:: (.*?))? -->\n).*?(<!-- end -->)", re.S
)
_NAMES = {int: "whole number", float: "number", str: "text", bool: "true, false", Any: "any"}
_HEAD = ["| key | type | unit | meaning |", "| --- | --- | --- | --- |"]


def fill(text: str) -> str:
    """Returns a page with its tables of records."""
    return MARK.sub(lambda m: m[1] + "\n".join(_lines(m[2], m[3])) + "\n" + m[4], text)


def _lines(mark: str, names: str | None) -> list[str]:
    if mark == "routes":
        return _routes()
    if mark == "metrics":
        return _metrics()
    if mark == "answers":  # to requests without a body
        answers = [part for r in protocol.ROUTES if not r.request for part in _records(r.answer)]
        return _parts([*dict.fromkeys(answers), *inside(answers)])
    kinds = [_named(name) for name in (names or "").split(", ")]
    return [*_HEAD, *_rows(kinds[0])] if mark == "record" else _parts(inside(kinds))


def _parts(kinds: Sequence[Any]) -> list[str]:
    lines = list(_HEAD)
    for part in kinds:
        about = " ".join((part.__doc__ or "").split())
        lines += [f"| **{part.__name__}** |  |  | {about} |", *_rows(part)]
    return lines


def _named(name: str) -> Any:
    module, _, name = name.partition(".")
    return getattr(MODULES[module], name)


def inside(kinds: Sequence[Any]) -> list[Any]:
    """Returns the records inside others, in the order in which they are first named."""
    waiting, result = list(kinds), []
    while waiting:
        kind = waiting.pop(0)
        parts = [part for entry in declared(kind).values() for part in _records(entry)]
        new = [p for p in dict.fromkeys(parts) if p not in result and p not in kinds]
        result += new
        waiting += new
    return result


def _records(kind: Any) -> Iterator[Any]:
    """Yields the records in a type."""
    if typing.is_typeddict(kind):
        yield kind
    for part in typing.get_args(kind):
        yield from _records(part)


def declared(kind: Any) -> dict[str, Any]:
    """Returns the types of the keys of a record, with their descriptions."""
    return typing.get_type_hints(kind, include_extras=True)


def _rows(kind: Any) -> list[str]:
    rows = []
    for key, entry in declared(kind).items():
        optional = typing.get_origin(entry) is typing.NotRequired
        if optional:
            (entry,) = typing.get_args(entry)
        shown, meaning, *unit = typing.get_args(entry)
        type_ = type_text(shown) + ", optional" * optional
        cells = f"`{key}`", type_, "".join(unit), meaning
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def type_text(kind: Any, *, is_inner: bool = False) -> str:
    """Returns a type in the words of JSON."""
    if kind in _NAMES:
        return _NAMES[kind]
    if typing.is_typeddict(kind):
        return f"{kind.__name__}"
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return f"list of {type_text(arguments[0], is_inner=True)}"
    if origin is dict:
        return f"object of {type_text(arguments[1], is_inner=True)}"
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        names = [type_text(k) for k in arguments if k is not type(None)]
        text = " or ".join([*names, *["null"] * (type(None) in arguments)])
        return f"({text})" if is_inner else text
    raise TypeError(f"must be a type of a record: found {kind}.")


def _routes() -> list[str]:
    lines = ["| path | method | request | answer | meaning |", "| --- | --- | --- | --- | --- |"]
    for route in protocol.ROUTES:
        request = type_text(route.request) if route.request else ""
        answer = type_text(route.answer) if route.answer else "text"
        cells = f"`{route.path}`", route.method, request, answer, route.meaning
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _metrics() -> list[str]:
    lines = ["| metric | type | labels | unit | meaning |", "| --- | --- | --- | --- | --- |"]
    for family in metrics.FAMILIES:
        name = family.name + "_total" * (family.kind == "counter")
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{name}` | {family.kind} | {labels} | {family.unit} | {family.text} |")
    return lines
