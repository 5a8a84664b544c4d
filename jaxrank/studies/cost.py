"""Throughput and cost of machines, measured here and estimated, by a table of prices."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrank import config_files
from jaxrank.aot.prices import Prices
from jaxrank.aot.scaling import RATES
from jaxrank.aot.topology import Topology, find_topology, topology
from jaxrank.errors import InputError
from jaxrank.studies.scaling import OPEN_BATCH, describe_devices, round_shards
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
    short_name,
)
from jaxrank.validate import field

_COLUMNS = (
    *("table", "model", "machine", "how", "peak TFLOPS", "$/hour", "TFLOPS per $/hour"),
    *("examples/s", "million examples per $", "speed", "examples per $, relative"),
)
_RATES, _THROUGHPUT = "rates and prices", "throughput and cost"
_MEASURED, _ESTIMATED, _EXTRAPOLATED = "measured", "estimated", "extrapolated"
_COLORS = {_MEASURED: "C0", _ESTIMATED: "C1", _EXTRAPOLATED: "C7"}


@dataclasses.dataclass(frozen=True)
class Options:
    prices: str = field("", help="a CSV file of prices; none: configs/prices.csv of the program")
    other_configs: tuple[str, ...] = field(
        (),
        help="configs of other models beside --config, such as configs/heavy.py, with the same"
        " overrides",
    )
    topologies: tuple[str, ...] = field(
        ("v3-32", "a100-4"), help="TPU slices and GPUs to estimate", non_empty=True
    )
    workers: int = field(56, help="workers of the CPU cluster that is extrapolated", at_least=1)
    servers: int = field(10, help="parameter servers of that cluster", at_least=0)
    estimated_batch_size: int = field(
        0, help="batch size of the estimates; 0: of the config", unit="examples", at_least=0
    )
    measured_batch_size: int = field(
        0, help="batch size on this machine; 0: of the config", unit="examples", at_least=0
    )
    measured_rows: int = field(
        0,
        help="maximum rows per split of generated data to measure with; 0: as in the config",
        at_least=0,
    )
    seconds: float = field(5.0, help="duration of each measurement", unit="seconds", above=0)


class _Model(NamedTuple):
    """A model of the study.

    path: of its config; empty: the config of the study.
    fields: {path: value} of its config.
    """

    name: str
    path: str
    fields: Mapping[str, Any]


class _Machine(NamedTuple):
    """A machine with its price. peak: bfloat16 operations/s, None if it is not known."""

    name: str
    how: str
    usd_per_hour: float
    peak: float | None


def runs(context: Context) -> Runs:
    options = context.options
    prices = Prices(options.prices)
    estimated = {
        name: _priced(topology(name, "--topologies"), prices) for name in options.topologies
    }
    models = _models(context)
    present = yield from describe_devices()
    machine = _present(present, prices)
    specs = [spec for model in models for spec in _specs(options, model, estimated)]
    results = yield specs
    rows = [_row(r, machine, estimated) for r in results if r.is_done]
    if present["platform"] == "cpu":
        rows += [_cluster(row, options, machine) for row in rows if row.machine.how == _MEASURED]
    rows.sort(key=lambda row: row.model != context.name)
    return Outcome(
        Table(_COLUMNS, [*_rate_rows(prices), *_throughput_rows(rows)]),
        _panels(rows),
        _conclusion(rows, prices),
        _notes(rows, options, prices),
    )


def _models(context: Context) -> list[_Model]:
    """Returns the models of the study. What the command line sets is set in all of them.

    Raises:
        InputError: another config cannot be loaded or lacks a field of the command line, or two
            configs have one name.
    """
    models = {context.name: _Model(context.name, "", context.fields)}
    for path in context.options.other_configs:
        try:
            config = config_files.load(path, context.overrides)
        except InputError as error:
            text = str(error).removeprefix("--config: ")
            raise InputError(f"--other-configs: {path}: {text}") from error
        model = _Model(short_name(path), path, config_files.flatten(config_files.to_plain(config)))
        if models.setdefault(model.name, model) is not model:
            raise InputError(
                "--other-configs: must be files of different names, and none"
                f" {context.name}.py: found {path!r}. Rename the file."
            )
    return list(models.values())


def _priced(machine: Topology, prices: Prices) -> _Machine:
    price = machine.chips * prices.usd_per_hour(machine.generation)
    return _Machine(
        machine.name, _ESTIMATED, price, machine.chips * RATES[machine.generation].flops
    )


def _present(values: Mapping[str, Any], prices: Prices) -> _Machine:
    """Returns this machine.

    Raises:
        InputError: its devices have no price.
    """
    if values["platform"] == "cpu":
        cores = values["cores"]
        name = f"CPU here, {cores} cores"
        return _Machine(name, _MEASURED, cores * prices.usd_per_hour("cpu"), None)
    machine = find_topology(values["kind"], values["count"])
    if machine is None:
        prices.usd_per_hour(values["kind"])  # raises, or the user has named it so
        price = values["count"] * prices.usd_per_hour(values["kind"])
        return _Machine(f"{values['count']} x {values['kind']}", _MEASURED, price, None)
    return _priced(machine, prices)._replace(how=_MEASURED)


def _specs(options: Options, model: _Model, estimated: Mapping[str, _Machine]) -> list[RunSpec]:
    fields = model.fields
    batch = options.estimated_batch_size or fields["batch_size"] or OPEN_BATCH
    measured = RunSpec(
        f"{_MEASURED}-{model.name}",
        _measured_overrides(options, fields),
        "bench",
        {"seconds": options.seconds},
        config=model.path,
    )
    specs = [measured]
    for name in estimated:
        changes = {
            "mesh.devices": 0,
            "batch_size": batch,
            "data.shards": round_shards(topology(name).devices, fields["data.shards"]),
        }
        run = f"{_ESTIMATED}-{model.name}-{name}"
        settings = {"topology": name}
        specs.append(RunSpec(run, changes, "estimate", settings, config=model.path))
    return specs


def _measured_overrides(options: Options, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a measurement changes in a config, because this machine may be a small one.

    Raises:
        InputError: the number of rows is set, and a model has data that is not generated.
    """
    changes: dict[str, Any] = {}
    if options.measured_batch_size:
        changes["batch_size"] = options.measured_batch_size
    if options.measured_rows:
        kind, rows_of = fields.get("source.kind"), "source.rows."
        if kind != "synthetic":
            raise InputError(
                "--measured-rows: must be 0 for data that is not generated: found"
                f" {options.measured_rows:,} and source.kind={kind!r}. Leave the flag"
                " out."
            )
        if fields["data.store"] or fields["data.direct"]:
            raise InputError(
                "--measured-rows: must be 0 for data that is not generated: found"
                f" {options.measured_rows:,}, data.store={fields['data.store']!r} and"
                f" data.direct={fields['data.direct']}. Leave the flag out."
            )
        for path, rows in fields.items():
            if path.startswith(rows_of):
                changes[path] = min(rows, options.measured_rows)
    return changes


