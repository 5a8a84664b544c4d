"""A split of examples that are in memory."""

from typing import Any

import numpy as np
from upath import UPath

from jaxrank.data.examples import Examples
from jaxrank.data.statistics.list_lengths import ListLengths
from jaxrank.data.store.split import Split
from jaxrank.features import MAX_GROUP


class InMemorySplit(Split):
    """One block of examples.

    Args:
        examples: the block.
        name: of the split, for messages.
        any_order: the room for lists fits the lists in any order, not only in the given one.
    """

    has_statistics = False

    def __init__(self, examples: Examples, name: str, *, any_order: bool = False):
        super().__init__(name, UPath(name), np.array([examples.rows]))
        self._examples = examples
        lists = examples.list_lengths
        if any_order:
            longest = lists.max(axis=0, initial=0).astype(np.int64)
            summary = {"max_per_example": longest, "max_total_per_run": longest * MAX_GROUP}
        else:
            lengths = ListLengths(lists.shape[1])
            lengths.add(lists)
            summary = lengths.summary()
        self._statistics = {"rows": examples.rows, "list_lengths": summary}

    @property
    def statistics(self) -> dict[str, Any]:
        return self._statistics

    @property
    def fingerprint(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        return 0

    def read_block(self, index: int) -> Examples:
        return self._examples
