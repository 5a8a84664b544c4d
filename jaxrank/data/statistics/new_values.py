"""Counts ids whose values are new to an earlier store's vocabularies, and reports features with
many.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.features import UNKNOWN_ROW

_MAX_SHOWN = 3  # values of a feature, and splits or days
_MAX_VALUE_CHARACTERS = 40  # per value
_MAX_LINES = 20
# A feature is reported if it has at least this share of new ids and this number of ids.
_HIGH_SHARE, _MIN_IDS = 0.5, 100


@dataclasses.dataclass
class NewValues:
    """Counts for a feature whose values were looked up in an earlier vocabulary.

    ids: number of non-missing ids.
    new: number of those whose value is not in the vocabulary.
    shown: some of these values. Empty if raw values are pseudonymised.
    """

    ids: int = 0
    new: int = 0
    shown: list[str] = dataclasses.field(default_factory=list)

    def merge(self, other: "NewValues") -> None:
        self.ids += other.ids
        self.new += other.new
        self.shown = first(dict.fromkeys([*self.shown, *other.shown]))

    @property
    def share(self) -> float:
        return self.new / max(self.ids, 1)

    @property
    def is_high(self) -> bool:
        return self.ids >= _MIN_IDS and self.share >= _HIGH_SHARE


Counted = dict[str, dict[str, NewValues]]  # by kind and name of the feature


def is_new(rows: np.ndarray, earlier: int) -> np.ndarray:
    """Returns bool[..]: True where a row of i32[..] is not among the first `earlier` rows."""
    return (rows == UNKNOWN_ROW) | (rows >= earlier)


def first(values: Iterable[str]) -> list[str]:
    """Returns the values to show."""
    return [value for _, value in zip(range(_MAX_SHOWN), values, strict=False)]


def lines(
    features: FeatureSpec,
    counted: Mapping[str, Counted],
    earlier: Mapping[str, Vocabulary],
    store: str,
) -> list[str]:
    """Returns a line for each feature most of whose values are new.

    Args:
        counted: by split, or by day of a split. Each is judged separately, because the format may
            differ in only one.
        earlier: the vocabularies of the earlier store `store`, by table.
    """
    messages = []
    for kind, entries in (("categorical", features.categorical), ("ragged", features.ragged)):
        for entry in entries:
            by_split = {place: new[kind].get(entry.name) for place, new in counted.items()}
            high = {place: new for place, new in by_split.items() if new and new.is_high}
            if high:
                messages.append(f"feature {entry.name}: {_line(high, earlier[entry.table], store)}")
    if len(messages) > _MAX_LINES:
        messages[_MAX_LINES:] = [f"and {len(messages) - _MAX_LINES} more features"]
    return messages


def _line(high: Mapping[str, NewValues], earlier: Vocabulary, store: str) -> str:
    joined = NewValues()
    for new in high.values():
        joined.merge(new)
    more = f" and {len(high) - _MAX_SHOWN} more" if len(high) > _MAX_SHOWN else ""
    present = earlier.values.slice(0, _MAX_SHOWN).to_pylist()
    values = f": found {_quoted(joined.shown)}; it has {_quoted(present)}" if joined.shown else ""
    return (
        f"{joined.share:.2%} of {joined.ids:,} values in {', '.join(first(high))}{more} are not in"
        f" the vocabulary of {store}{values}. A model that was trained on that store reads them as"
        " unknown. Check that the column is written as before."
    )


def _quoted(values: Sequence[str]) -> str:
    return ", ".join(repr(_short(value)) for value in values) or "none"


def _short(value: str) -> str:
    return value if len(value) <= _MAX_VALUE_CHARACTERS else f"{value[:_MAX_VALUE_CHARACTERS]}..."
