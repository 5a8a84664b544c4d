"""Compares jaxrank's DCN-V2 with FuxiCTR's on MovieLens-1M, step by step and over whole runs.

    python -m benchmarks.quality.parity steps --data=../shared/data/ml1m --workdir=/tmp/parity
    python -m benchmarks.quality.parity runs --data=../shared/data/ml1m --workdir=/tmp/parity

It needs the extra `bench`. Both programs have the settings of FuxiCTR's published run, with
dropout 0 in `steps`, because the masks of the programs differ.

steps: jaxrank trains on its batches. FuxiCTR's model starts from a copy of its initial values and
trains on the same batches with FuxiCTR's `train_step`. Both do so in float32 and in float64. The
largest difference of the loss over the steps is printed, and of the weights after the last. Each
further line, with --causes, changes one setting of jaxrank to another value (`lockstep.VARIANTS`).

runs: each program starts from its own initial values, makes its own batches, stops early, and
scores the test split at the checkpoint with the best validation AUC. The program prints mean,
deviation and the difference over --seeds with a 95% interval. --causes adds RUNS.

--rows is the number of training rows: all, or the first of them, such as 59121. The validation
split then has an eighth of it. The test split is never cut.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.harness.arguments import positive, run_main
from benchmarks.harness.checkout import environment
from benchmarks.quality import movielens
from benchmarks.quality.lockstep import CONFIG, EQUAL, compare_steps, flags
from benchmarks.quality.seeds import prepare_once
from jaxrank import json_files
from jaxrank.config_files import load
from jaxrank.evaluation.evaluate import evaluate
from jaxrank.metrics import run_intervals
from jaxrank.train import train

RUNS = {
    "jaxrank, equal settings": {},
    "jaxrank, outputs start at the base rate": {"model.initial_bias": "{}"},
    "jaxrank, no cut of the learning rate, patience 5": {
        "eval.reduce_lr_patience": "0",
        "eval.early_stopping_patience": "5",
    },
    "jaxrank, as before, with averaged weights": {
        "eval.reduce_lr_patience": "0",
        "eval.early_stopping_patience": "5",
        "ema_decay": "0.999",
    },
}


def difference(a: list[float], b: list[float]) -> str:
    """Formats the difference of the means with Welch's interval, as seeds do not make pairs."""
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return run_intervals.Interval(float(np.mean(a) - np.mean(b)), low, high).text("+.5f")


def jaxrank_run(store: Path, seed: int, changed: dict[str, str], place: Path) -> dict[str, float]:
    """Trains one run of jaxrank, and returns its test metrics."""
    settings = EQUAL | {
        "seed": str(seed),
        "data.store": str(store),
        "eval.early_stopping_patience": "2",
        "eval.reduce_lr_patience": "1",
    }
    config = load(CONFIG, flags(settings | changed))
    train(config, place, report=lambda _: None, quiet=True, page=False)
    scored = evaluate(str(place), checkpoint="best", split="test")
    return {name: scored.metrics["like"][name] for name in ("auc", "logloss")}


def peer_run(data: Path, seed: int, epochs: int) -> dict[str, float]:
    script = Path(__file__).with_name("peers.py")
    done = subprocess.run(
        [sys.executable, str(script), f"--data={data}", f"--seed={seed}", f"--epochs={epochs}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment(),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(lines, key=lambda line: line["valid_auc"])


def compare_runs(
    data: Path, store: Path, rows: int, seeds: int, causes: bool, folder: Path
) -> None:
    steps = math.ceil(rows / 4096)  # of FuxiCTR's epoch, whose last batch is partial
    epochs = 100 if steps < 100 else 30
    length = {
        "num_epochs": "0.0",
        "num_steps": str(steps * epochs),
        "steps_per_execution": str(steps),
        "log_every_steps": str(steps),
        "eval.every_steps": str(steps),
    }

    def results() -> Iterator[tuple[str, list[dict[str, float]]]]:
        yield "FuxiCTR", [kept("FuxiCTR", seed, {}) for seed in range(seeds)]
        for name, changed in list(RUNS.items())[: None if causes else 1]:
            yield name, [kept(name, seed, length | changed) for seed in range(seeds)]

    def kept(name: str, seed: int, settings: dict[str, str]) -> dict[str, float]:
        place = folder / name.replace(" ", "_").replace(",", "") / f"seed{seed}"
        record = place / "scores.json"
        if not record.exists():
            place.mkdir(parents=True, exist_ok=True)
            if name == "FuxiCTR":
                scores = peer_run(data, seed, epochs)
            else:
                scores = jaxrank_run(store, seed, settings, place / "run")
            json_files.write(record, scores)
        return json.loads(record.read_text())

    print("| program | seeds | test AUC | test logloss | AUC minus FuxiCTR's | logloss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    peer: list[dict[str, float]] = []
    for name, scores in results():
        peer = peer or scores
        cells = [name, str(len(scores))]
        for metric in ("auc", "logloss"):
            values = [score[metric] for score in scores]
            deviation = f" ({np.std(values, ddof=1):.5f})" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.5f}{deviation}")
        for metric in ("auc", "logloss"):
            a, b = ([score[metric] for score in side] for side in (scores, peer))
            cells.append("" if scores is peer else difference(a, b))
        print("| " + " | ".join(cells) + " |", flush=True)


def prepared(data: Path, folder: Path, rows: int) -> tuple[Path, Path]:
    """Returns the folder of the raw files with this number of training rows, and their store."""
    if rows:
        tenth = folder / f"rows{rows}"
        tenth.mkdir(parents=True, exist_ok=True)
        for split in movielens.SPLITS:
            table = movielens.read(data / f"ctr_{split}.csv.gz")
            if split != "test":
                table = table.slice(0, rows if split == "train" else rows // 8)
            movielens.write(table, tenth / f"ctr_{split}.csv.gz")
        data = tenth
    files = [
        f"--config.source.files.{split}={data.absolute() / f'ctr_{split}.csv.gz'}"
        for split in movielens.SPLITS
    ]
    store = folder / f"data{rows}"
    prepare_once(str(CONFIG), store, files)
    return data, store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("mode", choices=("steps", "runs"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=0, help="training rows; 0: all")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--causes", action="store_true", help="with all variants")
    parser.add_argument("--seeds", type=positive, default=3)
    args = parser.parse_args()
    folder = args.workdir.absolute() / f"{args.mode}{args.rows}"
    folder.mkdir(parents=True, exist_ok=True)
    data, store = prepared(args.data, args.workdir.absolute(), args.rows)
    if args.mode == "steps":
        compare_steps(store, args.steps, args.causes, folder)
    else:
        compare_runs(data, store, args.rows or 591_209, args.seeds, args.causes, folder)


if __name__ == "__main__":
    run_main(main)
