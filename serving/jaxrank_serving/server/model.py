"""One loaded version of a model, and the scores that it has given."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jaxrank_serving
from jaxrank_serving.encoder import Features
from jaxrank_serving.errors import BundleError, RequestError
from jaxrank_serving.scorer import Scorer


class Encoded(NamedTuple):
    """Encoded features of a request, and the number of its candidates."""

    features: Features
    rows: int


class ScoreStatistics(NamedTuple):
    """Number of candidates and sum of their scores, of an output."""

    candidates: int
    sum: float


class Model:
    """A loaded bundle. Threads may call its methods at the same time.

    Args:
        name: in URLs.
        scorer: of the bundle.
        batch_sizes: numbers of candidates that the dense part is run with, in rising order.
    """

    def __init__(self, name: str, scorer: Scorer, batch_sizes: Sequence[int]):
        self.name, self.scorer, self.batch_sizes = name, scorer, batch_sizes
        self.version = scorer.bundle.version
        self._lock = threading.Lock()
        self._statistics: dict[str, ScoreStatistics] = {}

    def score(self, requests: Sequence[Encoded]) -> list[dict[str, np.ndarray]]:
        """Returns the scores of each request, {output: f64[rows]}.

        The candidates of all requests are joined and padded to one of `batch_sizes`. If they
        exceed the largest, the dense part runs several times.
        """
        parts = [self.scorer.arrays(request.features, request.rows) for request in requests]
        counts = [request.rows for request in requests]
        scores = self.scorer.predictions(self._logits(parts, sum(counts)))
        for request in requests:
            self.scorer.count(request.features)
        self._add(scores)
        ends = np.cumsum(counts)[:-1]
        pieces = {name: np.split(values, ends) for name, values in scores.items()}
        return [{name: pieces[name][i] for name in pieces} for i in range(len(requests))]

    def _logits(self, parts: Sequence[Mapping[str, np.ndarray]], count: int) -> np.ndarray:
        """Returns f32[count, outputs]."""
        largest = self.batch_sizes[-1]
        whole, rest = divmod(count, largest)
        size = whole * largest + (self._padded(rest) if rest else 0)
        arrays = {name: _joined([part[name] for part in parts], size) for name in parts[0]}
        logits = [
            self.scorer.logits({name: a[start : start + largest] for name, a in arrays.items()})
            for start in range(0, size, largest)
        ]
        return np.concatenate(logits)[:count] if len(logits) > 1 else logits[0][:count]

    def _padded(self, count: int) -> int:
        return next(size for size in self.batch_sizes if size >= count)

    def warm_up(self) -> None:
        """Runs the model with every batch size, on a request in which all values are missing.

        Raises:
            BundleError: the bundle cannot score it, or a score is not finite.
        """
        columns = self.scorer.signature.columns
        context = {column.name: None for column in columns if column.source == "context"}
        candidate = {column.name: None for column in columns if column.source != "context"}
        try:
            features, count = self.scorer.encode(context, [candidate])
        except RequestError:
            return  # as models do whose features must have a value
        try:
            part = self.scorer.arrays(features, count)
            logits = [
                self.scorer.logits({name: _joined([a], size) for name, a in part.items()})[:count]
                for size in self.batch_sizes
            ]
            scores = self.scorer.predictions(np.concatenate(logits))
        except Exception as error:
            raise BundleError(
                f"{self.scorer.bundle.path}: must score a request without values:"
                f" found {type(error).__name__}: {error}."
            ) from error
        for name, values in scores.items():
            if not np.isfinite(values).all():
                raise BundleError(
                    f"{self.scorer.bundle.path}: must give a request without values a finite score:"
                    f" found {values[~np.isfinite(values)][0]} of {name}. The model is broken."
                )

    def _add(self, scores: Mapping[str, np.ndarray]) -> None:
        with self._lock:
            for name, values in scores.items():
                values = values[np.isfinite(values)]
                before = self._statistics.get(name, ScoreStatistics(0, 0.0))
                total = before.sum + float(values.sum())
                self._statistics[name] = ScoreStatistics(before.candidates + len(values), total)

    def statistics(self) -> dict[str, ScoreStatistics]:
        """Returns the number and sum of the scores of each output since the version was loaded."""
        with self._lock:
            return dict(self._statistics)


def _joined(parts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Returns the parts behind each other, and zeros up to `size` entries."""
    if len(parts) == 1 and len(parts[0]) == size:
        return parts[0]
    result = np.empty((size, *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    for part in parts:
        result[start : start + len(part)] = part
        start += len(part)
    result[start:] = 0
    return result


def load_model(
    path: Path,
    name: str,
    batch_sizes: Sequence[int],
    *,
    threads: int,
    hash_key: bytes | None,
    verify: bool,
) -> Model:
    """Loads a bundle, and runs it once with every batch size.

    Raises:
        BundleError: the bundle is absent, damaged, or cannot score.
    """
    scorer = jaxrank_serving.load(path, threads=threads, hash_key=hash_key, verify=verify)
    model = Model(name, scorer, batch_sizes)
    model.warm_up()
    return model
