"""Prepares a store from raw records in two passes: fit the encoders, then encode and write."""

import collections
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from upath import UPath

from jaxrank import json_files
from jaxrank.data import files, keyed_hash
from jaxrank.data.encode.fit import (
    FIT_NOTHING,
    NOTHING,
    FitSpec,
    FitState,
    FittedEncoders,
    fit_spec,
    looks_at_last_event,
)
from jaxrank.data.pipes import copy, is_pipe
from jaxrank.data.prepare import encode_unit, fit_unit, sample
from jaxrank.data.prepare.earlier import earlier_fitted
from jaxrank.data.prepare.runners import Local, Runner
from jaxrank.data.prepare.settings import PrepareSettings
from jaxrank.data.prepare.units import units_of
from jaxrank.data.sources.registry import Source, make_source
from jaxrank.data.spec.derived import with_derived
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.parse import feature_spec
from jaxrank.data.spec.resolve import (
    UnknownColumn,
    build_schema,
    ordered_as,
    provisional_schema,
    resolve,
)
from jaxrank.data.statistics import admission, new_values
from jaxrank.data.statistics import report as statistics_report
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.store.reader import Store, StoreSpec, open_store
from jaxrank.data.store.writer import SCRATCH, StoreWriter
from jaxrank.errors import InputError, RunError
from jaxrank.features import Schema
from jaxrank.report import Report
from jaxrank.validate import COMPRESSIONS, ON_ERROR, check_choice

TRAIN = "train"  # the split that encoders are fitted on
_LITTLE = 64 << 20  # bytes of raw data, below which a partial preparation is not kept
_STDIN = "standard input"  # name of the file that stores the standard input, shown in messages


def prepare(
    features: Mapping[str, Any],
    source: Mapping[str, Any],
    output: str | Path,
    *,
    block_size: int = 8192,
    compression: str = "",
    vocabularies: str = "",
    refit_scales: bool = False,
    on_error: str = "error",
    max_rejected: int = 1000,
    hash_key_file: str = "",
    unlabelled: bool = False,
    runner: Runner | None = None,
    report: Report = print,
    check: Callable[[Schema], None] | None = None,
) -> Store:
    """Writes the store `output` from raw data.

    After an error or a kill, completed work is kept in `.NAME.partial` beside the output and reused
    by the next run. It is not kept for small data.

    Args:
        features: the config's section, see `spec.features.FeatureSpec`.
        source: the config's section, see `sources.registry.make_source`. A file "-" is the standard
            input.
        output: path or URL.
        block_size: examples per block. The last block of a part of the data may have fewer.
        compression: of blocks, "lz4" or "zstd". Empty: none.
        vocabularies: an earlier store, whose values, scales and boundaries are kept. The split
            "train" decides which values are new and which are evicted, see `admission.admit`.
            Features with mostly new values are reported.
        refit_scales: if True, scales and boundaries are fitted to this data instead.
        on_error: policy for invalid records, "error" or "skip".
        max_rejected: maximum number of skipped records. They are listed in `rejected.jsonl`.
        hash_key_file: file of at least 16 bytes. Vocabularies and rejected records then hold keyed
            hashes instead of raw values.
        unlabelled: if True, columns that tasks name are not read and all labels are unknown.
        runner: executes the units. None: processes of this machine.
        report: receives lines for the user.
        check: receives the schema before records are read, when vocabularies have no rows yet, and
            may raise InputError.

    Raises:
        InputError: something in the configs or the data is invalid. Names file, row and column.
        RunError: the store could not be written, another process is writing it, or a file of the
            source has changed in the meantime. Nothing is left at `output`.
    """
    if block_size < 1:
        raise InputError(f"block_size: must be 1 or more: found {block_size}.")
    if refit_scales and not vocabularies:
        raise InputError("--refit-scales: must have --vocabularies: found none.")
    check_choice("data.compression", compression, COMPRESSIONS)
    check_choice("--on-error", on_error, ON_ERROR)
    if max_rejected < 0:
        raise InputError(f"--max-rejected: must be 0 or more: found {max_rejected}.")
    spec = feature_spec(features).stored
    unread: frozenset[str] = frozenset()
    if unlabelled:
        spec, unread = spec.without_labels(), spec.columns_of_tasks
    key = keyed_hash.fingerprint(keyed_hash.read_key(hash_key_file)) if hash_key_file else ""
    try:
        with StoreWriter(output) as writer:
            section = _with_copies(source, writer.work)
            data = make_source(section)
            resolved = _resolve(spec, data, unread)
            data.check_columns(resolved.named)
            if check is not None:
                check(provisional_schema(resolved))
            earlier = NOTHING
            if vocabularies:
                store = open_store(vocabularies)
                resolved = ordered_as(resolved, store.schema)
                earlier = earlier_fitted(resolved, store, key, scales=not refit_scales)
            wanted = _wanted(resolved, data, earlier)
            settings = PrepareSettings(
                features=resolved,
                source=section,
                directory=str(writer.work),
                wanted=wanted,
                block_size=block_size,
                compression=compression,
                on_error=on_error,
                max_rejected=max_rejected,
                types=dict(data.types),
                hash_key_file=hash_key_file,
                token=secrets.token_hex(8),
            )
            preparation = _Preparation(settings, data, writer, runner or Local(), report)
            writer.keep |= preparation.bytes >= _LITTLE
            preparation.report_sample()
            fitted = preparation.fit(earlier)
            preparation.write(fitted)
            preparation.report_new_values(earlier, vocabularies)
            schema = build_schema(
                resolved,
                {name: v.rows for name, v in fitted.vocabularies.items()},
                {name: v.checksum for name, v in fitted.vocabularies.items()},
                fitted.transforms,
                fitted.boundaries,
            )
            return writer.finish(schema, _store_spec(spec, resolved, source, fitted, key))
    except OSError as error:  # read errors are InputErrors already
        raise RunError(f"{output}: the store could not be written: {error}.") from error


