"""The first pass over the training data, which fits the encoders."""

import dataclasses
import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from upath import UPath

from jaxrank import json_files
from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.columns import numbers, read_column, texts
from jaxrank.data.encode.encoder import id_elements, log_transform, raw_floats
from jaxrank.data.encode.scales import OpenScales
from jaxrank.data.encode.sequences import all_lists
from jaxrank.data.encode.times import DAY, seconds
from jaxrank.data.keyed_hash import Pseudonymise, pseudonymised
from jaxrank.data.spec.entries import CategoricalSpec
from jaxrank.data.spec.features import FeatureSpec, TableSpec
from jaxrank.data.statistics.admission import NO_DAY, Changes, Limits, TableHistory, admit
from jaxrank.data.statistics.quantiles import QuantileSketch
from jaxrank.data.statistics.split import Moments
from jaxrank.data.statistics.vocabulary import Counter, Vocabulary
from jaxrank.features import RESERVED_ROWS

_SCHEMA = pa.schema(
    [("table", pa.int32()), ("day", pa.int32()), ("value", pa.string()), ("count", pa.int64())]
)


class FittedEncoders(NamedTuple):
    """Fitted values that encoding needs in addition to the spec.

    vocabularies: by table.
    transforms: (mean, deviation) after `log` of each standardised float, by name.
    boundaries: f64[buckets - 1] of each feature with fitted buckets, by name.
    logs: of each float whose transform was chosen, by name: True if it has `log`.
    as_of: the latest event of a split, in seconds since 1970, or None if no task needs it.
    earlier_rows: number of rows of each vocabulary whose values the earlier store had. Later rows
        are new.
    histories: what the store remembers beside each vocabulary, by table. A table of a store of an
        earlier version has none.
    changes: of each vocabulary, by table. Empty where nothing was fitted.
    """

    vocabularies: dict[str, Vocabulary]
    transforms: dict[str, tuple[float, float]]
    boundaries: dict[str, np.ndarray]
    as_of: float | None = None
    logs: Mapping[str, bool] = MappingProxyType({})
    earlier_rows: Mapping[str, int] = MappingProxyType({})
    histories: Mapping[str, TableHistory] = MappingProxyType({})
    changes: Mapping[str, Changes] = MappingProxyType({})

    def to_state(self) -> dict[str, Any]:
        """Returns a JSON-able state. It has only the checksums of vocabularies, which the store
        holds.
        """
        return {
            "transforms": self.transforms,
            "boundaries": {name: b.tolist() for name, b in self.boundaries.items()},
            "as_of": self.as_of,
            "vocabularies": {name: v.checksum for name, v in self.vocabularies.items()},
            "earlier_rows": dict(self.earlier_rows),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], vocabularies: dict[str, Vocabulary]
    ) -> "FittedEncoders":
        """Restores the object from the result of `to_state` and the same vocabularies."""
        return cls(
            vocabularies,
            {name: (mean, std) for name, (mean, std) in state["transforms"].items()},
            {name: np.asarray(b, np.float64) for name, b in state["boundaries"].items()},
            state["as_of"],
            earlier_rows=state["earlier_rows"],
        )


NOTHING = FittedEncoders({}, {}, {})


class FitSpec(NamedTuple):
    """The values to fit: tables, floats, buckets of ids, and the time of the last event.

    days: True if ids are counted by the day of their event.
    open: floats whose transform is chosen. They stay as they are without a training split.
    """

    tables: tuple[TableSpec, ...]
    dense: tuple[str, ...]
    buckets: tuple[CategoricalSpec, ...]
    as_of: bool
    days: bool = False
    open: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.names or self.open)

    @property
    def names(self) -> list[str]:
        names = [t.name for t in self.tables] + [*self.dense] + [f.name for f in self.buckets]
        return [*names, "the latest event"] if self.as_of else names


FIT_NOTHING = FitSpec((), (), (), False)


