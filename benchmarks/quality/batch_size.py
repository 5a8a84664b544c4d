"""Measures the logloss of large batches after the same examples, by learning rate scaling rule.

    python -m benchmarks.quality.batch_size --workdir=/tmp/batch

Trains a cheap model (6 id columns, 4 floats, one cross layer, a small tower) for one epoch on
generated data with a known truth.

1. For each pair of optimizers, chooses the learning rates at batch size 4,096 by validation logloss
   on the first seed. The best point is one where half a decade more and half a decade less are
   worse, for dense parameters and tables together. The smallest rates within 0.05% of its logloss
   are used.
2. Trains each batch size with each scaling rule, without warm-up and with a warm-up of a tenth of
   the steps. The rules are none, sqrt and linear for both dense parameters and tables, and sqrt for
   dense parameters with linear for tables.
3. Prints the validation logloss relative to that at 4,096 in percent: mean and standard deviation
   over seeds. Seeds have the same data, and differ in order and initial values.

--decay lets the learning rates fall to 0 over the run, also at 4,096. --overrides and
--base-overrides are further overrides for large batches and for 4,096, for example averaged
weights. --tune searches learning rates at some batch sizes, which is a bound for every rule.

Finished runs are not repeated, so an interrupted command can be given again.
"""

import argparse
import concurrent.futures
import itertools
import math
import os
import shlex
import shutil
import statistics
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from benchmarks.harness.arguments import positive, run_main
from benchmarks.quality.seeds import jaxrank, prepare_once
from jaxrank.config import default
from jaxrank.optim import DECAYS

BASE = 4096
IDS = (200_000, 50_000, 10_000, 1_000, 100, 10)
NEAR = 0.0005  # relative to the best logloss; half of the accepted loss of a large batch
RULES = {  # for dense parameters and for tables
    "none": ("none", "none"),
    "sqrt": ("sqrt", "sqrt"),
    "sqrt+linear": ("sqrt", "linear"),
    "linear": ("linear", "linear"),
}
# For dense parameters and for tables: the name, and the learning rate at which the search starts.
OPTIMIZERS = {
    "rowwise": (("adam", 0.0032), ("rowwise_adagrad", 0.032)),
    "adagrad": (("adagrad", 0.032), ("adagrad", 0.1)),
    "adam": (("adam", 0.0032), ("lazy_adam", 0.0032)),
    "sgd": (("sgd", 0.32), ("sgd", 32.0)),
}


class Case(NamedTuple):
    """One run.

    rates: learning rates of dense parameters and of tables at batch size BASE.
    overrides: further overrides.
    """

    optimizer: str
    rates: tuple[float, float]
    batch: int
    rule: str
    warmup: float
    decay: str
    overrides: str
    seed: int

    @property
    def name(self) -> str:
        parts = ("".join(str(x).split()).replace("--config.", "") for x in self if x != "")
        return "-".join(parts).replace("/", "_")


def get_config(rows: str) -> ConfigDict:
    c = default()
    sizes = dict(train=int(rows), valid=1_048_576)
    c.source = ConfigDict(
        dict(kind="synthetic", rows=sizes, seed=5, dense=4, categorical=list(IDS), exponent=1.05)
    )
    c.features.tasks = [dict(name="click", label="click", truth="p_click")]
    c.features.dense = [dict(columns="f*", standardize=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=rows) for i, rows in enumerate(IDS)
    ]
    c.embedding.dim = 8
    c.model.cross_layers = 1
    c.model.mlp_units = (32, 16)
    c.num_epochs = 1.0
    c.eval.batch_size = 65_536
    c.log_every_steps = 2**16
    return c


def arguments(case: Case, steps: int) -> list[str]:
    words = [f"--config.seed={case.seed}", f"--config.batch_size={case.batch}"]
    names, rules = OPTIMIZERS[case.optimizer], RULES[case.rule]
    parts = zip(("dense", "tables"), names, case.rates, rules, strict=True)
    for section, (name, _), rate, rule in parts:
        at = f"--config.optim.{section}."
        words += [f"{at}name={name}", f"{at}base_learning_rate={rate}", f"{at}base_batch={BASE}"]
        words += [f"{at}scaling={rule}", f"{at}warmup_steps={round(case.warmup * steps)}"]
        words += [f"{at}decay={case.decay}"]
    return [*words, *shlex.split(case.overrides)]


