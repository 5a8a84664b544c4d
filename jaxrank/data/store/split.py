"""The examples of one split, from any kind of storage."""

import abc
from collections.abc import Iterator
from typing import Any

import numpy as np
from upath import UPath

from jaxrank.data.examples import Examples


class Split(abc.ABC):
    """The examples of one split, or of several of its days, in order and read by block.

    Args:
        name: as requested.
        path: for messages.
        block_rows: i64[blocks], examples of each block.
        days: day and number of blocks, in order. Empty if the data is not stored by day.

    Attributes:
        has_statistics: True if its statistics cover labels and features.
        pack: number of examples of a pack, see `batches.packs`. 0: examples are not in packs.
    """

    has_statistics = True
    pack = 0

    def __init__(
        self,
        name: str,
        path: UPath,
        block_rows: np.ndarray,
        days: tuple[tuple[str, int], ...] = (),
    ):
        self.name, self.path, self.block_rows, self.days = name, path, block_rows, days

    @property
    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """See `statistics.split.Statistics`. Only `rows` and `list_lengths` if `has_statistics` is
        False.
        """

    @property
    def day_statistics(self) -> list[dict[str, Any]]:
        """Returns the statistics of each of `days`."""
        return []

    @property
    def files(self) -> list[UPath]:
        """Returns the Arrow files of a store, in stored order."""
        return []

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash of the data, which changes when the data is prepared again."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Total bytes of the files."""

    @abc.abstractmethod
    def read_block(self, index: int) -> Examples:
        """Reads block `index`.

        Raises:
            InputError: it cannot be read, or has changed since the split was opened.
            RunError: a server does not return it.
        """

    def list_lengths(self, index: int) -> np.ndarray:
        """Reads the list lengths of block `index`, i32[n, lists], without the other columns.

        Raises:
            InputError, RunError: as in `read_block`.
        """
        return self.read_block(index).list_lengths

    def requests(self, index: int) -> np.ndarray | None:
        """Reads the requests of block `index`, i64[n], or None; see `Examples`.

        Raises:
            InputError, RunError: as in `read_block`.
        """
        requests = self.read_block(index).requests
        return None if requests is None else requests[:, 0]

    @property
    def rows(self) -> int:
        return int(self.block_rows.sum())

    def blocks(self) -> Iterator[Examples]:
        return (self.read_block(i) for i in range(len(self.block_rows)))


class WrappedSplit(Split):
    """A split that reads another one. Subclasses override what they change.

    Args:
        split: the other one.
        block_rows: i64[blocks], if they differ from those of `split`.
    """

    def __init__(self, split: Split, block_rows: np.ndarray | None = None):
        rows = split.block_rows if block_rows is None else block_rows
        super().__init__(split.name, split.path, rows, split.days)
        self._split = split
        self.has_statistics, self.pack = split.has_statistics, split.pack

    @property
    def statistics(self) -> dict[str, Any]:
        return self._split.statistics

    @property
    def day_statistics(self) -> list[dict[str, Any]]:
        return self._split.day_statistics

    @property
    def files(self) -> list[UPath]:
        return self._split.files

    @property
    def fingerprint(self) -> str:
        """Returns the hash of the stored data."""
        return self._split.fingerprint

    @property
    def bytes(self) -> int:
        return self._split.bytes

    def read_block(self, index: int) -> Examples:
        return self._split.read_block(index)

    def list_lengths(self, index: int) -> np.ndarray:
        return self._split.list_lengths(index)

    def requests(self, index: int) -> np.ndarray | None:
        return self._split.requests(index)
