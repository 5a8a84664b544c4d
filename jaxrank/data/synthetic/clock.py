"""Assigns times to the rows of generated data."""

from collections.abc import Mapping

import numpy as np

from jaxrank.data.encode.times import DAY

_START = 1_704_067_200  # 2024-01-01, in seconds since 1970


class Clock:
    """Spreads the rows of each split evenly, in order, over its days.

    Args:
        days: of each split.
        first_day: of each split, counted from 2024-01-01.
    """

    def __init__(self, days: Mapping[str, int], first_day: Mapping[str, int]):
        self._days, self._first_day = days, first_day

    @property
    def end(self) -> int:
        """Returns the days from 2024-01-01 to the end of the last split."""
        return max(self._first_day[split] + days for split, days in self._days.items())

    def times(self, split: str, rows: int, first: int, count: int) -> np.ndarray:
        """Returns i64[count] seconds since 1970 for `count` rows from number `first`, of `rows`."""
        row = first + np.arange(count, dtype=np.int64)
        span = self._days[split] * DAY
        return _START + self._first_day[split] * DAY + row * span // max(rows, 1)


def days_since_start(times: np.ndarray) -> np.ndarray:  # i64[n] seconds -> f64[n] days
    return (times - _START) / DAY
