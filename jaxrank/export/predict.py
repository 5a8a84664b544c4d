"""Predicts raw data with a bundle: the encoders of preparation, and the tables of the scorer."""

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.derive import derive
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.examples import Examples, cut, traffic_weights
from jaxrank.data.keyed_hash import pseudonymise, read_key
from jaxrank.data.ragged import places_of_lists
from jaxrank.data.rejects import BadRows, Rejects
from jaxrank.data.sources.registry import make_source
from jaxrank.data.spec.derived import UnknownColumn, add_derived, check_column
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.sequences import age_features
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.errors import InputError
from jaxrank.evaluation.score import Scored, check_finite, check_output, write_table
from jaxrank.export.comparison.check import load_stablehlo
from jaxrank.features import PAD, UNKNOWN_ROW, Task
from jaxrank.report import Report
from jaxrank.runtime.threads import available_cores

if TYPE_CHECKING:
    from jaxrank_serving.encoder import Features
    from jaxrank_serving.index import Index
    from jaxrank_serving.signature import Signature

_SPLIT = "input"
_PIECE = 512
_TEXT_KINDS = ("csv", "criteo")
_BOOLEANS = {"true": "1", "1": "1", "false": "0", "0": "0"}
_NUMBERS = ("int", "uint", "float")
_ENDS = {".csv": ",", ".tsv": "\t", ".txt": ","}  # delimiters of text of another kind of run


class BundlePrediction(NamedTuple):
    """Summary of the predictions that `predict_bundle` wrote.

    version: checksum of the bundle's manifest.
    labelled: True if the input has labels.
    """

    rows: int
    output: str
    bundle: str
    version: str
    labelled: bool
    seconds: float


def predict_bundle(
    bundle: str, *, inputs: str, output: str, hash_key_file: str = "", report: Report = print
) -> BundlePrediction:
    """Writes the predictions of a bundle for raw data to a Parquet file, row by row in order.

    The columns are the ones of `score.write_predictions`. Labels are null if the input lacks them.
    Memory does not grow with the input. The file appears under its name only when it is complete.

    Args:
        bundle: directory of the bundle.
        inputs: a path, glob or directory of files in the format of the training data, or of Parquet
            or CSV files by their ends.
        hash_key_file: key of a store with keyed hashes.

    Raises:
        InputError: bundle, input or output are invalid, or a row is one that training rejects.
        RunError: a prediction is not finite, or the output cannot be written.
    """
    from jaxrank_serving import BundleError, Scorer
    from jaxrank_serving.bundle import open_bundle
    from jaxrank_serving.values import TEXTS

    started = time.perf_counter()
    path = check_output(output)
    key = read_key(hash_key_file) if hash_key_file else None
    try:
        opened = open_bundle(bundle)
        stand_in = None if opened.signature.model.onnx else load_stablehlo(opened)
        threads = available_cores() or 1
        # Threads of ONNX Runtime wait for each other in a loop, which took half of the processor.
        scorer = Scorer(opened, dense_part=stand_in, threads=1, hash_key=key)
    except BundleError as error:
        raise InputError(f"--bundle: {error}") from error
    signature = opened.signature
    if not signature.preparation:
        raise InputError(
            f"--bundle: {bundle}: must have the preparation of its features, to encode files: found"
            " none, because its format is 1. Export the model again, or predict with --workdir."
        )
    files.find(inputs)  # raises for a missing file, before `make_source` names a field for it
    section = _source(signature.preparation["source"], inputs)
    source = make_source(section)
    names = source.columns(_SPLIT)
    spec, missing = _labelled(FeatureSpec.from_state(signature.preparation["features"]), names)
    if missing:
        report(f"Without labels: {inputs} has no column {missing!r}")
    _check_names(spec, names, inputs, source.hint)
    source = make_source(section, spec.named)
    source.check_columns(spec.named)
    encoder = _encoder(signature, scorer.index, spec, key)
    is_text = section["kind"] in _TEXT_KINDS
    types = {c.name: c.type for c in signature.columns if not c.is_list} if is_text else {}
    typed = {name: kind for name, kind in types.items() if kind not in TEXTS}
    tasks = [Task(t.name, t.kind) for t in spec.tasks]

    def logits_of(examples: Examples) -> np.ndarray:
        arrays = scorer.arrays(_features(signature, examples), examples.rows)
        return scorer.logits(arrays)

    def scored() -> Iterator[tuple[Scored, list[Examples]]]:
        first = 1
        encoded = _examples(source, spec, encoder, typed)
        with ThreadPoolExecutor(threads) as pool:
            for examples in _ahead(encoded) if threads > 1 else encoded:
                parts = pool.map(logits_of, _pieces(examples))
                logits = np.concatenate(list(parts))[:, : len(tasks)]
                check_finite(logits, tasks, inputs, first)
                first += examples.rows
                traffic = examples.labels, examples.weights, examples.logit_correction
                yield Scored(logits, examples.labels, traffic_weights(*traffic)), [examples]

    results, stored = itertools.tee(scored())
    rows = write_table((r for r, _ in results), (pieces for _, pieces in stored), tasks, path)
    seconds = time.perf_counter() - started
    return BundlePrediction(rows, output, bundle, opened.version, not missing, seconds)


