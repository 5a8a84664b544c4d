"""The complete files of an export. After a kill it continues after the last of them."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrank import json_files
from jaxrank.data.lock import empty_directory
from jaxrank.errors import InputError

_FILE = "progress.json"


class Progress:
    """The complete files of a directory, which another export may have begun.

    Args:
        directory: emptied if it has files of another export.
        fingerprint: of everything that the files depend on.
    """

    def __init__(self, directory: Path, fingerprint: str):
        self._directory, self._path = directory, directory / _FILE
        self._state: dict[str, Any] = {"fingerprint": fingerprint, "files": {}, "results": {}}
        with contextlib.suppress(InputError):
            if self._path.exists():
                earlier = json_files.read(self._path)
                if earlier.get("fingerprint") == fingerprint:
                    self._state = earlier
        if not self._state["files"]:
            empty_directory(directory)

    def write(self, name: str, make: Callable[[Path], Any], *more: str) -> Any:
        """Makes a file unless it is complete, and returns the result of `make` as plain data.

        more: names of further files that `make` may write.
        """
        if not all(self._is_complete(file) for file in self._recorded_files(name)):
            self._state["files"].pop(name, None)
        if name not in self._state["files"]:
            result = make(self._directory / name)
            from jaxrank_serving.bundle import checksum

            entries = {
                file: {
                    "bytes": (self._directory / file).stat().st_size,
                    "checksum": checksum(self._directory / file),
                }
                for file in (name, *more)
                if (self._directory / file).exists()
            }
            self._state["files"][name] = entries
            self._state["results"][name] = json_files.plain(result)
            json_files.write(self._path, self._state, sync=True)
        return self._state["results"][name]

    def renew(self, name: str, make: Callable[[Path], Any]) -> None:
        """Makes a file, even if it is complete."""
        self._state["files"].pop(name, None)
        self.write(name, make)

    def entries(self) -> dict[str, Any]:
        """Returns {file: its bytes and checksum}."""
        return {
            file: entry
            for entries in self._state["files"].values()
            for file, entry in entries.items()
        }

    def remove(self) -> None:
        """Removes the record of complete files."""
        self._path.unlink()

    def _recorded_files(self, name: str) -> dict[str, Any]:
        return self._state["files"].get(name, {})

    def _is_complete(self, file: str) -> bool:
        path = self._directory / file
        entry = self.entries()[file]
        return path.exists() and path.stat().st_size == entry["bytes"]
