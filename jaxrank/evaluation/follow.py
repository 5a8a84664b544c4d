"""Evaluates each new checkpoint of a concurrent run."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.evaluate import Opened, open_run
from jaxrank.evaluation.report import evaluation_line, flatten_metrics
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.telemetry.writers import open_writer
from jaxrank.workdir import files as workdirs

_MAX_SECONDS = 86400


class Followed(NamedTuple):
    """Result of `follow`.

    evaluations: step and metrics by task of each checkpoint that this call scored.
    output: folder of metrics.jsonl and the TensorBoard files.
    """

    evaluations: list[dict[str, Any]]
    output: str


def follow(
    workdir: str,
    *,
    data: str = "",
    split: str = "",
    batch_size: int | None = None,
    every_seconds: float = 10.0,
    report: Report = print,
) -> Followed:
    """Scores each checkpoint of the run in `workdir` once, until the run has finished.

    A run that was killed or failed has not finished, because it may be resumed. Checkpoints that
    are deleted before they can be read are skipped. Metrics are written to `workdir`/follow/SPLIT.
    If `data` is set, the folder name includes the fingerprint of the data. A later call continues
    after the last checkpoint that was scored.

    Args:
        workdir: of the run.
        data, split, batch_size: as in `evaluate.evaluate`.
        every_seconds: interval between checks for a new checkpoint.
        report: receives a line per checkpoint.

    Raises:
        InputError: workdir or data are absent or do not match, or a checkpoint is damaged.
    """
    if not 0 < every_seconds <= _MAX_SECONDS:
        raise InputError(
            f"--every: must be more than 0 seconds, and at most {_MAX_SECONDS}: found"
            f" {every_seconds}."
        )
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    scoring.check_labelled(run.split)
    name = run.split.name.replace("/", "-").replace(":", "-")
    folder = Path(workdir) / "follow" / (f"{name}-{run.split.fingerprint[:8]}" if data else name)
    step = _last_step(folder)
    evaluations: list[dict[str, Any]] = []
    with open_writer(folder, step, kinds=("follow",)) as writer:
        while True:
            ended = workdirs.is_finished(
                Path(workdir)
            )  # before `newer`, or the last checkpoint could be missed
            newer = run.checkpoints.newer(step)
            if newer is None and ended:
                return Followed(evaluations, str(folder))
            if newer is None:
                time.sleep(every_seconds)
                continue
            step = newer
            metrics = _metrics(run, step)
            if metrics is None:
                report(f"step {step}: checkpoint deleted before it was evaluated")
                continue
            evaluations.append({"step": step, "metrics": metrics})
            writer.write(step, flatten_metrics(metrics), kind="follow")
            writer.flush()
            report(evaluation_line(f"step {step}", metrics))


def _metrics(run: Opened, step: int) -> scoring.Metrics | None:
    """Scores a checkpoint. Returns None if it is deleted before it can be read."""
    try:
        weights = run.weights(step)
    except InputError:
        if run.checkpoints.is_deleted(step):
            return None
        raise
    scores = scoring.evaluate(
        run.predictor, weights, run.split, run.batch_size, requests=run.requests
    )
    return scores.metrics


def _last_step(folder: Path) -> int:
    """Returns the last step that was scored, as process 0 reads it, or -1."""
    step = -1
    with processes.together():
        path = folder / "metrics.jsonl"
        if processes.is_first() and path.is_file():
            for line in path.read_text().split("\n")[:-1]:  # without an incomplete last line
                with contextlib.suppress(ValueError, TypeError, KeyError):  # the writer reports it
                    step = json.loads(line)["step"]
    return processes.broadcast_value(step)
