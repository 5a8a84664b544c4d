"""A baseline to beat: scikit-learn's logistic regression on the examples that a run trains on."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.examples import Entries, Examples, entries, traffic_weights
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.evaluation.score import Metrics, Scored
from jaxrank.evaluation.slices import Clusters
from jaxrank.features import Schema
from jaxrank.metrics import exact, intervals

MAX_EXACT_IDS = 1_000_000  # distinct ids of features that have a column each
_MAX_ENTRIES = 150_000_000  # non-zero numbers of an exact matrix, 12 bytes each
_HASHED_COLUMNS = 2**20
_HASHED_EPOCHS = 3
_STRENGTHS = tuple(10.0 ** (i / 2) for i in range(-6, 3))  # C, from 0.001 to 10


class Baseline(NamedTuple):
    """The regression's metrics, and how they came about.

    metrics: of each binary task on the split that is scored.
    features: "one-hot" or "hashed".
    distinct_ids: in the training split, each feature's own.
    strengths: {task: C}, the inverse strength of the L2 penalty chosen on the validation split.
    differences: {task: {metric: {difference, low, high}}}: metrics of the model minus those of the
        regression on the same examples, and the ends of the paired 95% interval, as of `compare`.
        NaN where undefined. Empty without a model.
    """

    metrics: Metrics
    features: str
    distinct_ids: int
    strengths: dict[str, float]
    seconds: float
    differences: dict[str, dict[str, dict[str, float]]]


def check_installed() -> None:
    """Raises InputError where scikit-learn is not installed."""
    try:
        import sklearn.linear_model  # noqa: F401, an optional extra
    except ImportError as error:
        raise InputError(
            f"--baseline: scikit-learn must be installed: found {error}. Install it with"
            " pip install 'jaxrank[baseline]', or leave out --baseline."
        ) from error


def _keys(ids: Entries) -> np.ndarray:
    """i64[k]: a number for each row of each column."""
    return (ids.column << 32) + ids.row


class _Features:
    """Turns blocks into sparse matrices: scaled numbers, then a column for each id or hash.

    Args:
        split: the training split, which is read once.
    """

    def __init__(self, split: Split, schema: Schema):
        self._schema = schema
        keys, numbers = np.zeros(0, np.int64), 0
        count, total, squares = 0, np.zeros(len(schema.dense)), np.zeros(len(schema.dense))
        for block in split.blocks():
            ids = entries(block, schema)
            numbers += len(ids.row) + block.dense.size
            if len(keys) <= MAX_EXACT_IDS:
                keys = np.union1d(keys, _keys(ids))
            count += block.rows
            floats = block.dense.astype(np.float64)
            total += floats.sum(axis=0)
            squares += (floats**2).sum(axis=0)
        self.distinct = len(keys)
        self.is_exact = len(keys) <= MAX_EXACT_IDS and numbers <= _MAX_ENTRIES
        self._keys = keys
        self._mean = total / max(count, 1)
        std = np.sqrt(np.maximum(squares / max(count, 1) - self._mean**2, 0))
        self._std = np.where(std > 1e-6 * (1 + np.abs(self._mean)), std, 1.0)

    def matrix(self, block: Examples) -> Any:
        """The features of a block, a CSR matrix; ids that training does not have are left out."""
        from scipy import sparse

        ids = entries(block, self._schema)
        key = _keys(ids)
        if self.is_exact:
            column = np.searchsorted(self._keys, key)
            known = column < len(self._keys)
            known[known] = self._keys[column[known]] == key[known]
            columns = len(self._keys)
        else:
            mixed = key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            column = ((mixed >> np.uint64(32)) % np.uint64(_HASHED_COLUMNS)).astype(np.int64)
            known, columns = np.ones(len(column), bool), _HASHED_COLUMNS
        cells = ids.factor[known], (ids.example[known], column[known])
        one_hot = sparse.csr_matrix(cells, shape=(block.rows, columns))
        dense = ((block.dense - self._mean) / self._std).astype(np.float32)
        return sparse.hstack([sparse.csr_matrix(dense), one_hot], format="csr")


class _Labelled(NamedTuple):
    """Examples of one task: features, labels f64[n] in [0, 1], weights f64[n] of all traffic."""

    features: Any
    labels: np.ndarray
    weights: np.ndarray

    def classes(self) -> "_Labelled":
        """Returns a binary problem. Labels between 0 and 1 become a positive and a negative."""
        y, w = self.labels, self.weights
        positive, negative = np.flatnonzero(w * y > 0), np.flatnonzero(w * (1 - y) > 0)
        rows = np.concatenate([positive, negative])
        weights = np.concatenate([(w * y)[positive], (w * (1 - y))[negative]])
        labels = np.concatenate([np.ones(len(positive)), np.zeros(len(negative))])
        return _Labelled(self.features[rows], labels, weights)


def _labelled(blocks: Iterable[Examples], features: Any, task: int) -> _Labelled:
    """Collects the labels of blocks, to go with `features`."""
    labels, weights = [], []
    for block in blocks:
        labels.append(np.nan_to_num(block.labels[:, task].astype(np.float64)))
        weights.append(
            traffic_weights(block.labels, block.weights, block.logit_correction)[:, task]
        )
    return _Labelled(features, np.concatenate(labels), np.concatenate(weights))


def fit(
    train: Split,
    valid: Split,
    schema: Schema,
    *,
    score_split: Split | None = None,
    model: Scored | None = None,
    clusters: Clusters | None = None,
) -> Baseline:
    """Fits a regression to each binary task, and scores it.

    Ids are one-hot, each feature's own, up to `MAX_EXACT_IDS` in all and hashed above; numbers are
    scaled to deviation 1. C rises until the validation logloss does.

    Args:
        train: the training split.
        valid: the split on which C is chosen.
        schema: of both.
        score_split: the split that is scored. None: the validation split.
        model: scores of a model on that split, which the regression is compared with.
        clusters: of the examples of that split. None: examples are independent.

    Raises:
        InputError: no task is binary, or scikit-learn is not installed.
    """
    check_installed()
    started = time.perf_counter()
    tasks = {task.name: i for i, task in enumerate(schema.tasks) if task.kind == "binary"}
    if not tasks:
        raise InputError(
            "--baseline: one task must be binary, as the baseline is logistic regression: found"
            f" {', '.join(f'{t.name} of kind {t.kind}' for t in schema.tasks)}."
        )
    features = _Features(train, schema)
    scored = (valid,) if score_split is None else (valid, score_split)
    targets = {n: [_labelled(s.blocks(), None, i) for s in scored] for n, i in tasks.items()}
    fits: Callable[[int], Iterator[tuple[float, list[np.ndarray]]]]
    if features.is_exact:
        train_matrix, *scored_matrices = [_stacked(split, features) for split in (train, *scored)]
        fits = functools.partial(_exact_fits, train, train_matrix, scored_matrices)
    else:
        fits = functools.partial(_hashed_fits, train, scored, features)
    metrics: Metrics = {}
    strengths, differences = {}, {}
    for name, task in tasks.items():
        lowest, best = None, None
        for strength, logits in fits(task):
            scores = _metrics(logits, targets[name])
            if lowest is not None and not scores[0]["logloss"] < lowest:
                break
            lowest, best = scores[0]["logloss"], logits[-1]
            metrics[name], strengths[name] = scores[-1], strength
        if model is not None and best is not None:
            code = clusters.code if clusters else None
            differences[name] = _differences(model.logits[:, task], best, targets[name][-1], code)
    return Baseline(
        metrics,
        "one-hot" if features.is_exact else "hashed",
        features.distinct,
        strengths,
        time.perf_counter() - started,
        differences,
    )


def _differences(
    model: np.ndarray, regression: np.ndarray, target: _Labelled, clusters: np.ndarray | None
) -> dict[str, dict[str, float]]:
    """Compares logits f[n] of a model and of the regression, {metric: {difference, low, high}}."""
    parts = target.labels, target.weights
    metrics = [exact.exact(logits, *parts) for logits in (model, regression)]
    influences = [
        intervals.influences(logits, *parts, clusters=clusters) for logits in (model, regression)
    ]
    margins = intervals.margins(influences[0], target.weights, influences[1], clusters)
    result = {}
    for name, margin in margins.items():
        difference = metrics[0][name] - metrics[1][name]
        low, high = margin.ends(difference)
        result[name] = {"difference": difference, "low": low, "high": high}
    return result


def _stacked(split: Split, features: _Features) -> Any:
    from scipy import sparse

    return sparse.vstack([features.matrix(block) for block in split.blocks()], format="csr")


def _exact_fits(
    train: Split, train_matrix: Any, scored_matrices: Sequence[Any], task: int
) -> Iterator[tuple[float, list[np.ndarray]]]:
    """Yields (C, logits f64[n] of each scored split) by rising C, each fit from the one before.

    Yields nothing where all labels are equal.
    """
    from sklearn.linear_model import LogisticRegression

    examples = _labelled(train.blocks(), train_matrix, task).classes()
    if len(set(examples.labels)) < 2:
        return
    model = LogisticRegression(solver="lbfgs", max_iter=300, tol=1e-5, warm_start=True)
    for strength in _STRENGTHS:
        model.set_params(C=strength)
        model.fit(examples.features, examples.labels, sample_weight=examples.weights)
        yield strength, [model.decision_function(matrix) for matrix in scored_matrices]


def _hashed_fits(
    train: Split, scored: Sequence[Split], features: _Features, task: int
) -> Iterator[tuple[float, list[np.ndarray]]]:
    """Yields fits like `_exact_fits`, block by block, for data whose matrix is too large."""
    from sklearn.linear_model import SGDClassifier

    for strength in _STRENGTHS:
        alpha = 1 / (strength * max(train.rows, 1))
        model = SGDClassifier(loss="log_loss", alpha=alpha, average=True, random_state=0)
        for block in itertools.chain(*(train.blocks() for _ in range(_HASHED_EPOCHS))):
            examples = _labelled([block], features.matrix(block), task).classes()
            if len(examples.labels):
                order = np.random.default_rng(0).permutation(len(examples.labels))
                matrix, labels, weights = (part[order] for part in examples)
                model.partial_fit(matrix, labels, classes=[0.0, 1.0], sample_weight=weights)
        logits = [
            np.concatenate([model.decision_function(features.matrix(b)) for b in split.blocks()])
            for split in scored
        ]
        yield strength, logits


def _metrics(logits: list[np.ndarray], targets: list[_Labelled]) -> list[dict[str, float]]:
    """Returns the metrics of each scored split."""
    pairs = zip(logits, targets, strict=True)
    return [exact.exact(logit, target.labels, target.weights) for logit, target in pairs]
