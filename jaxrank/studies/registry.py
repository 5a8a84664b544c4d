"""The studies by name, their flags, and the verb `study`."""

import argparse
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank.errors import InputError, StoppedError
from jaxrank.report import Report
from jaxrank.studies.execution import executor
from jaxrank.studies.execution import outcome as outcomes
from jaxrank.studies.execution.directories import Directories, command_overrides, config_name
from jaxrank.studies.execution.executor import WORKER
from jaxrank.studies.study import DEVICES, Context, Outcome, RunResult, Study, Table
from jaxrank.validate import check_choice, field_default, field_rules, parse


def _stability() -> Study:
    from jaxrank.studies import stability

    return stability.STUDY


def _batch_size() -> Study:
    from jaxrank.studies import batch_size

    return batch_size.STUDY


def _scaling() -> Study:
    from jaxrank.studies import scaling

    return scaling.STUDY


def _input() -> Study:
    from jaxrank.studies import input

    return input.STUDY


def _cost() -> Study:
    from jaxrank.studies import cost

    return cost.STUDY


def _ablation() -> Study:
    from jaxrank.studies import ablation

    return ablation.STUDY


def _sweep() -> Study:
    from jaxrank.studies import sweep

    return sweep.STUDY


# Each function imports the module of a study.
STUDIES: Mapping[str, Callable[[], Study]] = {
    "stability": _stability,
    "batch-size": _batch_size,
    "scaling": _scaling,
    "input": _input,
    "cost": _cost,
    "ablation": _ablation,
    "sweep": _sweep,
}


def find(name: str) -> Study:
    """Returns the study of a name.

    Raises:
        InputError: no study has that name. The error has the nearest one.
    """
    check_choice("the study", name, STUDIES)
    return STUDIES[name]()