def fit_spec(features: FeatureSpec, earlier: FittedEncoders) -> FitSpec:
    """Returns the fits that a spec needs and `earlier` lacks. Vocabularies are always extended.

    Ids are counted by day if the earlier store counts so and there is a time.
    """
    counted_by_day = any(history.by_event for history in earlier.histories.values())
    return FitSpec(
        tables=tuple(t for t in features.tables if t.encoding == "vocabulary"),
        dense=tuple(
            f.name for f in features.dense if f.standardize and f.name not in earlier.transforms
        ),
        buckets=tuple(
            f for f in features.categorical if f.buckets and f.name not in earlier.boundaries
        ),
        as_of=False,
        open=tuple(f.name for f in features.dense if f.is_open),
        days=features.records_days or (counted_by_day and bool(features.time)),
    )


def with_scales(features: FeatureSpec, fitted: FittedEncoders) -> FeatureSpec:
    """Returns the features with the chosen transform in each open entry."""
    dense = tuple(
        dataclasses.replace(entry, log=fitted.logs[entry.name], standardize=True)
        if entry.name in fitted.logs
        else entry
        for entry in features.dense
    )
    return dataclasses.replace(features, dense=dense)


def looks_at_last_event(features: FeatureSpec) -> bool:
    """Returns True if labels depend on the latest event of their split."""
    return any(task.time for task in features.tasks) and not features.as_of


