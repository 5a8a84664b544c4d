"""Logloss and AUC over batch sizes at equal examples, by the rule that scales the learning rates.

1. Learning rates are tuned at the base batch size, for synchronous and for asynchronous training.
2. Each batch size runs with each rule, with and without warm-up and averages, on one seed.
3. At each batch size, the best of these and the rule of the config run with the other seeds.

Losses are compared with the base batch size at equal seeds.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxrank.config_files import override_flags
from jaxrank.errors import InputError
from jaxrank.optim import SCALINGS
from jaxrank.studies import intervals, tuning
from jaxrank.studies.study import (
    Context,
    Outcome,
    Panel,
    RunResult,
    Runs,
    RunSpec,
    Series,
    Study,
    Table,
    first_metrics,
)
from jaxrank.validate import check_choice, field

_SATURATED = 0.95  # of the largest rate
_SIDES = ("dense", "tables")


@dataclasses.dataclass(frozen=True)
class Options:
    batch_sizes: tuple[int, ...] = field(
        (1024, 4096, 16384, 65536, 131072), help="batch sizes", unit="examples", at_least=1
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
                raise InputError(f"rules must be RULE or DENSE+TABLES: found {rule!r}.")


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


class _Specs:
    """Makes the specs of cases.

    tuned_config: the plain config without open fields, whose rates are for the base batch size.
    examples: of each run, a multiple of the largest batch size.
    """

    def __init__(self, context: Context, chosen: Mapping[str, Any]):
        self._options, self._config = context.options, context.config
        self.tuned_config = _at_base(chosen["config"], self._options.base)
        largest = max(*self._options.batch_sizes, self._options.base)
        available = self._options.examples or chosen["num_steps"] * chosen["config"]["batch_size"]
        self.examples = available // largest * largest
        if not self.examples:
            raise InputError(
                f"--batch-sizes must be at most the examples of a run: found {largest:,}, and runs"
                f" of {available:,} examples. Set --examples, or smaller batches."
            )
        self.points: Mapping[str, tuning.Point] = {}

    def steps(self, batch: int) -> int:
        return max(1, self.examples // batch)

    def side(self, workers: int) -> RunSpec:
        """Returns the spec of a side for the search, at the base batch size."""
        case = Case(self._options.base, self._options.rules[0], workers=workers)
        return RunSpec("async" if workers else "sync", self._overrides(case), *_kind(workers, 0))

    def of(self, case: Case, seed: int) -> RunSpec:
        point = self.points["async" if case.workers else "sync"]
        overrides = self._overrides(case)
        overrides |= tuning.rates(self.tuned_config, point, self._options.tune_factor)
        overrides["seed"] = self._config.seed + seed
        return RunSpec(f"{case.name}-seed{seed}", overrides, *_kind(case.workers, seed))

    def overrides_of(self, case: Case) -> dict[str, Any]:
        """Returns what sets a case for the user: without lengths and intervals."""
        kept = ("batch_size", "ema_decay", "optim")
        return {k: v for k, v in self.of(case, 0).overrides.items() if k.startswith(kept)}

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
        steps = self._config.steps_per_execution
        most = steps * self._options.base
        while steps % 2 == 0 and steps * batch > most:
            steps //= 2
        return steps


def _kind(workers: int, schedule_seed: int) -> tuple[str, dict[str, int]]:
    if not workers:
        return "train", {}
    return "asynchronous", {"workers": workers, "schedule_seed": schedule_seed}


def _at_base(config: Mapping[str, Any], base: int) -> dict[str, Any]:
    """Returns a plain config whose rates are those that it has at the base batch size."""
    sections = {}
    for side in _SIDES:
        section = config["optim"][side]
        times = base / section["base_batch"]
        below, above = SCALINGS[section["scaling"]]
        rate = section["base_learning_rate"] * times ** (below if times <= 1 else above)
        sections[side] = {**section, "base_batch": base, "base_learning_rate": rate}
    return {**config, "optim": {**config["optim"], **sections}}


def _config_rule(config: ConfigDict) -> str:
    dense, tables = (config.optim[side].scaling for side in _SIDES)
    return dense if dense == tables else f"{dense}+{tables}"


def _cases(options: Options, rule_of_config: str) -> list[Case]:
    """Returns the synchronous cases. At the base batch size all rules are the same."""
    rules = tuple(dict.fromkeys((*options.rules, rule_of_config)))
    others = sorted({0.0, *options.warmups}), sorted({0.0, *options.averages})
    cases = []
    for batch in sorted({*options.batch_sizes, options.base}):
        of_batch = (rule_of_config,) if batch == options.base else rules
        cases += [Case(batch, *values) for values in itertools.product(of_batch, *others)]
    return cases


def runs(context: Context) -> Runs:
    options = context.options
    chosen = yield from tuning.resolve(context.config, {})
    specs, rule = _Specs(context, chosen), _config_rule(context.config)
    sides = {"sync": specs.side(0)}
    if options.workers:
        sides["async"] = specs.side(options.workers)
    specs.points = yield from tuning.tuned(
        sides, specs.tuned_config, factor=options.tune_factor, rounds=options.tune_rounds
    )
    results: dict[Case, list[RunResult]] = {}

    def add(cases: Sequence[Case], seeds: Iterable[int]) -> Any:
        pairs = [(case, seed) for seed in seeds for case in cases]
        done = yield [specs.of(*pair) for pair in pairs]
        for (case, _), result in zip(pairs, done, strict=True):
            results.setdefault(case, []).append(result)

    cases = _cases(options, rule)
    yield from add(cases, [0])
    finalists = list(dict.fromkeys(_finalists(cases, results, rule)))
    parallel = [
        Case(batch, rule, workers=options.workers)
        for batch in dict.fromkeys(case.batch for case in cases)
        if 0 < options.workers <= specs.steps(batch)
    ]
    if options.runs > 1:
        yield from add(finalists, range(1, options.runs))
    if parallel:
        yield from add(parallel, range(options.runs))
    names = first_metrics([r for part in results.values() for r in part])
    if not names:
        return Outcome(Table(("batch size",), []), conclusion=["No run has finished."])
    base = results[Case(options.base, rule)]
    table = _table(results, base, names, specs)
    return Outcome(
        table,
        _panels(results, names, rule, options.base),
        _conclusion(results, base, names[0], rule, options),
        override_flags(specs.overrides_of(_best(results, max(options.batch_sizes)))),
    )


def _mean_loss(results: Sequence[RunResult]) -> float:
    return sum(map(tuning.loss, results)) / len(results)


def _best(results: Mapping[Case, list[RunResult]], batch: int) -> Case:
    """Returns the synchronous case with the smallest loss, of those with the most runs."""
    cases = [case for case in results if case.batch == batch and not case.workers]
    most = max(len(results[case]) for case in cases)
    return min(
        (case for case in cases if len(results[case]) == most),
        key=lambda case: _mean_loss(results[case]),
    )


def _finalists(
    cases: Sequence[Case], results: Mapping[Case, list[RunResult]], rule: str
) -> Iterable[Case]:
    """Yields the cases that run with all seeds: of each batch size the best and the config's."""
    for batch in dict.fromkeys(case.batch for case in cases):
        yield _best(results, batch)
        yield Case(batch, rule)


