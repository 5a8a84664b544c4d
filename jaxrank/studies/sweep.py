"""Search for values of fields in declared ranges, by random points and successive halving.

1. All points run on a fraction of the examples. The best of them continue with more examples.
2. The finalists and the config run on all examples with equal seeds, which the search did not use.

Points come from a scrambled Halton sequence of SciPy, which the package needs anyway, mapped by
the distributions of `scipy.stats`. They cover the ranges more evenly than independent points. The
first points of a longer sequence are the same, so a larger search reuses finished runs. Search
libraries such as scikit-learn and Optuna bring no more than that here: halving is a choice among
results, and the runs are executed by the study.

References:
    Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012.
    Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
        AISTATS 2016.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from jaxrank import config_files
from jaxrank.errors import InputError
from jaxrank.metrics import run_intervals
from jaxrank.studies import tuning
from jaxrank.studies.ranges import FORMS, Range, parse_ranges
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
    known,
)
from jaxrank.validate import field

CONFIG = "config"  # name of the point without overrides
_FIXED = ("num_steps", "num_epochs", "seed")  # fields that the study sets


@dataclasses.dataclass(frozen=True)
class Options:
    range: tuple[str, ...] = field(
        (), single=True, help=f"FIELD=RANGE, where the range is {FORMS}; required"
    )
    points: int = field(16, help="number of points", at_least=1)
    halving: int = field(
        4,
        help="factor by which points fall and examples rise from one round to the next; 1: all"
        " points run on all examples",
        at_least=1,
    )
    finalists: int = field(3, help="number of points that run with all seeds", at_least=1)
    runs: int = field(3, help="number of seeds of the finalists", at_least=2)
    examples: int = field(
        0, help="training examples of a full run; 0: as many as a run of the config", at_least=0
    )
    search_seed: int = field(0, help="seed of the points", at_least=0)


@dataclasses.dataclass(frozen=True)
class Round:
    """Results of points that run on an equal fraction of the examples.

    seeds: added to the seed of the config.
    """

    fraction: float
    seeds: Sequence[int]
    results: dict[str, list[RunResult]] = dataclasses.field(default_factory=dict)

    def order(self) -> list[str]:
        """Returns the points with a finite first metric, the best first."""
        losses = {name: tuning.mean_loss(results) for name, results in self.results.items()}
        return sorted(
            (name for name, loss in losses.items() if math.isfinite(loss)), key=losses.__getitem__
        )


def runs(context: Context) -> Runs:
    options, fields = context.options, context.fields
    ranges = parse_ranges(options.range, context.config, fixed=_FIXED)
    points = drawn(ranges, options.points, options.search_seed)
    common = tuning.final_evaluation(fields["steps_per_execution"])
    chosen = yield from tuning.resolve(common)
    specs = _Specs(fields, options, chosen, points)
    names = list(points)
    rounds: list[Round] = []
    shares = fractions(len(points), options.finalists, options.halving)
    for fraction in shares:
        rounds.append(Round(fraction, [0]))
        yield from _execute(rounds[-1], names, specs)
        order = _valid(rounds[-1])
        kept = 0 if fraction == shares[-1] else math.ceil(len(names) / options.halving)
        names = order[: max(options.finalists, kept)]
    rounds.append(Round(1.0, range(1, options.runs + 1)))
    yield from _execute(rounds[-1], [CONFIG, *names], specs)
    order = _valid(rounds[-1])
    metrics = first_metrics([r for name in order for r in rounds[-1].results[name]])
    best = order[0]
    return Outcome(
        _table(rounds, metrics, ranges, specs),
        _panels(rounds, metrics[0], ranges, specs),
        _conclusion(rounds, metrics[0], specs),
        ["A point that needs more examples to win may have been dropped after a short run."],
        config_files.override_flags(points.get(best, {})),
    )


def drawn(ranges: Sequence[Range], count: int, seed: int) -> dict[str, dict[str, Any]]:
    """Returns {name of a point: {field: value}}, without points that are equal to earlier ones."""
    sequence = stats.qmc.Halton(len(ranges), seed=np.random.default_rng(seed)).random(count)
    points: dict[str, dict[str, Any]] = {}
    for i, quantiles in enumerate(sequence):
        point = {r.path: r.value(float(q)) for r, q in zip(ranges, quantiles, strict=True)}
        if point not in points.values():
            points[f"point-{i}"] = point
    return points


def fractions(points: int, finalists: int, halving: int) -> list[float]:
    """Returns the fraction of the examples of each round before that of the finalists."""
    if points <= finalists:
        return []
    if halving == 1:
        return [1.0]
    rounds = max(1, round(math.log(points / finalists, halving)))
    return [float(halving) ** -i for i in range(rounds, 0, -1)]


class _Specs:
    """Makes the specs of points. Runs of equal fractions have equal examples, up to a batch."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        options: Options,
        chosen: Mapping[str, Any],
        points: Mapping[str, Mapping[str, Any]],
    ):
        self.fields, self.points = fields, points
        self.resolved = chosen["fields"]
        self.examples = options.examples or chosen["num_steps"] * self.resolved["batch_size"]

    def run_spec(self, name: str, fraction: float, seed: int) -> RunSpec:
        point = self.points.get(name, {})
        batch = point.get("batch_size", self.resolved["batch_size"])
        execution = point.get("steps_per_execution", self.fields["steps_per_execution"])
        examples = self.examples * fraction
        # A point with an invalid batch size fails when its config is checked.
        steps = max(1, round(examples / batch)) if isinstance(batch, int) and batch > 0 else 1
        never = tuning.final_evaluation(execution) if _is_count(execution) else {}
        length = {"num_steps": steps, "num_epochs": 0.0, "seed": self.fields["seed"] + seed}
        share = f"{1 / fraction:g}"
        return RunSpec(f"{name}-of{share}-seed{seed}", {**never, **length, **point})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _execute(of_round: Round, names: Sequence[str], specs: _Specs) -> Any:
    pairs = [(name, seed) for seed in of_round.seeds for name in names]
    results = yield [specs.run_spec(name, of_round.fraction, seed) for name, seed in pairs]
    for (name, _), result in zip(pairs, results, strict=True):
        of_round.results.setdefault(name, []).append(result)


