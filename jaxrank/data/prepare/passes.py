"""Prepares a store from raw records in two passes: fit the encoders, then encode and write."""

import dataclasses
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from upath import UPath

from jaxrank import json_files
from jaxrank.data import files, keyed_hash
from jaxrank.data.encode.fit import (
    FIT_NOTHING,
    NOTHING,
    FitSpec,
    FittedEncoders,
    fit_spec,
)
from jaxrank.data.pipes import copy, is_pipe
from jaxrank.data.prepare.earlier import earlier_fitted
from jaxrank.data.prepare.preparation import Preparation
from jaxrank.data.prepare.runners import Local, Runner
from jaxrank.data.prepare.settings import TRAIN, PrepareSettings
from jaxrank.data.sources.registry import Source, make_source
from jaxrank.data.spec.derived import UnknownColumn, add_derived
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import (
    build_schema,
    provisional_schema,
    resolve,
    sort_features,
    take_transforms,
)
from jaxrank.data.statistics.report import unscaled_line
from jaxrank.data.store.reader import Store, StoreSpec, open_store
from jaxrank.data.store.writer import SCRATCH, StoreWriter
from jaxrank.errors import InputError, RunError
from jaxrank.features import Schema
from jaxrank.report import Report
from jaxrank.validate import COMPRESSIONS, ON_ERROR, check_choice

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
    _check_options(block_size, compression, on_error, max_rejected)
    if refit_scales and not vocabularies:
        raise InputError("--refit-scales: must have --vocabularies: found none.")
    spec = FeatureSpec.from_state(features).stored
    unread: frozenset[str] = frozenset()
    if unlabelled:
        spec, unread = spec.without_labels(), spec.columns_of_tasks
    key = keyed_hash.fingerprint(keyed_hash.read_key(hash_key_file)) if hash_key_file else ""
    try:
        with StoreWriter(output) as writer:
            section = _copy_pipes(source, writer.work)
            data = make_source(section)
            resolved = _resolve(spec, data, unread)
            data.check_columns(resolved.named)
            if check is not None:
                check(provisional_schema(resolved))
            resolved, earlier = _reuse(resolved, vocabularies, key, scales=not refit_scales)
            settings = PrepareSettings(
                features=resolved,
                source=section,
                directory=str(writer.work),
                wanted=_wanted(resolved, data, earlier, vocabularies),
                block_size=block_size,
                compression=compression,
                on_error=on_error,
                max_rejected=max_rejected,
                types=dict(data.types),
                hash_key_file=hash_key_file,
                token=secrets.token_hex(8),
            )
            preparation = Preparation(settings, data, writer, runner or Local(), report)
            writer.keep |= preparation.bytes >= _LITTLE
            preparation.report_sample()
            fitted = preparation.fit(earlier)
            resolved = preparation.features
            preparation.write(fitted)
            preparation.report_new_values(earlier, vocabularies)
            store_spec = _store_spec(spec, resolved, source, fitted, key)
            copies = str(writer.work)  # of pipes, which are removed
            marks = [m for m in preparation.marks.values() if not m.path.startswith(copies)]
            store = writer.finish(_schema(resolved, fitted), store_spec, marks)
    except OSError as error:  # read errors are InputErrors already
        raise RunError(f"{output}: the store could not be written: {error}.") from error
    split = TRAIN if TRAIN in data.splits else data.splits[0]
    line = unscaled_line(store.schema.dense, store.split(split).statistics)
    if line:
        hint = " They are scaled by a split 'train', or as in a store that --vocabularies names."
        report(line + hint * (TRAIN not in data.splits and not vocabularies))
    return store


def _check_options(block_size: int, compression: str, on_error: str, max_rejected: int) -> None:
    if block_size < 1:
        raise InputError(f"block_size: must be 1 or more: found {block_size}.")
    check_choice("data.compression", compression, COMPRESSIONS)
    check_choice("--on-error", on_error, ON_ERROR)
    if max_rejected < 0:
        raise InputError(f"--max-rejected: must be 0 or more: found {max_rejected}.")


def _schema(resolved: FeatureSpec, fitted: FittedEncoders) -> Schema:
    return build_schema(
        resolved,
        {name: v.rows for name, v in fitted.vocabularies.items()},
        {name: v.checksum for name, v in fitted.vocabularies.items()},
        fitted.transforms,
        fitted.boundaries,
    )


def _copy_pipes(source: Mapping[str, Any], directory: UPath) -> dict[str, Any]:
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
            return _copied(_STDIN, _copy_stdin)
        if isinstance(path, str) and files.is_local(path) and is_pipe(path):
            if files.identify(path) in map(files.identify, pipes):
                raise InputError(f"source.files: must name a pipe once: found {path!r} again.")
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


def _copy_stdin(file: BinaryIO) -> None:
    shutil.copyfileobj(sys.stdin.buffer, file)
    if not file.tell():
        raise InputError(f"{_STDIN}: must have at least one row: found nothing.")


def _resolve(spec: FeatureSpec, data: Source, unread: Collection[str]) -> FeatureSpec:
    """Resolves the spec over the columns of the training split, which every split must have."""
    first = TRAIN if TRAIN in data.splits else data.splits[0]
    try:
        resolved = resolve(spec, add_derived(spec.derived, data.columns(first)), unread)
    except UnknownColumn as error:
        raise InputError(f"{error}{data.hint}") from error
    for split in data.splits:
        if resolve(spec, add_derived(spec.derived, data.columns(split)), unread) != resolved:
            raise InputError(
                f"source: the split {split!r} must have the columns of {first!r}: found"
                f" {data.columns(split)} and {data.columns(first)}."
            )
    return resolved


def _reuse(
    features: FeatureSpec, vocabularies: str, key: str, *, scales: bool
) -> tuple[FeatureSpec, FittedEncoders]:
    """Returns the features in the order of an earlier store, and the encoders to reuse from it.

    Args:
        features: resolved.
        vocabularies: the store; empty: none.
        key, scales: see `earlier_fitted`.
    """
    if not vocabularies:
        return features, NOTHING
    store = open_store(vocabularies)
    features = sort_features(features, store.schema)
    if scales:
        dense = take_transforms(features.dense, store.schema)
        features = dataclasses.replace(features, dense=dense)
    return features, earlier_fitted(features, store, key, scales=scales)


def _wanted(
    features: FeatureSpec, data: Source, earlier: FittedEncoders, vocabularies: str
) -> FitSpec:
    """Returns the values to fit. Raises if that needs a training split and there is none, or a time
    column.

    Args:
        vocabularies: the store of `earlier`.
    """
    wanted = fit_spec(features, earlier)
    if not wanted.any or TRAIN in data.splits:
        if not wanted.days and any(h.by_event for h in earlier.histories.values()):
            raise InputError(
                "features.time: must name the column of event times, because the store"
                f" {vocabularies} counts ids by the day of their events: found none. Set"
                " features.time as for that store, or prepare without --vocabularies."
            )
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
