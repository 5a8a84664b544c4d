"""Counts the values of each feature in one pass, in memory that does not grow with the data."""

from collections.abc import Mapping

import numpy as np

from jaxrank.data.drift.sides import Side
from jaxrank.data.encode.raw_numbers import raw_numbers
from jaxrank.data.examples import Examples
from jaxrank.data.statistics.quantiles import QuantileSketch
from jaxrank.features import PAD, RESERVED_ROWS, UNKNOWN_ROW, Schema

# Rows that are counted separately. Rows of larger tables share counts. Vocabularies have no limit,
# because their values take more memory than one count each.
_MAX_COUNTED_ROWS = 1 << 22


def folded_note() -> str:
    """Returns what a report says of a feature whose rows share counts."""
    return f"its table has more than {_MAX_COUNTED_ROWS:,} rows, which share counts"


class Counts:
    """Counts of one side.

    Attributes:
        rows: number of examples.
        numbers: a sketch of the raw numbers of each dense feature, by name. Missing ones that have
            an indicator are left out.
        ids: i64[rows of the table] of each categorical and ragged feature, by name. Except in
            vocabularies, rows from 4,194,304 share the counts of lower rows, but not those of
            reserved rows.
        folded: names of the features with such rows.
        waiting: number of ids of a log that wait for a row in the store, by feature. They are among
            the unknown ids.
    """

    def __init__(self, schema: Schema, waiting_from: Mapping[str, int] | None = None):
        self._schema = schema
        tables = {f.name: f.table for f in schema.categorical}
        tables |= {f.name: f.table for f in schema.ragged}
        sizes = {t.name: t.rows for t in schema.tables if t.encoding == "vocabulary"}
        self._limits = {name: sizes.get(t, _MAX_COUNTED_ROWS) for name, t in tables.items()}
        waits = waiting_from or {}
        self._waiting_from = {name: waits[t] for name, t in tables.items() if t in waits}
        names = [f.name for f in schema.dense]
        indicators = {i: schema.indicator(name) for i, name in enumerate(names)}
        self._indicators = {i: at for i, at in indicators.items() if at is not None}
        skipped = set(self._indicators.values())
        self._dense = [i for i in range(len(names)) if i not in skipped]
        self.rows = 0
        self.numbers = {names[i]: QuantileSketch() for i in self._dense}
        features = [f.name for f in schema.categorical] + [f.name for f in schema.ragged]
        self.ids = {name: np.zeros(0, np.int64) for name in features}
        self.folded: set[str] = set()
        self.waiting = dict.fromkeys(features, 0)

    @classmethod
    def count(cls, side: Side) -> "Counts":
        """Reads all examples of a side."""
        counts = cls(side.schema, side.waiting_from)
        for block in side.blocks():
            counts.add(block)
        return counts

    def add(self, block: Examples) -> None:
        self.rows += block.rows
        schema = self._schema
        for i in self._dense:
            values = raw_numbers(block.dense[:, i], schema.dense[i])
            if i in self._indicators:
                values = values[block.dense[:, self._indicators[i]] == 0]
            self.numbers[schema.dense[i].name].add(values)
        start = 0
        for feature in schema.categorical:
            self._add_ids(feature.name, block.ids[:, start : start + feature.length])
            start += feature.length
        owner = np.repeat(
            np.tile(np.arange(len(schema.ragged)), block.rows), block.list_lengths.reshape(-1)
        )
        for i, ragged in enumerate(schema.ragged):
            self._add_ids(ragged.name, block.list_values[owner == i])

    def _add_ids(self, name: str, rows: np.ndarray) -> None:
        present = rows[rows != PAD].astype(np.int64)
        if not len(present):
            return
        if name in self._waiting_from:
            waits = present >= self._waiting_from[name]
            self.waiting[name] += int(waits.sum())
            present[waits] = UNKNOWN_ROW
        limit = self._limits[name]
        above = present >= limit
        if above.any():
            self.folded.add(name)
            free = limit - RESERVED_ROWS
            present[above] = RESERVED_ROWS + (present[above] - RESERVED_ROWS) % free
        distinct, counts = np.unique(present, return_counts=True)
        stored = self.ids[name]
        if distinct[-1] >= len(stored):
            size = max(int(distinct[-1]) + 1, min(2 * len(stored), limit))
            stored = self.ids[name] = np.pad(stored, (0, size - len(stored)))
        stored[distinct] += counts