class _Row(NamedTuple):
    """The throughput of a model on a machine."""

    model: str
    machine: _Machine
    rate: float

    @property
    def per_dollar(self) -> float:
        return 3600 * self.rate / self.machine.usd_per_hour


def _row(result: RunResult, present: _Machine, estimated: Mapping[str, _Machine]) -> _Row:
    how, _, rest = result.spec.name.partition("-")
    if how == _MEASURED:
        return _Row(rest, present, result.examples_per_second)
    name = result.spec.settings["topology"]
    return _Row(rest.removesuffix(f"-{name}"), estimated[name], result.examples_per_second)


def _cluster(row: _Row, options: Options, present: _Machine) -> _Row:
    """Extrapolates a cluster of machines like this one, each worker as fast as it is alone."""
    hosts = options.workers + options.servers
    machine = _Machine(
        f"{options.workers} workers and {options.servers} servers like this host",
        _EXTRAPOLATED,
        hosts * present.usd_per_hour,
        None,
    )
    return _Row(row.model, machine, options.workers * row.rate)


def _rate_rows(prices: Prices) -> list[tuple[Any, ...]]:
    rows = []
    for device in prices.by_device:
        if device not in RATES:
            continue
        tflops, price = RATES[device].flops / 1e12, prices.known(device)
        per_price = tflops / price if price else None
        rows.append((_RATES, None, f"one chip of {device}", "published", tflops, price, per_price))
    return [(*row, *[None] * (len(_COLUMNS) - len(row))) for row in rows]