class Runner:
    """Runs cases with one number of training examples, each once, some of them in parallel."""

    def __init__(self, folder: Path, rows: int, jobs: int, decay: str):
        self._folder, self._rows, self._jobs, self._decay = folder / str(rows), rows, jobs, decay
        cores = sorted(os.sched_getaffinity(0))
        self._shares = [set(cores[i::jobs]) or set(cores) for i in range(jobs)]
        self._lock = threading.Lock()
        self._config = f"{Path(__file__).resolve()}:{rows}"
        self._store = self._folder / "data"
        prepare_once(self._config, self._store)

    def losses(
        self,
        optimizer: str,
        rates: tuple[float, float],
        batch: int,
        rule: str = "none",
        warmup: float = 0.0,
        overrides: str = "",
        *,
        seeds: Iterable[int],
    ) -> list[float]:
        """Returns the validation logloss per seed, infinity for runs that diverged."""
        parts = optimizer, rates, batch, rule, warmup, self._decay, overrides
        return self._losses([Case(*parts, seed) for seed in seeds])

    def first_losses(
        self, optimizer: str, batch: int, rates: list[tuple[float, float]], overrides: str
    ) -> list[float]:
        """Returns the validation logloss of the first seed per pair of learning rates."""
        return self._losses(
            [Case(optimizer, pair, batch, "none", 0.0, self._decay, overrides, 0) for pair in rates]
        )

    def _losses(self, cases: list[Case]) -> list[float]:
        with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(self._loss, cases))

    def _loss(self, case: Case) -> float:
        place = self._folder / case.name
        kept = place / "logloss"
        if not kept.exists():
            with self._lock:
                cores = self._shares.pop()
            try:
                kept_text = repr(self._trained(case, place, cores))
            finally:
                with self._lock:
                    self._shares.append(cores)
            kept.write_text(kept_text)
        loss = float(kept.read_text())
        print(f"  {case.name}: {loss:.5f}", flush=True)
        return loss

    def _trained(self, case: Case, place: Path, cores: set[int]) -> float:
        steps = self._rows // case.batch
        place.mkdir(parents=True, exist_ok=True)
        where = [f"--workdir={place / 'run'}", f"--config.data.store={self._store}"]
        args = ["train", f"--config={self._config}", *where, *arguments(case, steps)]
        try:
            return jaxrank(*args, cores=cores)["metrics"]["click/logloss"]
        except SystemExit as error:
            if "finite" not in str(error):
                raise
            return float("inf")
        finally:
            shutil.rmtree(place / "run", ignore_errors=True)


def best_rates(
    runner: Runner, optimizer: str, batch: int, best: tuple[float, float], overrides: str
) -> tuple[float, float]:
    """Searches learning rates on a grid of half decades.

    Climbs until no neighbour, also diagonally, is better. Then returns the smallest rates that are
    near the best. Rates at the edge of stability would not measure the loss of a larger batch.
    """
    losses: dict[tuple[float, float], float] = {}
    while True:
        dense, other = ([_half_decades(x, n) for n in (-1, 0, 1)] for x in best)
        neighbours = itertools.product(dense, other)
        new = [pair for pair in neighbours if pair not in losses]
        losses |= dict(zip(new, runner.first_losses(optimizer, batch, new, overrides), strict=True))
        before, best = best, min(losses, key=lambda pair: losses[pair])
        if best == before:
            close_pairs = [pair for pair in losses if losses[pair] < losses[best] * (1 + NEAR)]
            return min(close_pairs, key=math.prod)


def _half_decades(rate: float, more: int) -> float:
    return float(f"{10 ** ((round(2 * math.log10(rate)) + more) / 2):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--rows", type=positive, default=20_971_520, help="training examples")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--batches", nargs="+", type=positive, default=[16_384, 65_536, 131_072])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--warmups", nargs="+", type=float, default=[0.0, 0.1], help="of the steps")
    parser.add_argument("--decay", default="constant", choices=DECAYS)
    parser.add_argument(
        "--rates",
        nargs=2,
        type=float,
        metavar=("DENSE", "TABLES"),
        help=f"learning rates at {BASE} (default: searched)",
    )
    parser.add_argument(
        "--overrides", default="", help="further overrides at the other batch sizes"
    )
    parser.add_argument("--base-overrides", default="", help=f"further overrides at {BASE}")
    parser.add_argument(
        "--rates-base", nargs=2, type=float, metavar=("DENSE", "TABLES"), help="other rates there"
    )
    parser.add_argument(
        "--tune", nargs="*", type=int, default=[], help="batch sizes to search rates at"
    )
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument(
        "--jobs", type=positive, default=1, help="parallel runs, which share the cores"
    )
    args = parser.parse_args()
    runner = Runner(Path(args.workdir), args.rows, args.jobs, args.decay)
    seeds = range(args.seeds)
    for optimizer in args.optimizers:
        (_, dense), (_, tables) = OPTIMIZERS[optimizer]
        rates = args.rates and tuple(args.rates)
        rates = rates or best_rates(runner, optimizer, BASE, (dense, tables), args.base_overrides)
        base_rates = tuple(args.rates_base or rates)
        base = runner.losses(
            optimizer, base_rates, BASE, overrides=args.base_overrides, seeds=seeds
        )
        print(
            f"{optimizer}: learning rates {base_rates} at {BASE}:"
            f" logloss {statistics.mean(base):.5f}"
        )
        for batch, rule, warmup in itertools.product(args.batches, args.rules, args.warmups):
            losses = runner.losses(
                optimizer, rates, batch, rule, warmup, args.overrides, seeds=seeds
            )
            print_losses(
                f"{optimizer}, batch {batch:,}, {rule}, warm-up {warmup:.0%}", losses, base
            )
        for batch in args.tune:
            tuned = best_rates(runner, optimizer, batch, rates, args.overrides)
            losses = runner.losses(optimizer, tuned, batch, overrides=args.overrides, seeds=seeds)
            print_losses(f"{optimizer}, batch {batch:,}, tuned rates {tuned}", losses, base)


def print_losses(name: str, losses: list[float], base: list[float]) -> None:
    changes = [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
    lost = sum(not math.isfinite(x) for x in changes)
    spread = statistics.stdev(changes) if len(changes) > 1 and not lost else math.nan
    result = f"{lost} of {len(changes)} runs diverged" if lost else ""
    print(f"{name}: {result or f'{statistics.mean(changes):+.3f}% ({spread:.3f})'}", flush=True)


if __name__ == "__main__":
    run_main(main)