def _relative(results: Sequence[RunResult], base: Sequence[RunResult]) -> intervals.Interval:
    """Returns the increase of the loss over that of the base with equal seeds, in percent."""
    pairs = [
        (tuning.loss(result), tuning.loss(other))
        for result, other in zip(results, base, strict=False)
        if result.is_done and other.is_done
    ]
    return intervals.mean([100 * (loss / other - 1) for loss, other in pairs])


def _speed(results: Sequence[RunResult]) -> float | None:
    speeds = [r.examples_per_second for r in results if r.is_done and r.examples_per_second]
    return sum(speeds) / len(speeds) if speeds else None


def _table(
    results: Mapping[Case, list[RunResult]],
    base: Sequence[RunResult],
    names: Sequence[str],
    specs: _Specs,
) -> Table:
    columns = (
        "training",
        "batch size",
        "steps",
        "rule",
        "warm-up",
        "ema",
        "seeds",
        *names,
        "loss against base, %",
        "low",
        "high",
        "examples/s",
    )
    rows = []
    for case, of_case in results.items():
        done = [r for r in of_case if r.is_done]
        if not done:
            continue
        means = [intervals.mean([r.metrics[name] for r in done]).value for name in names]
        relative = [None if math.isnan(x) else x for x in _relative(of_case, base)]
        rows.append(
            (
                case.training,
                case.batch,
                specs.steps(case.batch),
                case.rule,
                case.warmup,
                case.average,
                len(done),
                *means,
                *relative,
                _speed(of_case),
            )
        )
    return Table(columns, rows)


