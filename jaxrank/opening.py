"""Opens the data of a run and chooses the open fields of its config: the same way for all verbs.

`locate` decides which store is read, `workdir.data.RunData` opens and checks it. `open_data` is for
verbs that train or plan: it checks names of the config before data is read, and splits after.
Verbs on a saved run read any store, whose features `evaluation.model_view` compares with the
model's. They have a config without open fields, which was checked when the run started.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from jaxrank import defaults
from jaxrank.build import Builder
from jaxrank.config import sections
from jaxrank.config_files import to_plain
from jaxrank.data.prepare import passes
from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.models.registry import find_module
from jaxrank.report import Report
from jaxrank.workdir import files
from jaxrank.workdir.data import RunData


class Generated(Protocol):
    """Data that is generated when it is read; see `placement.traffic.GeneratedReads`."""

    schema: Schema
    part_rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class OpenedData:
    """The data that a config trains on, and the builder of the parts that fit it.

    builder: of the config with a value in every field.
    store: None: there is none, and `generated` is read in its place.
    split, valid: training and validation split of the store. None: it has none.
    """

    builder: Builder
    store: Store | None
    split: Split | None
    valid: Split | None
    generated: Any = None  # the result of `generate`, see `open_data`


def locate(
    config: ConfigDict, workdir: str | Path, *, store_path: str = "", inherits: bool = False
) -> RunData:
    """Locates the data of a run.

    The first of these that is named is used: the store at `store_path`, raw files if `data.direct`
    is set, the store of the config, the store of the run in the workdir, and WORKDIR/data.

    Args:
        workdir: of the run. Empty: only `store_path` and the config are used.
        store_path: a store to read in place of the run's.
        inherits: True if a config that names no data uses that of the run in `workdir`.
    """
    is_direct = config.data.direct and not store_path
    path = "" if is_direct else store_path or config.data.store
    if inherits and not is_direct and not path:
        older = files.find_config(workdir)
        path = "" if older is None else older.data.store
    is_own = bool(workdir) and not is_direct and not path
    if is_own:
        path = str(files.directory(workdir) / "data")
    sections = (to_plain(section) for section in (config.data, config.features, config.source))
    return RunData(path, is_direct, is_own, *sections)


def names_features(config: ConfigDict) -> bool:
    """Returns True if the model's `fields_by_feature` are set, before or without `inherit`."""
    fields = getattr(find_module(config.model.name), "fields_by_feature", ())
    return any(config.model.get(field) for field in fields)


def inherit(config: ConfigDict, workdir: str | Path, init_from: Path | None = None) -> ConfigDict:
    """Returns the config with open fields as in the run in `workdir`, if there is one.

    Args:
        init_from: a workdir that must hold a run, which is used if `workdir` holds none.
    """
    older = files.find_config(workdir)
    if older is None and init_from is not None:
        older = files.load_config(init_from)
    return config if older is None else defaults.inherit(config, older)


def open_data(
    config: ConfigDict,
    workdir: str | Path,
    report: Report,
    *,
    inherits: bool = True,
    check: Callable[[Builder], None] = lambda builder: None,
    generate: Callable[[RunData], Generated] | None = None,
) -> OpenedData:
    """Opens the data that a config trains on, and chooses the open fields of the config by it.

    Args:
        workdir: of the run. May be empty.
        inherits: see `locate`.
        check: checks more than `Builder.check_names` before data is read. Fields are still open.
        generate: for verbs that estimate. They prepare nothing, read no labels to choose fields,
            and call this if no data is prepared. None: absent data is prepared.

    Raises:
        InputError: the config does not fit the data, or there is none.
    """
    located = locate(config, workdir, inherits=inherits)
    prepares = generate is None and not located.exists()
    checked = functools.partial(_check_names, config, check, traces=prepares)
    if generate is None:
        store = located.prepare(report, checked)
    elif located.exists():
        store = located.open_checked()
        checked(store.schema)
    else:
        generated = generate(located)
        schema, rows = generated.schema, int(generated.part_rows.sum())
        checked(schema)
        chosen = defaults.choose_unread(config, rows, schema, report)
        return OpenedData(Builder(chosen, schema), None, None, None, generated)
    split, valid = located.open_splits(store)
    if generate is None:
        data = defaults.measure_data(split, store.schema, config.data.order)
        chosen = defaults.choose(config, data, report)
    else:
        chosen = defaults.choose_unread(config, split.rows, store.schema, report)
    return OpenedData(Builder(chosen, store.schema), store, split, valid)


def _check_names(
    config: ConfigDict, check: Callable[[Builder], None], schema: Schema, *, traces: bool
) -> None:
    """Checks names in a config before its data is read.

    Parameters of a model that the data decides on are checked when it is built.

    Args:
        traces: see `Builder.check_names`. Before data is prepared, which takes longer.
    """
    assumed = defaults.choose_unread(config, 1, schema, lambda text: None)
    if defaults.has_open_model(config):
        with assumed.unlocked():
            assumed.optim.dense.lr_multipliers = ConfigDict()
        traces = False
    Builder(assumed, schema).check_names(traces=traces)
    check(Builder(config, schema))


def prepare(config: ConfigDict, output: str | Path, *, report: Report, **options: Any) -> Store:
    """Prepares the raw data of a config. See `passes.prepare` for the options.

    Raises:
        InputError: a field of the config is invalid, it has no source, or see `passes.prepare`.
    """
    sections(config).check_losses()
    if not to_plain(config.source):
        raise InputError(
            "source: must describe the raw data: found an empty section. Set source.kind and"
            " source.files in the config."
        )
    return passes.prepare(
        to_plain(config.features),
        to_plain(config.source),
        output,
        compression=config.data.compression,
        report=report,
        **options,
    )
