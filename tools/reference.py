"""Writes the generated parts of docs/, from the declarations in the code.

    python -m tools.reference

Whole pages: `config*.md`, `flags*.md`, `python*.md`. Within other pages, tables of config fields
between `<!-- fields: SECTION -->` and `<!-- end of fields -->`, and tables of records, see
`tools.records`.
"""

import argparse
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxrank
from jaxrank import config_reference, flags
from jaxrank.studies import registry as studies

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.append(str(ROOT / "serving"))  # the package of the server
from tools import records  # noqa: E402  of the server too

_BY = "Written by `python -m tools.reference`."
# Verbs and names that are not on the first page.
_MACHINES = ("serve", "plan", "compile", "bench", "study", "selftest", "check-model", "launch")
_PYTHON = {
    **dict.fromkeys(
        ("InputError", "RunError", "Requests", "default_config", "load_config"), "python_config.md"
    ),
    **dict.fromkeys(
        ("Inputs", "field", "register_loss", "register_metric", "register_model"),
        "python_extending.md",
    ),
}
_FIELDS = re.compile(r"(<!-- fields: (.*?) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
_TYPES = {str: "text", bool: "True, False", int: "whole number", float: "number"}


def pages() -> Iterator[tuple[Path, str]]:
    """Yields each page that is generated or has generated tables, with its text."""
    whole = {**config_reference.pages(), **_flags(), **_python()}
    for name, text in whole.items():
        yield DOCS / name, text
    sections = {s.title: s for s in config_reference.sections([], [])}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        filled = records.fill(_FIELDS.sub(lambda m: m[1] + _fields(sections[m[2]]) + m[3], text))
        if path.name not in whole and (_FIELDS.search(text) or records.MARK.search(text)):
            yield path, filled


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fields(section: config_reference.Section) -> str:
    """Returns a table with a row for each field of a section of the config."""
    kinds = typing.get_type_hints(section.declaration)
    lines = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, default, unit, allowed, help in config_reference.rows(section):
        shown = f"`{default}`" if default else "required"
        more = "; ".join(filter(None, (help, allowed and f"*{allowed}*")))
        kind = " ".join(filter(None, (_type(kinds[name]), unit and f"({unit})")))
        lines.append("| " + " | ".join(map(_cell, (f"`{name}`", kind, shown, more))) + " |")
    return "\n".join(lines) + "\n"


def _type(kind: Any) -> str:
    if kind in _TYPES:
        return _TYPES[kind]
    origin = typing.get_origin(kind)
    if origin in (tuple, list):
        return "list"
    if origin is dict or "Mapping" in str(origin):
        return "mapping"
    return "text or list" if str in typing.get_args(kind) else "section"


def _flags() -> dict[str, str]:
    """Returns the pages of all flags."""
    from jaxrank_serving.server import settings

    _, verbs = flags.parsers()
    settings.add_flags(verbs["serve"])
    on_data, on_machines = [], []
    for name, parser in verbs.items():
        lines = on_machines if name in _MACHINES else on_data
        lines += [f"## {name}", "", f"{_sentence(parser.description or '')}", ""]
        lines += _flag_table(parser._actions)
    of_studies = []
    for name in studies.STUDIES:
        _, verbs = flags.parsers()
        known = {id(a) for a in verbs["study"]._actions}
        studies.add_flags(verbs["study"], [name])
        of_studies += [f"## {name}", ""]
        of_studies += _flag_table([a for a in verbs["study"]._actions if id(a) not in known])
    first = [
        f"{_BY} `jaxrank VERB --help` prints the same. [commands.md](commands.md) explains the",
        "verbs. Every verb also takes `--json` and `--models=FILE`. The flags of [other",
        "verbs](flags_machines.md) and of [each study](flags_studies.md) have pages of their own.",
        "",
    ]
    return {
        "flags.md": _page("Flags", [*first, *on_data]),
        "flags_machines.md": _page(
            "Flags of other verbs", [f"{_BY} [flags.md](flags.md) has the rest.", "", *on_machines]
        ),
        "flags_studies.md": _page(
            "Flags of studies",
            [f"{_BY} [flags_machines.md](flags_machines.md#study) has the rest.", "", *of_studies],
        ),
    }


def _page(title: str, lines: list[str]) -> str:
    return "\n".join([f"# {title}", "", *lines]).rstrip() + "\n"


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:].removesuffix(".") + "."


