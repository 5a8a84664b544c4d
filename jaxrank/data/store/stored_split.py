"""A split in the files of a store."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from upath import UPath

from jaxrank.data.examples import Examples
from jaxrank.data.statistics import split as statistics
from jaxrank.data.store.file import Readers, StoredFile
from jaxrank.data.store.split import Split

_MAX_BLOCK_ROWS = 2**31  # maximum of Arrow's arrays, for a block
_OPEN_FILES = 64  # per split. Each is a memory map, whose number per process is limited


def _checked_file(directory: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Checks that a file's entry of the manifest has exactly the required keys."""
    blocks = [{key: block[key] for key in ("rows", "checksum")} for block in entry["blocks"]]
    for block in blocks:
        if type(block["rows"]) is not int or not 0 <= block["rows"] < _MAX_BLOCK_ROWS:
            raise ValueError(f"a block's rows must be a number of examples: {block['rows']!r}")
    if not re.fullmatch(r"[\w-]+\.arrow", entry["name"]):
        raise ValueError(f"a file's name must be letters, digits, - and _: found {entry['name']!r}")
    return {"name": f"{directory}/{entry['name']}", "bytes": entry["bytes"], "blocks": blocks}


class StoredSplit(Split):
    """A split of a store, or several of its days.

    Args:
        store: the directory.
        name: as requested.
        entries: of the manifest, by name of the split or of each of its days.
        statistics: of the examples that must fit in batches. None: those of the entries.
    """

    def __init__(
        self,
        store: UPath,
        name: str,
        entries: Mapping[str, Mapping[str, Any]],
        statistics: dict[str, Any] | None = None,
    ):
        self._store, self._wider = store, statistics
        self._statistics = [entry["statistics"] for entry in entries.values()]
        by_entry = {n: [_checked_file(n, f) for f in e["files"]] for n, e in entries.items()}
        self._files = [file for files_of_entry in by_entry.values() for file in files_of_entry]
        sizes = [b["rows"] for f in self._files for b in f["blocks"]]
        days = tuple(
            (entry.split("/")[1], sum(len(f["blocks"]) for f in files_of_entry))
            for entry, files_of_entry in by_entry.items()
            if "/" in entry
        )
        super().__init__(name, store / name, np.asarray(sizes, np.int64), days)
        self._where = [(i, j) for i, f in enumerate(self._files) for j in range(len(f["blocks"]))]
        self._reopen()

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps are not sent to input workers.
        return {key: value for key, value in self.__dict__.items() if key != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reopen()

    def _reopen(self) -> None:
        readers = Readers(_OPEN_FILES)
        self._open = [StoredFile(self._store / f["name"], f, readers) for f in self._files]

    @functools.cached_property
    def statistics(self) -> dict[str, Any]:
        if self._wider is not None:
            return self._wider
        if len(self._statistics) == 1:
            return self._statistics[0]
        return statistics.merged(self._statistics)

    @property
    def day_statistics(self) -> list[dict[str, Any]]:
        return self._statistics if self.days else []

    @property
    def bytes(self) -> int:
        return sum(f["bytes"] for f in self._files)

    @property
    def files(self) -> list[UPath]:
        return [self._store / f["name"] for f in self._files]

    @property
    def fingerprint(self) -> str:
        """Returns a hash of the checksums of all blocks in order."""
        digest = xxhash.xxh3_128()
        for file in self._files:
            for block in file["blocks"]:
                digest.update(f"{block['rows']} {block['checksum']}\n".encode())
        return digest.hexdigest()

    def read_block(self, index: int) -> Examples:
        """Reads block `index`.

        The checksum is verified on the first read and after each change of the file.

        Raises:
            InputError: the file is missing or corrupt.
            RunError: a server does not return it.
        """
        file, position = self._where[index]
        return self._open[file].read_block(position)

    def list_lengths(self, index: int) -> np.ndarray:
        file, position = self._where[index]
        lengths = self._open[file].matrix(position, "list_lengths")
        # The checksum covers the whole block. A corrupt length could request more than all memory.
        maximum = np.asarray(self.statistics["list_lengths"]["max_per_example"], np.int64)
        if lengths is None or (lengths < 0).any() or (lengths > maximum).any():
            return self.read_block(index).list_lengths
        return lengths

    def requests(self, index: int) -> np.ndarray | None:
        file, position = self._where[index]
        requests = self._open[file].matrix(position, "requests")
        if requests is None or len(requests) != self.block_rows[index]:
            return super().requests(index)
        return requests[:, 0]
