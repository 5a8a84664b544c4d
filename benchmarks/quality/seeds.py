"""Trains configs with several seeds and prints mean and deviation of the test metrics.

    python -m benchmarks.quality.seeds --config=configs/ml1m_dcnv2.py --workdir=/tmp/seeds \\
        --seeds=5 --variant='dnn: --config.model.cross=none' \\
        --variant='dcn: --config.model.cross=dcn'

The checkpoint of each run is the best one by the config's metric on the validation split. Further
arguments are passed to `jaxrank train`, and config overrides also to `jaxrank prepare`, which
prepares the data once. A variant may have its own --config. Variants use the same seeds as the
config itself, so they train on the same batches. Prints the difference of each metric from the
config, with a 95% confidence interval by Student's t over the pairs.

Finished runs are not repeated, so an interrupted command can be given again. Runs of another config
and data from another source are rejected.
"""

import argparse
import concurrent.futures
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import positive, run_main
from benchmarks.harness.checkout import environment
from jaxrank import json_files
from jaxrank.config import FREE
from jaxrank.config_files import differences, from_plain, load, to_plain
from jaxrank.data.store.reader import open_store
from jaxrank.defaults import inherit
from jaxrank.errors import InputError
from jaxrank.metrics import run_intervals

Scores = dict[str, list[float]]  # by metric, one value per seed


