"""The examples of one split, wherever they are read from."""

import abc
from collections.abc import Iterator
from typing import Any

import numpy as np
from upath import UPath

from jaxrank.data.examples import Examples


class Split(abc.ABC):
    """The examples of one split in their order, a block at a time; or of several days of one.

    Args:
        name: as it was asked for.
        path: for messages.
        block_rows: i64[blocks], examples of each block.
        days: day and number of blocks, in order; none where the data is not stored by day.

    Attributes:
        has_statistics: whether its statistics tell of labels and features.
    """

    has_statistics = True

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
        """See `statistics.split.Statistics`; only `rows` and `list_lengths` if not counted."""

    @property
    def day_statistics(self) -> list[dict[str, Any]]:
        """Those of each of `days`."""
        return []

    @property
    def files(self) -> list[UPath]:
        """The Arrow files of a store, in stored order."""
        return []

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Of the data: data that was prepared anew has another one."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Of the files."""

    @abc.abstractmethod
    def read_block(self, index: int) -> Examples:
        """Block `index`.

        Raises:
            InputError: it cannot be read, or is not what it was when the split was opened.
            RunError: a server does not give it.
        """

    def list_lengths(self, index: int) -> np.ndarray:
        """The list lengths of block `index`, i32[n, lists], read without the other columns.

        Raises:
            InputError, RunError: as `read_block`.
        """
        return self.read_block(index).list_lengths

    @property
    def rows(self) -> int:
        return int(self.block_rows.sum())

    def blocks(self) -> Iterator[Examples]:
        return (self.read_block(i) for i in range(len(self.block_rows)))
