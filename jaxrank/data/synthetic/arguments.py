"""Arguments of generated data: the fields of `source` of kind synthetic."""

import dataclasses
from collections.abc import Mapping

from jaxrank.data.synthetic.clock import Clock
from jaxrank.data.synthetic.history import HistoryShape
from jaxrank.validate import field, require

_MAX_TABLE_ROWS = 2**31 - 1  # of a table


@dataclasses.dataclass(frozen=True)
class ListShape:
    """A column of lists."""

    rows: int = field(help="rows of its table", unit="rows", at_least=1, at_most=_MAX_TABLE_ROWS)
    mean_length: float = field(help="mean length of a list", unit="ids", above=0)
    weighted: bool = field(False, help="adds a column with a weight per id")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A source of kind synthetic. See `SyntheticSource`."""

    rows: Mapping[str, int] = field(
        help="number of rows of each split", unit="rows", at_least=0, non_empty=True
    )
    seed: int = field(help="seed of the true effects and the rows", at_least=0)
    kind: str = field("synthetic", choices=("synthetic",), help="generated data")
    dense: int = field(13, help="number of dense features", at_least=0)
    missing: float = field(
        0.1, help="fraction of missing values in odd-numbered dense features", at_least=0, below=1
    )
    categorical: tuple[int, ...] = field(
        (),
        help="rows of the table of each categorical feature",
        unit="rows",
        at_least=1,
        at_most=_MAX_TABLE_ROWS,
    )
    exponent: float = field(1.05, help="exponent of the power law of ids", at_least=0)
    ragged: tuple[ListShape, ...] = field((), help="ragged features")
    history_items: int = field(
        0,
        help="number of candidate items; 0: no candidates or histories",
        unit="rows",
        at_least=0,
        at_most=_MAX_TABLE_ROWS,
    )
    history_categories: int = field(
        50, help="number of categories, with equally many items each", unit="categories", at_least=2
    )
    history_length: int = field(
        16, help="maximum number of events in a history", unit="events", at_least=1
    )
    history_share: float = field(
        0.5,
        help="fraction of the logits' variance that the candidate's similarity to the history"
        " contributes",
        above=0,
        below=1,
    )
    request_size: float = field(
        0.0,
        help="mean number of examples of a request, scattered over a split; 0: no requests",
        unit="examples",
        at_least=0,
    )
    request_effect: float = field(
        1.0, help="standard deviation of a request's effect on the logits of its clicks", at_least=0
    )
    signal: float = field(1.5, help="standard deviation of the logits", at_least=0)
    crosses: float = field(
        0.08,
        help="fraction of the logits' variance that products of features contribute",
        at_least=0,
        below=1,
    )
    click_rate: float = field(0.25, help="average probability of a click", above=0, below=1)
    conversion_rate: float = field(
        0.3, help="average probability that a click converts", above=0, below=1
    )
    days: int | Mapping[str, int] = field(
        0,
        help="number of days that the rows of every split cover, or of each split by name; 0: no"
        " times",
        unit="days",
        at_least=0,
    )
    first_day: Mapping[str, int] = field(
        {},
        help="first day of each split, in days since 2024-01-01; splits without an entry: 0",
        unit="days",
        at_least=0,
    )
    drift: float = field(
        0.0,
        help="standard deviation of the change per day of intercept and effects, relative to that"
        " of the logits; 0: no change",
        at_least=0,
    )
    delay_hours: float = field(
        0.0,
        help="mean of the exponential time from a click to its conversion; 0: no conversion_time",
        unit="hours",
        at_least=0,
    )
    negative_rate: float = field(
        1.0,
        help="fraction of the rows without a click that are kept; `rows` counts all of them",
        above=0,
        at_most=1,
    )

    def check(self, where: str) -> None:
        splits, days = list(self.rows), self.days_of_splits
        must = f"a number, or one for each of {splits}"
        require(set(days) == set(self.rows), f"{where}.days", must, self.days)
        must = f"a dict of splits among {splits}"
        require(set(self.first_day) <= set(splits), f"{where}.first_day", must, self.first_day)
        some = any(days.values())
        must = "0 for all splits or for none"
        require(all(days.values()) or not some, f"{where}.days", must, self.days)
        require(
            some or not self.first_day, f"{where}.first_day", "empty without days", self.first_day
        )
        least = self.history_categories
        must = f"0, or at least history_categories={least}"
        condition = self.history_items == 0 or self.history_items >= least
        require(condition, f"{where}.history_items", must, self.history_items)
        for name in ("drift", "delay_hours"):
            value = getattr(self, name)
            require(some or not value, f"{where}.{name}", "0 without days", value)

    @property
    def days_of_splits(self) -> Mapping[str, int]:
        """Returns the number of days by name of split."""
        return self.days if isinstance(self.days, Mapping) else dict.fromkeys(self.rows, self.days)

    @property
    def history(self) -> HistoryShape | None:
        """Returns the shape of histories, or None if there are none."""
        if not self.history_items:
            return None
        return HistoryShape(self.history_items, self.history_categories, self.history_length)

    @property
    def clock(self) -> Clock | None:
        """Returns the clock of the splits, or None if they have no days."""
        days = self.days_of_splits
        if not any(days.values()):
            return None
        return Clock(days, {name: self.first_day.get(name, 0) for name in self.rows})