def jaxrank(*args: str, cores: set[int] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxrank", *args, "--json"]
    pipe = subprocess.PIPE
    env = environment()  # configs of benchmarks import other benchmarks
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        if cores:
            os.sched_setaffinity(process.pid, cores)  # before it starts threads
        output, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{errors[-2000:]}")
    return json.loads(output.splitlines()[-1])


def fields(args: Sequence[str]) -> list[str]:
    """Returns the arguments that override config fields."""
    follows = [False, *(arg.startswith("--config.") and "=" not in arg for arg in args)]
    return [
        arg
        for arg, is_value in zip(args, follows, strict=False)
        if is_value or arg.startswith("--config.")
    ]


def plain(config: Any) -> dict[str, Any]:
    """Converts a config or a section of it to JSON types."""
    return json_files.plain(to_plain(config))


def check_same(workdir: Path, config: Any) -> None:
    """Rejects a run whose config has changed since. Fields that it leaves open are the run's."""
    path = workdir / "config.json"
    if not path.is_file():  # only the scores remain
        return
    before = json.loads(path.read_text())
    lines = differences(before, plain(inherit(config, from_plain(before))))
    changed = [line for line in lines if line.partition(":")[0] not in FREE]
    if changed:
        raise InputError(
            f"{workdir}: must hold a run of the same config: these fields differ:\n  "
            + "\n  ".join(changed)
            + "\nGive another --workdir, or remove it."
        )


def prepare_once(config: str, store: Path, args: Sequence[str] = ()) -> None:
    """Prepares the data of a config file, unless it exists and has the same source."""
    if not store.exists():
        jaxrank("prepare", f"--config={config}", f"--output={store}", *args)
        return
    wanted = plain(load(config, args).source)
    if changed := differences(open_store(store).spec.source, wanted, "source"):
        raise InputError(
            f"{store}: must be prepared from the source of the config, which differs:\n  "
            + "\n  ".join(changed)
            + "\nGive another --workdir, or remove it."
        )


def run(folder: Path, config: str, split: str, args: Sequence[str], cores: set[int]) -> dict:
    """Trains and scores once. Results that are in the folder already are only read."""
    scores = folder / "scores.json"
    command = [f"--config={config}", f"--split={split}", *args]
    if not scores.exists():
        workdir = f"--workdir={folder / 'run'}"
        was_begun = (folder / "run").exists()
        trained = jaxrank("train", f"--config={config}", workdir, *args, cores=cores)
        tested = jaxrank("evaluate", workdir, "--checkpoint=best", f"--split={split}", cores=cores)
        kept = {k: trained[k] for k in ("step", "seconds", "examples_per_second")}
        if was_begun:  # this call has measured a part of the run only
            kept |= {"seconds": None, "examples_per_second": None}
        json_files.write(scores, {"command": command, "trained": kept, "tested": tested})
    earlier = json.loads(scores.read_text())
    if (other := earlier.get("command", [])) != command:
        raise SystemExit(
            f"{scores}: must be of the arguments {shlex.join(command)}: found {shlex.join(other)}."
            " Give another --workdir, or remove it."
        )
    return earlier


def untrained(config: Any) -> set[str]:
    """Returns the tasks of weight 0."""
    names = [task["name"] for task in config.features.tasks]
    return {name for name, weight in zip(names, config.task_weights, strict=False) if not weight}


def task_metrics(result: dict[str, Any], excluded: set[str]) -> dict[str, float]:
    """Returns the metrics of all tasks except `excluded`. Undefined metrics are NaN."""
    return {
        name: float("nan") if value is None else value
        for name, value in result["tested"]["metrics"].items()
        if name.rpartition("/")[0] not in excluded
        and name.rpartition("/")[2] in ("auc", "logloss", "squared_error", "deviance")
    }


def compared(name: str, scores: Scores, first: Scores | None) -> None:
    for metric, values in scores.items():
        line = f"{name}: {metric}: mean {np.mean(values):.5f}"
        line += f", deviation {np.std(values, ddof=1):.5f}" if len(values) > 1 else ""
        if first is not None and metric in first and len(values) > 1:
            mean, low, high = run_intervals.paired(values, first[metric])
            line += f"; difference {mean:+.5f}, from {low:+.5f} to {high:+.5f}"
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
        "--jobs", type=positive, default=1, help="parallel runs, which share the cores"
    )
    args, rest = parser.parse_known_args()
    folder = Path(args.workdir).absolute()
    store = folder / "data"
    variants: dict[str, list[str]] = {"config": []}
    for variant in args.variant:
        name, colon, text = variant.partition(":")
        if not colon or name.strip() in variants:
            parser.error(f"--variant must be 'name: arguments' with a new name: found {variant!r}")
        variants[name.strip()] = shlex.split(text.replace("--config ", "--config="))
    prepare_once(args.config, store, fields(rest))
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[i :: args.jobs]) or set(cores) for i in range(args.jobs)]
    scores: dict[str, Scores] = {name: {} for name in variants}

    def run_arguments(name: str, seed: int) -> tuple[Path, str, list[str]]:
        """Returns the folder of a run, its config and the other arguments."""
        extra = variants[name]
        configs = [arg for arg in extra if arg.startswith("--config=")]
        config = configs[-1].removeprefix("--config=") if configs else args.config
        overrides = [f"--config.seed={seed}", f"--config.data.store={store}", *rest]
        overrides += [arg for arg in extra if arg not in configs]
        return folder / name / f"seed{seed}", config, overrides

    def run_seed(name: str, seed: int) -> dict[str, Any]:
        directory, config, overrides = run_arguments(name, seed)
        directory.mkdir(parents=True, exist_ok=True)
        cores = shares.pop()
        try:
            return run(directory, config, args.split, overrides, cores)
        finally:
            shares.append(cores)

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            (name, seed) for seed in range(args.first, args.first + args.seeds) for name in variants
        ]
        for (name, seed), result in zip(runs, pool.map(lambda r: run_seed(*r), runs), strict=True):
            directory, config, overrides = run_arguments(name, seed)
            now = load(config, fields(overrides))
            check_same(directory / "run", now)
            line = []
            for metric, value in task_metrics(result, untrained(now)).items():
                scores[name].setdefault(metric, []).append(value)
                line.append(f"{metric} {value:.5f}")
            trained = result["trained"]
            speed = trained["examples_per_second"]  # null without two consecutive executions
            seconds = trained["seconds"]
            print(
                f"{name}, seed {seed}: {', '.join(line)}; step {result['tested']['step']} of"
                f" {trained['step']}, {f'{seconds:.0f} s' if seconds else 'in several parts'},"
                f" {f'{speed:,.0f} examples/s' if speed else 'speed not measured'}",
                flush=True,
            )
    for name in variants:
        compared(name, scores[name], None if name == "config" else scores["config"])


if __name__ == "__main__":
    run_main(main)
