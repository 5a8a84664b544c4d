"""Raw records -> a store: one pass to learn vocabularies and scales, one to encode and write."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.block import Block, concatenate, slice_block
from jaxrank.data.columns import texts
from jaxrank.data.encode import Encoder, id_elements, list_elements, log_transform, raw_floats
from jaxrank.data.rejects import Rejects
from jaxrank.data.resolve import build_schema, resolve
from jaxrank.data.sources import Source, make_source
from jaxrank.data.spec import FeatureSpec, TableSpec
from jaxrank.data.statistics import Moments, Statistics
from jaxrank.data.store import Store, open_store
from jaxrank.data.store_writer import StoreWriter
from jaxrank.data.vocabulary import Counter, Vocabulary, build
from jaxrank.errors import InputError, RunError

TRAIN = "train"  # the split that everything is learned from
_MOST_FEATURES_REPORTED = 20


class Learned(NamedTuple):
    """What encoding needs beyond the spec.

    vocabularies: by table.
    transforms: (mean, deviation) after `log` of each float that is standardised, by name.
    """

    vocabularies: dict[str, Vocabulary]
    transforms: dict[str, tuple[float, float]]


def prepare(
    features: Mapping[str, Any],
    source: Mapping[str, Any],
    output: str | Path,
    *,
    block_size: int = 8192,
    vocabularies: str = "",
    report: Callable[[str], None] = print,
) -> Store:
    """Writes the store `output` from raw data.

    The manifest's `spec` holds `features` (`spec.canonical` of the section) and `transforms`.

    Args:
        features: the config's section, see `spec.FeatureSpec`.
        source: the config's section, see `sources.make_source`.
        block_size: examples in a block; the last of a split may have fewer.
        vocabularies: an earlier store, whose rows and transforms stay as they are. Values that are
            new in the split "train" get rows behind the old ones.
        report: gets lines for people to read.

    Raises:
        InputError: something in the configs or the data; names file, row and column.
        RunError: the store could not be written. Nothing is left at `output`.
    """
    if block_size < 1:
        raise InputError(f"block_size: must be 1 or more: found {block_size}.")
    spec = FeatureSpec.from_config(features)
    data = make_source(source)
    resolved = _resolve(spec, data)
    earlier = _earlier(resolved, open_store(vocabularies)) if vocabularies else Learned({}, {})
    try:
        with StoreWriter(output) as writer:
            learned = _learn(resolved, data, earlier, report)
            for table, vocabulary in learned.vocabularies.items():
                writer.write_vocabulary(
                    table, vocabulary.values.to_pylist(), vocabulary.counts.tolist()
                )
            for split in data.splits:
                _write_split(writer, split, data, resolved, learned, block_size, report)
            schema = build_schema(
                resolved,
                {name: v.rows for name, v in learned.vocabularies.items()},
                {name: v.checksum for name, v in learned.vocabularies.items()},
                learned.transforms,
            )
            transforms = {name: list(pair) for name, pair in learned.transforms.items()}
            return writer.finish(schema, {"features": spec.to_config(), "transforms": transforms})
    except OSError as error:  # those of reading are InputErrors already
        raise RunError(f"{output}: the store could not be written: {error}.") from error


def _resolve(spec: FeatureSpec, data: Source) -> FeatureSpec:
    """The spec over the columns of the training split, which every split must have."""
    first = TRAIN if TRAIN in data.splits else data.splits[0]
    resolved = resolve(spec, data.columns(first))
    for split in data.splits:
        if resolve(spec, data.columns(split)) != resolved:
            raise InputError(
                f"source: the split {split!r} must have the columns of {first!r}: found"
                f" {data.columns(split)} and {data.columns(first)}."
            )
    return resolved


def _vocabulary_tables(features: FeatureSpec) -> list[TableSpec]:
    return [table for table in features.tables if table.encoding == "vocabulary"]


def _earlier(features: FeatureSpec, store: Store) -> Learned:
    """What an earlier store has of what these features need."""
    found = {table.name: table.encoding for table in store.schema.tables}
    vocabularies = {}
    for table in features.tables:
        encoding = found.get(table.name, table.encoding)
        if encoding != table.encoding:
            raise InputError(
                f"{store.path}: the table {table.name!r} must have encoding={table.encoding!r} as"
                f" in the config: found {encoding!r}."
            )
        if table.encoding == "vocabulary" and table.name in found:
            values, counts = store.vocabulary(table.name)
            vocabularies[table.name] = Vocabulary(pa.array(values, pa.string()), counts)
    return Learned(vocabularies, _earlier_transforms(features, store))


def _earlier_transforms(features: FeatureSpec, store: Store) -> dict[str, tuple[float, float]]:
    learned = store.spec.get("transforms", {})
    log_of = {f.name: f.log for f in store.schema.floats}
    found = {}
    for entry in features.floats:
        if not entry.standardize or entry.name not in learned:
            continue
        if entry.log != log_of[entry.name]:
            raise InputError(
                f"{store.path}: the float {entry.name!r} must have log={entry.log} as in the"
                f" config, for its mean and deviation to be used again: found"
                f" log={log_of[entry.name]}. Set `log` as it was."
            )
        mean, std = learned[entry.name]
        found[entry.name] = (mean, std)
    return found


def _learn(
    features: FeatureSpec, data: Source, earlier: Learned, report: Callable[[str], None]
) -> Learned:
    """A pass over the training split, where something is to be learned from it."""
    tables = _vocabulary_tables(features)
    floats = [f for f in features.floats if f.standardize and f.name not in earlier.transforms]
    if not tables and not floats:
        return earlier
    if TRAIN not in data.splits:
        lacking = [t.name for t in tables if t.name not in earlier.vocabularies]
        lacking += [f.name for f in floats]
        if lacking:
            raise InputError(
                f"source: must have a split {TRAIN!r} to learn {', '.join(lacking)} from, or an"
                f" earlier store must have learned them: found the splits {data.splits}."
            )
        return earlier
    began = time.perf_counter()
    counters = {table.name: Counter() for table in tables}
    names = [f.name for f in floats]
    log = np.array([f.log for f in floats], bool)
    moments = Moments(len(floats))
    rows = 0
    for chunk in _chunks(data, TRAIN):
        rows += chunk.batch.num_rows
        moments.add(log_transform(raw_floats(names, chunk), log))
        for entry in features.ids:
            if entry.table in counters:
                counters[entry.table].add(texts(id_elements(entry, chunk)))
        for list_entry in features.lists:
            if list_entry.table in counters:
                counters[list_entry.table].add(texts(list_elements(list_entry, chunk).ids))
    vocabularies = {
        t.name: build(counters[t.name], t.min_count, earlier.vocabularies.get(t.name))
        for t in tables
    }
    pairs = zip(moments.mean.tolist(), moments.std.tolist(), strict=True)
    report(f"learned from {TRAIN}: {_speed(rows, began)}")
    return Learned(vocabularies, earlier.transforms | dict(zip(names, pairs, strict=True)))


def _chunks(data: Source, split: str) -> Iterator[Any]:
    for part in data.parts(split):
        yield from data.chunks(part, Rejects())


def _speed(rows: int, began: float) -> str:
    seconds = time.perf_counter() - began
    return f"{rows:,} rows in {seconds:.1f} s, {rows / max(seconds, 1e-9):,.0f} rows/s"


def _write_split(
    writer: StoreWriter,
    split: str,
    data: Source,
    features: FeatureSpec,
    learned: Learned,
    block_size: int,
    report: Callable[[str], None],
) -> None:
    began = time.perf_counter()
    statistics = Statistics(features)
    encoder = Encoder(features, learned.vocabularies, learned.transforms, statistics)
    entry: dict[str, Any] = {}
    target = writer.split(split, entry)
    for block in _blocks_of(map(encoder.encode, _chunks(data, split)), block_size):
        target.write(block)
    if not statistics.rows:
        raise InputError(f"source: the split {split!r} must have at least one row: found none.")
    entry.update(statistics.to_json())
    report(f"{split}: {_speed(statistics.rows, began)}")
    for line in describe(entry):
        report(f"  {line}")


def _blocks_of(pieces: Iterable[Block], size: int) -> Iterator[Block]:
    """The same examples in blocks of `size`; the last may have fewer."""
    pending: list[Block] = []
    rows = 0
    for piece in pieces:
        start = 0
        while rows + piece.rows - start >= size:
            stop = start + size - rows
            yield concatenate([*pending, slice_block(piece, start, stop)])
            pending, rows, start = [], 0, stop
        if start < piece.rows:
            pending.append(slice_block(piece, start, piece.rows))
            rows += piece.rows - start
    if pending:
        yield concatenate(pending)


def describe(statistics: Mapping[str, Any]) -> list[str]:
    """A split's statistics as lines for people, a summary where the features are many."""
    rows = max(statistics["rows"], 1)
    lines = [
        f"{name}: {t['known']:,} labels, {t['positives'] / max(t['known'], 1):.2%} positive"
        for name, t in statistics["tasks"].items()
    ]
    floats, ids, lists = parts = [statistics[kind] for kind in ("floats", "ids", "lists")]
    outside = [
        f"{name}: {f['out_of_range']:,} ids are no rows of their table"
        for name, f in (*ids.items(), *lists.items())
        if f["out_of_range"]
    ]
    if sum(map(len, parts)) > _MOST_FEATURES_REPORTED:
        return [*lines, *_summary(statistics, rows), *outside]
    lines += [f"{name}: {f['missing'] / rows:.2%} missing" for name, f in floats.items()]
    lines += [
        f"{name}: {f['missing'] / rows:.2%} missing, {f['unknown'] / rows:.2%} unknown"
        for name, f in ids.items()
    ]
    lines += [
        f"{name}: {f['mean']:.2f} ids, at most {f['max']}, {f['empty'] / rows:.2%} empty,"
        f" {f['unknown']:,} ids unknown, {f['truncated_ids']:,} cut"
        for name, f in lists.items()
    ]
    return lines + outside


def _summary(statistics: Mapping[str, Any], rows: int) -> list[str]:
    lines = []
    for kind, fields in (("floats", ["missing"]), ("ids", ["missing", "unknown"])):
        columns = statistics[kind]
        for field in fields if columns else []:
            most = max(columns, key=lambda name: columns[name][field])
            mean = sum(c[field] for c in columns.values()) / len(columns) / rows
            share = columns[most][field] / rows
            lines.append(f"{len(columns)} {kind}: {mean:.2%} {field}, most in {most} ({share:.2%})")
    lists = statistics["lists"]
    if lists:
        longest = max(lists, key=lambda name: lists[name]["max"])
        total = sum(f["mean"] for f in lists.values())
        lines.append(
            f"{len(lists)} lists: {total:.2f} ids an example, the longest list in {longest}"
            f" ({lists[longest]['max']}), {sum(f['truncated_ids'] for f in lists.values()):,} cut"
        )
    return lines
