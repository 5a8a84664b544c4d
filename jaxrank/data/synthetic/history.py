"""Generated histories: events of the past whose similarity to the candidate decides the labels.

An example has a candidate, the item that it shows, and a history of items. An item belongs to one
category. Most events of a history are of two categories, the interests of its user, and half of the
candidates are too. The similarity of candidate and history is log(1 + n), with n the number of
events of the candidate's category.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

_INTERESTS = 2
_OF_INTERESTS = 0.7  # fraction of the events
_CANDIDATES_OF_INTERESTS = 0.5
_GAP = 6 * 3600.0  # mean time between two events, in seconds
COLUMNS = ("item", "category", "history_item", "history_category")
TIMES = "history_time"


class HistoryShape(NamedTuple):
    """items: number of items. categories: of them. length: maximum number of events."""

    items: int
    categories: int
    length: int


class History(NamedTuple):
    """Candidates and histories of n examples, the oldest event first.

    item: i32[n], the candidates.
    lengths: i64[n], number of events.
    items: i32[events].
    gaps: f64[events], seconds from each event to the next, or to the example.
    categories: number of them.
    """

    item: np.ndarray
    lengths: np.ndarray
    items: np.ndarray
    gaps: np.ndarray
    categories: int

    @property
    def category(self) -> np.ndarray:
        """Categories of the candidates, i32[n]."""
        return self.item % np.int32(self.categories)

    @property
    def event_categories(self) -> np.ndarray:
        """Categories of the events, i32[events]."""
        return self.items % np.int32(self.categories)

    @property
    def similarity(self) -> np.ndarray:
        """log(1 + number of events of the candidate's category), f64[n]."""
        same = self.event_categories == np.repeat(self.category, self.lengths)
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.log1p(np.bincount(owner, same, len(self.lengths)))

    def columns(self, times: np.ndarray | None) -> dict[str, pa.Array]:
        """Returns the columns, with time columns if f64[n] times of the examples are given."""
        offsets = pa.array(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32))

        def lists(values: np.ndarray) -> pa.Array:
            return pa.ListArray.from_arrays(offsets, pa.array(values))

        arrays = (
            pa.array(self.item),
            pa.array(self.category),
            lists(self.items),
            lists(self.event_categories),
        )
        columns = dict(zip(COLUMNS, arrays, strict=True))
        if times is not None:
            # From an event to its example: the sum of the gaps from the event on.
            before = np.cumsum(self.gaps) - self.gaps
            ends = np.append(np.cumsum(self.gaps), 0)[np.cumsum(self.lengths) - 1]
            ages = np.repeat(ends, self.lengths) - before
            moments = np.repeat(times, self.lengths) - np.ceil(ages).astype(np.int64)
            columns[TIMES] = lists(moments.astype(np.int64))
        return columns


def draw(random: np.random.Generator, n: int, shape: HistoryShape) -> History:
    """Draws the histories of n examples."""
    lengths = random.integers(0, shape.length + 1, n)
    events = int(lengths.sum())
    interests = random.integers(0, shape.categories, (n, _INTERESTS))
    of_events = interests[np.repeat(np.arange(n), lengths), random.integers(0, _INTERESTS, events)]
    categories = np.where(
        random.random(events) < _OF_INTERESTS,
        of_events,
        random.integers(0, shape.categories, events),
    )
    category = np.where(
        random.random(n) < _CANDIDATES_OF_INTERESTS,
        interests[:, 0],
        random.integers(0, shape.categories, n),
    )
    per_category = shape.items // shape.categories

    def items(category: np.ndarray) -> np.ndarray:
        number = random.integers(0, per_category, len(category))
        return (category + shape.categories * number).astype(np.int32)

    gaps = random.exponential(_GAP, events)
    return History(items(category), lengths, items(categories), gaps, shape.categories)
