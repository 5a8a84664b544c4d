"""Evaluation of each new checkpoint of a run that goes on beside this one."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank import evaluate as evaluation
from jaxrank import processes, workdir
from jaxrank.errors import InputError
from jaxrank.restore import open_run
from jaxrank.summary import in_short
from jaxrank.writers import Writer, open_writer


class Followed(NamedTuple):
    """What `follow` found.

    evaluations: of each checkpoint that this call scored: its step, its metrics by task.
    output: the folder of metrics.jsonl and TensorBoard's files.
    """

    evaluations: list[dict[str, Any]]
    output: str


def follow(
    directory: str,
    *,
    data: str = "",
    split: str = "",
    batch_size: int = 0,
    every_seconds: float = 10.0,
    report: Callable[[str], None] = print,
) -> Followed:
    """Scores the checkpoints of the run in `directory`, each once, until the run has ended.

    A checkpoint that is deleted before it could be read is left out. What was scored stands in
    `directory`/follow/SPLIT, and a call after this one was ended goes on behind it.

    Args:
        data, split, batch_size: as of `restore.evaluate`.
        every_seconds: between looks for a new checkpoint.
        report: gets a line for each checkpoint.

    Raises:
        InputError: workdir or data are not there or do not fit together, a checkpoint is damaged.
    """
    if not every_seconds > 0:
        raise InputError(f"--every: must be more than 0 seconds: found {every_seconds}.")
    run = open_run(directory, data=data, split=split, batch_size=batch_size)
    folder = Path(directory) / "follow" / run.split.path.name
    step = _last_step(folder)
    found: list[dict[str, Any]] = []
    with contextlib.closing(open_writer(folder, step)) as writer:
        while True:
            ended = workdir.is_finished(Path(directory))  # or the last one could be missed
            newer = run.checkpoints.newer(step)
            if newer is None and ended:
                return Followed(found, str(folder))
            if newer is None:
                time.sleep(every_seconds)
                continue
            step = newer
            try:
                weights = run.weights(step)
            except InputError:
                if run.checkpoints.is_there(step):
                    raise
                report(f"step {step}: deleted before it could be read")
                continue
            scores = evaluation.evaluate(run.program, weights, run.split, run.batch_size)
            found.append({"step": step, "metrics": scores.metrics})
            _write(writer, step, scores.metrics)
            told = "; ".join(f"{task}: {in_short(m)}" for task, m in scores.metrics.items())
            report(f"step {step}: {told}")


def _last_step(folder: Path) -> int:
    """The last step that was scored, as process 0 reads it; -1 if none was."""
    step = -1
    with processes.together():
        path = folder / "metrics.jsonl"
        if processes.is_first() and path.is_file():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the end of one that was killed
                    step = json.loads(line)["step"]
    return processes.from_first(step)


def _write(writer: Writer, step: int, metrics: evaluation.Metrics) -> None:
    values = {f"{task}/{name}": v for task, found in metrics.items() for name, v in found.items()}
    writer.write(step, values, kind="follow")
    writer.flush()