def _with_copies(source: Mapping[str, Any], directory: UPath) -> dict[str, Any]:
    """Replaces the standard input and pipes, which can be read only once, by copies in files."""
    section = dict(source)
    paths = section.get("files")
    if not isinstance(paths, Mapping):
        return section
    if sum(path == "-" for path in paths.values()) > 1:
        raise InputError("source.files: one split may be the standard input, '-': found several.")
    pipes: list[str] = []

    def replaced(path: Any) -> Any:
        if isinstance(path, list | tuple):
            return [replaced(entry) for entry in path]
        if path == "-":
            return _copied(_STDIN, lambda file: shutil.copyfileobj(sys.stdin.buffer, file))
        if isinstance(path, str) and files.is_local(path) and is_pipe(path):
            pipes.append(path)
            name = f"pipe {len(pipes)}, {path.rpartition('/')[2]}"
            return _copied(name, lambda file: copy(path, file))
        return path

    def _copied(name: str, write: Callable[[BinaryIO], None]) -> str:
        kept = directory / SCRATCH / name
        kept.parent.mkdir(exist_ok=True)
        with kept.open("wb") as file:
            write(file)
        return str(kept)

    section["files"] = {split: replaced(path) for split, path in paths.items()}
    return section


def _resolve(spec: FeatureSpec, data: Source, unread: Collection[str]) -> FeatureSpec:
    """Resolves the spec over the columns of the training split, which every split must have."""
    first = TRAIN if TRAIN in data.splits else data.splits[0]
    try:
        resolved = resolve(spec, with_derived(spec.derived, data.columns(first)), unread)
    except UnknownColumn as error:
        raise InputError(f"{error}{data.hint}") from error
    for split in data.splits:
        if resolve(spec, with_derived(spec.derived, data.columns(split)), unread) != resolved:
            raise InputError(
                f"source: the split {split!r} must have the columns of {first!r}: found"
                f" {data.columns(split)} and {data.columns(first)}."
            )
    return resolved


def _wanted(features: FeatureSpec, data: Source, earlier: FittedEncoders) -> FitSpec:
    """Returns the values to fit. Raises if that needs a training split and there is none."""
    wanted = fit_spec(features, earlier)
    if not wanted.any or TRAIN in data.splits:
        return wanted
    lacking = [name for name in wanted.names if name not in earlier.vocabularies]
    if lacking:
        raise InputError(
            f"source: must have a split {TRAIN!r} to fit {', '.join(lacking)}, or an earlier store"
            f" must have them: found the splits {data.splits}."
        )
    return FIT_NOTHING


def _store_spec(
    spec: FeatureSpec,
    resolved: FeatureSpec,
    source: Mapping[str, Any],
    fitted: FittedEncoders,
    key: str,
) -> StoreSpec:
    """Returns the description of the store that the manifest records."""
    return StoreSpec(
        features=spec.to_state(),
        source=json_files.plain(source),
        transforms=json_files.plain(fitted.transforms),
        boundaries=json_files.plain(fitted.boundaries),
        buckets={f.name: f.buckets for f in resolved.categorical if f.buckets},
        hash_key=key,
    )


class _Preparation:
    """The two passes over all units."""

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
        marks = data.marks()
        self._units = {split: units_of(data, split, marks) for split in data.splits}
        self._new: dict[str, new_values.Counted] = {}  # by directory

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
        began = time.perf_counter()
        fit_state = self._fit_state(TRAIN, self._settings)
        self._report(f"Fitted on {TRAIN}: {_speed(fit_state.rows, began)}")
        fitted = fit_state.fitted(earlier)
        if earlier.vocabularies:
            for line in admission.report_lines(fitted.changes):
                self._report(line)
        return fitted

    def _fit_state(self, split: str, settings: PrepareSettings) -> FitState:
        self._runner.run(fit_unit.fit, settings, self._units[split])
        state = FitState(settings.features, settings.wanted)
        for unit in self._units[split]:
            state.merge(fit_unit.read_fit_state(settings, unit))
        return state

    def _as_of(self, split: str) -> float | None:
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
            began = time.perf_counter()
            units = self._units[split]
            state = fitted._replace(as_of=self._as_of(split)).to_state()
            learned_json = json_files.to_text(state, sort_keys=True)
            self._runner.run(encode_unit.encode, settings, units, learned_json)
            written = [encode_unit.read_result(settings, unit) for unit in units]
            rejected += [line for unit in written for line in unit.rejected]
            self._check_rejected(len(rejected))
            totals = self._joined(split, written)
            self._new |= {directory: joined.new for directory, joined in totals.items()}
            rows = sum(statistics.rows for statistics in totals.values())
            if not rows:
                raise InputError(
                    f"source: the split {split!r} must have at least one row: found none."
                )
            self._report(f"{split}: {_speed(rows, began)}")
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

    def _joined(self, split: str, written: Sequence[encode_unit.Written]) -> dict[str, Statistics]:
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
        for line in statistics_report.lines(whole.summary()):
            self._report(f"  {line}")

    def report_new_values(self, earlier: FittedEncoders, store: str) -> None:
        """Reports each feature most of whose values are missing in the earlier store."""
        features, vocabularies = self._settings.features, earlier.vocabularies
        for line in new_values.lines(features, self._new, vocabularies, store):
            self._report(line)


def _speed(rows: int, began: float) -> str:
    seconds = time.perf_counter() - began
    return f"{rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s"
