"""The verbs of the command line. Modules that a verb needs are imported when it runs."""

import argparse
import contextlib
import difflib
import errno
import faulthandler
import functools
import itertools
import os
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from jaxrank import extensions, json_files, signals
from jaxrank.errors import InputError, RunError, StoppedError
from jaxrank.flags import BUNDLE_FLAGS, ONCE, parsers
from jaxrank.runtime import huge_pages, processes, threads


def _check_picture(path: Path) -> None:
    """Rejects a picture that cannot be written, before the work starts."""
    from jaxrank.data.files import check_parent, check_replaceable

    if path.is_dir():
        raise InputError(f"--picture: {path} must be a file: found a directory.")
    check_replaceable(path, "--picture")
    check_parent(path, "--picture")


def _dash_flag(argument: str) -> str:
    """Returns a flag with dashes, --on-error for --on_error. Config fields stay unchanged."""
    name, equals, value = argument.partition("=")
    if not name.startswith("--") or name.startswith("--config."):
        return argument
    return name.replace("_", "-") + equals + value


def _check_flags(argv: Sequence[str]) -> None:
    """Raises InputError if a flag is empty (as by an unset variable) or one of ONCE is repeated."""
    seen: set[str] = set()
    for arg, following in itertools.pairwise([*argv, "-"]):
        name, equals, value = arg.partition("=")
        if not name.startswith("--") or name.startswith("--config."):
            continue
        if not (value if equals else following):
            raise InputError(f"{name}: must have a value: found nothing.")
        if name in seen and name in ONCE:
            raise InputError(f"{name}: must be given once: found it again, {arg!r}.")
        seen.add(name)


def _check_rest(
    parser: argparse.ArgumentParser, rest: Sequence[str], typed: Mapping[str, str]
) -> None:
    """Raises InputError unless every remaining argument overrides a field of the config.

    Args:
        typed: how the user spelled each argument.
    """
    flags = _flags(parser)
    takes_config = "--config" in flags
    for i, arg in enumerate(rest):
        value_of_previous = i > 0 and rest[i - 1].startswith("--config.") and "=" not in rest[i - 1]
        if takes_config and (arg.startswith("--config.") or value_of_previous):
            continue
        similar = difflib.get_close_matches(arg.split("=")[0], flags, 1)
        likely = (takes_config and _as_override(typed.get(arg, arg))) or "".join(similar)
        hint = f" Did you mean {likely}?" if likely else ""
        shown = typed.get(arg, arg)
        raise InputError(f"unknown argument {shown!r}.{hint} Try `{parser.prog} --help`.")


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return parser.format_usage().replace("[", " ").replace("]", " ").split()


def _as_override(argument: str) -> str:
    """Returns --config.FIELD=VALUE for --FIELD=VALUE if the config has the field, else ""."""
    from jaxrank.config import default

    name, equals, value = argument.removeprefix("--").partition("=")
    section: Any = default()
    for part in name.split("."):
        if not hasattr(section, "keys") or part not in section:
            return ""
        section = section[part]
    return f"--config.{name}{equals}{value}" if argument.startswith("--") else ""


def _check_unknown_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str], typed: Mapping[str, str]
) -> None:
    """Raises InputError for the first argument that is a flag which the verb does not have."""
    flags = _flags(parser)
    unknown = [arg for arg in argv if arg.startswith("--") and arg.split("=")[0] not in flags]
    _check_rest(parser, unknown, typed)


def _progress(args: argparse.Namespace, report: Callable) -> Callable:
    """Returns the function that reports everything but the result: none with --quiet."""
    return (lambda text: None) if getattr(args, "quiet", False) else report


