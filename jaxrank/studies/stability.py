"""Deviation of the result between runs: synchronous against asynchronous training.

Each group of runs differs in one thing: in nothing, in the seed of the run (order of the examples,
initial values), in the schedule of the workers, or in both. Every run trains on the same number of
examples, with learning rates that are tuned for each number of workers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrank.errors import InputError
from jaxrank.metrics import run_intervals
from jaxrank.studies import tuning
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
    training_kind,
)
from jaxrank.validate import field

SYNCHRONOUS = 0  # in place of a number of workers
_COLUMNS = (
    "training",
    "workers",
    "varies",
    "metric",
    "runs",
    "mean",
    "deviation",
    "low",
    "high",
    "smallest",
    "largest",
    "mean staleness",
    "maximum staleness",
    "examples/s",
    "tuned powers",
)


@dataclasses.dataclass(frozen=True)
class Options:
    runs: int = field(20, help="runs of each group", at_least=2)
    workers: tuple[int, ...] = field(
        (1, 4, 16, 56),
        help="numbers of asynchronous workers; 1 is a single run, which equals a synchronous one",
        at_least=1,
    )
    steps: int = field(
        200, help="steps of each run, if the config has more; 0: all of the config", at_least=0
    )
    tune_rounds: int = field(
        4, help="maximum number of moves in the search for learning rates; 0: no search", at_least=0
    )
    tune_factor: float = field(2.0, help="factor between the learning rates of the search", above=1)


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ in `varies` only: "nothing", "seed", "schedule" or "both"."""

    workers: int
    varies: str

    @property
    def side(self) -> str:
        return f"async{self.workers}" if self.workers else "sync"

    @property
    def label(self) -> str:
        return f"{f'W = {self.workers}' if self.workers else 'sync'}\n{self.varies}"

    def specs(self, context: Context, overrides: Mapping[str, Any]) -> list[RunSpec]:
        seed, by_seed = context.fields["seed"], self.varies in ("seed", "both")
        is_single = self.workers == 1
        return [
            RunSpec(
                f"{self.side}-{self.varies}-{i}",
                {**overrides, "seed": seed + i * by_seed},
                *training_kind(self.workers, i),
            )
            for i in range(1 if is_single else context.options.runs)
        ]


def runs(context: Context) -> Runs:
    options = context.options
    common = tuning.final_evaluation(context.fields["steps_per_execution"])
    chosen = yield from tuning.resolve(common)
    steps = chosen["num_steps"]
    if 0 < options.steps < steps:
        steps = options.steps
        common |= {"num_steps": steps, "num_epochs": 0.0}
    if max(options.workers, default=1) > steps:
        raise InputError(
            f"--workers: must be at most the number of steps of a run, which is {steps}: found"
            f" {max(options.workers)}. Set --steps, or fewer workers."
        )
    groups = [Group(SYNCHRONOUS, "nothing"), Group(SYNCHRONOUS, "seed")]
    for workers in options.workers:
        kinds = ("schedule",) if workers == 1 else ("schedule", "both")
        groups += [Group(workers, varies) for varies in kinds]
    sides = {
        group.side: RunSpec(group.side, common, *training_kind(group.workers, 0))
        for group in groups
        if group.workers != 1
    }
    points = yield from tuning.tuned(
        sides, chosen["fields"], factor=options.tune_factor, rounds=options.tune_rounds
    )
    points["async1"] = points["sync"]
    batches = [
        group.specs(
            context,
            common | tuning.rates(chosen["fields"], points[group.side], options.tune_factor),
        )
        for group in groups
    ]
    results = iter((yield [spec for batch in batches for spec in batch]))
    by_group = {g: [next(results) for _ in batch] for g, batch in zip(groups, batches, strict=True)}
    names = first_metrics([result for part in by_group.values() for result in part])
    if not names:
        return Outcome(Table(_COLUMNS, []), conclusion=["No run has finished."])
    return Outcome(
        _table(by_group, names, points),
        _panels(by_group, names),
        *_texts(by_group, names),
    )


def _values(results: Sequence[RunResult], name: str) -> list[float]:
    return [r.metrics[name] for r in results if r.is_done]


def _staleness(results: Sequence[RunResult]) -> list[Mapping[str, Any]]:
    return [r.values["staleness"] for r in results if "staleness" in r.values]


