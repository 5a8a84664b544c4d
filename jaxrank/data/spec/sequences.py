"""Entries of `features.sequences`: ragged features whose lists are aligned, event by event."""

import dataclasses
from collections.abc import Sequence

from jaxrank.data.spec.entries import RaggedSpec
from jaxrank.errors import InputError
from jaxrank.validate import field, nearest, require

OLDEST_FIRST = "oldest_first"
ORDERS = (OLDEST_FIRST, "newest_first")
# Rows of the feature `<name>:age`. Row i is for ages from 2^i - 1 seconds to 2^(i + 1) - 1.
AGE_ROWS = 32


@dataclasses.dataclass(frozen=True)
class SequenceSpec:
    """Ragged features whose n-th ids belong to the n-th event of an example's history.

    Their lists have equal lengths. A longer history keeps its newest `max_length` events. Stored
    lists begin with the newest event.
    """

    name: str = field(help="name of the sequence, for model.sequences")
    columns: tuple[str, ...] = field(
        non_empty=True,
        single=True,
        help="columns of entries of `ragged` with combiner='none' and equal `max_length`; a text is"
        " a list of one",
    )
    order: str = field(choices=ORDERS, help="the order of the events in the raw lists")
    time: str = field(
        "",
        help="a column with a list of the events' times. Events that are not strictly before the"
        " example's own time (features.time) are left out and counted",
    )
    ages: bool = field(
        False,
        help="adds the ragged feature '<name>:age', the age of each event in 32 buckets that"
        " double from 1 second on. Needs `time`",
    )

    def check(self, where: str) -> None:
        # The name is part of the names of parameters, where "/" separates modules.
        is_name = bool(self.name) and "/" not in self.name
        require(is_name, f"{where}.name", "a name without '/'", self.name)
        for i, column in enumerate(self.columns):
            must = "columns that are named once"
            require(column not in self.columns[:i], f"{where}.columns", must, self.columns)
        must = "False without `time`"
        require(bool(self.time) or not self.ages, f"{where}.ages", must, self.ages)

    @property
    def age(self) -> str:
        """Name of the feature of ages."""
        return f"{self.name}:age"

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the ragged features of the sequence."""
        return (*self.columns, self.age) if self.ages else self.columns


def check_sequences(sequences: Sequence[SequenceSpec], where: str, time: str) -> None:
    """Checks that no two sequences share a name or a column, and that examples have a time.

    Args:
        time: `features.time`.
    """
    owner: dict[str, int] = {}
    names: list[str] = []
    for i, sequence in enumerate(sequences):
        entry = f"{where}.sequences[{i}]"
        require(sequence.name not in names, f"{entry}.name", "used once", sequence.name)
        names.append(sequence.name)
        must = f"the name of the column of times with {entry}.time"
        require(bool(time) or not sequence.time, f"{where}.time", must, time)
        for column in sequence.columns:
            must = f"columns of one sequence; {column!r} is also in sequences[{owner.get(column)}]"
            require(column not in owner, f"{entry}.columns", must, sequence.columns)
            owner[column] = i


def age_features(sequences: Sequence[SequenceSpec]) -> set[str]:
    """Returns the names of the features that preparation computes."""
    return {sequence.age for sequence in sequences if sequence.ages}


def with_ages(
    sequences: Sequence[SequenceSpec], ragged: Sequence[RaggedSpec]
) -> tuple[RaggedSpec, ...]:
    """Checks the entries of sequences and appends those of ages.

    Args:
        ragged: resolved entries, without those of ages.

    Raises:
        InputError: a sequence names another column, or its entries do not fit together.
    """
    by_name = {entry.name: entry for entry in ragged}
    ages = []
    for i, sequence in enumerate(sequences):
        where = f"features.sequences[{i}].columns"
        for name in sequence.columns:
            if name not in by_name:
                raise InputError(
                    f"{where}: {name!r} must be a column of features.ragged"
                    f"{nearest(name, by_name, 3)}."
                )
        entries = [by_name[name] for name in sequence.columns]
        for entry in entries:
            must = f"of combiner 'none', as {entry.name!r} is part of a sequence"
            require(entry.combiner == "none", where, must, entry.combiner)
            must = f"'first' for {entry.name!r}, as a sequence keeps its newest events"
            require(entry.keep == "first", "features.ragged.keep", must, entry.keep)
            for shared in ("max_length", "on_overlong"):
                values = getattr(entries[0], shared), getattr(entry, shared)
                must = f"of equal {shared}: {entries[0].name!r} has {values[0]!r}"
                require(values[0] == values[1], where, must, f"{entry.name}: {values[1]!r}")
        if sequence.ages:
            ages.append(
                RaggedSpec(
                    columns=(sequence.age,),
                    table=sequence.age,
                    combiner="none",
                    max_length=entries[0].max_length,
                    on_overlong=entries[0].on_overlong,
                    encoding="integer",
                    rows=AGE_ROWS,
                )
            )
    return (*ragged, *ages)
