"""The data of a run: a prepared store, or raw files that are read directly."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrank.config_files import differences
from jaxrank.data import files as files_of_data
from jaxrank.data.prepare import passes
from jaxrank.data.spec import skip
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.store import direct
from jaxrank.data.store.reader import Store, is_store, no_split, open_store
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.report import Report
from jaxrank.run_schedule import NEXT_DAY
from jaxrank.runtime import processes


@dataclasses.dataclass(frozen=True)
class RunData:
    """The location of a run's data and its sections of the config. See `opening.locate`.

    path: of the store. Empty if raw files are read directly, or if no store is named.
    is_direct: raw files are read directly.
    is_own: the store is in the workdir and was prepared for this run only.
    settings, features, source: the sections `data`, `features` and `source` of the config, plain.
    """

    path: str
    is_direct: bool
    is_own: bool
    settings: Mapping[str, Any]
    features: Mapping[str, Any]
    source: Mapping[str, Any]

    @functools.cached_property
    def spec(self) -> FeatureSpec:
        """The section `features`, parsed."""
        return FeatureSpec.from_state(self.features)

    def exists(self) -> bool:
        """Returns True if the data exists, without opening it."""
        return self.is_direct or bool(self.path and is_store(self.path))

    def open(self) -> Store:
        """Opens existing data.

        Raises:
            InputError: the data does not exist.
        """
        if self.is_direct:
            return direct.open_direct(self.features, self.source)
        return open_store(self.path)

    def open_checked(self) -> Store:
        """Opens existing data with the features that training reads.

        Raises:
            InputError: the data does not exist, or was prepared with other features. For data in
                the workdir, also if it was prepared from another source.
        """
        with processes.together():
            store = self.open()
        self._check_features(store)
        if self.is_own:
            self._check_source(store)
        return self._selected(store)

    def prepare(self, report: Report, check: Callable[[Schema], None] | None = None) -> Store:
        """Opens the data. Process 0 prepares it first if it is absent and the config has a source.

        Args:
            check: see `passes.prepare`. Data that exists is checked before it is read, too.

        Raises:
            InputError: see `open_checked`, or the data is absent and cannot be prepared.
        """
        with processes.together():
            is_absent = processes.is_first() and not self.exists()
            if is_absent:
                self._prepare(report, check)
        store = self.open_checked()
        if processes.is_first():
            _report_changed_files(store, report)
        with processes.together():  # a check may read files, which one process may lack
            if check is not None and not is_absent:
                check(store.schema)
        return store

    def open_splits(self, store: Store) -> tuple[Split, Split | None]:
        """Opens the training split, and the validation split. None: the run has none of its own.

        Raises:
            InputError: the store lacks one.
        """
        train, valid = self.settings["train"], self.settings["valid"]
        return (
            store.split(train, "data.train"),
            None if valid in ("", NEXT_DAY) else store.split(valid, "data.valid"),
        )

    def _selected(self, store: Store) -> Store:
        """Returns the store without the features that `features.skip` names.

        Raises:
            InputError: a name matches no feature, or no feature is left.
        """
        return store.selected(skip.drop_features(store.schema, self.spec.skip))

    def _check_features(self, store: Store) -> None:
        """Raises InputError unless the store was prepared with the features of the config."""
        stored = self.spec.stored
        actual, expected = self._filled(store.spec.features), stored.to_state()
        _suit_open_scales(actual, expected)
        if actual != expected and actual == stored.without_labels().to_state():
            raise InputError(
                f"{store.path}: must hold labels: it was prepared with --unlabelled. Prepare it"
                " with labels to train on it."
            )
        if actual != expected:
            raise InputError(
                f"{store.path}: must be prepared with the features of the config, which differ:\n  "
                + "\n  ".join(differences(actual, expected, "features"))
                + "\nPrepare it again, or use the config that it was prepared with."
            )

    def _filled(self, features: dict[str, Any]) -> dict[str, Any]:
        """Fills in the defaults of fields that came after the store was prepared."""
        try:
            return FeatureSpec.from_state(features).stored.to_state()
        except InputError:
            return features

    def _check_source(self, store: Store) -> None:
        """Raises InputError if the config has a source and the store was prepared from another."""
        actual, expected = store.spec.source, self.source
        if expected and actual != expected:
            raise InputError(
                f"{store.path}: must be prepared from the source of the config, which differs:\n  "
                + "\n  ".join(differences(actual, expected, "source"))
                + "\nUse another --workdir, remove this directory to prepare the data again, or"
                f" keep it with --config.data.store={store.path} (and --allow-config-change if a"
                " run has started)."
            )

    def _prepare(self, report: Report, check: Callable[[Schema], None] | None) -> None:
        if not self.source:
            raise InputError(
                f"data.store: must be an existing store, or config.source must be set to prepare"
                f" one: found no store at {self.path}."
            )
        self.check_splits(self.path)
        report(f"Preparing {self.path}")
        compression = self.settings["compression"]

        def check_left(schema: Schema) -> None:
            left = skip.drop_features(schema, self.spec.skip)
            if check is not None:
                check(left)

        passes.prepare(
            self.features,
            self.source,
            self.path,
            compression=compression,
            report=report,
            check=check_left,
        )

    def check_splits(self, path: str) -> None:
        """Rejects splits that the source does not have. Days are known only after reading it.

        Args:
            path: name of the data in errors.
        """
        by_day = self.features.get("by_day", False)
        if self.settings["order"] == "days" and not by_day:
            raise InputError(
                "data.order: 'days' must have data that is stored by day: found features.by_day ="
                f" {by_day!r}. Set it to True and prepare the data again."
            )
        splits = self.source.get("rows" if self.source.get("kind") == "synthetic" else "files")
        if not isinstance(splits, Mapping):  # rejected when it is read
            return
        for field in ("train", "valid"):
            name = self.settings[field]
            split, slash, _ = name.partition("/")
            is_none = field == "valid" and name in ("", NEXT_DAY)
            if not is_none and (split not in splits or (slash and not by_day)):
                raise no_split(path, name, splits, f"data.{field}")


def _suit_open_scales(actual: dict[str, Any], expected: Mapping[str, Any]) -> None:
    """Sets `standardize` of stored entries to None where the config leaves it open.

    Such a config suits any scale, also of a store of an earlier version, whose default was False.
    """
    for stored, entry in zip(actual.get("dense", ()), expected["dense"], strict=False):
        if entry["standardize"] is None and (not entry["log"] or not stored.get("standardize")):
            stored["standardize"] = None


def _report_changed_files(store: Store, report: Report) -> None:
    """Reports source files that have changed since the store was prepared. They may be intact."""
    changed = files_of_data.changed(store.marks)
    if changed:
        path = Path(changed[0])
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        others = len(changed) - 1
        subject = f"{shown} and {others:,} other source file(s) have" if others else f"{shown} has"
        report(
            f"Warning: {subject} changed since {store.path} was prepared; remove"
            f" {store.path} to prepare it again"
        )
