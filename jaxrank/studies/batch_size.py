"""Logloss and AUC over batch sizes at equal examples, by the rule that scales the learning rates.

1. Learning rates are tuned at the base batch size, for synchronous and for asynchronous training.
2. Each batch size runs with each rule, with and without warm-up and averages, on one seed.
3. At each batch size, the best of these, the best without averaged weights and the rule of the
   config run with the other seeds.

The first metric is compared with the base batch size at equal seeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrank.config_files import override_flags
from jaxrank.metrics import run_intervals
from jaxrank.studies import tuning
from jaxrank.studies.batch_size_cases import (
    Case,
    Options,
    Specs,
    check_batches,
    scaling_rule,
    synchronous_cases,
)
from jaxrank.studies.study import (
    Context,
    Outcome,
    Panel,
    RunResult,
    Runs,
    Series,
    Study,
    Table,
    first_metrics,
    known,
)

_SATURATED = 0.95  # of the largest rate
_BEST_LABEL = "best of the values tried"


def runs(context: Context) -> Runs:
    options = context.options
    check_batches(context)
    common = tuning.final_evaluation(context.fields["steps_per_execution"])
    chosen = yield from tuning.resolve(common)
    specs, rule = Specs(context, chosen), scaling_rule(context.fields)
    sides = {"sync": specs.side(0)}
    if options.workers:
        sides["async"] = specs.side(options.workers)
    specs.points = yield from tuning.tuned(
        sides, specs.tuned, factor=options.tune_factor, rounds=options.tune_rounds
    )
    results: dict[Case, list[RunResult]] = {}

    def add(cases: Sequence[Case], seeds: Iterable[int]) -> Any:
        pairs = [(case, seed) for seed in seeds for case in cases]
        done = yield [specs.run_spec(*pair) for pair in pairs]
        for (case, _), result in zip(pairs, done, strict=True):
            results.setdefault(case, []).append(result)

    cases = synchronous_cases(options, rule)
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
        _notes(results, base, rule, options),
        override_flags(specs.overrides(_best(results, max(options.batch_sizes)))),
    )


def _best(
    results: Mapping[Case, list[RunResult]], batch: int, *, with_averages: bool = True
) -> Case:
    """Returns the synchronous case with the best first metric, of those with the most runs.

    with_averages: include averaged weights, which need a second copy of the tables.
    """
    cases = [case for case in results if case.batch == batch and not case.workers]
    cases = [case for case in cases if with_averages or not case.average]
    most = max(len(results[case]) for case in cases)
    return min(
        (case for case in cases if len(results[case]) == most),
        key=lambda case: tuning.mean_loss(results[case]),
    )


def _finalists(
    cases: Sequence[Case], results: Mapping[Case, list[RunResult]], rule: str
) -> Iterable[Case]:
    """Yields the cases that run with all seeds.

    Of each batch size these are the best, the best without averaged weights, and the config's.
    """
    for batch in dict.fromkeys(case.batch for case in cases):
        yield _best(results, batch)
        yield _best(results, batch, with_averages=False)
        yield Case(batch, rule)


def _relative(results: Sequence[RunResult], base: Sequence[RunResult]) -> run_intervals.Interval:
    """Returns the increase of the first metric over the base with equal seeds, in percent.

    Pairs whose base has a metric of 0 are left out, because no percentage is defined there.
    """
    pairs = [
        (tuning.first_value(result), tuning.first_value(other))
        for result, other in zip(results, base, strict=False)
        if result.is_done and other.is_done
    ]
    return run_intervals.mean([100 * (value / other - 1) for value, other in pairs if other])


def _speed(results: Sequence[RunResult]) -> float | None:
    speeds = [r.examples_per_second for r in results if r.is_done and r.examples_per_second]
    return sum(speeds) / len(speeds) if speeds else None


def _table(
    results: Mapping[Case, list[RunResult]],
    base: Sequence[RunResult],
    names: Sequence[str],
    specs: Specs,
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
        f"{names[0]} against base, %",
        "low",
        "high",
        "examples/s",
    )
    rows = []
    for case, of_case in results.items():
        done = [r for r in of_case if r.is_done]
        if not done:
            continue
        means = [run_intervals.mean([r.metrics[name] for r in done]).value for name in names]
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
                *known(_relative(of_case, base)),
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
    lines[_BEST_LABEL] = [_best(results, batch) for batch in batches]

    def series(label: str, cases: Sequence[Case], name: str) -> Series:
        values = {
            case.batch: run_intervals.mean([r.metrics[name] for r in results[case] if r.is_done])
            for case in cases
            if any(r.is_done for r in results[case])
        }
        style = "dashed" if label == _BEST_LABEL else "line"
        return Series.interval_series(label, values, style)

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
    measured = {batch: speed for batch, speed in speeds.items() if speed}
    if measured:
        line = Series("synchronous", list(measured), list(measured.values()))
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
        return _relative(results[case], base).text("+.3f", "%")

    changes = [
        f"{text(Case(largest, rule))} with the config's rule {rule}",
        f"{text(_best(results, largest))} with the best of the values tried",
    ]
    parallel = [case for case in results if case.workers and case.batch == largest]
    if parallel:
        changes.append(f"{text(parallel[0])} with {options.workers} asynchronous workers")
    searched = f"searched at {options.base:,} only" if options.tune_rounds else "not searched"
    return [
        f"After equal examples, {name} at batch size {largest:,} changes against"
        f" {options.base:,} by {', by '.join(changes[:-1])} and by {changes[-1]}.",
        f"This is a result about these examples, with learning rates that were {searched}, and not"
        " about other data or an asynchronous cluster.",
    ]


def _notes(
    results: Mapping[Case, list[RunResult]],
    base: Sequence[RunResult],
    rule: str,
    options: Options,
) -> list[str]:
    """Returns the best values at the largest batch size, and where the throughput saturates."""
    largest = max(options.batch_sizes)
    best = _best(results, largest)
    notes = [
        f"The best values at {largest:,} are {best.rule}, warm-up {best.warmup:g}, ema_decay"
        f" {best.average:g}. They were chosen on one seed, so they are partly the luckiest."
    ]
    if best.average:
        single = _best(results, largest, with_averages=False)
        notes.append(
            "The best values without averaged weights, which need a second copy of the tables, are"
            f" {single.rule}, warm-up {single.warmup:g}:"
            f" {_relative(results[single], base).text('+.3f', '%')}."
        )
    speeds = {
        case.batch: speed
        for case in results
        if case == Case(case.batch, rule) and (speed := _speed(results[case]))
    }
    if speeds:
        enough = min(b for b, s in speeds.items() if s >= _SATURATED * max(speeds.values()))
        notes.append(
            f"Synchronous throughput on this machine reaches {_SATURATED:.0%} of its largest value"
            f" at batch size {enough:,}. The rate of the asynchronous simulation says nothing about"
            " a cluster."
        )
    return notes


STUDY = Study(
    "batch-size",
    "logloss, AUC and throughput over batch sizes at equal examples",
    Options,
    runs,
    compares_metrics=True,
)
