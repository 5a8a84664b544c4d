"""Trains a config with several seeds and prints mean and deviation of the test metrics.

    python benchmarks/seeds.py --config=configs/ml1m_dcnv2.py --workdir=/tmp/seeds --seeds=3

The checkpoint of each run is the best one by the config's metric on the validation split. Further
arguments go to `jaxrank train`. Data is prepared once.
"""

import argparse
import json
import statistics
import subprocess
import sys


def jaxrank(*args: str) -> dict:
    command = [sys.executable, "-m", "jaxrank", *args, "--json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--split", default="test")
    args, rest = parser.parse_known_args()
    store = f"{args.workdir}/data"
    config = f"--config={args.config}"
    jaxrank("prepare", config, f"--output={store}", *rest)
    scores: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        run = f"--workdir={args.workdir}/seed{seed}"
        own = [f"--config.seed={seed}", f"--config.data.store={store}"]
        trained = jaxrank("train", config, run, *own, *rest)
        tested = jaxrank("evaluate", run, "--checkpoint=best", f"--split={args.split}")
        line = []
        for task, found in tested["metrics"].items():
            for name in ("auc", "logloss"):
                scores.setdefault(f"{task}/{name}", []).append(found[name])
                line.append(f"{task}/{name} {found[name]:.5f}")
        print(
            f"seed {seed}: {', '.join(line)}; step {tested['step']} of {trained['step']},"
            f" {trained['seconds']:.0f} s, {trained['examples_per_second']:,.0f} examples/s",
            flush=True,
        )
    for name, values in scores.items():
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        print(f"{name}: mean {statistics.mean(values):.5f}, standard deviation {spread:.5f}")


if __name__ == "__main__":
    main()