def _source(trained: dict[str, Any], inputs: str) -> dict[str, Any]:
    """Returns the section `source` for input in the format of the training, or as files end."""
    files = {"files": {_SPLIT: inputs}}
    name = inputs.lower()
    for end in (".gz", ".zst", ".bz2"):
        name = name.removesuffix(end)
    end = os.path.splitext(name)[1]
    if end == ".parquet":
        return {"kind": "parquet"} | files
    if end in _ENDS and trained["kind"] not in _TEXT_KINDS:
        return {"kind": "csv", "delimiter": _ENDS[end]} | files
    return trained | files


def _labelled(spec: FeatureSpec, columns: list[str]) -> tuple[FeatureSpec, str]:
    """Returns the spec, without labels if a column of them is absent, and that column's name."""
    missing = sorted(spec.columns_of_tasks - set(columns))
    is_late = any(task.time for task in spec.tasks) and not spec.as_of
    if missing or is_late:  # labels that come later need the time of the snapshot
        return spec.without_labels(), missing[0] if missing else "as_of"
    return spec, ""


def _check_names(spec: FeatureSpec, names: list[str], inputs: str, hint: str) -> None:
    """Raises UnknownColumn, with the hint of the source, for a column that the input lacks."""
    try:
        columns = [*add_derived(spec.derived, names), *age_features(spec.sequences)]
        entries: list[Any] = [*spec.dense, *spec.categorical, *spec.ragged]
        for entry in entries:
            check_column(entry.columns[0], columns, f"feature {entry.name}")
    except UnknownColumn as error:
        must = " The input must have the format of the training data."
        raise UnknownColumn(f"{inputs}: {error}{hint}{must}") from error
    except InputError as error:  # a derived column has the name of another one
        raise InputError(f"{inputs}: {error}") from error


def _encoder(
    signature: "Signature", index: "Index", spec: FeatureSpec, key: bytes | None
) -> Encoder:
    seeds = {t.name: t.seed for t in signature.tables if t.encoding == "vocabulary"}
    buckets = (f for f in signature.categorical if f.encoding == "bucket")
    return Encoder(
        spec,
        {name: _IndexedVocabulary(index, seed) for name, seed in seeds.items()},
        {entry.name: (entry.mean, entry.std) for entry in signature.dense},
        Statistics(spec),
        boundaries={f.name: np.asarray(f.boundaries) for f in buckets},
        pseudonymise=pseudonymise(key) if signature.hash_key and key else None,
        counts=False,
    )


class _IndexedVocabulary(Vocabulary):
    """Looks up values in the index of a bundle."""

    def __init__(self, index: "Index", seed: int):
        self._index, self._seed = index, seed

    def lookup(self, values: Iterable[str], count: int) -> np.ndarray:
        encoded = map(str.encode, values)
        digests = map(xxhash.xxh3_64_intdigest, encoded, itertools.repeat(self._seed))
        hashes = np.fromiter(digests, np.uint64, count)
        return self._index.rows(hashes, UNKNOWN_ROW).astype(np.int32)


