"""Evaluates and predicts with a checkpoint of a run."""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import pyarrow as pa
from ml_collections import ConfigDict

from jaxrank import mesh as meshes
from jaxrank import opening
from jaxrank.build import Builder
from jaxrank.calibration import files as calibrations
from jaxrank.calibration.maps import Calibration
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.data.store.reader import Store
from jaxrank.data.store.same_values import check_extends
from jaxrank.data.store.split import Split
from jaxrank.embedding import GROUPS
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation import slices
from jaxrank.evaluation.model_view import view_for_model
from jaxrank.evaluation.requests import RequestSpec, request_spec
from jaxrank.features import RESERVED_ROWS, Schema, Table
from jaxrank.layout import Layout
from jaxrank.metrics import exact
from jaxrank.program import Predictor
from jaxrank.run_schedule import NEXT_DAY
from jaxrank.runtime import processes
from jaxrank.step import Weights
from jaxrank.workdir import files as workdirs
from jaxrank.workdir.data import RunData

# The ids of scored data are not measured in advance. Buffers have room for twice as many distinct
# ids of one owner as a device reads on average.
_UNMEASURED = 2.0


class Evaluation(NamedTuple):
    """Result of `evaluate`. Fields with the same name as in `report.Result` have the same meaning.

    buckets: {task: calibration by equal-count buckets of the prediction}.
    histograms: {task: weight by score and label}, see `histograms.score_histogram`.
    by: metrics per value of a column, if requested, see `slices.Slices`.
    untrained: tasks without weight, which stay as they were initialised.
    intervals: {task: {metric: [low, high]}}, the 95% interval of each metric. NaN where undefined.
    cluster: {column, clusters} of the intervals. None: examples count as independent.
    requests: what the metrics of requests count; see `requests.score_requests`. None: no requests.
    calibration_error: {task: expected calibration error}, see `exact.calibration_error`.
    calibrated: method and data of the calibration, if the checkpoint has one.
    """

    step: int
    examples_per_second: float
    seconds: float
    metrics: scoring.Metrics
    best_possible: scoring.Metrics | None
    constant: scoring.Metrics
    buckets: dict[str, list[dict[str, float]]]
    histograms: dict[str, dict[str, list[float]]]
    checkpoint: str
    data: str
    by: dict[str, Any] | None
    untrained: tuple[str, ...] = ()
    intervals: Mapping[str, Mapping[str, list[float]]] = MappingProxyType({})
    cluster: dict[str, Any] | None = None
    requests: dict[str, Any] | None = None
    calibration_error: Mapping[str, float] = MappingProxyType({})
    calibrated: Mapping[str, Any] | None = None
    losses: Mapping[str, str] = MappingProxyType({})


class Prediction(NamedTuple):
    """Summary of the predictions that `predict` wrote.

    worse_than_constant: tasks for which a constant did better in the evaluation of the run.
    ranked: tasks that are trained by ranking alone. Their predictions are scores.
    """

    rows: int
    output: str
    step: int
    seconds: float
    checkpoint: str
    worse_than_constant: list[str]
    ranked: tuple[str, ...] = ()


