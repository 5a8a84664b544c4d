"""Scores candidates: raw values in, a prediction per task and candidate out."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrank_serving.bundle import Bundle, open_bundle
from jaxrank_serving.dense_part import DensePart, SharedDensePart, open_onnx
from jaxrank_serving.encoder import Encoder, Features
from jaxrank_serving.index import Index
from jaxrank_serving.requests import Candidates, cells_of_request
from jaxrank_serving.signature import Signature
from jaxrank_serving.tables import StackRows

THREADS = 2  # of a request
_LOG_COUNT_LIMIT = 30.0  # that of training


class Counts(NamedTuple):
    """Numbers of values of a feature since the bundle was loaded.

    A value of the context counts once per request.

    missing, unknown: values that are absent, or in no vocabulary.
    out_of_range: row numbers out of range, to which `on_bad_id` applied.
    truncated, truncated_lists: ids that were cut from lists, and the lists.
    """

    values: int
    missing: int
    unknown: int
    out_of_range: int
    truncated: int
    truncated_lists: int


class Scorer:
    """A loaded bundle. Threads may call its methods at the same time.

    Args:
        bundle: an open bundle.
        dense_part: computes logits in place of the bundle's ONNX model.
        threads: maximum number that share the candidates of a request; see `load`.
        hash_key: key of the data, for bundles with keyed hashes.

    Attributes:
        index: of the vocabularies.
        encoder: of requests.

    Raises:
        BundleError: the bundle has no ONNX model, or a file does not match its signature.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        dense_part: DensePart | None = None,
        threads: int = THREADS,
        hash_key: bytes | None = None,
    ):
        self.bundle = bundle
        signature = bundle.signature
        self.index = Index(bundle.file(signature.index.file), signature.index)
        self.encoder = Encoder(signature, self.index, hash_key)
        self._rows = {stack.name: StackRows(bundle, stack) for stack in signature.stacks}
        self._dense_part = dense_part or SharedDensePart(open_onnx(bundle), threads)
        self._columns = {column.name: column for column in signature.columns}
        self._by_value = _ByValue(signature) if signature.calibration else None
        self._lengths = {f.name: f.max_length for f in signature.ragged}
        self._lock = threading.Lock()
        self._counts = np.zeros((len(self.encoder.names), len(Counts._fields)), np.int64)

    @property
    def signature(self) -> Signature:
        """The meaning of the bundle."""
        return self.bundle.signature

    def score(
        self,
        context: Mapping[str, Any],
        candidates: Candidates,
    ) -> dict[str, np.ndarray]:
        """Scores the candidates of one request.

        A feature is read from the context or from the candidates. None and "" are missing values.

        Args:
            context: {column: value} that all candidates share.
            candidates: a dict of {column: value} for each candidate, or {column: values}.

        Returns:
            {output: f64[candidates]}, see `signature.Output`.

        Raises:
            RequestError: a required feature is absent, unknown or given twice, or a value is one
                that training rejects.
        """
        columns, rows = cells_of_request(context, candidates, self._columns)
        if not rows:
            return {output.name: np.zeros(0) for output in self.signature.outputs}
        features = self.encoder.encode(columns, rows)
        logits = self.logits(self.arrays(features, rows))
        self.count(features)
        return self.predictions(logits)

    def encode(
        self,
        context: Mapping[str, Any],
        candidates: Candidates,
    ) -> tuple[Features, int]:
        """Returns the encoded features of a request, and the number of candidates."""
        columns, rows = cells_of_request(context, candidates, self._columns)
        return self.encoder.encode(columns, rows), rows

    def counts(self) -> dict[str, Counts]:
        """Returns the counts of each feature since the bundle was loaded."""
        with self._lock:
            rows = self._counts.tolist()
        return {name: Counts(*row) for name, row in zip(self.encoder.names, rows, strict=True)}

    def arrays(self, features: Features, rows: int) -> dict[str, np.ndarray]:
        """Returns the inputs of the dense part by name, with the vectors of the tables."""
        arrays = {"dense": features.dense}
        for stack in self.signature.stacks:
            table = self._rows[stack.name]
            if stack.ids or stack.sequences:
                place = len(stack.ids)
                places = place + sum(self._lengths[name] for name in stack.sequences)
                wanted = np.full((rows, places), stack.rows, np.int64)
                for i, (feature, number) in enumerate(stack.ids):
                    wanted[:, i] = features.ids[feature][:, number]
                filled = np.zeros((rows, places), bool)
                filled[:, :place] = True
                for feature in stack.sequences:
                    end = place + self._lengths[feature]
                    wanted[:, place:end], filled[:, place:end] = _sequence(
                        *features.lists[feature][:2], end - place, stack.rows
                    )
                    place = end
                arrays[f"{stack.name}_ids"] = table.read(wanted)
                if stack.sequences:
                    arrays[f"{stack.name}_filled"] = filled
            if stack.lists:
                parts = [features.lists[name] for name in stack.lists]
                arrays[f"{stack.name}_lists"] = _combined(table, parts, rows, stack.dim)
        if self._by_value:
            arrays |= self._by_value.arrays(features, rows)
        return arrays

    def logits(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns logits f32[n, outputs] of the dense part, from the arrays of `arrays`."""
        return self._dense_part(arrays)

    def predictions(self, logits: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {output: f64[n]}, the predictions of logits f32[n, outputs]."""
        return {
            output.name: prediction(logits[:, i], output.kind)
            for i, output in enumerate(self.signature.outputs)
        }

    def count(self, features: Features) -> None:
        """Adds the values of scored features to the counts."""
        with self._lock:
            self._counts += features.counts


class _ByValue:
    """The corrections of a calibration by value; see `signature.Calibration`."""

    def __init__(self, signature: Signature):
        calibration = signature.calibration
        assert calibration is not None
        self._feature = calibration.feature
        entry = next(e for e in signature.categorical if e.name == self._feature)
        table = next(t for t in signature.tables if t.name == entry.table)
        self._rows = np.array(calibration.rows, np.int64) + table.offset  # of the stack
        self._tables = {
            name: np.array(values, np.float32)
            for name, values in (
                ("calibration_slopes", calibration.slopes),
                ("calibration_offsets", calibration.offsets),
            )
        }

    def arrays(self, features: Features, rows: int) -> dict[str, np.ndarray]:
        """Returns the inputs of the dense part by name, f32[rows, tasks]."""
        wanted = np.broadcast_to(features.ids[self._feature][:, 0], rows)
        place = np.minimum(np.searchsorted(self._rows, wanted), len(self._rows) - 1)
        is_known = (self._rows[place] == wanted)[:, None]
        return {
            name: np.where(is_known, table[place], np.float32(name == "calibration_slopes"))
            for name, table in self._tables.items()
        }


def _sequence(
    rows: np.ndarray, lengths: np.ndarray, most: int, zeros: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns i64[n or 1, most] the rows of lists, and bool[n or 1, most] the filled places."""
    filled = np.arange(most) < lengths[:, None]
    matrix = np.full(filled.shape, zeros, np.int64)
    matrix[filled] = rows
    return matrix, filled


def _combined(table: StackRows, parts: Sequence[Any], rows: int, dim: int) -> np.ndarray:
    """Returns f32[n, features, dim], the weighted sums of lists, read by one call."""
    indices = np.concatenate([part[0] for part in parts])
    lengths = np.concatenate([part[1] for part in parts])
    factors = np.concatenate([part[2] for part in parts])
    sums = np.zeros((len(lengths), dim), np.float32)
    filled = lengths > 0
    if filled.any():
        vectors = table.read(indices) * factors[:, None]
        starts = (np.cumsum(lengths) - lengths)[filled]
        sums[filled] = np.add.reduceat(vectors, starts, axis=0)
    result = np.empty((rows, len(parts), dim), np.float32)
    start = 0
    for i, (_, part_lengths, _) in enumerate(parts):
        result[:, i] = sums[start : start + len(part_lengths)]
        start += len(part_lengths)
    return result


def prediction(logits: np.ndarray, kind: str) -> np.ndarray:
    """Returns f64[n]: a probability, an expected count or a number, from logits f32[n].

    A ranked score is converted as its kind is, which keeps its order.
    """
    x = logits.astype(np.float64)
    if kind == "binary":
        e = np.exp(-np.abs(x))
        return np.where(x >= 0, 1.0, e) / (1 + e)
    return np.exp(np.minimum(x, _LOG_COUNT_LIMIT)) if kind == "count" else x


def load(
    path: str | Path,
    *,
    threads: int = THREADS,
    hash_key: bytes | None = None,
    verify: bool = False,
) -> Scorer:
    """Loads a bundle that `jaxrank export` wrote. Tables are mapped, not read.

    Args:
        path: directory of the bundle.
        threads: maximum number that share the candidates of a request in its dense part. 1 leaves
            the other cores to other requests.
        hash_key: key of the data, for bundles with keyed hashes.
        verify: whether the content of all files is compared with their checksums first.

    Raises:
        BundleError: the bundle is absent, damaged or of another format, or the key is another one.
    """
    bundle = open_bundle(path)
    if verify:
        bundle.verify()
    return Scorer(bundle, threads=threads, hash_key=hash_key)