def _throughput_rows(rows: Sequence[_Row]) -> list[tuple[Any, ...]]:
    """Returns the rows, relative to the last CPU machine of the model, or else to the first row."""
    cells = []
    for row in rows:
        same = [other for other in rows if other.model == row.model]
        base = next((o for o in same if o.machine.how == _EXTRAPOLATED), same[0])
        machine = row.machine
        tflops = machine.peak / 1e12 if machine.peak else None
        cells.append(
            (
                *(_THROUGHPUT, row.model, machine.name, machine.how, tflops, machine.usd_per_hour),
                tflops / machine.usd_per_hour if tflops else None,
                *(row.rate, row.per_dollar / 1e6, row.rate / base.rate),
                row.per_dollar / base.per_dollar,
            )
        )
    return cells


def _panels(rows: Sequence[_Row]) -> list[Panel]:
    panels = []
    for title, scale, value in (
        ("Throughput, examples/s", "log", lambda row: row.rate),
        ("Million examples per $", "linear", lambda row: row.per_dollar / 1e6),
    ):
        series = []
        for how, color in _COLORS.items():
            chosen = [row for row in rows if row.machine.how == how]
            labels = [f"{row.model}\n{_short(row.machine)}" for row in chosen]
            if chosen:
                values = [value(row) for row in chosen]
                series.append(Series(how, labels, values, style="bars", color=color))
        panels.append(Panel(title, "", title.rpartition(",")[2].strip(), series, y_scale=scale))
    return panels


def _short(machine: _Machine) -> str:
    return "cluster" if machine.how == _EXTRAPOLATED else machine.name.partition(",")[0]


def _conclusion(rows: Sequence[_Row], prices: Prices) -> list[str]:
    if not rows:
        return ["No run has finished."]
    best = []
    for model in dict.fromkeys(row.model for row in rows):
        same = sorted((r for r in rows if r.model == model), key=lambda row: -row.per_dollar)
        first, last = same[0], same[-1]
        text = (
            f"most examples of {model} on {first.machine.name} ({first.machine.how}),"
            f" {first.per_dollar / 1e6:,.1f} million"
        )
        if len(same) > 1:
            text += (
                f" and {first.per_dollar / last.per_dollar:.1f} times as many as on"
                f" {last.machine.name} ({last.machine.how})"
            )
        best.append(text)
    return [
        f"A dollar trains {', and '.join(best)}.",
        "Only measured rows were run, so ratios to the others are no result about machines, and"
        f" the prices are of {prices.dates()}.",
    ]


def _notes(rows: Sequence[_Row], options: Options, prices: Prices) -> list[str]:
    ways = {row.machine.how for row in rows}
    notes = [f"The prices are in {prices.path}. Check them before you compare."]
    if _ESTIMATED in ways:
        notes.append(
            "Estimates assume published rates and leave out the input. The direction of their error"
            " is unknown, most of all for GPUs, which are estimated from the program for a TPU."
        )
    if _EXTRAPOLATED in ways:
        notes.append(
            f"The cluster of {options.workers} workers and {options.servers} servers is an"
            " extrapolation: every worker is assumed as fast as this host alone, with free network"
            " and parameter servers that never limit."
        )
    return notes


STUDY = Study(
    "cost",
    "examples per second and per dollar on machines measured here and estimated",
    Options,
    runs,
)
