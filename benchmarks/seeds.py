"""Trains configs with several seeds and prints mean and deviation of the test metrics.

    python benchmarks/seeds.py --config=configs/ml1m_dcnv2.py --workdir=/tmp/seeds --seeds=5 \\
        --variant='dnn: --config.model.cross=none' --variant='dcn: --config.model.cross=vector'

The checkpoint of each run is the best one by the config's metric on the validation split. Further
arguments go to `jaxrank train`. Data is prepared once. Variants are trained with the same seeds,
and so on the same batches, as the config itself; of each metric the difference from the config is
printed, with its 95% confidence interval by Student's t over the pairs.

Runs that are there already are not done again, so the command can be given once more.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counts import positive
from scipy import stats

Scores = dict[str, list[float]]  # by metric, of each seed


def jaxrank(*args: str, cores: set[int] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxrank", *args, "--json"]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: cores and os.sched_setaffinity(0, cores),
    )
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{found.stderr[-2000:]}")
    return json.loads(found.stdout.splitlines()[-1])


def prepare_once(config: str, store: Path, *args: str) -> None:
    if not store.exists():
        jaxrank("prepare", config, f"--output={store}", *args)


def run(folder: Path, config: str, split: str, args: Sequence[str], cores: set[int]) -> dict:
    """Trains and scores once; what is in the folder already is only read."""
    scores = folder / "scores.json"
    command = [config, f"--split={split}", *args]
    if not scores.exists():
        workdir = f"--workdir={folder / 'run'}"
        trained = jaxrank("train", config, workdir, *args, cores=cores)
        tested = jaxrank("evaluate", workdir, "--checkpoint=best", f"--split={split}", cores=cores)
        kept = {k: trained[k] for k in ("step", "seconds", "examples_per_second")}
        scores.write_text(json.dumps({"command": command, "trained": kept, "tested": tested}))
    found = json.loads(scores.read_text())
    if (other := found.get("command", [])) != command:
        raise SystemExit(
            f"{scores} is of the arguments {shlex.join(other)}; now they are"
            f" {shlex.join(command)}. Give another --workdir, or remove it."
        )
    return found


def metrics_of(found: dict[str, Any]) -> dict[str, float]:
    """NaN where one is undefined."""
    return {
        f"{task}/{name}": float("nan") if value is None else value
        for task, metrics in found["tested"]["metrics"].items()
        for name, value in metrics.items()
        if name in ("auc", "logloss", "squared_error", "deviance")
    }


def told(name: str, scores: Scores, first: Scores | None) -> None:
    for metric, values in scores.items():
        line = f"{name}: {metric}: mean {statistics.mean(values):.5f}"
        line += f", deviation {statistics.stdev(values):.5f}" if len(values) > 1 else ""
        if first is not None and len(values) > 1:
            apart = [a - b for a, b in zip(values, first[metric], strict=True)]
            half = stats.t.ppf(0.975, len(apart) - 1) * statistics.stdev(apart) / len(apart) ** 0.5
            mean = statistics.mean(apart)
            line += f"; difference {mean:+.5f}, from {mean - half:+.5f} to {mean + half:+.5f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--split", default="test")
    parser.add_argument("--variant", action="append", default=[], help="'name: arguments'")
    parser.add_argument(
        "--jobs", type=positive, default=1, help="runs at a time, sharing the cores"
    )
    args, rest = parser.parse_known_args()
    folder = Path(args.workdir)
    config = f"--config={args.config}"
    store = folder / "data"
    variants: dict[str, list[str]] = {"config": []}
    for variant in args.variant:
        name, colon, own = variant.partition(":")
        if not colon or name.strip() in variants:
            parser.error(f"--variant must be 'name: arguments', of a new name: found {variant!r}")
        variants[name.strip()] = shlex.split(own)
    prepare_once(config, store, *rest)
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[i :: args.jobs]) or set(cores) for i in range(args.jobs)]
    scores: dict[str, Scores] = {name: {} for name in variants}

    def one(name: str, seed: int) -> dict[str, Any]:
        mine = shares.pop()
        own = [f"--config.seed={seed}", f"--config.data.store={store}"]
        place = folder / name / f"seed{seed}"
        place.mkdir(parents=True, exist_ok=True)
        try:
            return run(place, config, args.split, [*own, *rest, *variants[name]], mine)
        finally:
            shares.append(mine)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            (name, seed) for seed in range(args.first, args.first + args.seeds) for name in variants
        ]
        for (name, seed), found in zip(runs, pool.map(lambda r: one(*r), runs), strict=True):
            line = []
            for metric, value in metrics_of(found).items():
                scores[name].setdefault(metric, []).append(value)
                line.append(f"{metric} {value:.5f}")
            trained = found["trained"]
            speed = trained["examples_per_second"]  # null where no two calls followed each other
            print(
                f"{name}, seed {seed}: {', '.join(line)}; step {found['tested']['step']} of"
                f" {trained['step']}, {trained['seconds']:.0f} s,"
                f" {f'{speed:,.0f} examples/s' if speed else 'speed not measured'}",
                flush=True,
            )
    for name in variants:
        told(name, scores[name], None if name == "config" else scores["config"])


if __name__ == "__main__":
    main()
