"""Evaluation of each new checkpoint of a run that goes on beside this one."""

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

_MOST_SECONDS = 86400


class Followed(NamedTuple):
    """What `follow` found.

    evaluations: of each checkpoint that this call scored: its step, its metrics by task.
    output: the folder of metrics.jsonl and TensorBoard's files.
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
    """Scores the checkpoints of the run in `workdir`, each once, until the run has finished.

    A run that was killed or failed has not: it may be resumed. A checkpoint that is deleted before
    it could be read is left out. What was scored stands in `workdir`/follow/SPLIT, with the
    data's fingerprint where `data` is given, and a call after this one was ended goes on behind it.

    Args:
        data, split, batch_size: as of `evaluate.evaluate`.
        every_seconds: between looks for a new checkpoint.
        report: gets a line for each checkpoint.

    Raises:
        InputError: workdir or data are not there or do not fit together, a checkpoint is damaged.
    """
    if not 0 < every_seconds <= _MOST_SECONDS:
        raise InputError(
            f"--every: must be more than 0 seconds, and at most {_MOST_SECONDS}: found"
            f" {every_seconds}."
        )
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    scoring.check_labelled(run.split)
    name = run.split.name.replace("/", "-").replace(":", "-")
    folder = Path(workdir) / "follow" / (f"{name}-{run.split.fingerprint[:8]}" if data else name)
    step = _last_step(folder)
    found: list[dict[str, Any]] = []
    with open_writer(folder, step) as writer:
        while True:
            ended = workdirs.is_finished(Path(workdir))  # or the last one could be missed
            newer = run.checkpoints.newer(step)
            if newer is None and ended:
                return Followed(found, str(folder))
            if newer is None:
                time.sleep(every_seconds)
                continue
            step = newer
            metrics = _metrics(run, step)
            if metrics is None:
                report(f"step {step}: deleted before it could be read")
                continue
            found.append({"step": step, "metrics": metrics})
            writer.write(step, flatten_metrics(metrics), kind="follow")
            writer.flush()
            report(evaluation_line(f"step {step}", metrics))


def _metrics(run: Opened, step: int) -> scoring.Metrics | None:
    """Those of a checkpoint; None if it is deleted before it could be read."""
    try:
        weights = run.weights(step)
    except InputError:
        if run.checkpoints.is_deleted(step):
            return None
        raise
    return scoring.evaluate(run.predictor, weights, run.split, run.batch_size).metrics


def _last_step(folder: Path) -> int:
    """The last step that was scored, as process 0 reads it; -1 if none was."""
    step = -1
    with processes.together():
        path = folder / "metrics.jsonl"
        if processes.is_first() and path.is_file():
            for line in path.read_text().split("\n")[:-1]:  # without what a kill left of a line
                with contextlib.suppress(ValueError, TypeError, KeyError):  # told by the writer
                    step = json.loads(line)["step"]
    return processes.from_first(step)
