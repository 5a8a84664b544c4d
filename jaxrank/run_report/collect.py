"""Collects what a report shows of a run from the files in its workdir."""

import shlex
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank import json_files
from jaxrank.config_files import to_plain
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError
from jaxrank.evaluation.evaluate import Evaluation, SavedRun, evaluate, load_run
from jaxrank.metrics.intervals import Z
from jaxrank.report import Report
from jaxrank.run_report import history, summary
from jaxrank.run_schedule import NEXT_DAY
from jaxrank.workdir import files as workdirs


class RunReport(NamedTuple):
    """The facts about a run that a report shows.

    name: short and distinct among the runs of a report.
    summary: see `summary.write`. `result` is None without a checkpoint.
    slices: results of `evaluate --by`, one per column, with the fields of `Evaluation`.
    """

    name: str
    directory: Path
    summary: Mapping[str, Any]
    history: history.History
    slices: list[dict[str, Any]]


def collect(workdir: str | Path, by: str = "", report: Report = lambda _: None) -> RunReport:
    """Reads the files of a run. Scores its checkpoint if it has no summary, or for slices.

    Args:
        workdir: of the run.
        by: a column, or "day", to score slices by. Empty: none.
        report: receives a line before a checkpoint is scored.

    Raises:
        InputError: there is no run, its files are damaged, or there is no such column.
    """
    directory = workdirs.directory(workdir)
    known = summary.read(directory) or _unfinished(directory, report)
    if by:
        if not load_run(directory).builder.data.valid:
            raise InputError(
                f"--by: {directory} must be a run with validation data: found none. Score another"
                f" split first: jaxrank evaluate --workdir={directory} --by={shlex.quote(by)}"
                " --split=NAME."
            )
        report(f"Scoring {directory} by {by}")
        save_slices(directory, evaluate(str(directory), checkpoint=_checkpoint(known), by=by))
    slices = _slices(directory)
    if by and not any(entry["by"]["column"] == by for entry in slices):
        raise InputError(f"{directory}: must be writable for --by: results cannot be stored there.")
    curves = history.read(directory / "metrics.jsonl")
    return RunReport(directory.name, directory, known, curves, slices)


def _checkpoint(known: Mapping[str, Any]) -> str:
    return str(known["result"]["checkpoint_step"]) if known["result"] else "newest"


def _unfinished(directory: Path, report: Report) -> dict[str, Any]:
    """Returns the summary of a run that has none, with the scores of its newest checkpoint."""
    run = load_run(directory)
    hot, coverage = workdirs.load_placement(directory), workdirs.load_coverage(directory)
    tables = summary.describe_tables(run.schema, hot, coverage)
    store = None
    try:
        store = run.open_data()
        data = {"store": str(store.path), "splits": summary.split_statistics(store)}
    except InputError as error:
        report(f"{directory}: its data cannot be read, and is not shown: {error}")
        data = {"store": "", "splits": {}}
    result = None
    if workdirs.has_checkpoint(directory) and store is not None and run.builder.data.valid:
        report(f"Scoring the checkpoint of {directory}, which has no summary.json")
        scored = evaluate(
            str(directory), checkpoint=run.default_checkpoint, split=_split(run, store)
        )
        result = json_files.plain(scored) | {"checkpoint_step": scored.step, "days": []}
    return {
        "version": "",
        "finished": "",
        "result": result,
        "description": "",
        "devices": "",
        "data": data,
        "tables": tables,
        "config": to_plain(run.config),
    }


def _split(run: SavedRun, store: Store) -> str:
    """Returns the split to score: empty for that of the config, or a day of the training data.

    Progressive validation has no split of its own, so the last day is scored.
    """
    if run.builder.data.valid != NEXT_DAY:
        return ""
    train = run.builder.data.train
    day, _ = store.split(train, "data.train").days[-1]
    return f"{train.partition('/')[0]}/{day}"


def save_slices(directory: Path, evaluation: Evaluation) -> None:
    """Stores the result of `evaluate --by` in a workdir, for reports, if it can be written."""
    assert evaluation.by is not None
    folder = directory / "evaluations"
    name = urllib.parse.quote(evaluation.by["column"], safe="")[:200]
    try:
        folder.mkdir(exist_ok=True)
        json_files.write(folder / f"by-{name}.json", evaluation)
    except OSError:  # a workdir may be read-only
        return


def _slices(directory: Path) -> list[dict[str, Any]]:
    paths = sorted((directory / "evaluations").glob("by-*.json"))
    entries = [json_files.read(path) for path in paths]
    for path, entry in zip(paths, entries, strict=True):
        if not isinstance(entry.get("by"), Mapping):
            raise InputError(
                f"{path}: must be the result of `jaxrank evaluate --by`: found no object `by`."
                " Delete the file."
            )
        for value in entry["by"]["values"]:
            if "errors" in value:  # written by an earlier version
                value["intervals"] = _intervals(value["metrics"], value.pop("errors"))
    return entries


def _intervals(metrics: Mapping[str, Any], errors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the 95% intervals of standard errors, {task: {metric: [low, high]}}."""
    return {
        task: {
            name: None if error is None else [metrics[task][name] + s * Z * error for s in (-1, 1)]
            for name, error in of_task.items()
        }
        for task, of_task in errors.items()
    }


def distinct_names(runs: list[RunReport]) -> list[RunReport]:
    """Returns the runs with distinct names: as many parts of their paths as that takes."""
    for parts in range(1, 20):
        names = ["/".join(run.directory.parts[-parts:]) for run in runs]
        if len(set(names)) == len(runs):
            return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]
    raise InputError(
        "RUN: each run must be given once: found"
        f" {json_files.to_text([run.directory for run in runs])}."
    )
