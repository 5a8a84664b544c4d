"""The flags of the command line, verb by verb."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jaxrank
from jaxrank.errors import InputError
from jaxrank.validate import EXPORT_FORMATS, GROWTH, ON_ERROR, TABLE_DTYPES

# Flags that must not be repeated. argparse would use the last value, where a user may expect all.
ONCE = ("--config", "--by", "--against")
# Flags of export with --format=bundle only, and their defaults.
BUNDLE_FLAGS: dict[str, Any] = {
    "tables": "float32",
    "context": [],
    "default": [],
    "hash_key_file": "",
    "since": "",
}


# Of compare-data, by the name of the flag.
_THRESHOLDS = {
    "psi": "population stability index, such as 0.2",
    "new": "share of ids that OLD does not have, such as 0.1",
    "lost": "share of OLD's ids that NEW does not have",
    "missing": "change of the share of missing values, such as 0.01",
    "unknown": "change of the share of ids that the vocabulary lacks",
    "mean": "shift of the mean of numbers, in standard deviations",
    "length": "relative change of the mean length of lists",
}


class _Verb(NamedTuple):
    """Help text of a verb, function that adds its flags, and an example command."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    example: str


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that raises InputError, so that its errors are reported like all others."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. Try `{self.prog} --help`.")


class _HelpConfig(argparse.Action):
    """Prints the reference of the config and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from jaxrank import config_reference  # imports every module that declares fields

        print(config_reference.text(), end="")
        parser.exit()


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Returns the parser of the program, and the parser of each verb."""
    parser = _Parser(prog="jaxrank", description=jaxrank.__doc__, allow_abbrev=False, add_help=True)
    parser.add_argument("--version", action="version", version=f"jaxrank {jaxrank.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, verb in _VERBS.items():
        sub = verbs.add_parser(
            name,
            help=verb.help,
            description=verb.help,
            epilog=f"example:\n  {verb.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object as the last line of standard output, and everything else"
            " to standard error",
        )
        sub.add_argument(
            "--models",
            action="append",
            default=[],
            metavar="FILE",
            help="a Python file that registers models of your own; may be repeated",
        )
        verb.add_flags(sub)
    return parser, verbs.choices


def _add_config(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a config file, or the name of one that `jaxrank configs` lists; any field can be set:"
        " --config.optim.dense.base_learning_rate=0.002",
    )
    sub.add_argument(
        "--help-config",
        action=_HelpConfig,
        nargs=0,
        help="show all fields of a config, with defaults, units and bounds, and exit",
    )


def _add_processes(sub: argparse.ArgumentParser) -> None:
    group = sub.add_argument_group(
        "several processes",
        "detected automatically on a TPU pod, in a SLURM step and under Open MPI",
    )
    group.add_argument(
        "--coordinator", default="", metavar="HOST:PORT", help="address of process 0"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    group.add_argument("--process-id", type=int, metavar="I", help="index of this process, from 0")


def _add_quiet(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--quiet", action="store_true", help="print the result only")


def _prepare(sub: argparse.ArgumentParser) -> None:
    _add_config(sub)
    sub.add_argument("--output", required=True, metavar="DIR", help="directory of the new store")
    sub.add_argument(
        "--vocabularies",
        default="",
        metavar="STORE",
        help="an earlier store, whose vocabularies, scales and bucket boundaries are continued; see"
        " docs/daily.md",
    )
    sub.add_argument(
        "--refit-scales",
        action="store_true",
        help="with --vocabularies: fit means, standard deviations and bucket boundaries to the new"
        " data",
    )
    sub.add_argument(
        "--unlabelled",
        action="store_true",
        help="prepare rows for scoring only: columns that tasks name are not read",
    )
    sub.add_argument(
        "--on-error",
        default="error",
        choices=ON_ERROR,
        help="action for invalid records; skip: they are written to rejected.jsonl",
    )
    sub.add_argument(
        "--max-rejected",
        type=int,
        default=1000,
        metavar="N",
        help="maximum number of skipped records; default: 1000",
    )
    sub.add_argument(
        "--hash-key-file",
        default="",
        metavar="FILE",
        help="a key: vocabularies and rejected records hold keyed hashes, not raw values",
    )
    sub.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="number of processes; default: one per core",
    )
    sub.add_argument(
        "--runner", default="local", metavar="NAME", help="local, or one of Apache Beam's"
    )
    sub.add_argument(
        "--runner-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of the Beam pipeline, such as --runner-option=--project=mine; may be"
        " repeated",
    )
    sub.add_argument("--picture", default="", metavar="FILE", help="a PNG of the statistics")


def _train(sub: argparse.ArgumentParser) -> None:
    _add_config(sub)
    sub.add_argument(
        "--workdir",
        required=True,
        metavar="DIR",
        help="directory of the run: its data, checkpoints, metrics and logs",
    )
    _add_quiet(sub)
    sub.add_argument(
        "--allow-config-change",
        action="store_true",
        help="continue a run that was started with other values",
    )
    sub.add_argument(
        "--allow-older-checkpoint",
        action="store_true",
        help="if the newest checkpoint is damaged, continue from the newest one that is not",
    )
    sub.add_argument(
        "--init-from",
        default="",
        metavar="DIR",
        help="start from the model of an older run, its workdir or WORKDIR/checkpoints/STEP, whose"
        " vocabularies and features may differ; ignored once this run has a checkpoint",
    )
    sub.add_argument(
        "--baseline",
        action="store_true",
        help="also fit scikit-learn's logistic regression to the training split, and compare the"
        " model with it, by a paired 95%% interval; its regularisation strength C is chosen on the"
        " validation split",
    )
    sub.add_argument(
        "--profile-steps",
        default="",
        metavar="FIRST:LAST",
        help="steps to trace with JAX's profiler, into WORKDIR/profile: both ends included, counted"
        " from 1 as in metrics.jsonl, extended to whole executions of steps_per_execution",
    )
    sub.add_argument(
        "--debug-batches",
        type=int,
        default=0,
        metavar="N",
        help="write the batches of the last N steps into WORKDIR/debug after a loss that is not"
        " finite or that spikes",
    )
    sub.add_argument(
        "--no-report", action="store_true", help="do not write WORKDIR/report.html at the end"
    )
    _add_processes(sub)


def _add_checkpoint(sub: argparse.ArgumentParser, required: bool = True) -> None:
    sub.add_argument(
        "--workdir", required=required, default="", metavar="DIR", help="directory of the run"
    )
    sub.add_argument(
        "--checkpoint", default="newest", metavar="WHICH", help="newest, best or a step"
    )


def _add_scored(sub: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds the flags that select a checkpoint and the data to score."""
    _add_checkpoint(sub, required)
    _add_store(sub)
    sub.add_argument(
        "--split", default="", help="the split to score; default: the run's validation split"
    )


def _add_store(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--data", default="", metavar="STORE", help="prepared data; default: the run's own"
    )
    sub.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples per batch; default: the run's",
    )


def _evaluate(sub: argparse.ArgumentParser) -> None:
    _add_scored(sub)
    sub.add_argument(
        "--follow",
        action="store_true",
        help="score each new checkpoint until the run has ended, into WORKDIR/follow",
    )
    sub.add_argument(
        "--by",
        default="",
        metavar="COLUMNS",
        help="also report the metrics of each value of a column or feature, of each day or hour, of"
        " numbers in buckets (price/20), or of each combination of several (hour,device): they are"
        " crossed; repeat the command for each column by itself",
    )
    sub.add_argument(
        "--against",
        default="",
        metavar="DIR",
        help="also score the run that this one may replace, on the same rows, and print paired"
        " differences to it",
    )
    sub.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit with status 1 if it holds, such as 'click/logloss > +0.1%%' (a difference to"
        " --against) or 'click/calibration outside 0.9..1.1'; may be repeated; see docs/daily.md",
    )
    sub.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="with --follow: time between checks for a new checkpoint; default: 10",
    )
    sub.add_argument(
        "--picture", default="", metavar="FILE", help="a PNG or SVG of the reliability diagram"
    )
    _add_quiet(sub)
    _add_processes(sub)


def _calibrate(sub: argparse.ArgumentParser) -> None:
    _add_checkpoint(sub)
    _add_store(sub)
    sub.add_argument("--split", required=True, help="the split to fit on")
    sub.add_argument(
        "--measure-on",
        default="",
        metavar="SPLIT",
        help="another split, to measure the result on; default: the run's validation split",
    )
    sub.add_argument(
        "--method",
        default="platt",
        metavar="NAME",
        help="platt (two numbers per task), isotonic (a curve, for many labels), or none to remove"
        " the calibration; default: platt",
    )
    sub.add_argument(
        "--by",
        default="",
        metavar="FEATURE",
        help="a feature of one id per example, whose values get a correction of their own, small"
        " ones almost none; default: none",
    )
    _add_quiet(sub)
    _add_processes(sub)


def _explain(sub: argparse.ArgumentParser) -> None:
    _add_scored(sub)
    sub.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=FEATURES",
        help="features, or patterns of them, that are permuted together: user=user_id,user_*; may"
        " be repeated; default: each feature by itself",
    )
    sub.add_argument(
        "--rows",
        type=int,
        default=100_000,
        metavar="N",
        help="examples to score, the first ones of the split; default: 100,000",
    )
    sub.add_argument(
        "--by", default="", metavar="COLUMNS", help="also per value of a column, as in evaluate"
    )
    sub.add_argument("--picture", default="", metavar="FILE", help="a PNG or SVG of the result")
    _add_quiet(sub)


def _predict(sub: argparse.ArgumentParser) -> None:
    _add_scored(sub, required=False)
    group = sub.add_argument_group("with a bundle, in place of --workdir")
    group.add_argument("--bundle", default="", metavar="DIR", help="a bundle of `jaxrank export`")
    group.add_argument(
        "--input",
        default="",
        metavar="FILES",
        help="raw data in the format of the training, or Parquet or CSV: a path, glob or directory",
    )
    group.add_argument(
        "--hash-key-file", default="", metavar="FILE", help="the key of the bundle's data"
    )
    sub.add_argument("--output", required=True, metavar="FILE", help="a Parquet file")
    _add_quiet(sub)
    _add_processes(sub)


def _export(sub: argparse.ArgumentParser) -> None:
    _add_checkpoint(sub)
    sub.add_argument(
        "--output", required=True, metavar="DIR", help="a directory that does not exist yet"
    )
    sub.add_argument(
        "--data",
        default="",
        metavar="STORE",
        help="prepared data that has the run's vocabularies; default: the run's own",
    )
    sub.add_argument(
        "--format",
        default="bundle",
        choices=EXPORT_FORMATS,
        help="bundle: scores raw values, by jaxrank_serving; files: Parquet, NumPy and JSON",
    )
    _add_quiet(sub)
    group = sub.add_argument_group("a bundle")
    group.add_argument(
        "--tables",
        default=BUNDLE_FLAGS["tables"],
        choices=TABLE_DTYPES,
        help="dtype of the stored rows; int8: with a factor per row",
    )
    group.add_argument(
        "--context",
        action="append",
        default=BUNDLE_FLAGS["context"],
        metavar="COLUMNS",
        help="columns, or patterns of them, that all candidates of a request share, such as"
        " --context='user*,hour'; default: a request may give any column in either place",
    )
    group.add_argument(
        "--default",
        action="append",
        default=BUNDLE_FLAGS["default"],
        metavar="NAME=VALUE",
        help="the value of a column that requests may omit, such as --default=position=1; may be"
        " repeated",
    )
    group.add_argument(
        "--hash-key-file",
        default=BUNDLE_FLAGS["hash_key_file"],
        metavar="FILE",
        help="the key that the run's data was prepared with",
    )
    group.add_argument(
        "--since",
        default=BUNDLE_FLAGS["since"],
        metavar="BUNDLE",
        help="write a delta: only what has changed since that bundle",
    )


def _plan(sub: argparse.ArgumentParser) -> None:
    _add_config(sub)
    sub.add_argument("--devices", type=int, metavar="N", help="number of devices of the machine")
    sub.add_argument(
        "--topology",
        default="",
        metavar="NAME",
        help="a TPU slice or GPUs, such as v3-32 or h200-8",
    )
    sub.add_argument(
        "--memory",
        default="",
        metavar="SIZE",
        help="memory of a device, such as 16GiB; default: that of the topology",
    )
    sub.add_argument(
        "--replicas", type=int, metavar="N", help="copies of split rows; default: mesh.replicas"
    )
    sub.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help="batches that are replayed; default: 100, fewer if they hold very many ids",
    )
    sub.add_argument("--picture", default="", metavar="FILE", help="a PNG to draw the plan into")
    _add_data_of_run(sub)


def _add_data_of_run(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--workdir",
        default="",
        metavar="DIR",
        help="directory of a run whose prepared data is read",
    )


def _compile(sub: argparse.ArgumentParser) -> None:
    _add_config(sub)
    sub.add_argument(
        "--topology",
        required=True,
        metavar="NAMES",
        help="TPU slices, such as v3-8,v3-32,v5e-16, or GPUs, such as h100-8,h200-1",
    )
    sub.add_argument(
        "--scaling",
        default="",
        choices=GROWTH,
        help="also estimate how the time of a step scales: with the same batch (strong), or with a"
        " batch that grows with the devices (weak); GPUs by the extra tpu, from a program for v6e",
    )
    sub.add_argument("--picture", default="", metavar="FILE", help="a PNG of --scaling")
    _add_data_of_run(sub)


def _bench(sub: argparse.ArgumentParser) -> None:
    _add_config(sub)
    sub.add_argument(
        "--workdir",
        required=True,
        metavar="DIR",
        help="directory of a run, whose data is read; the run is not changed",
    )
    sub.add_argument(
        "--seconds",
        type=float,
        default=10,
        metavar="N",
        help="length of each measurement; default: 10",
    )
    sub.add_argument("--picture", default="", metavar="FILE", help="a PNG of the measurements")


def _study(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", metavar="NAME", help="name of the study, the first argument")
    _add_config(sub)
    sub.add_argument(
        "--workdir",
        required=True,
        metavar="DIR",
        help="directory of the study: its data, its runs, the table and the picture",
    )
    sub.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of runs at once; default: 1"
    )


def _add_runs(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("runs", nargs="+", metavar="RUN", help="workdir of a run")


def _report(sub: argparse.ArgumentParser) -> None:
    _add_runs(sub)
    sub.add_argument(
        "--output",
        default="",
        metavar="FILE",
        help="the page, FILE.html; default: report.html in RUN, or in this directory for several",
    )
    sub.add_argument(
        "--by",
        default="",
        metavar="COLUMNS",
        help="also score each value of columns, or each day; the results stay in the workdir",
    )


def _compare(sub: argparse.ArgumentParser) -> None:
    _add_runs(sub)
    sub.add_argument(
        "--by", default="", metavar="COLUMNS", help="also compare each value of columns, or day"
    )
    sub.add_argument(
        "--data", default="", metavar="STORE", help="prepared data; default: each run's own"
    )
    sub.add_argument(
        "--split", default="", help="the split to score; default: each run's validation split"
    )
    sub.add_argument(
        "--batch-size", type=int, metavar="N", help="examples per batch; default: each run's"
    )
    sub.add_argument("--picture", default="", metavar="FILE", help="a PNG or SVG of the curves")


def _compare_data(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("old", metavar="OLD", help="a store")
    sub.add_argument(
        "new", metavar="NEW", help="a store, or Parquet or CSV files of scored requests"
    )
    for side in ("old", "new"):
        sub.add_argument(
            f"--{side}-split",
            default="",
            metavar="SPLIT",
            help=f"split of {side.upper()}, or days of it; default: train",
        )
    sub.add_argument(
        "--hash-key-file",
        default="",
        metavar="FILE",
        help="the key of a store with keyed hashes, to compare it with requests",
    )
    group = sub.add_argument_group(
        "thresholds", "the exit status is 1 if a feature exceeds one of them"
    )
    for name, meaning in _THRESHOLDS.items():
        group.add_argument(f"--max-{name}", type=float, metavar="X", help=f"maximum {meaning}")


def _selftest(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--workdir",
        default="",
        metavar="DIR",
        help="a directory on the file system that runs will use; default: one for temporary files",
    )
    sub.add_argument(
        "--full",
        action="store_true",
        help="test every device by itself, with larger data, longer measurements and more kills",
    )
    _add_processes(sub)


def _check_model(sub: argparse.ArgumentParser) -> None:
    _add_config(sub)
    sub.add_argument(
        "--topology",
        default="v3-8,h200-1",
        metavar="NAMES",
        help="accelerators to compile for; those without an installed compiler are skipped;"
        " default: v3-8,h200-1",
    )
    sub.add_argument(
        "--skip",
        default="",
        metavar="PROPERTIES",
        help="properties that are not checked, such as compile,onnx",
    )
    _add_data_of_run(sub)


def _launch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--path", action="store_true", required=True, help="print the directory")


_VERBS: Mapping[str, _Verb] = {
    "prepare": _Verb(
        "make a store of column blocks from raw or generated data",
        _prepare,
        "jaxrank prepare --config=configs/criteo.py --config.source.files.train=day_0.tsv"
        " --config.source.files.valid=day_1.tsv --output=/data/criteo",
    ),
    "train": _Verb(
        "train, from the newest checkpoint in the workdir if there is one",
        _train,
        "jaxrank train --config=quickstart --workdir=/tmp/quickstart",
    ),
    "evaluate": _Verb(
        "score a checkpoint on prepared data",
        _evaluate,
        "jaxrank evaluate --workdir=/tmp/quickstart --checkpoint=best --split=valid",
    ),
    "calibrate": _Verb(
        "fit the probabilities of a checkpoint to labels, for evaluate, predict and export",
        _calibrate,
        "jaxrank calibrate --workdir=/tmp/quickstart --split=valid --measure-on=test",
    ),
    "explain": _Verb(
        "measure how much worse a checkpoint is if a feature is permuted",
        _explain,
        "jaxrank explain --workdir=/tmp/quickstart --group='user=user*' --picture=/tmp/explain.png",
    ),
    "predict": _Verb(
        "write the predictions of a checkpoint for prepared data",
        _predict,
        "jaxrank predict --workdir=/tmp/quickstart --split=valid --output=/tmp/predictions.parquet",
    ),
    "export": _Verb(
        "write a checkpoint as a bundle that scores raw values anywhere, or as plain files",
        _export,
        "jaxrank export --workdir=/tmp/quickstart --checkpoint=best --output=/tmp/exported",
    ),
    "serve": _Verb(
        "serve a bundle over HTTP",
        lambda sub: None,  # jaxrank_serving declares its flags, which are added when it runs
        "jaxrank serve /tmp/ads --port=8080",
    ),
    "plan": _Verb(
        "show where each table is placed on a machine, whether it fits, and how even the load is",
        _plan,
        "jaxrank plan --config=configs/powerlaw.py --topology=v3-32 --picture=/tmp/plan.png",
    ),
    "compile": _Verb(
        "compile the training step for TPUs or GPUs that need not be present",
        _compile,
        "jaxrank compile --config=quickstart --topology=v3-8,v5e-16",
    ),
    "bench": _Verb(
        "measure the speed of input and step, alone and together, and report which one limits",
        _bench,
        "jaxrank bench --config=quickstart --workdir=/tmp/quickstart --picture=/tmp/bench.png",
    ),
    "study": _Verb(
        "run an experiment: many runs of a config, a table, a picture and what they mean",
        _study,
        "jaxrank study stability --config=quickstart --workdir=/tmp/stability --jobs=2",
    ),
    "report": _Verb(
        "write one HTML page about a run, or about several side by side",
        _report,
        "jaxrank report /tmp/quickstart --by=c0",
    ),
    "compare": _Verb(
        "compare runs on the same validation rows, with intervals of the differences",
        _compare,
        "jaxrank compare /tmp/first /tmp/second --picture=/tmp/curves.png",
    ),
    "compare-data": _Verb(
        "compare two days of data, or scored requests with a store, feature by feature",
        _compare_data,
        "jaxrank compare-data /data/day1 /data/day2 --max-psi=0.2 --max-missing=0.01",
    ),
    "selftest": _Verb(
        "check devices, network, file system and resuming on these machines",
        _selftest,
        "jaxrank selftest --workdir=/mnt/jaxrank",
    ),
    "check-model": _Verb(
        "check that a model gives the same result for any batch size and number of devices, resumes"
        " and exports",
        _check_model,
        "jaxrank check-model --models=my_models.py --config=my_config.py",
    ),
    "configs": _Verb(
        "list the configs that come with the program",
        lambda sub: None,
        "jaxrank configs --json",
    ),
    "launch": _Verb(
        "print the directory of the scripts that start several processes",
        _launch,
        'ls "$(jaxrank launch --path)"',
    ),
}
