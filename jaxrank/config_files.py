"""Config files: loading, overriding fields, plain data, differences."""

import ast
import contextlib
import functools
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrank import renames, shipped
from jaxrank.config import PATTERN_FIELDS, default, named_fields, sections
from jaxrank.config_lines import Sources, recording
from jaxrank.data.sources import registry
from jaxrank.errors import InputError
from jaxrank.extensions import importing_from
from jaxrank.json_files import to_text
from jaxrank.models.registry import DEFAULT as DEFAULT_MODEL
from jaxrank.task_losses import loss_name
from jaxrank.validate import nearest, no_such_field

# What must hold, by the start of Python's message.
_CONVERSIONS = {
    "could not convert string to float": "a number",
    "invalid literal for int()": "a whole number",
    "('Non-boolean argument": "True or False",
}


def _override(config: ConfigDict, override: str) -> ConfigDict:
    """Returns the config after "--config.optim.dense.base_learning_rate=0.002" or the like."""
    if not override.startswith("--config.") or "=" not in override:
        raise InputError(f"an override must be --config.FIELD=VALUE: found {override!r}.")
    path, _, value = override.removeprefix("--config.").partition("=")
    if _set_by_name(config, path, value):
        return config
    values = flags.FlagValues()
    argv = ["jaxrank", override]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        text = error.args[0] if error.args else error
        if isinstance(error, KeyError | IndexError):
            text = f"must be a field or element of the config: found none ({text})."
        elif isinstance(error, TypeError) and "indices must be integers" in str(text):
            text = "entries of a list have numbers: give one, such as features.ragged[0].columns."
        text = str(text).removeprefix(f"flag {override}: ")
        for start, must in _CONVERSIONS.items():
            if text.startswith(start):
                text = f"must be {must}: found {value!r}."
        raise InputError(f"{override}: {text}") from error
    return values["config"].value


def _set_by_name(config: ConfigDict, path: str, value: str) -> bool:
    """Sets a field whose section accepts fields of any name, and returns True if it did.

    The value is `value` as a Python literal, a number or a text. Such fields are fields of the
    source's kind, and fields of `features` that are lists or that an entry does not set yet. The
    code that reads these sections checks their names. Returns False if the section has only the
    fields of `default`.

    Raises:
        InputError: no field `path`, such as `a.b[0].c`, exists. The error has the nearest name.
    """
    if path.startswith("task_losses.") and path.count(".") == 2:
        _, task, name = path.split(".")
        _set_of_loss(config, task, name, _literal(value, bool | int | float | str))
        return True
    if path.startswith("features.") and _set_unnamed(config, path, value):
        return True
    if _is_of_source(config, path) and _set_unnamed(config, path, value):
        return True
    section, where = config, ""
    if path.startswith("source.files.") and _is_of_source(config, "source.files"):
        config.source.files = ConfigDict()  # the config sets a kind without files
    named = named_fields(config.model.name)
    for part in path.split("."):
        by_name = where.removesuffix(".") in named and f"{where}{part}" == path
        if by_name and not isinstance(section.get(part), tuple):
            parsed = value if where == "source.files." else _literal(value)
            with section.unlocked(), section.ignore_type():
                if where.removesuffix(".") in PATTERN_FIELDS and part in section:
                    del section[part]  # the last one given counts
                section[part] = parsed
            return True
        name = part.split("[")[0]
        if name not in section:
            raise no_such_field(where.removesuffix("."), name, _declared(section, where))
        section, where = section[name], f"{where}{name}."
        if not isinstance(section, ConfigDict):
            return False
    if value.lstrip().startswith("{"):
        return False  # a dict sets several fields
    section_name = where.removesuffix(".")
    names = "NAME" if section_name in named else next(iter(section), "NAME")
    raise InputError(
        f"--config.{path}: must set a field, because {section_name} is a section, such as"
        f" --config.{path}.{names}=VALUE: found {value!r}."
    )


def _declared(section: ConfigDict, where: str) -> list[str]:
    """Returns the fields that a section has or accepts."""
    of_source = registry.fields(section.get("kind")) if where == "source." else ()
    return list({*section, *of_source})


def _is_of_source(config: ConfigDict, path: str) -> bool:
    section, _, name = path.partition(".")
    source = config.get("source")
    if section != "source" or not isinstance(source, ConfigDict) or name in source:
        return False
    return name in registry.fields(source.get("kind"))


