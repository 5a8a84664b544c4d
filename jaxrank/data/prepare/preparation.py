"""The two passes of a preparation over its units: fit the encoders, then encode and write."""

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrank import json_files
from jaxrank.data.encode.fit import (
    FIT_NOTHING,
    FitState,
    FittedEncoders,
    looks_at_last_event,
    with_scales,
)
from jaxrank.data.encode.scales import Scale
from jaxrank.data.encode.scales import line as scale_line
from jaxrank.data.prepare import encode_unit, fit_unit, gather_unit, sample
from jaxrank.data.prepare.runners import Runner
from jaxrank.data.prepare.settings import TRAIN, PrepareSettings
from jaxrank.data.prepare.units import make_units
from jaxrank.data.sources.registry import Source
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics import admission, new_values
from jaxrank.data.statistics import report as statistics_report
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.store.writer import StoreWriter
from jaxrank.errors import InputError
from jaxrank.report import Report

_SMALLEST_RANGE = 1e-15  # of real labels


class Preparation:
    """The two passes over all units.

    features: resolved. After `fit`, no transform is open.
    marks: versions of the files of the source, as in `Source.marks`.
    """

    def __init__(
        self,
        settings: PrepareSettings,
        data: Source,
        writer: StoreWriter,
        runner: Runner,
        report: Report,
    ):
        self._settings, self._data, self._writer = settings, data, writer
        self._runner, self._report = runner, report
        self.marks = marks = data.marks()
        self._units = {split: make_units(data, split, marks) for split in data.splits}
        self._new: dict[str, new_values.Counted] = {}  # by directory

    @property
    def features(self) -> FeatureSpec:
        return self._settings.features

    @property
    def bytes(self) -> int:
        """Returns the approximate bytes of raw data."""
        return sum(unit.bytes for units in self._units.values() for unit in units)

    def report_sample(self) -> None:
        """Reports what the first records seem to mean without a field that says so."""
        split = TRAIN if TRAIN in self._data.splits else self._data.splits[0]
        for line in sample.shared_files(self._data):
            self._report(line)
        if self._data.files and not self._settings.hash_key_file:
            for line in sample.notes(self._settings.features, self._data, split):
                self._report(line)

    def fit(self, earlier: FittedEncoders) -> FittedEncoders:
        """Runs a pass over the training split, if anything must be fitted."""
        if not self._settings.wanted.any:
            return earlier
        started = time.perf_counter()
        fit_state = self._fit_state(TRAIN, self._settings)
        self._report(f"Fitted on {TRAIN}: {_speed(fit_state.rows, started)}")
        fitted = fit_state.fitted(earlier)
        self._settings = self._settings._replace(features=with_scales(self.features, fitted))
        if fitted.logs:
            chosen = {n: Scale(log, *fitted.transforms[n]) for n, log in fitted.logs.items()}
            self._report(scale_line(chosen))
        if earlier.vocabularies or any(c.waiting or c.dropped for c in fitted.changes.values()):
            is_first = not earlier.vocabularies
            for line in statistics_report.vocabulary_lines(fitted.changes, is_first=is_first):
                self._report(line)
        if not self._settings.hash_key_file:
            for name, vocabulary in fitted.vocabularies.items():
                if line := statistics_report.forms_line(f"table {name}", vocabulary.values):
                    self._report(line)
        if days := _extended_days(earlier, fitted):
            self._report(
                f"{', '.join(days)}: the earlier store has counts of this day too, and both are"
                " added up. If that store has a part of the day and this data all of it, the part"
                " counts twice: set --vocabularies to the store of the day before"
            )
        for table in self._settings.wanted.tables:
            rows = len(fitted.vocabularies[table.name].values)
            if table.max_rows and rows > table.max_rows:
                self._report(
                    f"table {table.name}: {rows:,} ids have rows, more than max_rows ="
                    f" {table.max_rows:,}, because this data adds no counts: limits are applied"
                    " with the next new data"
                )
        return fitted

    def _fit_state(self, split: str, settings: PrepareSettings) -> FitState:
        self._runner.run(fit_unit.fit, settings, self._units[split])
        state = FitState(settings.features, settings.wanted)
        for unit in self._units[split]:
            state.merge(fit_unit.read_fit_state(settings, unit))
        return state

    def _snapshot_time(self, split: str) -> float | None:
        """Returns the latest event of a split, the time of its snapshot, if labels depend on it."""
        settings = self._settings
        if not looks_at_last_event(settings.features):
            return None
        return self._fit_state(
            split, settings._replace(wanted=FIT_NOTHING._replace(as_of=True))
        ).as_of

    def write(self, fitted: FittedEncoders) -> None:
        """Runs a pass over all splits."""
        settings = self._settings
        for table, vocabulary in fitted.vocabularies.items():
            history, changes = fitted.histories.get(table), fitted.changes.get(table)
            self._writer.write_vocabulary(
                table, vocabulary.values, vocabulary.counts, history, changes
            )
        rejected: list[str] = []
        for split in self._data.splits:
            started = time.perf_counter()
            units = self._units[split]
            state = fitted._replace(as_of=self._snapshot_time(split)).to_state()
            learned_json = json_files.to_text(state, sort_keys=True)
            buckets = gather_unit.number_of_buckets(units)
            self._runner.run(encode_unit.encode, settings, units, learned_json, buckets)
            written = [encode_unit.read_result(settings, unit) for unit in units]
            rejected += [line for unit in written for line in unit.rejected]
            self._check_rejected(len(rejected))
            gathered = self._gather(split, written, buckets) if settings.features.group else {}
            totals = self._joined(written, gathered)
            self._new |= {directory: joined.new for directory, joined in totals.items()}
            rows = sum(statistics.rows for statistics in totals.values())
            if not rows:
                raise InputError(
                    f"source: the split {split!r} must have at least one row: found none."
                )
            self._report(f"{split}: {_speed(rows, started)}")
            self._report_split(split, totals)
        if rejected:
            self._writer.write_rejected(rejected)
            self._report(f"{len(rejected):,} record(s) skipped: see rejected.jsonl in the store")

    def _check_rejected(self, count: int) -> None:
        limit = self._settings.max_rejected
        if count > limit:
            raise InputError(
                f"at most {limit:,} records may be skipped (--max-rejected): found {count:,}."
            )

    def _gather(
        self, split: str, written: Sequence[encode_unit.Written], buckets: int
    ) -> dict[str, gather_unit.Gathered]:
        """Brings the examples of each request together, and returns the blocks by directory."""
        scattered: dict[str, list[Any]] = collections.defaultdict(list)
        for unit in written:
            for directory, entry in unit.splits.items():
                scattered[directory].append(entry["files"])
        settings = self._settings
        checksum = gather_unit.write_scattered(settings, split, scattered)
        units = gather_unit.units_of_buckets(split, self._units[split], buckets)
        self._runner.run(gather_unit.gather, settings, units, checksum, buckets)
        gathered = gather_unit.read_gathered(settings, units)
        for line in gather_unit.lines(gathered, settings.features.group):
            self._report(f"{split}: {line}")
        return gathered

    def _joined(
        self,
        written: Sequence[encode_unit.Written],
        gathered: Mapping[str, gather_unit.Gathered],
    ) -> dict[str, Statistics]:
        """Adds the results of a split's units to the store and returns statistics by directory."""
        entries: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
        for unit in written:
            for directory, entry in unit.splits.items():
                entries[directory].append(entry)
        by_directory = {}
        for directory in sorted(entries):
            joined = Statistics(self._settings.features)
            for entry in entries[directory]:
                joined.merge(Statistics.from_state(self._settings.features, entry["statistics"]))
            of_files = [file for entry in entries[directory] for file in entry["files"]]
            if directory in gathered:
                of_files = gathered[directory].files
                joined.set_lengths(gathered[directory].lengths)
            self._writer.add(directory, of_files, joined.summary())
            by_directory[directory] = joined
        return by_directory

    def _report_split(self, split: str, totals: Mapping[str, Statistics]) -> None:
        for directory, joined in totals.items():
            if directory != split:
                self._report(f"  {directory}: {joined.rows:,} rows")
        whole = Statistics(self._settings.features)
        for joined in totals.values():
            whole.merge(joined)
        summary = whole.summary()
        if split == TRAIN:
            self._check_ranges(summary)
        for line in statistics_report.lines(summary):
            self._report(f"  {line}")

    def _check_ranges(self, summary: Mapping[str, Any]) -> None:
        """Rejects real labels whose differences have squares near 0 in float32."""
        for name, task in summary["tasks"].items():
            if task.get("kind") != "real" or task["min"] is None:
                continue
            if 0 < task["max"] - task["min"] < _SMALLEST_RANGE:
                raise InputError(
                    f"features.tasks: labels of {name!r} in the split {TRAIN!r} must have a range"
                    f" of at least {_SMALLEST_RANGE:g}, so that float32 can square it: found"
                    f" {task['min']:g} to {task['max']:g}. Multiply them by a constant."
                )

    def report_new_values(self, earlier: FittedEncoders, store: str) -> None:
        """Reports each feature most of whose values are missing in the earlier store."""
        features, vocabularies = self._settings.features, earlier.vocabularies
        for line in new_values.lines(features, self._new, vocabularies, store):
            self._report(line)


def _extended_days(earlier: FittedEncoders, fitted: FittedEncoders) -> list[str]:
    """Returns the dates to whose counts in the earlier store others are added."""
    days = {
        day
        for table, history in earlier.histories.items()
        for day in admission.extended_days(history, fitted.histories[table])
    }
    return [str(np.datetime64(day, "D")) for day in sorted(days)]


def _speed(rows: int, started: float) -> str:
    seconds = time.perf_counter() - started
    return f"{rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s"
