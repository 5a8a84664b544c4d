"""Computes exact metrics or writes predictions to Parquet, in one pass over a split."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrank.atomic import replacing
from jaxrank.calibration.maps import Calibration
from jaxrank.data.batches.pipeline import EvaluationBatches
from jaxrank.data.examples import Examples, cut, traffic_weights
from jaxrank.data.files import check_parent, is_local
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import slices
from jaxrank.evaluation.requests import NO_REQUESTS, NO_SCORES, RequestSpec, score_requests
from jaxrank.features import MAX_GROUP, Batch, Schema, Task
from jaxrank.mesh import put_batch
from jaxrank.metrics import exact
from jaxrank.metrics.histograms import score_histogram
from jaxrank.program import Predictor
from jaxrank.runtime import processes
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.step import Weights

# Maximum number of batches whose results wait on the devices.
_IN_FLIGHT = 4

Metrics = dict[str, dict[str, float]]


class Scores(NamedTuple):
    """Result of a pass over a split.

    metrics, buckets: of each task.
    histograms: of the scores of each task; see `histograms.score_histogram`.
    rows: number of examples.
    seconds: duration, including compilation.
    slices: metrics per group, if requested.
    intervals: {task: {metric: [low, high]}}.
    scored: the scores of all examples.
    requests: what the metrics of requests count; see `requests.score_requests`. None: no requests.
    """

    metrics: Metrics
    buckets: dict[str, list[dict[str, float]]]
    histograms: dict[str, dict[str, list[float]]]
    rows: int
    seconds: float
    slices: slices.Slices | None
    intervals: dict[str, dict[str, list[float]]]
    scored: "Scored"
    requests: dict[str, Any] | None = None


# Marks files of predictions in the metadata of their schema.
_MARK = b"jaxrank.predictions"

# File extensions of other formats than Parquet.
_OTHER_FORMATS = (".csv", ".tsv", ".txt", ".json", ".jsonl", ".npy", ".npz")


class Scored(NamedTuple):
    """Scored examples in stored order, f32[n, tasks] each.

    logits: outputs of the model for all kinds of tasks, see `Task`. They predict all traffic, also
        if negatives were sampled.
    labels: of all tasks.
    weights: corrected for the sampling of negatives.
    """

    logits: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def whole_groups(batch_size: int, predictor: Predictor) -> int:
    """Rounds `batch_size` up so that every device has whole groups of packed examples."""
    unit = MAX_GROUP * predictor.mesh.size
    return -(-batch_size // unit) * unit


def score(
    predictor: Predictor,
    weights: Weights,
    split: Split,
    batch_size: int,
    calibration: Calibration | None = None,
    table_rows: np.ndarray | None = None,
) -> Generator[Scored, None, None]:
    """Yields the scores of a split, batch by batch in stored order, without padding.

    A thread prepares batches and transfers them until the generator ends or is closed.

    Args:
        predictor: compiled program of the model.
        weights: of a checkpoint.
        split: to score.
        batch_size: in examples, a multiple of the group size.
        calibration: maps the logits. None: they are those of the model.
        table_rows: of the examples, for a calibration by value; see `feature_rows`. None: those of
            the split.

    Raises:
        RunError: a prediction is not finite.
    """
    process = (jax.process_index(), jax.process_count())
    layout = predictor.layout
    batches = EvaluationBatches(
        split, layout, batch_size=batch_size, shards=predictor.mesh.size, process=process
    )

    def put(item: tuple[Batch, int]) -> tuple[Batch, int]:
        return put_batch(item[0], predictor.mesh), item[1]

    waiting: list[tuple[Any, int]] = []
    first = 1  # row of the next result
    if calibration is not None and calibration.by and table_rows is None:
        table_rows = feature_rows(split, layout.schema, calibration.by.feature)

    def fetched(outputs: Any, rows: int) -> Scored:
        nonlocal first
        start = first - 1
        scored = Scored(*(np.asarray(x)[:rows] for x in jax.device_get(outputs)))
        check_finite(scored.logits, layout.schema.tasks, f"split {split.name}", first)
        first += rows
        if calibration is None:
            return scored
        of_batch = None if table_rows is None else table_rows[start : start + rows]
        return calibrated(scored, calibration, of_batch)

    with (
        closing(iter(batches)) as batch_iterator,
        closing(DevicePrefetcher(batch_iterator, put)) as feed,
    ):
        for batch, rows in feed:
            waiting.append((predictor.predict(weights, batch), rows))
            if len(waiting) > _IN_FLIGHT:
                yield fetched(*waiting.pop(0))
    for item in waiting:
        yield fetched(*item)


def feature_rows(split: Split, schema: Schema, feature: str) -> np.ndarray:
    """Returns i32[n], the table row of each example of a split under a feature of one id."""
    column = [entry.name for entry in schema.id_columns].index(feature)
    return np.concatenate([block.ids[:, column] for block in split.blocks()])


def calibrated(
    scored: Scored, calibration: Calibration, table_rows: np.ndarray | None = None
) -> Scored:
    """Maps the logits of scored examples, in float64.

    Args:
        table_rows: i32[n], see `feature_rows`. Needed by a calibration by value.
    """
    by = calibration.by
    coefficients = None
    if by is not None:
        assert table_rows is not None
        coefficients = by.coefficients(table_rows)
    logits = calibration(scored.logits.astype(np.float64), np, coefficients)
    return scored._replace(logits=logits.astype(scored.logits.dtype))


def check_finite(logits: np.ndarray, tasks: Sequence[Task], data: str, first: int) -> None:
    """Raises RunError if a logit f32[n, tasks] of the rows from `first` of `data` is not finite."""
    bad = ~np.isfinite(logits)
    for i in np.flatnonzero(bad.any(axis=0))[:1]:
        raise RunError(
            f"predictions of task {tasks[i].name} must be finite: found {int(bad[:, i].sum())} that"
            f" are not, of the {len(bad)} in rows {first} to {first + len(bad) - 1} of {data};"
            f" the first is row {first + int(bad[:, i].argmax())}."
        )


def evaluate(
    predictor: Predictor,
    weights: Weights,
    split: Split,
    batch_size: int,
    groups: slices.Groups | None = None,
    clusters: slices.Clusters | None = None,
    requests: RequestSpec = NO_REQUESTS,
    calibration: Calibration | None = None,
) -> Scores:
    """Computes exact metrics of `weights` on a split. Needs 12 bytes per example and task.

    Args:
        predictor: compiled program of the model.
        weights: of a checkpoint.
        split: to score.
        batch_size: in examples, rounded up to whole groups.
        groups: of examples, for metrics per group.
        clusters: of examples, for intervals. None: examples are independent, and requests are.
        requests: how requests are scored.
        calibration: see `score`.

    Raises:
        RunError: a prediction is not finite.
    """
    start = time.perf_counter()
    scored = score_all(predictor, weights, split, batch_size, calibration)
    metrics, buckets, histograms, spans = {}, {}, {}, {}
    tasks = predictor.layout.schema.tasks
    code = clusters.code if clusters else None
    for i, task in enumerate(tasks):
        logits, labels, weight = scored.logits[:, i], scored.labels[:, i], scored.weights[:, i]
        metrics[task.name] = exact.exact(logits, labels, weight, task.kind)
        if task.name not in requests.ranked:
            buckets[task.name] = exact.calibration_buckets(logits, labels, weight, task.kind)
        histograms[task.name] = score_histogram(logits, labels, weight, task.kind)
        spans[task.name] = slices.metric_intervals(
            metrics[task.name], logits, labels, weight, task.kind, code
        )
    of_split = requests.read(split)
    ranking = score_requests(requests, of_split, tasks, *scored, code) if of_split else NO_SCORES
    for task in tasks:
        name = task.name
        of_metrics, of_spans = (part.get(name, {}) for part in ranking[:2])
        metrics[name] = requests.joined(task, metrics[name], of_metrics)
        spans[name] = requests.joined(task, spans[name], of_spans)
    sliced = None
    if groups:
        sliced = slices.group_metrics(groups, tasks, *scored, clusters, requests, of_split)
    seconds = time.perf_counter() - start
    return Scores(
        metrics, buckets, histograms, split.rows, seconds, sliced, spans, scored, ranking.described
    )


def score_all(
    predictor: Predictor,
    weights: Weights,
    split: Split,
    batch_size: int,
    calibration: Calibration | None = None,
) -> Scored:
    """Returns the scores of all examples of a split. See `evaluate` for arguments and errors."""
    size = whole_groups(batch_size, predictor)
    parts = list(score(predictor, weights, split, size, calibration))
    return Scored(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def unlabelled_tasks(split: Split) -> dict[str, str]:
    """Returns {task: reason} for the tasks of a split without a known label of weight above 0.

    Empty for data without statistics of labels.
    """
    if not split.has_statistics:
        return {}
    traffic = split.statistics.get("traffic", {})
    reasons = {}
    for name, task in split.statistics["tasks"].items():
        if not task["known"]:
            reasons[name] = f"No label of {name} is known in {split.path}"
        elif name in traffic and not traffic[name]["weight"] > 0:
            reasons[name] = f"All weights of known labels of {name} are 0 in {split.path}"
    return reasons


def check_labelled(split: Split) -> None:
    """Raises InputError if no label of a split is known.

    This happens if a join has found no labels, or if the data was prepared without labels. Data
    that is read directly is not checked, because it has no statistics.
    """
    if not split.has_statistics:
        return
    tasks = split.statistics["tasks"]
    if not any(task["known"] for task in tasks.values()):
        raise InputError(
            f"{split.path}: must have labels: found none that is known, of {', '.join(tasks)}, in"
            f" {split.rows:,} examples. `jaxrank predict` needs none."
        )


class Reference(NamedTuple):
    """Metrics of reference predictions.

    constant: of the best constant prediction.
    best_possible: of the true probabilities of synthetic data. None if they are unknown.
    """

    constant: Metrics
    best_possible: Metrics | None


def reference(split: Split, schema: Schema) -> Reference:
    """Computes the reference metrics in process 0 for all processes. Reads the split once."""
    references = None
    with processes.together():
        if processes.is_first():
            references = tuple(_reference(split, schema))
    return Reference(*processes.broadcast_value(references))


def _reference(split: Split, schema: Schema) -> Reference:
    labels, weights, truths = [], [], []
    for block in split.blocks():
        labels.append(block.labels)
        weights.append(traffic_weights(block.labels, block.weights, block.logit_correction))
        if block.truth is not None:
            truths.append(block.truth)
    label, weight = np.concatenate(labels), np.concatenate(weights)
    truth = np.concatenate(truths) if truths else np.full_like(label, np.nan)
    label = np.nan_to_num(label)
    constant, best = {}, {}
    for i, task in enumerate(schema.tasks):
        constant[task.name] = exact.constant(label[:, i], weight[:, i], task.kind)
        if not np.isnan(truth[:, i]).any():
            best[task.name] = exact.exact_from_probabilities(truth[:, i], label[:, i], weight[:, i])
    return Reference(constant, best or None)


def write_predictions(
    predictor: Predictor,
    weights: Weights,
    split: Split,
    batch_size: int,
    output: str | Path,
    calibration: Calibration | None = None,
) -> int:
    """Writes a Parquet file with one row per example in stored order, and returns the rows.

    The columns are those in `features.keep`, then `label_<task>` (null if unknown) and
    `predicted_<task>` for each task: a probability, a real number or an expected count. Of a task
    that is trained by ranking alone it is a score, which has an order alone. Only process 0 writes.
    The file appears under its name only when it is complete.

    Raises:
        InputError: `output` is a URL, exists and is not a file of predictions, or is in no writable
            directory.
        RunError: a prediction is not finite, or the file cannot be written.
    """
    output = check_output(output)
    batch_size = whole_groups(batch_size, predictor)
    tasks = predictor.layout.schema.tasks
    with closing(score(predictor, weights, split, batch_size, calibration)) as scores:
        if not processes.is_first():
            return sum(len(scored.logits) for scored in scores)
        return write_table(scores, _rebatched(split.blocks(), batch_size), tasks, output)


def check_output(output: str | Path) -> Path:
    """The file to write predictions to.

    Raises:
        InputError: it cannot be written, or is there and no file of predictions.
    """
    text, output = output, Path(output)
    with processes.together():
        if not str(text) or str(text).endswith("/"):
            raise InputError(f"--output: must name a file: found {str(text) or 'nothing'}.")
        if not is_local(text):
            raise InputError(f"--output: must be a local path: found the URL {text}.")
        if output.suffix.lower() in _OTHER_FORMATS:
            raise InputError(
                f"--output: must not end in {output.suffix}, because predictions are Parquet:"
                f" found {output}."
            )
        if processes.is_first() and output.exists() and not output.is_file():
            kind = "a directory" if output.is_dir() else "a device, pipe or socket"
            raise InputError(f"--output: {output} must be a file: found {kind}.")
        if processes.is_first():
            if output.exists() and not _is_of_predict(output):
                raise InputError(
                    f"--output: {output} must be a new file or one that `predict` wrote, which is"
                    " replaced: found another file. Remove it or name another."
                )
            check_parent(output)
    return output


def _is_of_predict(path: Path) -> bool:
    try:
        schema = pq.read_schema(path)
        return (schema.metadata or {}).get(_MARK) == _columns(schema)
    except (pa.ArrowException, OSError):
        return False


def _columns(schema: pa.Schema) -> bytes:
    """Returns the names of all columns. A file to which somebody added one is not replaced."""
    return "\n".join(schema.names).encode()


def write_table(
    scores: Iterator[Scored], stored: Iterator[list[Examples]], tasks: Sequence[Task], output: Path
) -> int:
    """Writes predictions as `write_predictions` does, and returns the rows.

    Args:
        scores: of consecutive examples.
        stored: the examples, in the same batches.
    """
    sink = None
    rows = 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as partial:
            for scored, block in zip(scores, stored, strict=True):
                table = _predictions(scored, block, tasks)
                table = table.replace_schema_metadata({_MARK: _columns(table.schema)})
                sink = sink or pq.ParquetWriter(partial, table.schema)
                sink.write_table(table)
                rows += table.num_rows
            if sink is not None:
                sink.close()
    except OSError as error:
        raise RunError(f"{output}: cannot be written: {error}.") from error
    return rows


def _rebatched(blocks: Iterator[Examples], size: int) -> Iterator[list[Examples]]:
    """Regroups the examples of blocks into batches of `size`, each a list of pieces."""
    pieces: list[Examples] = []
    wanted = size
    for block in blocks:
        at = 0
        while at < block.rows:
            taken = min(wanted, block.rows - at)
            pieces.append(cut(block, at, at + taken))
            at += taken
            wanted -= taken
            if not wanted:
                yield pieces
                pieces, wanted = [], size
    if pieces:
        yield pieces


def _predictions(scored: Scored, pieces: list[Examples], tasks: Sequence[Task]) -> pa.Table:
    batches = [p.kept for p in pieces if p.kept is not None]
    kept = pa.Table.from_batches(batches) if batches else None
    columns = {} if kept is None else {name: kept[name] for name in kept.schema.names}
    labels = np.concatenate([p.labels for p in pieces])
    is_weighted = pieces[0].weights is not None or pieces[0].logit_correction is not None
    for i, task in enumerate(tasks):
        predicted = exact.prediction(scored.logits[:, i], task.kind)
        columns[f"label_{task.name}"] = pa.array(labels[:, i], from_pandas=True)
        if is_weighted:  # a kept column with this name has priority
            columns.setdefault(f"weight_{task.name}", pa.array(scored.weights[:, i]))
        columns[f"predicted_{task.name}"] = pa.array(predicted)
    return pa.table(columns)
