"""Versions of a model on disk: verifies and loads a newer one, and keeps the old one if it fails.

The path names one of these:

    a bundle                              one version
    a symbolic link to a bundle           the version that it points to; replace the link
    a directory of bundles                the last one by name, where 9 is before 10

A bundle must not be changed in place, because its tables are mapped into memory.
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxrank_serving.bundle import MANIFEST
from jaxrank_serving.errors import BundleError
from jaxrank_serving.server.model import Model

_Mark = tuple[tuple[str, int, int], ...]


class Refresh(NamedTuple):
    """Result of a check for a newer version.

    loaded: True if another version was loaded.
    errors: of newer versions that were not loaded.
    """

    loaded: bool
    errors: tuple[str, ...]


class BusyError(Exception):
    """Another check is running."""


class Repository:
    """The loaded version of a model. Threads may call its methods at the same time.

    Args:
        path: see above.
        load: loads a bundle, verified if its second argument is True. Raises BundleError.
        report: called with messages about versions.
        verify: whether the first version is verified.

    Raises:
        BundleError: no version could be loaded.
    """

    def __init__(
        self,
        path: Path,
        load: Callable[[Path, bool], Model],
        report: Callable[[str], None],
        *,
        verify: bool = True,
    ):
        self._path, self._load, self._report = path, load, report
        self._lock = threading.Lock()
        self._mark: tuple[Path, _Mark] | None = None
        self._failed: dict[Path, tuple[_Mark, str]] = {}
        self._model: Model | None = None
        self.loads = self.failures = 0
        result = self._refresh(verify)
        if self._model is None:
            if not result.errors:
                raise BundleError(
                    f"{path}: must be a bundle, or a directory of bundles: found no {MANIFEST}."
                    " Run `jaxrank export`."
                )
            raise BundleError(result.errors[0])
        for text in result.errors:
            report(f"Not loaded: {text}")

    @property
    def model(self) -> Model:
        """The newest version that could be loaded."""
        assert self._model is not None
        return self._model

    @property
    def errors(self) -> tuple[str, ...]:
        """Errors of versions that could not be loaded, while they remain on disk."""
        return tuple(text for _, text in list(self._failed.values()))

    def refresh(self) -> Refresh:
        """Loads the newest version, unless it is loaded or has failed before without a change.

        Raises:
            BusyError: another thread is checking.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError
        try:
            return self._refresh(verify=True)
        finally:
            self._lock.release()

    def _refresh(self, verify: bool) -> Refresh:
        errors: list[str] = []
        try:
            paths = _versions(self._path)
        except OSError as error:
            return Refresh(False, (f"{self._path}: must be readable: found {error}.",))
        self._failed = {path: self._failed[path] for path in paths if path in self._failed}
        for path in paths:
            mark = _mark(path)
            if self._mark == (path, mark):
                return Refresh(False, tuple(errors))
            known, text = self._failed.get(path, (None, ""))
            if known == mark:
                errors.append(text)
                continue
            try:
                model = self._load(path, verify)
            except Exception as error:  # whatever it is, the loaded version still serves
                self._failed[path] = mark, str(error)
                self.failures += 1
                errors.append(str(error))
                if self._model is not None:
                    self._report(f"Not loaded: {error} Serving {self._model.version}.")
                continue
            self._failed.pop(path, None)
            self._model, self._mark = model, (path, mark)
            self.loads += 1
            self._report(f"Loaded version {model.version} from {path}")
            return Refresh(True, tuple(errors))
        return Refresh(False, tuple(errors))


def _versions(path: Path) -> list[Path]:
    """Returns the bundles at a path, newest first, with symbolic links resolved."""
    path = path.resolve()
    if (path / MANIFEST).is_file() or not path.is_dir():
        return [path] if path.exists() else []
    folders = [p for p in path.iterdir() if not p.name.startswith(".") and p.is_dir()]
    folders.sort(key=lambda folder: _natural(folder.name), reverse=True)
    return [folder.resolve() for folder in folders if (folder / MANIFEST).is_file()]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key by which numbers in names are compared as numbers."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(0, int(number), "") if number else (1, 0, text) for number, text in parts]


def _mark(path: Path) -> _Mark:
    """Returns names, sizes and times of all files, by which a change is noticed."""
    entries = []
    for file in path.rglob("*"):
        try:
            status = file.stat()
        except OSError:  # it is being removed
            continue
        entries.append((str(file.relative_to(path)), status.st_size, status.st_mtime_ns))
    return tuple(sorted(entries))