def _valid(of_round: Round) -> list[str]:
    """Returns the order of the points.

    Raises:
        InputError: no point has a finite first metric.
    """
    points = {name: results for name, results in of_round.results.items() if name != CONFIG}
    losses = [tuning.mean_loss(results) for results in points.values()]
    if not any(map(math.isfinite, losses)):
        errors = [r.error for results in points.values() for r in results if not r.is_done]
        first = errors[0] if errors else "its first metric is not finite."
        raise InputError(
            f"--range: must have a valid point: found {len(points)} points, and none has a finite"
            f" first metric. The first: {first}"
        )
    return of_round.order()


def _table(
    rounds: Sequence[Round], metrics: Sequence[str], ranges: Sequence[Range], specs: _Specs
) -> Table:
    """Returns a row per point with its last round: the finalists, then the latest to drop out."""
    columns = (
        "point",
        *(r.path for r in ranges),
        "examples",
        "runs",
        *metrics,
        f"{metrics[0]} against config",
        "low",
        "high",
    )
    rows, listed = [], set()
    for of_round in reversed(rounds):
        order = of_round.order()
        for name in (*order, *(n for n in of_round.results if n not in order)):
            if name in listed:
                continue
            listed.add(name)
            done = [r for r in of_round.results[name] if r.is_done]
            means = [run_intervals.mean([r.metrics[m] for r in done]).value for m in metrics]
            change = _change(of_round, name)
            rows.append(
                (
                    name,
                    *(_cell(_value(specs, name, r.path)) for r in ranges),
                    round(specs.examples * of_round.fraction),
                    len(done),
                    *known((*means, *change)),
                )
            )
    return Table(columns, rows)


def _value(specs: _Specs, name: str, path: str) -> Any:
    return specs.points[name][path] if name in specs.points else specs.resolved.get(path)


def _cell(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or is_number:
        return value
    return str(tuple(value) if isinstance(value, list) else value)


def _change(of_round: Round, name: str) -> run_intervals.Interval:
    """Returns the change of the first metric from the config to a point, over equal seeds."""
    unchanged = of_round.results.get(CONFIG, [])
    pairs = [
        (tuning.first_value(r), tuning.first_value(c))
        for r, c in zip(of_round.results[name], unchanged, strict=False)
        if math.isfinite(tuning.first_value(r)) and math.isfinite(tuning.first_value(c))
    ]
    if name == CONFIG or not pairs:
        return run_intervals.Interval(math.nan, math.nan, math.nan)
    return run_intervals.mean([value - other for value, other in pairs])


def _panels(
    rounds: Sequence[Round], metric: str, ranges: Sequence[Range], specs: _Specs
) -> list[Panel]:
    panels = []
    for r in ranges:
        series = []
        for i, of_round in enumerate(rounds):
            names = [name for name in of_round.order() if name in specs.points]
            if r.scale == "choices":  # texts are drawn in the order in which they come
                names.sort(key=lambda name: r.choices.index(specs.points[name][r.path]))
            share = f"{specs.examples * of_round.fraction:,.0f} examples"
            label = f"finalists, {share}" if i == len(rounds) - 1 else share
            values = [specs.points[name][r.path] for name in names]
            x = list(map(str, values)) if r.scale == "choices" else values
            results = [of_round.results[name] for name in names]
            y = [run_intervals.mean(list(map(tuning.first_value, of))).value for of in results]
            series.append(Series(label, x, y, style="points"))
        x_scale = "log" if r.scale == "log" else "linear"
        panels.append(Panel(r.path, r.path, metric, series, x_scale=x_scale))
    return panels


def _conclusion(rounds: Sequence[Round], metric: str, specs: _Specs) -> list[str]:
    last = rounds[-1]
    best, count = last.order()[0], len(last.results) - 1
    finalists = f"{count} finalist{'s' * (count > 1)}"
    better, top = ("higher", "highest") if tuning.is_higher_better(metric) else ("lower", "lowest")
    if best == CONFIG:
        first = f"None of {finalists} has a {better} mean {metric} than the config"
    else:
        change = _change(last, best)
        first = f"Of {finalists}, {best} has the {top} mean {metric}"
        if not math.isnan(change.value):
            first += f", {change.text()} against the config"
    first += f", and the search drew {len(specs.points)} points."
    return [
        first,
        "The best of several points is partly the best by chance on this validation split, so check"
        " it on other data.",
    ]


STUDY = Study(
    "sweep",
    "search for the best values in declared ranges",
    Options,
    runs,
    compares_metrics=True,
)