def _set_of_loss(config: ConfigDict, task: str, name: str, value: Any) -> None:
    """Sets the name or a setting of the loss of a task."""
    entry = config.task_losses.get(task, {})
    fields = {"name": entry} if isinstance(entry, str) else dict(entry)
    with config.task_losses.unlocked(), config.task_losses.ignore_type():
        config.task_losses[task] = ConfigDict({**fields, name: value})


def _set_unnamed(config: ConfigDict, path: str, value: str) -> bool:
    *parents, name = re.findall(r"\[\d+\]|[^.\[\]]+", path)
    section: Any = config
    try:
        for parent in parents:
            section = section[int(parent[1:-1]) if parent[0] == "[" else parent]
    except (KeyError, IndexError, TypeError):
        return False
    is_parent = isinstance(section, ConfigDict | dict) and path.endswith(f".{name}")
    if not is_parent or not isinstance(section.get(name, []), list | tuple):
        return False
    with contextlib.ExitStack() as stack:
        if isinstance(section, ConfigDict):
            stack.enter_context(section.unlocked())
            stack.enter_context(section.ignore_type())
        section[name] = _literal(value, int | float | str | list | tuple | dict)
    return True


def _literal(text: str, kinds: Any = int | float | str) -> Any:
    try:
        parsed = ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        return text
    return parsed if isinstance(parsed, kinds) else text


def load(path: str | Path, overrides: Sequence[str] = ()) -> ConfigDict:
    """Loads the config of a Python file with `get_config()`, or one of `shipped.configs` by name.

    `file.py:text` calls `get_config` with a text, as in ml_collections. Modules that the file
    imports from its own directory are unloaded afterwards, so that they are not reused for another
    file.

    Args:
        overrides: fields to set, as on the command line:
            "--config.optim.dense.base_learning_rate=0.002", or the value as the next item.

    Raises:
        InputError: the file does not exist, raises, or does not return a config, or a field cannot
            be set.
    """
    return load_with_sources(path, overrides)[0]