class SavedRun(NamedTuple):
    """A run that was loaded from its workdir.

    builder: makes its parts, from its config and the schema of its model.
    """

    directory: Path
    builder: Builder

    @property
    def config(self) -> ConfigDict:
        """The whole config, to store or to compare it."""
        return self.builder.config

    @property
    def schema(self) -> Schema:
        """The schema that the model was trained on."""
        return self.builder.schema

    @property
    def default_checkpoint(self) -> str:
        """The checkpoint that represents the run: "best" with early stopping, else "newest"."""
        return "best" if self.builder.eval.early_stopping_patience else "newest"

    def data(self, store_path: str = "") -> RunData:
        """Locates the store at `store_path`, or the run's own data if it is empty."""
        return opening.locate(self.config, self.directory, store_path=store_path)

    def open_data(self, store_path: str = "") -> Store:
        """Opens the store at `store_path`, or the run's own data if empty, as the model reads it.

        Raises:
            InputError: the data is absent, or the run's model cannot read it.
        """
        return self.view(self.data(store_path).open())

    def view(self, store: Store) -> Store:
        """Returns a store as the model reads it. See `model_view.view_for_model`."""
        return view_for_model(self.schema, store, self.open_own)

    def open_own(self) -> Store:
        """Opens the store that the run was trained on, to match rows by raw value.

        Raises:
            InputError: it is absent.
        """
        try:
            return self.data().open()
        except InputError as error:
            raise InputError(
                f"{self.directory}: the run's own data must exist, because it has the raw values of"
                f" the rows of its tables: {error}"
            ) from error

    def values(self, table: Table, store: Store) -> pa.ChunkedArray:
        """Returns the raw value of each row of a vocabulary of the run, without reserved rows.

        Args:
            store: is read if it extends that vocabulary, else the run's own data.

        Raises:
            InputError: both hold another vocabulary.
        """
        extending = store if store.extends(table) else self.open_own()
        check_extends(extending, table)
        return extending.values(table.name).slice(0, table.rows - RESERVED_ROWS)

    def check_training_data(self, store: Store, checkpoints: Checkpoints) -> None:
        """Checks that a store at the path of the run's own data still has that data.

        Raises:
            InputError: the run was trained on other data.
        """
        expected = checkpoints.data_fingerprint()
        split = store.split(self.builder.data.train, "data.train")
        if expected and split.fingerprint != expected:
            raise InputError(
                f"{split.path}: must be the data that the run in {self.directory.absolute()} was"
                " trained on, because --data is not set: found other blocks. Name the store with"
                " --data."
            )

    def layout(self) -> Layout:
        """Returns the layout of the run's tables."""
        return self.builder.layout(workdirs.load_placement(self.directory))

    def weights_shape(self) -> Weights:
        """Returns the shapes of the weights that predict, without using a device."""
        return self.builder.weights_shape(self.layout())

    def predictor(self) -> Predictor:
        """Builds the predictor for the available devices, independent of the mesh of the run."""
        # Rows can be sharded over a power of two. The other factor of the devices is replicas.
        count = jax.device_count()
        mesh = meshes.make_mesh(replicas=count // math.gcd(count, GROUPS))
        processes.check_devices(mesh)
        layout = self.layout()
        room = min(1.0, _UNMEASURED / mesh.shape[meshes.SHARD])
        return self.builder.predictor(
            layout, mesh, room={stack.name: room for stack in layout.stacks}
        )


def load_run(workdir: str | Path) -> SavedRun:
    """Loads the run in `workdir`.

    Raises:
        InputError: there is no run, or its files are damaged.
    """
    directory = workdirs.directory(workdir)
    builder = Builder(workdirs.load_config(directory), workdirs.load_schema(directory))
    return SavedRun(directory, builder)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A run whose checkpoints can be scored on all available devices, and the data to score.

    store: with all features and its own table rows.
    view: `store` as the model reads it, with `split`.
    requests: how requests are scored.
    """

    saved: SavedRun
    batch_size: int
    predictor: Predictor
    split: Split
    checkpoints: Checkpoints
    store: Store
    view: Store
    requests: RequestSpec

    def calibration(self, step: int) -> Calibration | None:
        """Reads the calibration of a checkpoint. See `calibration.files.load`."""
        sums = self.checkpoints.saved_checksums(step)["weights"]
        return calibrations.load(self.saved.directory, step, sums)

    def groups(self, by: str, *, is_limited: bool = True) -> slices.Groups | None:
        """Reads the columns to slice by, None if `by` is empty. See `slices.read_groups`."""
        if not by:
            return None
        return slices.read_groups(self.store, self._stored_split(), by, is_limited=is_limited)

    def clusters(self) -> slices.Clusters | None:
        """Reads the clusters of the run, if it has any. See `slices.read_clusters`."""
        cluster = self.saved.builder.eval.cluster
        return slices.read_clusters(self.store, self._stored_split(), cluster)

    def _stored_split(self) -> Split:
        return self.store.split(self.split.name)

    def with_split(self, split: str, flag: str) -> "Opened":
        """Returns the run with another split to score. Empty: its validation split.

        Args:
            flag: names the split in errors.
        """
        return dataclasses.replace(self, split=_open_split(self.saved, self.view, split, flag))

    def weights(self, step: int) -> Weights:
        """Restores the weights that predict from a checkpoint.

        Raises:
            InputError: the checkpoint cannot be restored.
        """
        return self.checkpoints.restore_weights(
            step, self.predictor.weights_shape, self.predictor.weights_sharding
        )


def open_run(
    workdir: str, *, data: str = "", split: str = "", batch_size: int | None = None
) -> Opened:
    """Opens a run and the data to score. See `evaluate` for arguments and errors."""
    _check_batch_size(batch_size)  # before anything is read
    with processes.together():
        run = load_run(workdir)
    return open_saved(run, data=data, split=split, batch_size=batch_size)


def _check_batch_size(batch_size: int | None) -> None:
    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size: must be at least 1: found {batch_size}.")


def open_saved(
    run: SavedRun, *, data: str = "", split: str = "", batch_size: int | None = None
) -> Opened:
    """Opens the data to score for a run that was loaded. See `open_run`."""
    _check_batch_size(batch_size)
    with processes.together():
        store = run.data(data).open()
        view = run.view(store)
    opened = _open_split(run, view, split, "--split")
    processes.check_same(f"the run in {run.directory}", f"{run.config} {run.schema}")

    section = run.builder.eval
    checkpoints = Checkpoints(run.directory, read_only=True)
    if not data:
        run.check_training_data(view, checkpoints)
    return Opened(
        saved=run,
        batch_size=batch_size or section.batch_size,
        predictor=run.predictor(),
        split=opened,
        checkpoints=checkpoints,
        store=store,
        view=view,
        requests=request_spec(store, section.top_k, run.builder.ranked),
    )


def _open_split(run: SavedRun, store: Store, split: str, flag: str) -> Split:
    """Opens a split of a store as the model reads it. See `Opened.with_split`."""
    with processes.together():
        name = split or run.builder.data.valid
        if name in ("", NEXT_DAY):
            raise InputError(f"{flag}: must be set, because the run has no validation split.")
        opened = store.split(name, flag if split else "data.valid")
    processes.check_same(f"the data in {store.path}", f"{opened.fingerprint} {store.schema}")
    return opened


def evaluate(
    workdir: str,
    *,
    checkpoint: str = "newest",
    data: str = "",
    split: str = "",
    batch_size: int | None = None,
    by: str = "",
) -> Evaluation:
    """Scores one checkpoint of the run in `workdir`.

    Args:
        workdir: of the run.
        checkpoint: "newest", "best" or a step number.
        data: a store. Empty: the run's own data.
        split: of the store. Empty: the run's validation split.
        batch_size: in examples. None: the batch size of the config.
        by: columns of the store for metrics per value, see `slices.read_groups`. Empty: none.

    Raises:
        InputError: workdir, checkpoint, column or data are absent or do not match.
    """
    started = time.perf_counter()
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    evaluation, _ = evaluate_opened(run, checkpoint, run.groups(by), run.clusters())
    return evaluation._replace(seconds=time.perf_counter() - started)


def evaluate_opened(
    run: Opened,
    checkpoint: str,
    groups: slices.Groups | None,
    clusters: slices.Clusters | None,
) -> tuple[Evaluation, scoring.Scored]:
    """Scores one checkpoint. Returns the result of `evaluate`, and the scores of all examples."""
    started = time.perf_counter()
    scoring.check_labelled(run.split)
    step, (weights, calibration, untrained_then) = run.checkpoints.read(
        checkpoint,
        lambda step: (run.weights(step), run.calibration(step), run.checkpoints.untrained(step)),
    )
    scores = scoring.evaluate(
        run.predictor,
        weights,
        run.split,
        run.batch_size,
        groups,
        clusters,
        run.requests,
        calibration,
    )
    saved, schema = run.saved, run.predictor.layout.schema
    left = saved.builder.untrained()
    reference = scoring.reference(run.split, schema)
    evaluation = Evaluation(
        step=step,
        examples_per_second=scores.rows / scores.seconds,
        seconds=time.perf_counter() - started,
        metrics=scores.metrics,
        best_possible=reference.best_possible,
        constant=reference.constant,
        buckets=scores.buckets,
        histograms=scores.histograms,
        checkpoint=run.checkpoints.directory(step),
        data=str(run.split.path),
        by=scores.slices._asdict() if scores.slices else None,
        untrained=tuple(
            task.name for task in schema.tasks if task.name in {*left, *untrained_then}
        ),
        losses=saved.builder.losses,
        intervals=scores.intervals,
        cluster=clusters.to_json() if clusters else None,
        requests=scores.requests,
        calibration_error={
            task: exact.calibration_error(buckets)
            for task, buckets in scores.buckets.items()
            if task not in run.requests.ranked
        },
        calibrated=dict(calibration.origin) if calibration else None,
    )
    return evaluation, scores.scored


def predict(
    workdir: str,
    *,
    output: str,
    checkpoint: str = "newest",
    data: str = "",
    split: str = "",
    batch_size: int | None = None,
) -> Prediction:
    """Writes the predictions of one checkpoint to `output`.

    See `evaluate` and `score.write_predictions` for arguments and errors.
    """
    started = time.perf_counter()
    scoring.check_output(output)
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    step, (weights, calibration, worse) = run.checkpoints.read(
        checkpoint,
        lambda step: (
            run.weights(step),
            run.calibration(step),
            run.checkpoints.worse_than_constant(step),
        ),
    )
    rows = scoring.write_predictions(
        run.predictor, weights, run.split, run.batch_size, output, calibration
    )
    seconds = time.perf_counter() - started
    where, ranked = run.checkpoints.directory(step), run.requests.ranked
    return Prediction(rows, output, step, seconds, where, worse, ranked)
