"""Studies: experiments that consist of runs, and the types that describe them.

A study module defines one `Study`. It knows neither how runs are executed nor where results are
written: its generator yields batches of `RunSpec`, receives their `RunResult`s in the same order,
and returns an `Outcome`.

    def runs(context: Context) -> Runs:
        specs = [RunSpec(f"seed-{seed}", {"seed": seed}) for seed in range(context.options.runs)]
        results = yield specs
        rows = [(r.spec.name, r.metrics.get("click/auc")) for r in results]
        return Outcome(Table(("run", "AUC"), rows), conclusion=["..."])

    STUDY = Study("seeds", "one run per seed", Options, runs)
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from jaxrank import config_files
from jaxrank.metrics.run_intervals import Interval
from jaxrank.report import Report


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run of a study: a change of a config, and the kind of run.

    A run is a pure function of the config and its spec. Specs of one study with equal names must be
    equal.

    name: the name of the run's directory.
    overrides: {path of a field of the config: value}.
    kind: a key of `execution.kinds.KINDS`: "train" trains and evaluates.
    settings: of the kind, plain data.
    devices: number of CPU devices to open; 0: the default of JAX. Has no effect on accelerators.
    config: another config to change, with the overrides of the command line: a path or a name, as
        for --config. Empty: the config of the study.
    """

    name: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = "train"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: int = 0
    config: str = ""


# Describes the devices of this machine; see `execution.measure.describe_devices`.
DEVICES = RunSpec("devices-present", kind="devices")


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one run.

    status: "done" or "failed".
    metrics: {"task/metric": value} of the validation split. Empty if the run failed.
    seconds: duration of the run.
    examples_per_second: of training; 0 if unknown.
    error: text of the error of a failed run.
    values: other results of the kind of run, plain data.
    """

    spec: RunSpec
    status: str
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    examples_per_second: float = 0.0
    error: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.status == "done"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table with a title for each column. Values are text, numbers, or None where unknown."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of a panel.

    x: numbers, or text for categories.
    low, high: ends of the intervals around y; empty: none.
    style: "line", "dashed", "points" or "bars".
    color: of matplotlib; empty: the next one of the cycle.
    """

    label: str
    x: Sequence[Any]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = "line"
    color: str = ""

    @classmethod
    def interval_series(
        cls, label: str, points: Mapping[Any, Interval], style: str = "line"
    ) -> "Series":
        """Returns the series of {x: interval}. A value without interval has one of width 0."""
        values = points.values()
        return cls(
            label,
            list(points),
            [v.value for v in values],
            [v.value if math.isnan(v.low) else v.low for v in values],
            [v.value if math.isnan(v.high) else v.high for v in values],
            style,
        )


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes of a picture. x_scale, y_scale: "linear", "log" or "log2"."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: str = "linear"
    y_scale: str = "linear"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a study.

    panels: the picture; empty: none.
    conclusion: one or two sentences of what the result means and what it does not.
    notes: further facts: assumptions, limits and other findings.
    best_overrides: flags that set the best values, such as "--config.batch_size=4096".
    """

    table: Table
    panels: Sequence[Panel] = ()
    conclusion: Sequence[str] = ()
    notes: Sequence[str] = ()
    best_overrides: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Context:
    """Input of a study.

    config: the config that the runs change. Runs that change neither features nor source share its
        data. They may change `features.skip`.
    options: an instance of `Study.options`.
    overrides: what the command line set in the config, for other configs to set too.
    name: of the config, for tables and pictures.
    """

    config: ConfigDict
    options: Any
    report: Report
    overrides: Sequence[str] = ()
    name: str = "config"

    @functools.cached_property
    def fields(self) -> Mapping[str, Any]:
        """{path of a field of the config: value}, for studies whose runs depend on it."""
        return config_files.flatten(config_files.to_plain(self.config))


Runs: TypeAlias = Generator[Sequence[RunSpec], Sequence[RunResult], Outcome]


@dataclasses.dataclass(frozen=True)
class Study:
    """A study.

    options: a dataclass whose fields are declared by `validate.field`. They become flags: a field
        of int, float, str, bool, or a tuple of int, float or str, which is given as "1,2". The flag
        of a tuple that may be given as its `single` entry is repeated, once for each entry.
    compares_metrics: whether results depend on metrics of `data.valid`, which the config must name.
    """

    name: str
    help: str
    options: type
    runs: Callable[[Context], Runs]
    compares_metrics: bool = False


def short_name(path: str) -> str:
    """Returns the name of a config, such as "heavy" of configs/heavy.py:small."""
    return re.sub(r"[^\w.,=+-]", "_", Path(path.partition(".py:")[0]).stem)


def first_metrics(results: Sequence[RunResult], count: int = 2) -> list[str]:
    """Returns the names of the first metrics of each task, such as its logloss and AUC."""
    names: dict[str, list[str]] = {}
    for result in results:
        for name in result.metrics:
            of_task = names.setdefault(name.partition("/")[0], [])
            if name not in of_task:
                of_task.append(name)
    return [name for of_task in names.values() for name in of_task[:count]]


def known(values: Iterable[float]) -> list[float | None]:
    """Returns values for the cells of a table: None in place of NaN."""
    return [None if math.isnan(value) else value for value in values]


def training_kind(workers: int, schedule_seed: int) -> tuple[str, dict[str, int]]:
    """Returns kind and settings of a run that trains. workers: 0 for synchronous training."""
    if not workers:
        return "train", {}
    return "asynchronous", {"workers": workers, "schedule_seed": schedule_seed}