def _flag_table(actions: list[argparse.Action]) -> list[str]:
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for action in actions:
        names = action.option_strings or [action.metavar or action.dest]
        if names[-1] in ("--help", "--json", "--models"):
            continue
        value = action.metavar or (", ".join(map(str, action.choices)) if action.choices else "")
        if action.nargs != 0 and action.option_strings:
            names = [f"{names[-1]}={value or action.dest.upper()}"]
        default = "" if action.default in (None, "", False, []) else f"`{action.default}`"
        if default == f"`{argparse.SUPPRESS}`":
            default = ""
        if action.required and action.option_strings:
            default = "required"
        cells = (f"`{names[-1]}`", default, (action.help or "").replace("%%", "%"))
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return [*lines, ""] if len(lines) > 2 else ["No flags of its own.", ""]


def _python() -> dict[str, str]:
    """Returns the pages of the public Python names."""
    first = [
        f"{_BY} These names are public: `import jaxrank`, then `jaxrank.NAME`. This page has those",
        "that prepare, train and score. [Configs and errors](python_config.md) and [your own",
        "models, losses and metrics](python_extending.md) have pages of their own. Also public are",
        "the modules that [extending.md](extending.md) imports, `jaxrank.config.default` for",
        "configs, `jaxrank.records` with the types of JSON ([records.md](records.md)), and the",
        "package `jaxrank_serving` ([serving.md](serving.md)). Anything else may change in any",
        "version. The package has types (`py.typed`). Names are imported when they are used, so",
        "`import jaxrank` is quick. Import the file that registers your own model, loss or metric",
        "before `load_config`: `--models` is of the command line only. In a script, call these",
        "names under `if __name__ == '__main__':`, because worker processes import the script.",
        "",
        "<!-- run by docs_commands_test.py: python -->",
        "```python",
        "import jaxrank",
        "",
        'config = jaxrank.load_config("clicks.py", ["--config.num_steps=8"])',
        'result = jaxrank.train_model(config, "run_python", report=lambda line: None)',
        'print(result.metrics["click"]["logloss"])',
        "```",
        "",
    ]
    other = [f"{_BY} [python.md](python.md) has the other names.", ""]
    pages = {
        "python.md": ("Python API", first),
        "python_config.md": ("Python API of configs and errors", list(other)),
        "python_extending.md": ("Python API of extensions", list(other)),
    }
    for name, (module, attribute) in jaxrank._PUBLIC.items():
        value = getattr(importlib.import_module(module), attribute)
        about = inspect.cleandoc(value.__doc__ or "")
        _, lines = pages[_PYTHON.get(name, "python.md")]
        lines += [f"## `{name}`", "", f"`{module}.{attribute}`", ""]
        if inspect.isfunction(value):
            lines += ["```text", f"{name}{_signature(value)}", "```", ""]
        lines += ["```text", about, "```", ""]
    return {name: _page(title, lines) for name, (title, lines) in pages.items()}


def _signature(function: Any) -> str:
    """Returns the parameters of a function, one per line, without types."""
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        default = parameter.default
        value = "" if default is inspect.Parameter.empty else f"={_default(default)}"
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(f"{star}{parameter.name}{value}")
    return f"({', '.join(shown)})"


def _default(value: Any) -> str:
    return getattr(value, "__name__", None) or (
        "..." if " at 0x" in repr(value) or "object" in repr(value) else repr(value)
    )


if __name__ == "__main__":
    for page, content in pages():
        if not page.exists() or page.read_text() != content:
            page.write_text(content)
            print(page)