class FitState:
    """Accumulated counts of chunks, to fit encoders from. States of parts can be merged."""

    def __init__(self, features: FeatureSpec, wanted: FitSpec):
        self._features, self._wanted = features, wanted
        self.rows = 0
        self.as_of = -math.inf
        self.moments = Moments(len(wanted.dense))
        self.scales = OpenScales(wanted.open)
        self.newest = NO_DAY
        # By table and by day of the event, or 0 if days are not wanted.
        self.counters: dict[str, dict[int, Counter]] = {t.name: {} for t in wanted.tables}
        self.quantiles = {entry.name: QuantileSketch() for entry in wanted.buckets}
        # Whether an event is padding depends on all columns of its sequence.
        aligned = {name for sequence in features.sequences for name in sequence.features}
        ragged = tuple(
            entry
            for entry in features.ragged
            if entry.table in self.counters or entry.name in aligned
        )
        self._lists = dataclasses.replace(features, ragged=ragged)
        by_name = {f.name: f for f in features.dense}
        self._floats = [by_name[name] for name in wanted.dense]
        self._open = [by_name[name] for name in wanted.open]
        self._log = np.array([f.log for f in self._floats], bool)

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk. Raises BadRows before any of it is counted."""
        floats, open_floats = raw_floats(self._floats, chunk), raw_floats(self._open, chunk)
        values = [
            (entry.table, id_elements(entry, chunk))
            for entry in self._features.categorical
            if entry.table in self.counters
        ]
        values += [
            (entry.table, cells.ids)
            for entry, cells in zip(self._lists.ragged, all_lists(self._lists, chunk), strict=True)
            if entry.table in self.counters
        ]
        strings = [(table, texts(column), column.lengths) for table, column in values]
        numeric = {
            entry.name: numbers(read_column(chunk, entry.name), "a finite number or empty")
            for entry in self._wanted.buckets
        }
        times = None
        if self._wanted.as_of or self._wanted.days:
            column = read_column(chunk, self._features.time)
            times = seconds(column, time_format=self._features.time_format)
        days = np.zeros(chunk.batch.num_rows, np.int32)
        if self._wanted.days and times is not None:
            days = np.where(np.isnan(times), NO_DAY, np.nan_to_num(times) // DAY).astype(np.int32)
            self.newest = max(self.newest, int(days.max(initial=NO_DAY)))
        self.rows += chunk.batch.num_rows
        self.moments.add(log_transform(floats, self._log))
        self.scales.add(open_floats)
        of_chunk = np.unique(days).tolist()
        for table, column_values, lengths in strings:
            for day in of_chunk:
                part = column_values
                if len(of_chunk) > 1:
                    is_of_day = days == day if lengths is None else (days == day).repeat(lengths)
                    part = column_values.filter(pa.array(is_of_day))
                self.counters[table].setdefault(day, Counter()).add(part)
        for name, column_values in numeric.items():
            self.quantiles[name].add(column_values)
        if times is not None and not np.isnan(times).all():
            self.as_of = max(self.as_of, float(np.nanmax(times)))

    def merge(self, other: "FitState") -> None:
        self.newest = max(self.newest, other.newest)
        self.rows += other.rows
        self.as_of = max(self.as_of, other.as_of)
        self.moments.merge(other.moments)
        self.scales.merge(other.scales)
        for name, by_day in other.counters.items():
            for day, counter in by_day.items():
                self.counters[name].setdefault(day, Counter()).add_counts(counter.counts())
        for name, quantiles in other.quantiles.items():
            self.quantiles[name].merge(quantiles)

    def write(self, path: UPath, fingerprint: str, pseudonymise: Pseudonymise | None) -> None:
        """Writes an Arrow file. Only `pseudonymise`d values are written if it is not None."""
        state = {
            "fingerprint": fingerprint,
            "rows": self.rows,
            "as_of": self.as_of,
            "newest": self.newest,
            "moments": self.moments.to_state(),
            "scales": self.scales.to_state(),
            "quantiles": {name: q.to_state() for name, q in self.quantiles.items()},
        }
        schema = _SCHEMA.with_metadata({"jaxrank": json_files.to_text(state)})
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_file(buffer, schema) as sink:
            for index, by_day in enumerate(self.counters.values()):
                for day in sorted(by_day):
                    counts = by_day[day].counts()
                    values = counts["value"].combine_chunks()
                    values = pseudonymised(values, pseudonymise) if pseudonymise else values
                    keys = [pa.array(np.full(len(counts), key, np.int32)) for key in (index, day)]
                    sink.write_table(pa.table([*keys, values, counts["count"]], schema=schema))
        files.write_whole(path, buffer.getvalue())

    def read(self, path: UPath) -> str:
        """Restores the result of `write` and returns the fingerprint."""
        with path.open("rb") as file:
            content = pa.ipc.open_file(file).read_all()
        state = json.loads(content.schema.metadata[b"jaxrank"])
        self.rows, self.as_of, self.newest = state["rows"], state["as_of"], state["newest"]
        self.moments = Moments.from_state(state["moments"])
        self.scales = OpenScales.from_state(self._wanted.open, state["scales"])
        for name, sketch in state["quantiles"].items():
            self.quantiles[name] = QuantileSketch.from_state(sketch)
        tables, days = content["table"].to_numpy(), content["day"].to_numpy()
        for index, by_day in enumerate(self.counters.values()):
            first, last = np.searchsorted(tables, [index, index + 1]).tolist()
            for day in np.unique(days[first:last]).tolist():
                start, stop = first + np.searchsorted(days[first:last], [day, day + 1])
                counts = content.select(["value", "count"]).slice(start, stop - start)
                by_day.setdefault(day, Counter()).add_counts(counts)
        return state["fingerprint"]

    def fitted(self, earlier: FittedEncoders) -> FittedEncoders:
        """Fits the encoders from these counts and the fitted encoders of an earlier store."""
        admitted = {
            t.name: admit(
                self.counters[t.name],
                Limits(t.min_count, t.max_rows, t.keep_days, t.max_waiting),
                newest=self.newest,
                by_event=self._wanted.days,
                earlier=earlier.vocabularies.get(t.name),
                history=earlier.histories.get(t.name),
            )
            for t in self._wanted.tables
        }
        pairs = zip(self.moments.mean.tolist(), self.moments.std.tolist(), strict=True)
        transforms = dict(zip(self._wanted.dense, pairs, strict=True))
        chosen = self.scales.choose()
        transforms |= {name: (scale.mean, scale.std) for name, scale in chosen.items()}
        boundaries = {
            f.name: self.quantiles[f.name].boundaries(f.buckets) for f in self._wanted.buckets
        }
        return FittedEncoders(
            earlier.vocabularies | {name: a.vocabulary for name, a in admitted.items()},
            earlier.transforms | transforms,
            earlier.boundaries | boundaries,
            logs={name: scale.log for name, scale in chosen.items()},
            earlier_rows={
                name: RESERVED_ROWS + admitted[name].changes.kept if name in admitted else rows
                for name, rows in earlier.earlier_rows.items()
            },
            histories={
                **earlier.histories,
                **{name: a.history for name, a in admitted.items()},
            },
            changes={name: a.changes for name, a in admitted.items()},
        )
