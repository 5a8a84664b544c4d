"""Kinds of runs: functions that a worker process calls. Modules are imported when a run needs them.

Each gets a `RunInput` and returns the fields of `RunResult` that it knows. An exception fails the
run.
"""

import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class RunInput:
    """Input of a run.

    plain_config: the config as plain data.
    store: the data of the study, if the run reads it; empty: the run finds its data by the config.
    settings: of `RunSpec`.
    directory: of the run; anything in it from an interrupted attempt has been removed.
    """

    plain_config: Mapping[str, Any]
    store: str
    settings: Mapping[str, Any]
    directory: Path

    @functools.cached_property
    def config(self) -> "ConfigDict":
        """The config, with `data.store` set to the data of the study."""
        from jaxrank import config_files

        config = config_files.from_plain(self.plain_config)
        return config_files.overridden(config, {"data.store": self.store}) if self.store else config


Kind = Callable[[RunInput], Mapping[str, Any]]


def _train(run: RunInput) -> Mapping[str, Any]:
    """Trains and evaluates. Deletes the checkpoints, because a study has many runs."""
    from jaxrank.evaluation.report import flatten_metrics
    from jaxrank.train import train

    workdir = run.directory / "train"
    result = train(run.config, workdir, quiet=True)
    shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return {
        "metrics": flatten_metrics(result.metrics),
        "examples_per_second": _known(result.examples_per_second),
        "values": {"step": result.step},
    }


def _known(rate: float) -> float:
    """Returns a rate, or 0 if a run of one execution has none."""
    return rate if math.isfinite(rate) else 0.0


def _train_asynchronously(run: RunInput) -> Mapping[str, Any]:
    """Settings: `workers` and `schedule_seed`."""
    from jaxrank.studies.execution import train_asynchronous

    result = train_asynchronous.train(
        run.config, run.directory / "train", report=print, **run.settings
    )
    return {
        "metrics": result.metrics,
        "examples_per_second": result.examples_per_second,
        "values": {"staleness": train_asynchronous.staleness_summary(result.staleness)},
    }


def _resolve(run: RunInput) -> Mapping[str, Any]:
    """Chooses the open fields of a config by its data, as a run does."""
    from jaxrank import config_files
    from jaxrank import run as runs
    from jaxrank.data.spec import skip

    directory = run.directory / "train"
    data = runs.open_data(run.config, directory, print, inherits_store=False)
    num_steps = data.builder.run_schedule(data.packed.rows).num_steps
    plain = config_files.to_plain(data.builder.config)
    values = {"config": plain, "rows": data.split.rows, "num_steps": num_steps}
    return {"values": {**values, "features": skip.columns(data.store.schema)}}


def _prepare(run: RunInput) -> Mapping[str, Any]:
    """Prepares the data that the runs of the study share, or checks that it is complete."""
    from jaxrank import opening

    store = opening.locate(run.config, str(run.directory.parents[1])).prepare(print)
    return {"values": {"store": str(store.path)}}


def _measure(name: str) -> Kind:
    """Returns a function of `measure`, which is imported when a run needs it."""

    def kind(run: RunInput) -> Mapping[str, Any]:
        from jaxrank.studies.execution import measure

        return getattr(measure, name)(run)

    return kind


PREPARE, DEVICES, ESTIMATE = "prepare", "devices", "estimate"
KINDS: Mapping[str, Kind] = {
    "train": _train,
    "asynchronous": _train_asynchronously,
    "resolve": _resolve,
    DEVICES: _measure("describe_devices"),
    "bench": _measure("bench"),
    "input": _measure("input_rate"),
    "store": _measure("prepare_store"),
    ESTIMATE: _measure("estimate"),
    PREPARE: _prepare,
}

# Kinds of runs that do not read the data of the study.
WITHOUT_DATA = (PREPARE, DEVICES)

# Kinds of runs that read a sample of generated data, which they generate themselves.
GENERATES_SAMPLE = (ESTIMATE,)

# Verbs that do the same as a kind of run without settings.
VERBS: Mapping[str, str] = {"train": "train"}