def add_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Adds the flags of the study that the first argument of the verb names.

    Without a name, the help lists the studies.

    Raises:
        InputError: no study has that name, or an option has the name of a flag of the verb.
    """
    first = next(iter(arguments), "-")
    if first.startswith("-"):
        lines = [f"  {name:<12}{find(name).help}" for name in STUDIES]
        parser.epilog = "\n".join(["studies:", *lines, "", str(parser.epilog)])
        return
    study = find(first)
    group = parser.add_argument_group(f"options of {study.name}", study.help)
    kinds = typing.get_type_hints(study.options)
    for field in dataclasses.fields(study.options):
        try:
            _add_flag(group, field, kinds[field.name])
        except argparse.ArgumentError as error:
            raise InputError(
                f"the study {study.name}: the option {field.name} must have another name than the"
                f" flags of every study. Rename the field of {study.options.__name__}: {error}."
            ) from error


def _add_flag(group: Any, field: dataclasses.Field, kind: Any) -> None:
    flag, rules, default = (
        f"--{field.name.replace('_', '-')}",
        field_rules(field),
        field_default(field),
    )
    if kind is bool:
        group.add_argument(flag, action="store_true", help=rules.help)
        return
    if rules.single:
        text = f"{rules.help}; may be repeated".replace("%", "%%")
        group.add_argument(flag, action="append", default=list(default), metavar="TEXT", help=text)
        return
    is_tuple = typing.get_origin(kind) is tuple
    shown = ",".join(map(str, default)) if is_tuple else default
    unit = f" {rules.unit}" if rules.unit else ""
    group.add_argument(
        flag,
        type=functools.partial(_entries, typing.get_args(kind)[0]) if is_tuple else kind,
        default=default,
        metavar="LIST" if is_tuple else {str: "TEXT"}.get(kind, "N"),
        help=f"{rules.help}; default: {shown if shown != '' else 'none'}{unit}".replace("%", "%%"),
    )


def _entries(kind: type, text: str) -> tuple[Any, ...]:
    try:
        entries = tuple(kind(entry.strip()) for entry in text.split(",") if entry.strip())
    except ValueError as error:
        kinds = {int: "whole numbers", float: "numbers"}
        must = f"must be {kinds[kind]} separated by commas: found {text!r}"
        raise argparse.ArgumentTypeError(must) from error
    if len(set(entries)) < len(entries):
        raise argparse.ArgumentTypeError(f"must have each entry once: found {text!r}")
    return entries


def make_options(study: Study, flags: Mapping[str, Any]) -> Any:
    """Returns the options of a study from the parsed flags.

    Raises:
        InputError: a value is out of bounds, or not among the choices.
    """
    names = [field.name for field in dataclasses.fields(study.options)]
    try:
        return parse(study.options, {name: flags[name] for name in names}, "")
    except InputError as error:
        # The message begins with the name of the field.
        text = re.sub(r"^\w+", lambda name: name[0].replace("_", "-"), str(error))
        raise InputError(f"--{text}") from error


def run(
    study: Study,
    config: ConfigDict,
    workdir: Path,
    options: Any,
    *,
    command: Sequence[str],
    jobs: int = 1,
    report: Report = print,
    worker: Sequence[str] = WORKER,
) -> dict[str, Any]:
    """Executes the runs of a study and writes its outcome into the workdir.

    Args:
        command: arguments that give this config, for the commands of single runs: those that come
            before the config, "--config=NAME", and overrides.
        jobs: number of runs at the same time.
        worker: see `executor.opened`.

    Returns:
        The content of NAME.json. With "error", the error of a study some of whose runs failed.

    Raises:
        InputError: the options are invalid, the study compares metrics and the config names no
            validation split, or there are several jobs, and devices that only one process can open.
        InputError, RunError, StoppedError: see `Executor.run` and `executor.opened`.
    """
    outcomes.check_directory(workdir, study.name)
    directories = Directories(config, workdir, command)
    context = Context(config, options, report, command_overrides(command), config_name(command))
    # An invalid config and invalid options are errors before anything is written.
    if study.compares_metrics:
        configs.check_validated(config, f"the study {study.name}", "whose metrics it compares")
    next(study.runs(context))
    failed: dict[str, RunResult] = {}
    try:
        with executor.opened(
            directories, workdir, jobs=jobs, report=report, worker=worker
        ) as execution:
            if jobs > 1:
                _check_devices(execution, jobs)

            def execute(specs: Any) -> list[RunResult]:
                results = execution.run(specs)
                failed.update({r.spec.name: r for r in results if not r.is_done})
                return results

            outcome = _outcome(study, context, execute)
            result = outcomes.write(workdir, study.name, outcome, list(failed.values()))
    except StoppedError:
        _report_unfinished(study, context, execution.finished)
        raise
    report(outcomes.describe(outcome, list(failed.values())))
    report(f"Files: {', '.join(result['files'])}")
    if failed:
        result["error"] = f"{len(failed)} runs failed: {', '.join(failed)}. See {workdir}/runs."
    return result


def _check_devices(execution: executor.Executor, jobs: int) -> None:
    """Raises InputError if several workers cannot open the devices of this machine together."""
    (present,) = execution.run([DEVICES])
    if not present.is_done:
        raise InputError(present.error)
    if present.values["platform"] != "cpu":
        raise InputError(
            f"--jobs: must be 1, because one process uses all accelerators: found {jobs}, with"
            f" {present.values['count']} x {present.values['kind']}. Set --jobs=1, or"
            " JAX_PLATFORMS=cpu."
        )


def _report_unfinished(study: Study, context: Context, finished: Callable[[Any], Any]) -> None:
    """Reports the table of the runs that have finished.

    It is that of the study if the study can make one without the other runs.

    Args:
        finished: see `Executor.finished`.
    """
    done: dict[str, RunResult] = {}

    def collect(specs: Any) -> list[RunResult]:
        results = finished(specs)
        done.update({r.spec.name: r for r in results if r.is_done})
        return results

    try:
        table = _outcome(study, context, collect).table
    except InputError:  # of a study that cannot choose its next runs
        table = Table((), ())
    table = table if table.rows else outcomes.runs_table(list(done.values()))
    if table.rows:
        text = outcomes.table_text(table)
        context.report(f"Runs that have finished, of an unfinished study:\n{text}")


def _outcome(study: Study, context: Context, execute: Callable[[Any], Any]) -> Outcome:
    """Drives the generator of a study: executes each batch of runs and sends the results."""
    runs = study.runs(context)
    results = None
    while True:
        try:
            specs = next(runs) if results is None else runs.send(results)
        except StopIteration as stop:
            return stop.value
        results = execute(specs)
