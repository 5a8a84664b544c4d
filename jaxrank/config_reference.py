"""Generates the reference of all config fields from their declarations.

`jaxrank train --help-config` prints it, and `python -m tools.reference` writes docs/config*.md.
"""

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrank import extensions, optim, task_losses
from jaxrank.config import Config
from jaxrank.data.sources import registry
from jaxrank.embedding import ROW_OPTIMIZERS
from jaxrank.models.fields import SECTIONS
from jaxrank.models.registry import MODEL
from jaxrank.validate import field_default, field_rules

_INTRODUCTION = """
Written by `python -m tools.reference` from the declarations of fields. `jaxrank train
--help-config` prints the same. A field without a default must be given.
"""
# By the first part of a section's path: the title of its page, and the page.
_FIRST = "Config reference", "config.md"
_PAGES = {
    "source": ("Config of sources", "config_source.md"),
    "features": ("Config of features", "config_features.md"),
    "model": ("Config of models", "config_model.md"),
    "task_losses": ("Config of losses and optimizers", "config_optim.md"),
    "optim": ("Config of losses and optimizers", "config_optim.md"),
}


class Section(NamedTuple):
    """The fields of one section.

    title: path of the section, with its condition if other sections can stand in its place.
    path: of its fields, in front of their names.
    """

    title: str
    path: str
    declaration: type


def sections(models: Iterable[str], losses: Iterable[str]) -> Iterator[Section]:
    """Yields all sections in the order of the config, including every variant of a section."""
    kinds = typing.get_type_hints(Config)
    yield Section("The run", "", Config)
    for kind, source in registry.KINDS.items():
        yield Section(f'source, kind "{kind}"', "source", source)
    shapes = typing.get_type_hints(registry.KINDS["synthetic"])["ragged"]
    yield Section('source.ragged[i], kind "synthetic"', "source.ragged[i]", _entry(shapes))
    features: Any = next(
        k for k in typing.get_args(kinds["features"]) if dataclasses.is_dataclass(k)
    )
    yield Section("features", "features", features)
    for name, kind in typing.get_type_hints(features).items():
        if _entry(kind):
            yield Section(f"features.{name}[i]", f"features.{name}[i]", _entry(kind))
    for name in ("data", "embedding"):
        yield Section(name, name, kinds[name])
    for name in models:
        yield Section(f'model, name "{name}"', "model", SECTIONS[name])
        for part, kind in typing.get_type_hints(SECTIONS[name]).items():
            if _value(kind):
                yield Section(f"model.{part}[name]", f"model.{part}[name]", _value(kind))
    for name in losses:
        if dataclasses.fields(settings := task_losses.loss_settings(name)):
            yield Section(f'task_losses.TASK, name "{name}"', "task_losses.TASK", settings)
    for name in ("dense", "tables"):
        path = f"optim.{name}"
        yield Section(path, path, typing.get_type_hints(kinds["optim"])[name])
        variants: Mapping[str, type] = optim.OPTIMIZERS if name == "dense" else ROW_OPTIMIZERS
        for row_optimizer, settings in variants.items():
            if dataclasses.fields(settings):
                yield Section(
                    f'{path}.settings, name "{row_optimizer}"', f"{path}.settings", settings
                )
    for name in ("eval", "checkpoint", "watch", "mesh"):
        yield Section(name, name, kinds[name])


def _entry(kind: Any) -> Any:
    """Returns the dataclass of the entries of a list, or None for other types."""
    inner = typing.get_args(kind)[:1]
    return inner[0] if inner and dataclasses.is_dataclass(inner[0]) else None


def _value(kind: Any) -> Any:
    """Returns the dataclass of the values of a mapping, or None for other types."""
    inner = typing.get_args(kind)[1:]
    return inner[0] if inner and dataclasses.is_dataclass(inner[0]) else None


def rows(section: Section) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields name, default, unit, allowed values and help of each field of a section."""
    for entry in dataclasses.fields(section.declaration):
        value, rules = field_default(entry), field_rules(entry)
        if section.declaration is Config and (value is None or _is_section(value, entry.name)):
            continue
        shown = "" if value is dataclasses.MISSING else repr(value)
        allowed = ", ".join(map(repr, rules.choices)) or rules.bounds
        if rules.read_when is not None:
            conditions = [rules.read_when, *([rules.or_when] if rules.or_when else [])]
            alternatives = (f"{other} is {' or '.join(known)}" for other, known in conditions)
            condition = f"read where {', or '.join(alternatives)}"
            allowed = f"{allowed}; {condition}" if allowed else condition
        yield entry.name, shown, rules.unit, allowed, rules.help


def _is_section(value: Any, name: str) -> bool:
    return dataclasses.is_dataclass(value) or name == "model"


def pages() -> dict[str, str]:
    """Returns the pages docs/config*.md by name, for the models and losses of this package."""
    users = extensions.origins()
    models = [name for name in SECTIONS if (MODEL, name) not in users]
    losses = [name for name in task_losses.names() if (task_losses.LOSS, name) not in users]
    parts: dict[tuple[str, str], list[Section]] = {}
    for section in sections(models, losses):
        first = re.split(r"[.\[]", section.path)[0]
        parts.setdefault(_PAGES.get(first, _FIRST), []).append(section)
    result = {}
    for (title, name), held in parts.items():
        lines = [f"# {title}", _INTRODUCTION]
        if name == _FIRST[1]:
            lines += ["| sections | page |", "| --- | --- |"]
            for (_, page), inside in parts.items():
                names = ", ".join(f"`{s.title}`" for s in inside)
                lines.append(f"| {names} | [{page}]({page}) |")
            lines.append("")
        for section in held:
            lines += _section_lines(section)
        result[name] = "\n".join(lines).rstrip() + "\n"
    return result


def _section_lines(section: Section) -> list[str]:
    summary = (section.declaration.__doc__ or "").strip().partition("\n")[0]
    lines = [f"## {section.title}", "", *([summary, ""] if summary else [])]
    lines += ["| field | default | unit | allowed | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, shown, unit, allowed, help in rows(section):
        cells = (f"`{name}`", f"`{shown}`" if shown else "", unit, allowed, help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def text() -> str:
    """Returns the reference for a terminal: each field with its default, then its meaning."""
    lines = []
    for section in sections(SECTIONS, task_losses.names()):
        lines += ["", f"{section.title}:"]
        for name, shown, unit, allowed, help in rows(section):
            path = f"{section.path}.{name}" if section.path else name
            stated = "; ".join(filter(None, (unit, allowed)))
            lines.append(f"  --config.{path}={shown}" + (f"  ({stated})" if stated else ""))
            lines.append(f"      {help}")
    return "\n".join(lines).lstrip("\n") + "\n"
