"""Tunes models on MovieLens-1M, trains the best of each with several seeds, and prints a table.

    python -m benchmarks.quality.board --workdir=/tmp/board --models=dcn_v2,qnn_dcn_v2,gdcn \\
        --data=../shared/data/ml1m --peer-python=python

Each model of `configs/ml1m_board.py` gets --tunings runs of seed 0: the config as it is, and points
of a Halton sequence in the ranges below. The run with the best AUC of the validation split is
trained with seeds 1, 2, ... The test split is scored once for each of them, at the checkpoint with
the best validation AUC. Differences are paired by seed, with a 95% interval by Student's t. They
are from the first model. No model is an ensemble.

`fuxictr` is FuxiCTR's DCN-V2 on the same rows, run by --peer-python, a Python with the extra
`bench`. --data has the files `ctr_{train,valid,test}.csv.gz` of `benchmarks/quality/movielens.py`.

Finished runs are not repeated, so an interrupted command can be given again, also with more models,
tunings or seeds. With --results it appends one result per model and metric, as benchmarks/results
has them.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.arguments import positive, run_main
from benchmarks.harness.checkout import ROOT, environment
from benchmarks.quality.seeds import prepare_once
from jaxrank import json_files
from jaxrank.config_files import load, override_flags
from jaxrank.errors import InputError
from jaxrank.evaluation.evaluate import evaluate
from jaxrank.metrics import run_intervals
from jaxrank.studies.ranges import parse_ranges
from jaxrank.studies.sweep import drawn
from jaxrank.train import train

CONFIG = ROOT / "configs" / "ml1m_board.py"
PEER = "fuxictr"
_REGULARISATION = ("embedding.l2=log:0.001..0.012", "model.dropout=linear:0..0.5")
_WIDTHS = "(128,128)|(192,192)|(400,400)|(256,128,64)"
RANGES: Mapping[str, Sequence[str]] = {
    "defaults": (),
    "factorization_machine": (
        "embedding.dim=int:5..33",
        "model.cross_scale=log:0.05..1",
        "optim.tables.base_learning_rate=log:0.1..1",
    ),
    **{
        name: (*_REGULARISATION, "model.cross_layers=int:1..4", f"model.mlp_units={_WIDTHS}")
        for name in ("dcn_v2", "dcn", "dcn_mix", "gdcn")
    },
    **{
        name: (*_REGULARISATION, f"model.mlp_units={_WIDTHS}")
        for name in ("dlrm", "none", "deepfm")
    },
    "final_mlp": (
        *_REGULARISATION,
        f"model.first_mlp_units={_WIDTHS}",
        "model.second_mlp_units=(64,)|(192,)|(192,192)",
        "model.heads=1|2|8",
    ),
    PEER: (
        "embedding.l2=log:0.001..0.03",
        "model.dropout=linear:0..0.5",
        "model.cross_layers=int:1..4",
        f"model.mlp_units={_WIDTHS}",
    ),
    "qnn": (*_REGULARISATION, "model.layers=int:1..4", "model.products=int:1..4"),
    "qnn_dcn_v2": (
        *_REGULARISATION,
        "model.layers=int:1..4",
        "model.products=int:1..4",
        f"model.mlp_units={_WIDTHS}",
    ),
}
# Published test AUC and logloss: one tuned run on another random split.
PUBLISHED = {
    "DCN-V2, published, another split": (0.9056, 0.3098),
    "QNN with DCN-V2, published, another split": (0.90917, 0.29578),
}
METRICS = ("auc", "logloss")

Scores = dict[str, float]  # by metric


class Entry(NamedTuple):
    """Results of one model.

    tunings: number of runs of the search.
    chosen: overrides of the best.
    valid: its metrics of the validation split.
    tests: metrics of the test split by seed.
    """

    tunings: int
    chosen: dict[str, Any]
    valid: Scores
    tests: dict[int, Scores]


class Runner:
    """Executes runs, or reads the results of earlier ones."""

    def __init__(self, args: argparse.Namespace):
        self.folder, self.args = args.workdir.absolute(), args
        self.store = self.folder / "data"

    def prepare(self) -> None:
        prepare_once(str(CONFIG), self.store, self._files())

    def points(self, model: str) -> list[dict[str, Any]]:
        """Returns the overrides of the tuning runs, first none."""
        ranges = RANGES[model]
        if not ranges:
            return [{}]
        config = load(f"{CONFIG}:{'dcn_v2' if model == PEER else model}")
        parsed = parse_ranges(ranges, config, fixed=())
        return [{}, *drawn(parsed, self.args.tunings, seed=0).values()][: self.args.tunings]

    def entry(self, model: str) -> Entry:
        """Tunes a model and scores the best with every seed."""
        points = self.points(model)
        results = [
            self.run(model, f"point-{i}", point, 0, "valid") for i, point in enumerate(points)
        ]
        best = int(np.argmax([result["auc"] for result in results]))
        tests = {
            seed: self.run(model, f"best-seed{seed}", points[best], seed, "test")
            for seed in range(1, self.args.seeds + 1)
        }
        return Entry(len(points), points[best], results[best], tests)

    def run(
        self, model: str, name: str, overrides: Mapping[str, Any], seed: int, split: str
    ) -> Scores:
        """Trains once and scores the checkpoint that is best on the validation split."""
        place = self.folder / model / name
        record = place / "scores.json"
        settings = {**overrides, "seed": seed}
        if not record.exists():
            place.mkdir(parents=True, exist_ok=True)
            execute = self._peer if model == PEER else self._jaxrank
            scores = execute(place / "run", model, settings, split)
            json_files.write(record, {"settings": settings, "split": split, "scores": scores})
            print(f"{model}, {name}: {split} {scores} {settings}", file=sys.stderr, flush=True)
        earlier = json.loads(record.read_text())
        if earlier["settings"] != json.loads(json.dumps(settings)) or earlier["split"] != split:
            raise InputError(
                f"{record}: must have the settings {settings}, split {split}: found"
                f" {earlier['settings']}, split {earlier['split']}. Give another --workdir, or"
                " remove it."
            )
        return earlier["scores"]

    def _jaxrank(self, workdir: Path, model: str, settings: dict[str, Any], split: str) -> Scores:
        overrides = {**settings, "data.store": str(self.store)}
        flags = [*override_flags(overrides), *self._files(), *self.args.override]
        config = load(f"{CONFIG}:{model}", flags)
        train(config, workdir, report=lambda _: None, quiet=True, page=False)
        metrics = evaluate(str(workdir), checkpoint="best", split=split)
        shutil.rmtree(workdir / "checkpoints")
        (task,) = metrics.metrics.values()
        return {name: task[name] for name in METRICS} | {"step": metrics.step}

    def _peer(self, workdir: Path, _: str, settings: dict[str, Any], split: str) -> Scores:
        flags = [f"--{name.rpartition('.')[2]}={value}" for name, value in settings.items()]
        script = Path(__file__).with_name("peers.py")
        done = subprocess.run(
            [self.args.peer_python, str(script), "--board", f"--data={self.args.data}", *flags],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment(),
        )
        epochs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        best = max(epochs, key=lambda epoch: epoch["valid_auc"])
        prefix = "valid_" if split == "valid" else ""
        return {name: best[prefix + name] for name in METRICS} | {"step": best["epoch"]}

    def _files(self) -> list[str]:
        splits = ("train", "valid", "test")
        files = {s: self.args.data.absolute() / f"ctr_{s}.csv.gz" for s in splits}
        return [f"--config.source.files.{split}={path}" for split, path in files.items()]


def rows(entries: Mapping[str, Entry]) -> list[list[str]]:
    """Returns the cells of the table."""
    first = next(iter(entries.values()))
    lines = [["model", "tuning runs", "seeds", "valid AUC"]]
    lines[0] += ["test AUC", "test logloss", "AUC against the first", "logloss against the first"]
    for name, entry in entries.items():
        line = [name, str(entry.tunings), str(len(entry.tests)), f"{entry.valid['auc']:.5f}"]
        line += [spread([t[metric] for t in entry.tests.values()]) for metric in METRICS]
        for metric in METRICS:
            values, others = ([t[metric] for t in e.tests.values()] for e in (entry, first))
            difference = run_intervals.paired(values, others).text("+.5f")
            line.append("" if entry is first else difference)
        lines.append(line)
    for name, published in PUBLISHED.items():
        lines.append([name, "", "1", "", *(f"{value:.5f}" for value in published), "", ""])
    return lines


def spread(values: Sequence[float]) -> str:
    """Formats mean and deviation."""
    deviation = f" ({np.std(values, ddof=1):.5f})" if len(values) > 1 else ""
    return f"{np.mean(values):.5f}{deviation}" if values else ""


def results(entries: Mapping[str, Entry], commit: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file of benchmarks/results."""
    first = next(iter(entries))
    for name, entry in entries.items():
        command = f"python -m benchmarks.quality.board --models={name} --tunings={entry.tunings}"
        common: dict[str, Any] = dict(
            workload="MovieLens-1M, seven features",
            program=name,
            unit="",
            hardware="2 cores",
            date=str(datetime.date.today()),
            commit=commit,
            command=f"{command} --seeds={len(entry.tests)} --data=../shared/data/ml1m"
            " --workdir=/tmp/board",
            note=f"settings {entry.chosen}; in brackets the deviation over seeds, of differences"
            " half of the 95% interval",
        )
        yield dict(common, metric="tuning runs", value=entry.tunings)
        yield dict(common, metric="seeds", value=len(entry.tests))
        for metric, title in zip(METRICS, ("test AUC", "test logloss"), strict=True):
            values, others = (
                [t[metric] for t in e.tests.values()] for e in (entry, entries[first])
            )
            line = dict(common, metric=title, value=round(float(np.mean(values)), 5))
            if len(values) > 1:
                line["deviation"] = round(float(np.std(values, ddof=1)), 5)
            yield line
            if name != first and len(values) > 1:
                mean, low, high = run_intervals.paired(values, others)
                line = dict(common, metric=f"{title} against {first}", value=round(mean, 5))
                yield dict(line, deviation=round((high - low) / 2, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of ctr_*.csv.gz")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--models", default=",".join(RANGES), help="names with commas between")
    parser.add_argument("--tunings", type=positive, default=12, help="tuning runs per model")
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--override", action="append", default=[], help="flag of every config")
    parser.add_argument("--results", type=Path, help="file to which results are appended")
    parser.add_argument("--commit", default="", help="commit named in the results")
    args = parser.parse_args()
    models = args.models.split(",")
    if unknown := [name for name in models if name not in RANGES]:
        parser.error(f"--models: must be of {', '.join(RANGES)}: found {unknown}")
    runner = Runner(args)
    runner.prepare()
    entries = {name: runner.entry(name) for name in models}
    for i, line in enumerate(rows(entries)):
        print("| " + " | ".join(line) + " |")
        if not i:
            print("| --- " + "| ---: " * (len(line) - 1) + "|")
    if args.results:
        with args.results.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in results(entries, args.commit))


if __name__ == "__main__":
    run_main(main)