def _prepare(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.data.prepare.runners import make_runner
    from jaxrank.opening import prepare

    store = prepare(
        args.config,
        args.output,
        vocabularies=args.vocabularies,
        refit_scales=args.refit_scales,
        on_error=args.on_error,
        max_rejected=args.max_rejected,
        hash_key_file=args.hash_key_file,
        unlabelled=args.unlabelled,
        runner=make_runner(args.runner, args.workers, args.runner_option),
        report=report,
    )
    report(f"Store: {store.path}")
    statistics = {
        name: {k: v for k, v in split.statistics.items() if k != "mergeable"}
        for name, split in store.splits.items()
    }
    if args.picture:
        from jaxrank import plots

        plots.draw_statistics(statistics, args.picture)
        report(f"picture: {args.picture}")
    return {
        "store": str(store.path),
        "splits": {
            name: {"rows": split.rows, "bytes": split.bytes, "statistics": statistics[name]}
            for name, split in store.splits.items()
        },
        "tables": {table.name: table.rows for table in store.schema.tables},
        "vocabularies": {
            table: history["changes"]
            for table, history in store.histories.items()
            if "changes" in history
        },
    }


def _train(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation import report as summary
    from jaxrank.train import train

    result = train(
        args.config,
        args.workdir,
        report=_progress(args, report),
        quiet=args.quiet,
        allow_config_change=args.allow_config_change,
        allow_older_checkpoint=args.allow_older_checkpoint,
        init_from=args.init_from,
        baseline=args.baseline,
        profile_steps=args.profile_steps,
        debug_batches=args.debug_batches,
        page=not args.no_report,
    )
    report(summary.format_training(result, args.workdir, page=not args.no_report))
    return result._asdict()


def _plan(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.aot.topology import topology
    from jaxrank.placement import report as plan_report
    from jaxrank.placement.plan import plan
    from jaxrank.report import parse_bytes

    if (args.devices is None) == (not args.topology):
        raise InputError(
            "--devices, --topology: one of them must be given: found"
            f" --devices={args.devices}, --topology={args.topology!r}."
        )
    if not args.topology and not args.memory:
        raise InputError("--memory: must be given with --devices: found none.")
    if args.devices is not None and args.devices < 1:
        raise InputError(f"--devices: must be at least 1: found {args.devices}.")
    named = topology(args.topology) if args.topology else None
    memory = parse_bytes(args.memory) if args.memory else 0
    planned = plan(
        args.config,
        devices=named.devices if named else args.devices,
        memory=memory or (named.usable_bytes if named else 0),
        topology=args.topology,
        replicas=args.replicas,
        batches=args.batches,
        workdir=args.workdir,
        report=report,
    )
    report(plan_report.describe(planned))
    if args.picture:
        plan_report.draw(planned, args.picture)
        report(f"picture: {args.picture}")
    return plan_report.to_json(planned)


def _compile(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.aot import report as compile_report
    from jaxrank.aot.compile import check_names, compile_slices

    names = check_names(args.topology)
    if args.picture and not args.scaling:
        raise InputError(
            "--picture: must be used with --scaling, whose result it draws: found no --scaling."
        )
    compiled = list(
        compile_slices(
            args.config, names, workdir=args.workdir, scaling=args.scaling, report=report
        )
    )
    report(compile_report.describe(compiled))
    if args.picture and compile_report.draw(compiled, args.picture):
        report(f"picture: {args.picture}")
    return compile_report.to_json(compiled)


def _bench(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.bench import report as bench_report
    from jaxrank.bench.measure import bench

    result = bench(args.config, args.workdir, seconds=args.seconds, report=report)
    report(bench_report.describe(result))
    if args.picture:
        from jaxrank import plots

        plots.draw_bench(
            result.rates._asdict(),
            result.stages,
            args.picture,
            limit=result.limit,
            title=f"{result.device}, batch {result.batch_size:,}",
        )
        report(f"picture: {args.picture}")
    return bench_report.to_json(result)


def _selftest(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.selftest import report as selftest_report
    from jaxrank.selftest.job import FULL, Size
    from jaxrank.selftest.supervise import selftest
    from jaxrank.workdir.files import directory

    result = selftest(
        str(directory(args.workdir)) if args.workdir else "",
        FULL if args.full else Size(),
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_id=args.process_id,
        report=report,
    )
    if result.process:  # process 0 reports for all
        if result.failed:
            raise FailedCheckError(selftest_report.summary(result))
        return {}
    report(selftest_report.describe(result))
    return selftest_report.to_json(result)


def _check_model(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.aot.compile import check_names
    from jaxrank.model_check import check

    check.use_cpus()
    result = check.check_model(
        args.config,
        workdir=args.workdir,
        topologies=check_names(args.topology),
        skip=[name.strip() for name in args.skip.split(",") if name.strip()],
        report=report,
    )
    report(check.describe(result))
    return check.to_json(result)


def _which(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags that select a checkpoint and the data to score."""
    return {name: getattr(args, name) for name in ("checkpoint", "data", "split", "batch_size")}


def _evaluate(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation import report as summary
    from jaxrank.evaluation.evaluate import evaluate

    if args.follow:
        return _follow(args, report)
    if args.every is not None:
        raise InputError(f"--every: must be used with --follow: found {args.every:g} without it.")
    if args.against or args.fail_if:
        return _gate(args, report)
    result = evaluate(args.workdir, **_which(args), by=args.by)
    if args.by and not args.data and processes.is_first():
        from jaxrank.run_report import collect

        collect.save_slices(Path(args.workdir), result)
    report(summary.format_evaluation(result))
    _draw_reliability(args, result.buckets, report)
    return result._asdict()


def _draw_reliability(args: argparse.Namespace, buckets: Any, report: Callable) -> None:
    """Draws the reliability diagram of --picture."""
    from jaxrank.evaluation import report as summary

    if args.picture and not buckets:
        report("no picture: no task has probabilities, because all are trained by ranking alone")
    elif args.picture and processes.is_first():
        from jaxrank import plots

        plots.draw_panels(summary.reliability_panels(buckets), [args.picture])
        report(f"picture: {args.picture}")


def _calibrate(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation.calibrate import calibrate, describe

    result = calibrate(
        args.workdir,
        method=args.method,
        measure_on=args.measure_on,
        by=args.by,
        **_which(args),
        report=_progress(args, report),
    )
    report(describe(result))
    return result._asdict()


def _explain(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.explain.importance import describe, explain, panels

    result = explain(
        args.workdir,
        **_which(args),
        by=args.by,
        group=args.group,
        rows=args.rows,
        report=_progress(args, report),
    )
    report(describe(result))
    if args.picture:
        from jaxrank import plots

        plots.draw_panels(panels(result), [args.picture])
        report(f"picture: {args.picture}")
    return result._asdict()


def _gate(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation import report as summary
    from jaxrank.evaluation.gate import text
    from jaxrank.evaluation.gate.judge import judge

    gate = judge(
        args.workdir, against=args.against, fail_if=args.fail_if, **_which(args), by=args.by
    )
    report(summary.format_evaluation(gate.evaluation))
    _draw_reliability(args, gate.evaluation.buckets, report)
    report(text.describe(gate))
    return text.to_json(gate)


def _follow(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation.follow import follow

    settings = _which(args)
    if settings.pop("checkpoint") != "newest":
        raise InputError(
            "--checkpoint: must be used without --follow, which scores every checkpoint: found"
            f" {args.checkpoint!r} with it."
        )
    for flag in ("by", "against", "fail_if", "picture"):
        if value := getattr(args, flag):
            name = f"--{flag.replace('_', '-')}"
            raise InputError(f"{name}: must be used without --follow: found {name}={value}.")
    every = {} if args.every is None else {"every_seconds": args.every}
    result = follow(args.workdir, **settings, **every, report=report)
    _progress(args, report)(f"The run has ended; TensorBoard: tensorboard --logdir={result.output}")
    return result._asdict()


def _predict(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation.evaluate import predict

    if args.bundle:
        return _predict_bundle(args, report)
    for flag in ("input", "hash_key_file"):
        if value := getattr(args, flag):
            name = flag.replace("_", "-")
            raise InputError(f"--{name}: must be used with --bundle: found {value!r} without it.")
    if not args.workdir:
        raise InputError("--workdir, --bundle: one of them must be given: found neither.")
    result = predict(args.workdir, output=args.output, **_which(args))
    report(f"{result.rows:,} predictions of {result.checkpoint}: {result.output}")
    if result.ranked:
        report(f"scores without calibration, by ranking alone: {', '.join(result.ranked)}")
    _report_worse(result.worse_than_constant, result.checkpoint, report)
    return result._asdict()


def _predict_bundle(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.export.bundle import check_packages
    from jaxrank.export.predict import predict_bundle

    flags = {"workdir": args.workdir, **_which(args)}
    flags["checkpoint"] = "" if args.checkpoint == "newest" else args.checkpoint
    for flag, value in flags.items():
        if value:
            name = flag.replace("_", "-")
            raise InputError(f"--{name}: must be used without --bundle: found {value!r} with it.")
    if not args.input:
        raise InputError("--input: must name the raw data that --bundle scores: found none.")
    check_packages("--bundle")
    result = predict_bundle(
        args.bundle,
        inputs=args.input,
        output=args.output,
        hash_key_file=args.hash_key_file,
        report=_progress(args, report),
    )
    report(f"{result.rows:,} predictions of {result.bundle}: {result.output}")
    return result._asdict()


def _export(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    settings = dict(output=args.output, checkpoint=args.checkpoint, data=args.data)
    if args.format == "bundle":
        return _export_bundle(args, settings, report)
    for flag, default in BUNDLE_FLAGS.items():
        if (value := getattr(args, flag)) != default:
            raise InputError(
                f"--{flag.replace('_', '-')}: must be used with --format=bundle: found {value!r}"
                f" with --format={args.format}. Omit it."
            )
    from jaxrank.export.write import export

    result = export(args.workdir, **settings)
    report(
        f"{result.rows:,} rows of {result.tables} tables and {result.parameters:,} parameters of"
        f" {result.checkpoint}: {result.output}"
    )
    _report_worse(result.worse_than_constant, result.checkpoint, report)
    return result._asdict()


def _export_bundle(
    args: argparse.Namespace, settings: dict[str, str], report: Callable
) -> dict[str, Any]:
    from jaxrank.export.bundle import export_bundle
    from jaxrank.export.signature import Requests
    from jaxrank.report import format_bytes

    result = export_bundle(
        args.workdir,
        **settings,
        tables=args.tables,
        requests=Requests.parse(args.context, args.default),
        hash_key_file=args.hash_key_file,
        since=args.since,
        report=_progress(args, report),
    )
    kind = f"Delta of {args.since} to" if args.since else "Bundle of"
    report(
        f"{kind} {result.rows:,} rows of {result.tables} tables, {format_bytes(result.bytes)},"
        f" of {result.checkpoint}: {result.output}"
    )
    _report_worse(result.worse_than_constant, result.checkpoint, report)
    return result._asdict()


def _report_worse(tasks: list[str], checkpoint: str, report: Callable) -> None:
    if tasks:
        report(f"{checkpoint} is worse than a constant for {', '.join(tasks)}")


def _study(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.studies import registry
    from jaxrank.workdir import files

    study = registry.find(args.name)
    return registry.run(
        study,
        args.config,
        files.directory(args.workdir),
        registry.make_options(study, vars(args)),
        command=args.config_command,
        jobs=args.jobs,
        report=report,
        worker=(*registry.WORKER, *args.models),
    )


def _report(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.run_report import collect, page

    output = _page(args)
    runs = [collect.collect(run, args.by, report) for run in args.runs]
    page.write(collect.distinct_names(runs), output)
    report(f"report: {output}")
    return {"output": str(output), "runs": [str(run.directory) for run in runs]}


def _page(args: argparse.Namespace) -> Path:
    """Returns the path of the page to write.

    Raises:
        InputError: it cannot be written, or is not named as a page.
    """
    from jaxrank.data.files import check_parent, check_replaceable
    from jaxrank.workdir import files

    for run in args.runs:
        files.load_config(files.directory(run))  # before anything is scored
    folder = files.directory(args.runs[0]) if len(args.runs) == 1 else Path.cwd()
    output = Path(args.output or folder / "report.html")
    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--output: must be a file FILE.html: found {args.output}.")
    if output.is_dir():
        raise InputError(f"--output: {output} must be a file: found a directory.")
    if args.output or len(args.runs) > 1:  # else the page of the run
        check_replaceable(output, "--output")
    check_parent(output, "--output")
    return output


def _compare(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.evaluation.comparison import text
    from jaxrank.evaluation.comparison.compare import compare

    panels = _curves(args.runs) if args.picture else []  # before the runs are scored
    settings = {name: getattr(args, name) for name in ("data", "split", "batch_size", "by")}
    result = compare(args.runs, **settings, report=report)
    report(text.describe(result))
    if args.picture:
        from jaxrank import plots

        plots.draw_panels(panels, [args.picture])
        report(f"picture: {args.picture}")
    return result._asdict()


def _curves(workdirs: list[str]) -> list[dict[str, Any]]:
    """Returns the learning curves of runs in one picture.

    Raises:
        InputError: no run has steps.
    """
    from jaxrank.run_report import collect, run_sections

    runs = collect.distinct_names([collect.collect(run) for run in workdirs])
    panels = run_sections.curve_panels(runs)
    if not panels:
        raise InputError("--picture: must be of runs with a metrics.jsonl: found no step in any.")
    return panels


def _serve(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank_serving.errors import BundleError
    from jaxrank_serving.server import serve, settings

    from jaxrank.workdir.files import has_checkpoint

    try:
        serve.serve(settings.from_flags(args), report)
    except (BundleError, settings.SettingsError) as error:
        if has_checkpoint(Path(args.bundle)):
            raise InputError(
                f"{args.bundle}: is a workdir: export it first, by `jaxrank export"
                f" --workdir={args.bundle} --output=BUNDLE`, and serve BUNDLE."
            ) from error
        raise InputError(str(error)) from error
    return {}


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    try:
        import uvicorn  # noqa: F401
        from jaxrank_serving.server import settings
    except ImportError as error:
        raise InputError(
            "jaxrank serve: must have the packages of the extra `serve`: found no"
            f" {error.name}. Install them in a clone of jaxrank with"
            " pip install './serving[server]' -e '.[serve]'."
        ) from error
    settings.add_flags(parser)


def _compare_data(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank.data.drift import report as drift_report
    from jaxrank.data.drift.compare import MEASURES, compare_data

    limits = {name: getattr(args, f"max_{name}") for name in MEASURES}
    result = compare_data(
        args.old,
        args.new,
        old_split=args.old_split,
        new_split=args.new_split,
        hash_key_file=args.hash_key_file,
        thresholds={name: limit for name, limit in limits.items() if limit is not None},
        report=report,
    )
    report(drift_report.describe(result))
    return drift_report.to_json(result)


def _configs(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank import shipped

    lines = shipped.configs()
    width = max(map(len, lines), default=0)
    report("\n".join(f"{name:<{width}}  {line}" for name, line in lines.items()))
    return {"configs": lines}


def _launch(args: argparse.Namespace, report: Callable) -> dict[str, Any]:
    from jaxrank import shipped

    path = str(shipped.folder("launch"))
    report(path)
    return {"path": path}


def _join(args: argparse.Namespace) -> None:
    """Connects the processes of this run and checks that all run the same command."""
    from jaxrank.runtime import rendezvous

    rendezvous.join(args.coordinator, args.num_processes, args.process_id)
    processes.open_devices()
    processes.check_shares()
    flags = {k: v for k, v in vars(args).items() if k not in ("coordinator", "process_id")}
    processes.check_same("flags and config", str(flags))
    processes.check_same("versions of jaxrank, JAX and NumPy", processes.versions())
    if args.models:
        checksums = {key: origin.checksum for key, origin in extensions.origins().items()}
        processes.check_same("the files of --models", str(checksums))


def _warn_of_changed_code(args: argparse.Namespace, report: Callable) -> None:
    from jaxrank.workdir import files, user_code

    for run in getattr(args, "runs", None) or filter(None, [args.workdir]):  # none for a bundle
        for change in user_code.changes(files.directory(run)):
            report(
                f"Warning: {change} since the run in {run} was trained: this may be another model"
            )


class FailedCheckError(RunError):
    """A verb printed its result, and the result is a failed check."""


_RUN: dict[str, Callable[[argparse.Namespace, Callable], dict[str, Any]]] = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "calibrate": _calibrate,
    "explain": _explain,
    "predict": _predict,
    "export": _export,
    "serve": _serve,
    "plan": _plan,
    "compile": _compile,
    "bench": _bench,
    "study": _study,
    "report": _report,
    "compare": _compare,
    "compare-data": _compare_data,
    "selftest": _selftest,
    "check-model": _check_model,
    "configs": _configs,
    "launch": _launch,
}
# Verbs that use the model of a run as it was trained.
_OF_RUNS = ("evaluate", "calibrate", "explain", "predict", "export", "report", "compare")
# `study` and `selftest` leave the devices to other processes, which they start.
_WITHOUT_DEVICES = (
    "prepare",
    "serve",
    "compile",
    "study",
    "selftest",
    "compare-data",
    "check-model",
    "configs",
    "launch",
)


def run(argv: Sequence[str]) -> None:
    """Runs one command.

    Raises:
        InputError, RunError: as the verb does.
    """
    parser, verbs = parsers()
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        raise InputError(f"{argv[0]}: flags must follow the verb. Try `jaxrank --help`.")
    typed = {_dash_flag(arg): arg for arg in argv}
    argv = [_dash_flag(arg) for arg in argv]
    _check_flags(argv)
    if argv[:1] == ["study"]:
        from jaxrank.studies import registry as studies

        studies.add_flags(verbs["study"], argv[1:])
    if argv[:1] == ["serve"]:
        _add_serve_flags(verbs["serve"])
    try:
        args, rest = parser.parse_known_args(argv)
    except InputError:
        if argv and argv[0] in verbs:  # a mistyped flag says more than the one that is absent
            _check_unknown_flags(verbs[argv[0]], argv[1:], typed)
        raise
    if args.verb is None:
        parser.error("a verb must be given: found none")
    _check_rest(verbs[args.verb], rest, typed)

    if getattr(args, "picture", ""):
        _check_picture(Path(args.picture))
    if args.models:
        for file in args.models:
            extensions.load(file)
    naming_lines: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if hasattr(args, "config"):
        from jaxrank import config_files

        models = [f"--models={file}" for file in args.models]
        args.config_command = [*models, f"--config={args.config}", *rest]
        args.config, sources = config_files.load_with_sources(args.config, rest)
        naming_lines = config_files.naming_lines(args.config, sources, rest)
    several = hasattr(args, "coordinator") and args.verb not in _WITHOUT_DEVICES
    if several:
        _join(args)
    elif args.verb not in _WITHOUT_DEVICES:
        from jaxrank.runtime import rendezvous

        rendezvous.check_alone(args.verb)
        processes.open_devices()
    if args.verb not in _WITHOUT_DEVICES:
        from jaxrank.runtime import compilation_cache

        compilation_cache.enable()

    _make_absolute(args)

    def is_reporting() -> bool:
        return not several or processes.is_first()

    # The object on standard output is then the whole result.
    is_silent = args.json and getattr(args, "quiet", False)

    def report(text: str) -> None:
        if is_reporting() and not is_silent:
            _print(text, sys.stderr if args.json else sys.stdout)

    with processes.peer_loss_as_run_error():
        if args.verb in _OF_RUNS and is_reporting():
            _warn_of_changed_code(args, _progress(args, report))
        try:
            with naming_lines:
                result = _RUN[args.verb](args, report)
        except (InputError, RunError, StoppedError, OSError):
            raise
        except Exception as error:
            if not (line := extensions.user_code_line(error)):
                raise
            text = " ".join(str(error).split())[:600]
            raise InputError(f"{line}: {type(error).__name__}: {text}") from error
        if args.json and result and is_reporting():
            _print(json_text(args.verb, result), sys.stdout)
        if result.get("error"):
            raise FailedCheckError(result["error"])
        if several:
            processes.wait()


def _make_absolute(args: argparse.Namespace) -> None:
    """Replaces local paths of results, so that printed paths are valid in any directory."""
    for name in ("output", "picture"):
        if path := getattr(args, name, ""):
            from jaxrank.data.files import is_local

            if is_local(path):
                # A slash at the end stays, which the name of a file must not have.
                setattr(args, name, os.path.join(os.getcwd(), path))


# Parts of results that hold metrics by task and name.
_METRICS = ("metrics", "best_possible", "constant", "intervals")


def json_text(verb: str, result: Mapping[str, Any]) -> str:
    """Returns the result of a verb as --json prints it. `records.verbs` declares its keys."""
    shown = json_files.plain(result, non_finite="null")
    if verb in ("train", "evaluate", "compare"):
        shown = _named(shown)
    return json_files.to_text(shown, non_finite="null")


def _named(value: Any) -> Any:
    """Returns a plain result in which each metric has its full name, such as "click/auc"."""
    if isinstance(value, list):
        return [_named(inside) for inside in value]
    if not isinstance(value, dict):
        return value
    tree = {key: _named(inside) for key, inside in value.items()}
    for key in tree.keys() & {*_METRICS}:
        if tree[key] is not None:
            tree[key] = {
                f"{t}/{name}": v for t, task in tree[key].items() for name, v in task.items()
            }
    if {"gauc", "gauc_excluded"} <= tree.keys():  # slices; not differences of a metric gauc
        tree["metrics"] = {f"{task}/gauc": v for task, v in tree.pop("gauc").items()}
    return tree


def _print(text: str, file: TextIO) -> None:
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        # The reader of the pipe has exited, as `head` does, or the terminal is closed. The work
        # continues without output.
        is_terminal = stat.S_ISCHR(os.fstat(file.fileno()).st_mode)
        if error.errno != errno.EPIPE and not (error.errno == errno.EIO and is_terminal):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def main() -> NoReturn:
    """Runs the console program.

    The exit status is 0 on success, 2 for invalid input, and 1 for a run that failed. After a
    signal it is 128 plus the number of the signal.
    """
    if sys.argv[1:2] and sys.argv[1] in ("train", "evaluate", "predict", "bench"):
        huge_pages.ensure()
        threads.ensure_several()
    faulthandler.enable(2)  # prints the stack at a fatal signal, such as SIGBUS of a failing disk
    status, interrupted = 0, False
    try:
        with (
            signals.end_at_second(),
            signals.reraise_interrupt(),
            signals.not_in_native_imports(),
            signals.end_at_sigterm(functools.partial(_print_error, "stopped by SIGTERM")),
        ):
            run(sys.argv[1:])
    except FailedCheckError as error:
        status = _print_error(f"error: {error}", error.exit_status, has_result=True)
    except (InputError, RunError) as error:
        status = _print_error(f"error: {error}", error.exit_status)
    except StoppedError as error:
        status = _print_error(str(error), error.exit_status)
    except OSError as error:  # for example a full disk under the logs
        status = _print_error(f"error: {error}", RunError.exit_status)
    except KeyboardInterrupt:
        status, interrupted = _print_error("interrupted", 130), True
    except SystemExit as error:  # of the parser, which has printed what is wrong
        if error.code:
            _print_json_error("error: the arguments must be valid: see the standard error", 2)
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            status = _print_error(f"error: {_describe_memory_error(error)}", RunError.exit_status)
        else:
            traceback.print_exc()
            status = RunError.exit_status
            _print_json_error(f"error: {type(error).__name__}: {error}", status)
    # Threads of libraries may still be running. After an interrupt their resources are gone, and
    # after a checkpoint that failed to start some threads wait five minutes for it.
    processes.leave(status, at_once=interrupted or status == RunError.exit_status)
    sys.exit(status)


def _describe_memory_error(error: Exception) -> str:
    """Returns a short message for an out-of-memory error of the host or, from XLA, of a device."""
    text = " ".join(str(error).partition("\n\n")[0].split())[:400].rstrip(".")
    return (
        f"not enough memory: {text}. The memory of a step grows with batch_size and, for its input,"
        " with steps_per_execution and data.prefetch_batches. Tables are split over all"
        " devices. `jaxrank plan` and `jaxrank compile` report whether a run fits a machine."
    )


def _print_error(text: str, status: int, *, has_result: bool = False) -> int:
    # One write per line, newline included, because other processes may write to the same file.
    sys.stderr.write(f"{processes.name()}: {text}\n")
    if not has_result:
        _print_json_error(text, status)
    return status


def _print_json_error(text: str, status: int) -> None:
    """Prints an error as a JSON object if --json is set. Only the first process prints it."""
    if "--json" in sys.argv[1:] and (not processes.joined() or processes.is_first()):
        result = {"error": text.removeprefix("error: "), "status": status}
        _print(json_files.to_text(result), sys.stdout)
