"""What large batches cost: logloss after the same examples, by rule of scaling the learning rate.

    python benchmarks/batch_size.py --workdir=/tmp/batch

A cheap model (6 id columns, 4 floats, one cross layer, a small tower) is trained for one pass over
generated data with a known truth. For each pair of optimizers the rate at batches of 4,096 is first
chosen among --rates by validation logloss, on the first seed. Then each batch size is trained with
each rule (none, sqrt, linear; for dense parameters and tables alike), without warm-up and with one
of a tenth of the steps. Printed is the validation logloss over that at 4,096, in percent, as mean
and deviation over the seeds, whose data is the same and whose order and initial values differ.

Runs that are there already are not done again, so the command can be given once more.
"""

import argparse
import concurrent.futures
import itertools
import os
import statistics
import threading
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict
from seeds import jaxrank, run

from jaxrank.config import default

BASE = 4096
IDS = (200_000, 50_000, 10_000, 1_000, 100, 10)
RULES = ("none", "sqrt", "linear")
# Of dense parameters and of tables: the name, and the rates to choose from at batches of BASE.
OPTIMIZERS = {
    "sgd": ("sgd", "sgd", (0.1, 0.3, 1.0), (10.0, 30.0, 100.0)),
    "adagrad": ("adagrad", "adagrad", (0.01, 0.03, 0.1), (0.03, 0.1, 0.3)),
    "rowwise": ("adam", "rowwise_adagrad", (0.001, 0.003, 0.01), (0.01, 0.03, 0.1)),
    "adam": ("adam", "lazy_adam", (0.001, 0.003, 0.01), (0.001, 0.003, 0.01)),
}


class Case(NamedTuple):
    """One run. rates: of dense parameters and of tables at batches of BASE."""

    optimizer: str
    rates: tuple[float, float]
    batch: int
    rule: str
    warmup: float
    seed: int

    @property
    def name(self) -> str:
        return "-".join(str(x) for x in self).replace(" ", "")


def get_config() -> ConfigDict:
    c = default()
    rows = dict(train=int(os.environ.get("JAXRANK_BATCH_ROWS", 20_971_520)), valid=1_048_576)
    c.source = ConfigDict(
        dict(kind="synthetic", rows=rows, seed=5, floats=4, ids=list(IDS), exponent=1.05)
    )
    c.features.tasks = [dict(name="click", label="click", truth="p_click")]
    c.features.floats = [dict(columns="f*", standardize=True)]
    c.features.ids = [
        dict(columns=f"c{i}", encoding="integer", rows=rows) for i, rows in enumerate(IDS)
    ]
    c.embedding.dim = 8
    c.model.cross_layers = 1
    c.model.hidden = (32, 16)
    c.num_epochs = 1.0
    c.eval.batch_size = 65_536
    c.log_every_steps = 2**16
    return c


def arguments(case: Case, steps: int) -> list[str]:
    dense, tables, _, _ = OPTIMIZERS[case.optimizer]
    found = [f"--config.seed={case.seed}", f"--config.batch_size={case.batch}"]
    for section, name, rate in zip(("dense", "tables"), (dense, tables), case.rates, strict=True):
        at = f"--config.optim.{section}."
        found += [f"{at}name={name}", f"{at}base_rate={rate}", f"{at}base_batch={BASE}"]
        found += [f"{at}scaling={case.rule}", f"{at}warmup_steps={round(case.warmup * steps)}"]
    return found


class Runner:
    """Runs cases, each once, some at a time."""

    def __init__(self, folder: Path, jobs: int):
        self._folder, self._jobs = folder, jobs
        cores = sorted(os.sched_getaffinity(0))
        self._shares = [set(cores[i::jobs]) or set(cores) for i in range(jobs)]
        self._lock = threading.Lock()
        self._config, self._store = str(Path(__file__).resolve()), str(folder / "data")
        jaxrank("prepare", f"--config={self._config}", f"--output={self._store}")

    def losses(self, cases: list[Case]) -> list[float]:
        """Validation logloss of each; infinite where a run did not stay finite."""
        with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(self._loss, cases))

    def _loss(self, case: Case) -> float:
        with self._lock:
            cores = self._shares.pop()
        rows = get_config().source.rows.train
        steps = rows // case.batch
        place = self._folder / case.name
        place.mkdir(parents=True, exist_ok=True)
        try:
            args = [*arguments(case, steps), f"--config.data.store={self._store}"]
            found = run(place, self._config, "valid", args, cores)
            loss = found["tested"]["metrics"]["click"]["logloss"]
        except SystemExit as error:
            if "finite" not in str(error):
                raise
            loss = float("inf")
        finally:
            with self._lock:
                self._shares.append(cores)
        print(f"  {case.name}: {loss:.5f}", flush=True)
        return loss


def best_rates(runner: Runner, optimizer: str) -> tuple[float, float]:
    _, _, dense, tables = OPTIMIZERS[optimizer]
    pairs = list(itertools.product(dense, tables))
    found = runner.losses([Case(optimizer, p, BASE, "none", 0.0, 0) for p in pairs])
    return pairs[found.index(min(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--batches", nargs="+", type=int, default=[16_384, 65_536, 131_072])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, sharing the cores")
    args = parser.parse_args()
    runner = Runner(Path(args.workdir), args.jobs)
    seeds = range(args.seeds)
    for optimizer in args.optimizers:
        rates = best_rates(runner, optimizer)
        base = runner.losses([Case(optimizer, rates, BASE, "none", 0.0, s) for s in seeds])
        print(f"{optimizer}: rates {rates} at {BASE}: logloss {statistics.mean(base):.5f}")
        for batch, rule, warmup in itertools.product(args.batches, RULES, (0.0, 0.1)):
            found = runner.losses([Case(optimizer, rates, batch, rule, warmup, s) for s in seeds])
            over = [100 * (a / b - 1) for a, b in zip(found, base, strict=True)]
            spread = statistics.stdev(over) if len(over) > 1 else float("nan")
            print(
                f"{optimizer}, batch {batch:,}, {rule}, warm-up {warmup:.0%}:"
                f" {statistics.mean(over):+.3f}% ({spread:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