def _panels(
    results: Mapping[Case, list[RunResult]], names: Sequence[str], rule: str, base: int
) -> list[Panel]:
    batches = sorted({case.batch for case in results})
    lines: dict[str, list[Case]] = {}
    for case in results:
        if case.workers:
            lines.setdefault(f"{case.training}, {case.rule}", []).append(case)
        elif not case.warmup and not case.average and case.batch != base:
            lines.setdefault(case.rule, []).append(case)
    for cases in lines.values():
        if not cases[0].workers:
            cases.append(Case(base, rule))
        cases.sort(key=lambda case: case.batch)
    lines["best found"] = [_best(results, batch) for batch in batches]

    def series(label: str, cases: Sequence[Case], name: str) -> Series:
        values = {
            case.batch: intervals.mean([r.metrics[name] for r in results[case] if r.is_done])
            for case in cases
            if any(r.is_done for r in results[case])
        }
        ends = [v if not math.isnan(v.low) else (v.value,) * 3 for v in values.values()]
        return Series(
            label,
            list(values),
            [v.value for v in values.values()],
            [low for _, low, _ in ends],
            [high for _, _, high in ends],
            style="dashed" if label == "best found" else "line",
        )

    panels = [
        Panel(
            f"{name} after equal examples",
            "batch size",
            name,
            [series(label, cases, name) for label, cases in lines.items()],
            x_scale="log2",
        )
        for name in names[:2]
    ]
    speeds = {batch: _speed(results.get(Case(batch, rule), [])) for batch in batches}
    known = {batch: speed for batch, speed in speeds.items() if speed}
    if known:
        line = Series("synchronous", list(known), list(known.values()))
        panels.append(Panel("throughput", "batch size", "examples/s", [line], x_scale="log2"))
    return panels


def _conclusion(
    results: Mapping[Case, list[RunResult]],
    base: Sequence[RunResult],
    name: str,
    rule: str,
    options: Options,
) -> list[str]:
    largest = max(options.batch_sizes)

    def text(case: Case) -> str:
        value, low, high = _relative(results[case], base)
        interval = "" if math.isnan(low) else f" ({low:+.3f}% to {high:+.3f}%)"
        return f"{value:+.3f}%{interval}"

    best = _best(results, largest)
    sentence = (
        f"At batch size {largest:,}, {name} with the config's rule {rule} changes by"
        f" {text(Case(largest, rule))} against {options.base:,} after equal examples, and by"
        f" {text(best)} with the best of the values tried: {best.rule}, warm-up {best.warmup:g},"
        f" ema_decay {best.average:g}."
    )
    parallel = [case for case in results if case.workers and case.batch == largest]
    if parallel:
        sentence += f" With {options.workers} asynchronous workers it is {text(parallel[0])}."
    sentences = [sentence]
    speeds = {
        case.batch: speed
        for case in results
        if case == Case(case.batch, rule) and (speed := _speed(results[case]))
    }
    if speeds:
        enough = min(b for b, s in speeds.items() if s >= _SATURATED * max(speeds.values()))
        sentences.append(
            f"Synchronous throughput on this machine reaches {_SATURATED:.0%} of its largest value"
            f" at batch size {enough:,}; the rate of the asynchronous simulation says nothing about"
            " a cluster."
        )
    return sentences


STUDY = Study(
    "batch-size", "logloss, AUC and throughput over batch sizes at equal examples", Options, runs
)