def _table(
    by_group: Mapping[Group, list[RunResult]],
    names: Sequence[str],
    points: Mapping[str, tuning.Point],
) -> Table:
    rows = []
    for group, results in by_group.items():
        stale = _staleness(results)
        speeds = [r.examples_per_second for r in results if r.is_done and r.examples_per_second]
        for name in names:
            values = _values(results, name)
            if not values:
                continue
            deviation = run_intervals.standard_deviation(values)
            rows.append(
                (
                    "asynchronous" if group.workers else "synchronous",
                    group.workers or None,
                    group.varies,
                    name,
                    len(values),
                    run_intervals.mean(values).value,
                    *known(deviation),
                    min(values),
                    max(values),
                    sum(s["mean"] for s in stale) / len(stale) if stale else None,
                    max(s["max"] for s in stale) if stale else None,
                    sum(speeds) / len(speeds) if speeds else None,
                    "dense {:+d}, tables {:+d}".format(*points[group.side]),
                )
            )
    return Table(_COLUMNS, rows)


def _panels(by_group: Mapping[Group, list[RunResult]], names: Sequence[str]) -> list[Panel]:
    panels, counts = [], sorted({group.workers for group in by_group})
    for name in names[:2]:
        series = []
        for group, results in by_group.items():
            values = _values(results, name)
            color = f"C{counts.index(group.workers)}"
            series.append(
                Series("", [group.label] * len(values), values, style="points", color=color)
            )
        panels.append(Panel(f"{name}, one point per run", "", name, series))
    deviations = {
        group.label: run_intervals.standard_deviation(_values(results, names[0]))
        for group, results in by_group.items()
        if len(_values(results, names[0])) > 1
    }
    panels.append(
        Panel(
            f"deviation of {names[0]}, 95% interval",
            "",
            "deviation",
            [Series.interval_series("", deviations, style="points")],
        )
    )
    return [*panels, *_staleness_panel(by_group)]


def _staleness_panel(by_group: Mapping[Group, list[RunResult]]) -> list[Panel]:
    """Returns the panel of the distribution of staleness, if a run has more than one worker."""
    series = []
    for group, results in by_group.items():
        if group.workers > 1 and group.varies == "schedule" and (stale := _staleness(results)):
            length = max(len(s["histogram"]) for s in stale)
            counts = [
                sum(s["histogram"][i] for s in stale if i < len(s["histogram"]))
                for i in range(length)
            ]
            shares = [count / sum(counts) for count in counts]
            series.append(Series(f"W = {group.workers}", list(range(length)), shares))
    if not series:
        return []
    return [Panel("staleness", "pushes between pull and push", "fraction of pushes", series)]


def _texts(
    by_group: Mapping[Group, list[RunResult]], names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the conclusion and the notes."""
    name = names[0]

    def text(group: Group) -> str:
        return run_intervals.standard_deviation(_values(by_group[group], name)).text(".2g")

    first = (
        f"The deviation of {name} between synchronous runs with several seeds is"
        f" {text(Group(SYNCHRONOUS, 'seed'))}"
    )
    most = max(group.workers for group in by_group)
    if most > 1:
        first += (
            f"; with {most} asynchronous workers it is {text(Group(most, 'schedule'))} between"
            f" schedules alone and {text(Group(most, 'both'))} between seeds and schedules"
        )
    identical = _values(by_group[Group(SYNCHRONOUS, "nothing")], name)
    limits, notes = [], []
    if len(identical) > 1 and len(set(identical)) == 1:
        limits.append(
            "identical synchronous runs are equal, which is determinism of the program and no"
            " property of synchronous training elsewhere"
        )
    elif len(identical) > 1:
        limits.append(
            "identical synchronous runs are not equal on this device, so its rounding is part of"
            " each deviation"
        )
    if most:
        limits.append("the simulation of asynchronous training does not reproduce another system")
        notes.append(
            "The simulation has neither delays beyond its schedule nor lost workers, torn reads or"
            " owners of shards."
        )
    single = _values(by_group.get(Group(1, "schedule"), []), name)
    if single and identical:
        equal = "equal" if set(single) == set(identical) else "not equal"
        notes.append(f"One asynchronous worker is {equal} to the synchronous runs of its seed.")
    second = ", and ".join(limits)
    conclusion = [first, f"{second[0].upper()}{second[1:]}"] if second else [first]
    return [f"{sentence}." for sentence in conclusion], notes


STUDY = Study(
    "stability",
    "standard deviation of the result between runs, synchronous and asynchronous",
    Options,
    runs,
    compares_metrics=True,
)
