"""The data of a run: prepared first if need be, or read as it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrank.config_files import differences, to_plain
from jaxrank.data.prepare import passes
from jaxrank.data.spec import parse
from jaxrank.data.store import direct
from jaxrank.data.store.reader import Store, is_store, no_split, open_store
from jaxrank.errors import InputError
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.timetable import NEXT_DAY


def place(config: ConfigDict, directory: str | Path) -> str:
    """Where the store of a run in `directory` lies, or will."""
    return config.data.store or str(Path(directory) / "data")


def opened(config: ConfigDict, directory: str | Path) -> Store:
    """The data of a run that is there.

    Raises:
        InputError: it is not.
    """
    if config.data.direct:
        return direct.open_direct(to_plain(config.features), to_plain(config.source))
    return open_store(place(config, directory))


def prepared(config: ConfigDict, directory: Path, report: Report) -> Store:
    """The data of a run; process 0 prepares it if the config says how and it is not there.

    Raises:
        InputError: it is not there and cannot be made, or was made of other features; or, where it
            is the run's own, of another source.
    """
    if not config.data.direct:
        path = place(config, directory)
        with processes.together():
            if processes.is_first() and not is_store(path):
                _prepare(config, path, report)
    with processes.together():
        store = opened(config, directory)
    check_features(store, config)
    if not config.data.direct and not config.data.store:
        _check_source(store, config)
    return store


def check_features(store: Store, config: ConfigDict) -> None:
    """Raises InputError unless a store was prepared with the features of a config."""
    found, expected = store.spec.features, parse.canonical(to_plain(config.features))
    if found != expected and found == parse.unlabelled(to_plain(config.features)):
        raise InputError(
            f"{store.path}: must hold labels to train on, and was prepared with --unlabelled."
        )
    if found != expected:
        raise InputError(
            f"{store.path}: the store was prepared with other features than the config's:\n  "
            + "\n  ".join(differences(found, expected, "features"))
        )


def _check_source(store: Store, config: ConfigDict) -> None:
    """Raises InputError if a store was prepared from another source than a config's, if any."""
    found, expected = store.spec.source, to_plain(config.source)
    if expected and found != expected:
        raise InputError(
            f"{store.path}: was prepared from another source than the config's:\n  "
            + "\n  ".join(differences(found, expected, "source"))
            + "\nUse another --workdir, remove this directory to prepare it anew, or go on with"
            f" what it holds by --config.data.store={store.path} (and --allow-config-change, where"
            " a run has begun)."
        )


def _prepare(config: ConfigDict, path: str, report: Report) -> None:
    if not to_plain(config.source):
        raise InputError(f"data.store: no store at {path}, and config.source does not say how.")
    section, source = to_plain(config.features), to_plain(config.source)
    check_splits(config, section, source, path)
    report(f"Preparing {path}")
    compression = config.data.compression
    passes.prepare(section, source, path, compression=compression, report=report)


def check_splits(
    config: ConfigDict, section: Mapping[str, Any], source: Mapping[str, Any], path: str
) -> None:
    """Refuses splits that the source will not have; which days it has, only its records tell."""
    by_day = section.get("by_day", False)
    if config.data.order == "days" and not by_day:
        raise InputError(
            "data.order: 'days' must have data that is stored by day: found features.by_day ="
            f" {by_day!r}."
        )
    splits = source.get("rows" if source.get("kind") == "synthetic" else "files")
    if not isinstance(splits, Mapping):  # refused where it is read
        return
    for field in ("train", "valid"):
        name = config.data[field]
        split, slash, _ = name.partition("/")
        is_none = field == "valid" and name in ("", NEXT_DAY)
        if not is_none and (split not in splits or (slash and not by_day)):
            raise no_split(path, name, splits, f"data.{field}")