def load_with_sources(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[ConfigDict, Sources]:
    """Returns the config that `load` loads, and the files that it comes from.

    Raises:
        InputError: see `load`.
    """
    loaded, sources = _loaded(path)
    left, joined = list(overrides), []
    while left:
        override = left.pop(0)
        if "=" not in override and left and not left[0].startswith("--config."):
            override += f"={left.pop(0)}"
        joined.append(override)
    # The name of the model decides on its other fields.
    for override in sorted(joined, key=lambda text: not text.startswith("--config.model.name=")):
        loaded = _override(loaded, override)
    try:
        sections(loaded)
    except InputError as error:
        raise InputError(f"{error}{_mentions(sources, str(error), overrides)}") from error
    return loaded, sources


@contextlib.contextmanager
def naming_lines(config: ConfigDict, sources: Sources, overrides: Sequence[str]) -> Iterator[None]:
    """Adds the lines that set a field to an InputError about it within the block.

    Args:
        config, sources, overrides: see `load_with_sources`.
    """
    try:
        yield
    except InputError as error:
        field = re.match(r"\w+(?=[.\[:,])", str(error))
        lines = _mentions(sources, str(error), overrides) if field and field[0] in config else ""
        if not lines:
            raise
        raise InputError(f"{error}{lines}") from error


def id_patterns(section: ConfigDict) -> list[str]:
    """Returns the patterns of columns in the categorical and ragged entries of `features`."""
    features, patterns = to_plain(section), []
    for entry in (*features.get("categorical", ()), *features.get("ragged", ())):
        columns = entry.get("columns", ())
        patterns += [columns] if isinstance(columns, str) else list(columns)
    return patterns


def overridden(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """Returns the config with fields set, by the rules of the command line.

    Args:
        overrides: {path of a field: value}.

    Raises:
        InputError: a field does not exist, or a value is invalid.
    """
    config = from_plain(to_plain(config))
    for override in override_flags(overrides):
        config = _override(config, override)
    sections(config)
    return config


def override_flags(overrides: Mapping[str, Any]) -> list[str]:
    """Returns flags that set fields, such as "--config.batch_size=4096"."""
    return [
        f"--config.{path}={value if isinstance(value, str) else repr(value)}"
        for path, value in overrides.items()
    ]


def _mentions(sources: Sources, message: str, overrides: Sequence[str]) -> str:
    """Returns a sentence with the lines of files that set the field a message begins with.

    It is empty if there are none, or the command line sets the field.
    """
    field = re.match(r"[\w.\[\]]+", message)
    name = re.findall(r"[^\W\d]\w*", field[0])[-1:] if field else []
    if not name or any(name[0] in override for override in overrides):
        return ""
    assert field is not None
    lines = sources.lines(field[0])
    return f" See {', '.join(lines)}." if lines else ""


def _divided(path: str | Path) -> tuple[str, list[str]]:
    """Returns the file of a config, which may be a shipped one, and arguments of `get_config`."""
    if shipped_name := re.fullmatch(r"(\w+)(:\w*)?", str(path)):
        path = f"{_shipped(shipped_name[1])}{shipped_name[2] or ''}"
    name, colon, argument = str(path).partition(".py:")
    return (f"{name}.py", [argument]) if colon else (str(path), [])


def _loaded(path: str | Path) -> tuple[ConfigDict, Sources]:
    """Returns the config of a file, and this file and the user files that it imports."""
    path, arguments = _divided(path)
    if not Path(path).is_file() or Path(path).suffix != ".py":
        raise InputError(f"--config: no such file: {path}. It must be a Python file.")
    spec = importlib.util.spec_from_file_location("jaxrank_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    beside = Path(path).resolve().parent  # a config may start from its neighbour
    before = set(sys.modules)
    sys.modules["jaxrank_config"] = module  # where annotations that are text are looked up
    is_of_user = functools.cache(lambda file: file == str(path) or _is_of_user(file))
    importlib.invalidate_caches()  # to see files that were written a moment ago
    try:
        with importing_from(beside), recording(is_of_user) as lines:
            spec.loader.exec_module(module)
            if not callable(getattr(module, "get_config", None)):
                must = "must define get_config(): found no such function"
                raise InputError(f"--config: {path}: {must}.")
            config = module.get_config(*arguments)
    except (Exception, SystemExit) as error:  # it is the user's program
        line = error_line(error, str(path))
        if isinstance(error, InputError):
            raise (InputError(f"--config: {line}: {error}") if line else error) from error
        if unknown := _unknown_field(error):
            raise InputError(f"--config: {line or path}: {unknown}") from error
        text = " ".join(str(error).split())
        raise InputError(f"--config: {line or path}: {type(error).__name__}: {text}") from error
    finally:
        imported = set(sys.modules) - before
        files = [
            getattr(sys.modules[name], "__dict__", {}).get("__file__")
            for name in imported - {spec.name}
        ]
        _forget(imported, beside)
    if not isinstance(config, ConfigDict):
        raise InputError(
            f"--config: {path}: get_config() must return a ConfigDict: found {config!r}."
        )
    others = sorted({f for f in files if f and _is_of_user(f)} - {str(path)})
    return config, Sources((str(path), *others), lines.by_path(config))


def _unknown_field(error: BaseException) -> str:
    """Returns the message for a field that a section of the config lacks; empty for other errors.

    The messages of ml_collections print the whole section.
    """
    roots: list[ConfigDict] = []
    section: ConfigDict | None = None
    name: Any = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = frame.f_locals
        if isinstance(values.get("self"), ConfigDict):
            section, name = values["self"], values.get("key", values.get("attribute"))
        else:
            roots += [value for value in values.values() if isinstance(value, ConfigDict)]
    is_lookup = isinstance(error, AttributeError | KeyError)
    if not is_lookup or section is None or not isinstance(name, str) or name in section:
        return ""
    where = max((_path(root, section) or "" for root in roots), key=len, default="")
    new = "" if renames.now(where, name) else renames.now_anywhere(name)
    known = _declared(section, f"{where}.")
    return f"{name} is now {new}." if new else str(no_such_field(where, name, known))


def _path(config: ConfigDict, section: ConfigDict) -> str | None:
    """Returns the path of a section, such as "optim.dense". None if the config does not have it."""
    if config is section:
        return ""
    for name, value in config.items():
        below = _path(value, section) if isinstance(value, ConfigDict) else None
        if below is not None:
            return f"{name}.{below}".rstrip(".")
    return None


def error_line(error: BaseException, path: str) -> str:
    """Returns FILE:LINE of the last line of user code in the traceback, or an empty text.

    User code is a config file and the modules that it imports, without libraries.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if name == path or _is_of_user(name):
            place = f"{name}:{number}"
    return place


def _is_of_user(file: str) -> bool:
    """Returns True if a file of code exists and is not of a library or of this program."""
    libraries = [
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    libraries += [str(Path(__file__).parent), "<frozen"]
    return not any(file.startswith(library) for library in libraries) and Path(file).is_file()


def _shipped(name: str) -> Path:
    """Returns the file of a config that comes with the program.

    Raises:
        InputError: no config has that name.
    """
    names = shipped.configs()
    if name not in names:
        raise InputError(
            f"--config: must be a Python file or one of {', '.join(names)}: found"
            f" {name!r}{nearest(name, names)}."
        )
    return shipped.folder("configs") / f"{name}.py"


def _forget(names: Iterable[str], directory: Path) -> None:
    """Unloads the modules among `names` that are files of a directory or of packages in it."""
    local = set()
    for name in names:
        # An entry of sys.modules may be any object, even one that has every attribute.
        attributes = getattr(sys.modules[name], "__dict__", {})
        places = attributes.get("__path__", [attributes.get("__file__")])
        if "." not in name and any(p and Path(p).parent == directory for p in places):
            local.add(name)
    for name in names:
        if name.partition(".")[0] in local:
            del sys.modules[name]


def to_plain(config: Any) -> Any:
    """Converts a config to dictionaries, lists, numbers and strings for JSON.

    Fields keep the order in which they were set, because the last pattern that matches a name wins.
    """
    if isinstance(config, ConfigDict):
        # Iteration over a ConfigDict is sorted by name.
        return {key: to_plain(config[key]) for key in config._fields}
    if isinstance(config, Mapping):
        return {str(key): to_plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(value) for value in config]
    if isinstance(config, os.PathLike):
        return os.fspath(config)
    return config.item() if hasattr(config, "item") else config  # a NumPy number


def from_plain(tree: Mapping[str, Any]) -> ConfigDict:
    """The inverse of `to_plain`, for a config that was saved with a run."""
    config = default(model_name(tree))
    with config.unlocked():
        _fill(config, tree)
    return config


def model_name(tree: Mapping[str, Any]) -> str:
    """Returns the name of the model of a plain config, that of the default without a field."""
    section = tree.get("model")
    return section.get("name", DEFAULT_MODEL) if isinstance(section, Mapping) else DEFAULT_MODEL


def code_names(tree: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Returns (kind, name) of the model and of the losses that a plain config selects."""
    losses = {("loss", loss_name(entry)) for entry in tree["task_losses"].values()}
    return {("model", tree["model"]["name"]), *losses}


def _fill(config: ConfigDict, tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(config.get(key), ConfigDict) and isinstance(value, Mapping):
            _fill(config[key], value)
        elif isinstance(value, Mapping):
            config[key] = ConfigDict(dict(value))
        else:
            config[key] = tuple(value) if isinstance(config.get(key), tuple) else value


def flatten(tree: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Returns the values of a plain config by their path. Empty sections have none."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{name}.{key}" if name else key
        flat |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def hyperparameters(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields by which runs can be compared: all but data and features."""
    flat = flatten(to_plain(config))
    sections = ("source", "features", "data")
    return {
        path: value if isinstance(value, bool | int | float | str) else to_text(value)
        for path, value in flat.items()
        if path.partition(".")[0] not in sections
    }


def differing_fields(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns [path, value in each config] for the fields that differ; see `flatten`."""
    paths = dict.fromkeys(path for config in configs for path in config)
    rows = [[path, *(as_text(config.get(path, "unset")) for config in configs)] for path in paths]
    return [row for row in rows if len(set(row[1:])) > 1]


def as_text(value: Any) -> str:
    """Returns a value of a plain config as text."""
    return value if isinstance(value, str) else to_text(value)


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Returns one line per difference of two plain configs, such as `batch_size: 256, now 512`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in sorted({*old, *new}):
            where = f"{name}.{key}" if name else key
            lines += differences(old.get(key, "unset"), new.get(key, "unset"), where)
        if not lines and name in PATTERN_FIELDS and list(old) != list(new):
            lines = [f"{name}: patterns in the order {', '.join(old)}, now {', '.join(new)}"]
        return lines
    return [] if old == new else [f"{name}: {to_text(old)}, now {to_text(new)}"]
