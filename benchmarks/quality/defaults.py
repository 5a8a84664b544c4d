"""Compares the defaults with scikit-learn's logistic regression, on generated and on public data.

    python -m benchmarks.quality.defaults --data=../shared/data --workdir=/tmp/defaults

Sets of FURTHER are read from the folder of --further, as published.
With --results it also writes one result per set and metric, as benchmarks/results has them.
Nothing but the features is set. Each seed is data of its own: other generated effects and rows, or
another random split of the same rows of a public set into 70% training, 15% validation and 15%
test. The regression has its C chosen on the validation split, and both are scored on the test
split. Of each set the mean difference of the logloss relative to the regression's is printed, with
its 95% interval by Student's t over the seeds. Results that are there already are not computed
again.
"""

import argparse
import datetime
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from benchmarks.harness.arguments import positive, run_main
from benchmarks.quality.public_sets import FURTHER, PUBLIC, further, public
from jaxrank import json_files
from jaxrank.config import default
from jaxrank.evaluation import baseline
from jaxrank.evaluation.evaluate import evaluate, load_run
from jaxrank.metrics import run_intervals
from jaxrank.train import train

TABLES = [20_000, 3_000, 500, 100, 20, 10]  # rows of the generated id features
MANY = [10_000, 3_000, 1_000, 500, 200, 100, 50, 20, 10] * 2


class Generated(NamedTuple):
    """A generated set.

    rate: fraction of clicks.
    crosses: share of the logits' variance; 0: the truth is linear.
    """

    rows: int
    rate: float
    crosses: float
    tables: tuple[int, ...] = tuple(TABLES)


SIZES = (  # rows, and fraction of clicks
    (5_000, 0.02),
    (5_000, 0.5),
    (40_000, 0.005),
    (40_000, 0.1),
    (200_000, 0.001),
    (200_000, 0.1),
)
LARGE_SIZES = ((600_000, 0.1), (1_000_000, 0.005), (2_000_000, 0.1), (20_000_000, 0.005))


def of_size(rows: int, rate: float) -> dict[str, Generated]:
    """Returns a linear set and one with crosses, by name."""
    return {
        f"{rows // 1000} k rows, {rate:.1%} clicks, {kind}": Generated(rows, rate, crosses)
        for kind, crosses in (("linear", 0.0), ("crosses", 0.4))
    }


GENERATED = {name: value for size in SIZES for name, value in of_size(*size).items()}
GENERATED["40 k rows, 10.0% clicks, 18 features"] = Generated(40_000, 0.1, 0.0, tuple(MANY))
# Hours: only if --only is the whole name.
LARGE = {name: value for size in LARGE_SIZES for name, value in of_size(*size).items()}


def generated(source: Generated, seed: int) -> ConfigDict:
    c = default()
    scored = max(20_000, source.rows // 4)
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=dict(train=source.rows, valid=scored, test=scored),
            seed=1000 + seed,
            dense=1,
            categorical=list(source.tables),
            click_rate=source.rate,
            crosses=source.crosses,
        )
    )
    c.features.tasks = [dict(name="click", label="click", truth="p_click")]
    c.features.dense = [dict(columns="f*", standardize=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="vocabulary") for i in range(len(source.tables))
    ]
    return c


def differences(folder: Path, config_of: Any, seeds: range) -> Iterator[tuple[float, float]]:
    """(logloss of the regression, relative difference of the defaults) of each seed."""
    for seed in seeds:
        place = folder / f"seed{seed}"
        place.mkdir(parents=True, exist_ok=True)
        scores = place / "scores.json"
        if not scores.exists():
            config = config_of(place, seed)
            config.seed = seed
            json_files.write(scores, score_test(config, place / "run"))
        record = json.loads(scores.read_text())
        (metrics,) = record["metrics"].values()
        (regression,) = record["baseline"]["metrics"].values()
        yield regression["logloss"], metrics["logloss"] / regression["logloss"] - 1


def score_test(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Trains on the training split, and scores model and regression on the test split."""
    result = train(config, workdir, report=lambda _: None, quiet=True)
    run = load_run(workdir)
    store = run.open_data()
    training, valid, test = (store.split(name) for name in ("train", "valid", "test"))
    regression = baseline.fit(training, valid, store.schema, score_split=test)
    evaluation = evaluate(str(workdir), checkpoint=run.default_checkpoint, split="test")
    return dict(metrics=evaluation.metrics, baseline=regression._asdict(), seconds=result.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public sets")
    parser.add_argument("--further", type=Path, help="folder of the sets of FURTHER, else left out")
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file to which results are appended")
    parser.add_argument("--commit", default="", help="commit named in the results")
    parser.add_argument(
        "--only",
        default="",
        help="sets whose names contain this; a set of LARGE needs its whole name",
    )
    args = parser.parse_args()
    makers: dict[str, Any] = {
        name: lambda place, seed, source=source: generated(source, seed)
        for name, source in (GENERATED | LARGE).items()
    } | {
        f"{name}, {'tuned' if tuned else 'not tuned'}": (
            lambda place, seed, name=name: public(name, args.data, place, seed)
        )
        for name, tuned in PUBLIC.items()
    }
    if args.further:
        makers |= {
            name: lambda place, seed, source=source: further(source, args.further, place, seed)
            for name, source in FURTHER.items()
        }
    print("| data | logloss of the regression | defaults | 95% interval |")
    print("| --- | ---: | ---: | ---: |")
    for name, config_of in makers.items():
        if args.only not in name or (name in LARGE and args.only != name):
            continue
        folder = args.workdir.absolute() / name.replace(" ", "_").replace(",", "").replace("%", "")
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        pairs = list(differences(folder, config_of, seeds))
        regression, change = (np.array(column) for column in zip(*pairs, strict=True))
        mean, low, high = run_intervals.mean(change)
        print(
            f"| {name} | {regression.mean():.4f} | {mean:+.2%} | {low:+.2%} to {high:+.2%} |",
            flush=True,
        )
        if args.results:
            command = f"python -m benchmarks.quality.defaults --seeds={args.seeds} "
            command += f"--first-seed={args.first_seed} --only={shlex.quote(name)}"
            note = f"{args.seeds} seeds; in brackets half of the 95% interval; C chosen on"
            note += " validation, both scored on test"
            is_untuned = "not tuned" in name or (name in FURTHER and "tuned on" not in name)
            common = dict(
                workload=name,
                program="defaults, not tuned on" if is_untuned else "defaults",
                hardware="2 cores",
                date=str(datetime.date.today()),
                commit=args.commit,
                command=f"{command} --data=../shared/data --workdir=/tmp/defaults"
                + (" --further=/tmp/further" if name in FURTHER else ""),
            )
            results = (
                dict(metric="regression, test logloss", value=round(regression.mean(), 4), unit=""),
                dict(
                    metric="defaults, difference",
                    value=round(100 * mean, 2),
                    deviation=round(50 * (high - low), 2),
                    unit="%",
                ),
            )
            with args.results.open("a") as lines:
                for result in results:
                    lines.write(json_files.to_text(common | result | dict(note=note)) + "\n")


if __name__ == "__main__":
    run_main(main)
