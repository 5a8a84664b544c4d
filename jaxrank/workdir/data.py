"""The data of a run: prepared first if need be, or read as it is."""

import dataclasses
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
from jaxrank.run_schedule import NEXT_DAY
from jaxrank.runtime import processes
from jaxrank.workdir import files


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, which `locate` gives: where it is, and what the config says about it.

    path: of the store; empty where raw files are read as they are, and where nothing names a store.
    is_direct: raw files are read as they are.
    is_own: the store is in the workdir, prepared for this run only.
    settings, features, source: the sections `data`, `features` and `source` of the config, plain.
    """

    path: str
    is_direct: bool
    is_own: bool
    settings: Mapping[str, Any]
    features: Mapping[str, Any]
    source: Mapping[str, Any]

    def exists(self) -> bool:
        """Whether the data is there, without a look into it."""
        return self.is_direct or bool(self.path and is_store(self.path))

    def open(self) -> Store:
        """Opens data that is there.

        Raises:
            InputError: it is not.
        """
        if self.is_direct:
            return direct.open_direct(self.features, self.source)
        return open_store(self.path)

    def prepare(self, report: Report) -> Store:
        """Opens the data; process 0 prepares it if the config says how and it is not there.

        Raises:
            InputError: it is not there and cannot be made, or was made of other features; or, where
                it is the run's own, of another source.
        """
        with processes.together():
            if processes.is_first() and not self.exists():
                self._prepare(report)
        with processes.together():
            store = self.open()
        self.check_features(store)
        if self.is_own:
            self._check_source(store)
        return store

    def check_features(self, store: Store) -> None:
        """Raises InputError unless a store was prepared with the features of the config."""
        spec = parse.feature_spec(self.features)
        found, expected = self._filled(store.spec.features), spec.to_state()
        if found != expected and found == spec.without_labels().to_state():
            raise InputError(
                f"{store.path}: must hold labels to train on, and was prepared with --unlabelled."
            )
        if found != expected:
            raise InputError(
                f"{store.path}: the store was prepared with other features than the config's:\n  "
                + "\n  ".join(differences(found, expected, "features"))
            )

    def _filled(self, features: dict[str, Any]) -> dict[str, Any]:
        """Fills in the defaults of fields that came after the store was prepared."""
        try:
            return parse.feature_spec(features).to_state()
        except InputError:
            return features

    def _check_source(self, store: Store) -> None:
        """Raises InputError if a store was prepared from another source than a config's, if any."""
        found, expected = store.spec.source, self.source
        if expected and found != expected:
            raise InputError(
                f"{store.path}: was prepared from another source than the config's:\n  "
                + "\n  ".join(differences(found, expected, "source"))
                + "\nUse another --workdir, remove this directory to prepare it anew, or go on with"
                f" what it holds by --config.data.store={store.path} (and --allow-config-change,"
                " where a run has begun)."
            )

    def _prepare(self, report: Report) -> None:
        if not self.source:
            raise InputError(
                f"data.store: no store at {self.path}, and config.source does not say how."
            )
        self.check_splits(self.path)
        report(f"Preparing {self.path}")
        compression = self.settings["compression"]
        passes.prepare(
            self.features, self.source, self.path, compression=compression, report=report
        )

    def check_splits(self, path: str) -> None:
        """Refuses splits that the source will not have; which days it has, only its records tell.

        Args:
            path: what errors call the data.
        """
        by_day = self.features.get("by_day", False)
        if self.settings["order"] == "days" and not by_day:
            raise InputError(
                "data.order: 'days' must have data that is stored by day: found features.by_day ="
                f" {by_day!r}."
            )
        splits = self.source.get("rows" if self.source.get("kind") == "synthetic" else "files")
        if not isinstance(splits, Mapping):  # refused where it is read
            return
        for field in ("train", "valid"):
            name = self.settings[field]
            split, slash, _ = name.partition("/")
            is_none = field == "valid" and name in ("", NEXT_DAY)
            if not is_none and (split not in splits or (slash and not by_day)):
                raise no_split(path, name, splits, f"data.{field}")


def locate(
    settings: ConfigDict,
    features: ConfigDict,
    source: ConfigDict,
    workdir: str | Path,
    *,
    given: str = "",
    inherits: bool = False,
) -> RunData:
    """The data of a run: the first that is named of the store given, raw files that are read as
    they are, the store of the config, that of the run in the workdir, and WORKDIR/data.

    Args:
        settings, features, source: sections `data`, `features` and `source` of the config.
        workdir: of the run; empty for none, whose store is then that of the config or none.
        given: a store, to be read in place of the run's.
        inherits: whether a config that names no data means that of the run in `workdir`.
    """
    is_direct = settings.direct and not given
    path = "" if is_direct else given or settings.store
    if inherits and workdir and not is_direct and not path:
        path = files.store_of_run(Path(workdir))
    is_own = bool(workdir) and not is_direct and not path
    if is_own:
        path = str(Path(workdir) / "data")
    sections = (to_plain(section) for section in (settings, features, source))
    return RunData(path, is_direct, is_own, *sections)