def _examples(
    source: Any, spec: FeatureSpec, encoder: Encoder, typed: Mapping[str, str]
) -> Iterator[Examples]:
    """Yields the encoded rows of all files in order.

    Args:
        typed: {column of text: type of the column in the training data}.
    """
    rejects = Rejects("error")

    def encode(chunk: Chunk) -> Examples:
        chunk = _as_trained(chunk, typed)
        if spec.derived:
            chunk = derive(spec.derived, chunk, spec.time_format)
        return encoder.encode(chunk)

    for part in source.parts(_SPLIT):
        for chunk in source.chunks(part, rejects):
            _, examples = rejects.attempt(chunk, encode)
            assert examples is not None
            yield examples


def _as_trained(chunk: Chunk, typed: Mapping[str, str]) -> Chunk:
    """Spells text as preparation spelled the values of columns of other types.

    Whole numbers have no fraction, and booleans are 1 and 0.

    Raises:
        BadRows: a value is no boolean.
    """
    batch = chunk.batch
    for name, kind in typed.items():
        index = batch.schema.get_field_index(name)
        if index < 0 or not pa.types.is_string(batch.schema.field(index).type):
            continue
        column = batch.column(index)
        if kind == "bool":
            lowered = pc.utf8_lower(column)
            position = pc.index_in(lowered, pa.array(list(_BOOLEANS)))
            bad = pc.and_(pc.is_null(position), pc.greater(pc.binary_length(lowered), 0))
            rows = np.flatnonzero(bad.fill_null(False))
            if len(rows):
                actual = repr(column[int(rows[0])].as_py())
                raise BadRows(chunk, rows, name, "true, false, 1, 0 or empty", actual)
            column = pc.take(pa.array(list(_BOOLEANS.values())), position)
        elif kind.startswith(_NUMBERS):
            column = pc.replace_substring_regex(column, r"^([-+]?\d+)\.0*$", r"\1")
        batch = batch.set_column(index, name, column)
    return chunk._replace(batch=batch)


def _ahead(items: Iterator[Examples]) -> Iterator[Examples]:
    """Computes the next item in a thread while the current one is in use."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, None)
        while (item := pending.result()) is not None:
            pending = pool.submit(next, items, None)
            yield item


def _pieces(examples: Examples) -> Iterator[Examples]:
    """Divides examples into pieces of `_PIECE` rows.

    The arrays between layers then stay in the cache. ONNX Runtime needs 15 us per row of
    configs/criteo.py with 512 rows at once, and 23 with 14,000.
    """
    for start in range(0, examples.rows, _PIECE):
        yield cut(examples, start, min(start + _PIECE, examples.rows))


def _features(signature: "Signature", examples: Examples) -> "Features":
    """Converts rows of tables to rows of stacks."""
    from jaxrank_serving.encoder import Features
    from jaxrank_serving.lists import combiner_factors

    tables = {table.name: table for table in signature.tables}
    zeros = {stack.name: stack.rows for stack in signature.stacks}

    def stacked(name: str, rows: np.ndarray) -> np.ndarray:
        table = tables[name]
        result = rows.astype(np.int64)
        result += table.offset
        result[rows == PAD] = zeros[table.stack]
        return result

    ids, lists, start = {}, {}, 0
    for entry in signature.categorical:
        part = examples.ids[:, start : start + entry.length]
        start += entry.length
        ids[entry.name] = stacked(entry.table, part)
    places = places_of_lists(examples.list_lengths)
    for i, (feature, place) in enumerate(zip(signature.ragged, places, strict=True)):
        lengths = examples.list_lengths[:, i].astype(np.int64)
        weights = None
        if feature.weights or feature.weight_separator:
            assert examples.list_weights is not None
            weights = examples.list_weights[place]
        factors = combiner_factors(feature.combiner, lengths, weights)
        lists[feature.name] = stacked(feature.table, examples.list_values[place]), lengths, factors
    return Features(examples.dense, ids, lists, np.zeros((0, 0), np.int64))
