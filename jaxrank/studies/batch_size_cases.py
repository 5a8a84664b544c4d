"""Options of the study `batch_size`, its cases, and the specs of their runs."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from jaxrank.errors import InputError
from jaxrank.optim import SCALINGS
from jaxrank.studies import tuning
from jaxrank.studies.study import Context, RunSpec, training_kind
from jaxrank.validate import check_choice, field

_SIDES = ("dense", "tables")


@dataclasses.dataclass(frozen=True)
class Options:
    batch_sizes: tuple[int, ...] = field(
        (1024, 4096, 16384, 65536, 131072),
        help="batch sizes",
        unit="examples",
        at_least=1,
        non_empty=True,
    )
    base: int = field(
        4096, help="batch size at which learning rates are tuned", unit="examples", at_least=1
    )
    rules: tuple[str, ...] = field(
        ("none", "sqrt", "linear", "sqrt+sqrt_linear"),
        help="rules that scale the learning rates: one for both, or DENSE+TABLES",
        non_empty=True,
    )
    warmups: tuple[float, ...] = field(
        (0.0, 0.1), help="lengths of the warm-up, as fractions of the steps", at_least=0, at_most=1
    )
    averages: tuple[float, ...] = field(
        (0.0, 0.99), help="values of ema_decay, 0 for no averaged weights", at_least=0, below=1
    )
    runs: int = field(3, help="number of seeds", at_least=1)
    workers: int = field(16, help="number of asynchronous workers; 0: synchronous only", at_least=0)
    examples: int = field(
        0, help="training examples of each run; 0: as many as a run of the config", at_least=0
    )
    tune_rounds: int = field(
        4, help="maximum number of moves in the search for learning rates; 0: no search", at_least=0
    )
    tune_factor: float = field(2.0, help="factor between the learning rates of the search", above=1)

    def check(self, where: str) -> None:
        for rule in self.rules:
            for part in rule.split("+"):
                check_choice("rules", part, SCALINGS)
            if rule.count("+") > 1:
                raise InputError(f"rules: must be RULE or DENSE+TABLES: found {rule!r}.")


@dataclasses.dataclass(frozen=True)
class Case:
    """Runs that differ in their seed only. workers: 0 for synchronous training."""

    batch: int
    rule: str
    warmup: float = 0.0
    average: float = 0.0
    workers: int = 0

    @property
    def name(self) -> str:
        side = f"async{self.workers}" if self.workers else "sync"
        return f"{side}-{self.batch}-{self.rule}-warmup{self.warmup:g}-ema{self.average:g}"

    @property
    def training(self) -> str:
        return f"asynchronous, {self.workers} workers" if self.workers else "synchronous"


class Specs:
    """Makes the specs of cases.

    tuned: {path: value} of the config without open fields, whose rates are for the base batch size.
    examples: of each run, a multiple of the largest batch size.
    """

    def __init__(self, context: Context, chosen: Mapping[str, Any]):
        self._options, self._fields = context.options, context.fields
        self.tuned = set_base_rates(chosen["fields"], self._options.base)
        largest = max(*self._options.batch_sizes, self._options.base)
        available = self._options.examples or chosen["num_steps"] * chosen["fields"]["batch_size"]
        self.examples = available // largest * largest
        if not self.examples:
            raise InputError(
                f"--batch-sizes: must be at most the examples of a run: found {largest:,}, and runs"
                f" of {available:,} examples. Set --examples, or smaller batches."
            )
        self.points: Mapping[str, tuning.Point] = {}

    def steps(self, batch: int) -> int:
        return max(1, self.examples // batch)

    def side(self, workers: int) -> RunSpec:
        """Returns the spec of a side for the search, at the base batch size.

        All rules are the same there. It has that of the config, so that other `rules` reuse it.
        """
        case = Case(self._options.base, scaling_rule(self._fields), workers=workers)
        return RunSpec(
            "async" if workers else "sync", self._overrides(case), *training_kind(workers, 0)
        )

    def run_spec(self, case: Case, seed: int) -> RunSpec:
        point = self.points["async" if case.workers else "sync"]
        overrides = self._overrides(case)
        overrides |= tuning.rates(self.tuned, point, self._options.tune_factor)
        overrides["seed"] = self._fields["seed"] + seed
        return RunSpec(f"{case.name}-seed{seed}", overrides, *training_kind(case.workers, seed))

    def overrides(self, case: Case) -> dict[str, Any]:
        """Returns what sets a case for the user: without lengths and intervals."""
        kept = ("batch_size", "ema_decay", "optim")
        return {k: v for k, v in self.run_spec(case, 0).overrides.items() if k.startswith(kept)}

    def _overrides(self, case: Case) -> dict[str, Any]:
        steps, execution = self.steps(case.batch), self._execution(case.batch)
        dense, _, tables = case.rule.partition("+")
        overrides: dict[str, Any] = {
            **tuning.final_evaluation(execution),
            "batch_size": case.batch,
            "num_steps": steps,
            "num_epochs": 0.0,
            "steps_per_execution": execution,
            "ema_decay": case.average,
        }
        for side, rule in zip(_SIDES, (dense, tables or dense), strict=True):
            overrides[f"optim.{side}.scaling"] = rule
            overrides[f"optim.{side}.warmup_steps"] = round(case.warmup * steps)
        return overrides

    def _execution(self, batch: int) -> int:
        """Returns steps per execution: fewer for large batches, so that memory does not grow."""
        steps = self._fields["steps_per_execution"]
        most = steps * self._options.base
        while steps % 2 == 0 and steps * batch > most:
            steps //= 2
        return steps


def check_batches(context: Context) -> None:
    """Raises InputError unless the streams of the data divide each batch."""
    shards = context.fields["data.shards"]
    for batch in (*context.options.batch_sizes, context.options.base):
        if batch % shards:
            raise InputError(
                f"--batch-sizes, --base: must be multiples of data.shards={shards}: found {batch}."
            )


def set_base_rates(fields: Mapping[str, Any], base: int) -> dict[str, Any]:
    """Returns the fields of a config with the rates that it has at the base batch size."""
    new = dict(fields)
    for side in _SIDES:
        rate, batch = f"optim.{side}.base_learning_rate", f"optim.{side}.base_batch"
        times = base / fields[batch]
        below, above = SCALINGS[fields[f"optim.{side}.scaling"]]
        new[rate] = fields[rate] * times ** (below if times <= 1 else above)
        new[batch] = base
    return new


def scaling_rule(fields: Mapping[str, Any]) -> str:
    """Returns the rule by which the rates of a config scale, of both sides if they differ."""
    dense, tables = (fields[f"optim.{side}.scaling"] for side in _SIDES)
    return dense if dense == tables else f"{dense}+{tables}"


def synchronous_cases(options: Options, rule_of_config: str) -> list[Case]:
    """Returns the synchronous cases. At the base batch size all rules are the same."""
    rules = tuple(dict.fromkeys((*options.rules, rule_of_config)))
    others = sorted({0.0, *options.warmups}), sorted({0.0, *options.averages})
    cases = []
    for batch in sorted({*options.batch_sizes, options.base}):
        of_batch = (rule_of_config,) if batch == options.base else rules
        cases += [Case(batch, *values) for values in itertools.product(of_batch, *others)]
    return cases
