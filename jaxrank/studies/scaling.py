"""Throughput over devices: measured on this machine, and estimated for TPU slices and GPUs."""

import dataclasses
import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

from jaxrank.aot.scaling import PARTS, PUBLISHED
from jaxrank.aot.topology import Topology, topology
from jaxrank.errors import InputError
from jaxrank.studies.study import (
    DEVICES,
    Context,
    Outcome,
    Panel,
    RunResult,
    Runs,
    RunSpec,
    Series,
    Study,
    Table,
)
from jaxrank.validate import GROWTH, field

MEASURED, ESTIMATED = "measured", "estimated"
_MAX_CPU_DEVICES = 256  # a CPU opens any number of devices, which share its memory
OPEN_BATCH = 4096  # for a config whose batch size depends on its data
_COLUMNS = (
    *("how", "batch", "machine", "devices", "examples per step", "examples/s", "step alone"),
    *("speed-up", "of linear"),
    *(f"{part}, ms" for part in PARTS),
    "limit",
)
_COLORS = {
    **{MEASURED: "C0", "v2": "C6", "v3": "C1", "v4": "C8", "v5e": "C3", "v5p": "C4", "v6e": "C5"},
    **{"a100": "C2", "h100": "C9", "h200": "darkblue"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    devices: tuple[int, ...] = field(
        (),
        help="numbers of devices to measure; none: powers of two up to all, or up to the cores",
        at_least=1,
    )
    topologies: tuple[str, ...] = field(
        ("v3-8", "v3-32", "v3-128", "a100-1", "a100-4", "a100-8"),
        help="TPU slices and GPUs to estimate",
    )
    measured_batch_size: int = field(
        0,
        help="batch size on the fewest devices of this machine; 0: of the config",
        unit="examples",
        at_least=0,
    )
    seconds: float = field(5.0, help="duration of each measurement", unit="seconds", above=0)


def runs(context: Context) -> Runs:
    options = context.options
    # Checked before anything runs.
    machines = [topology(name, "--topologies") for name in options.topologies]
    present = yield from describe_devices()
    counts = options.devices or _powers(present)
    is_cpu = present["platform"] == "cpu"
    most = _MAX_CPU_DEVICES if is_cpu else present["count"]
    if max(counts) > most:
        raise InputError(
            f"--devices: must be at most {most} with devices of kind {present['kind']}: found"
            f" {max(counts)}."
        )
    entries = [
        (growth, spec)
        for growth in GROWTH
        for spec in (
            *(_measured(context, growth, n, present, min(counts)) for n in counts),
            *(_estimated(context, growth, machine, machines) for machine in machines),
        )
    ]
    # The smallest machine of a family has the same run for both.
    unique = {spec.name: spec for _, spec in entries}
    results = dict(zip(unique, (yield list(unique.values())), strict=True))
    lines = [
        _line(growth, results[spec.name]) for growth, spec in entries if results[spec.name].is_done
    ]
    return Outcome(
        Table(_COLUMNS, [row for line in _families(lines) for row in _rows(line)]),
        [*(_speedups(lines, growth) for growth in GROWTH), _parts(lines)],
        _conclusion(lines, present),
        _notes(lines, present),
    )


def describe_devices() -> Generator[Sequence[RunSpec], Sequence[RunResult], Mapping[str, Any]]:
    """Returns the values of the run `DEVICES`.

    Raises:
        InputError: the devices do not open, or the config is invalid.
    """
    (present,) = yield [DEVICES]
    if not present.is_done:
        raise InputError(present.error)
    return present.values


def _powers(present: Mapping[str, Any]) -> list[int]:
    """Returns the powers of two up to the number of devices, on CPU up to that of the cores."""
    most = present["count"]
    if present["platform"] == "cpu":
        most = max(most, present["cores"])
    return [2**i for i in range(most.bit_length())]


def round_shards(devices: int, shards: int) -> int:
    """Returns the smallest multiple of the devices that is at least `shards`."""
    return devices * -(-shards // devices)


def _batch_size(context: Context) -> int:
    return context.fields["batch_size"] or OPEN_BATCH


def _overrides(context: Context, devices: int, batch: int) -> dict[str, Any]:
    """Returns the overrides for a number of devices and a batch size."""
    return {
        "mesh.devices": devices,
        "batch_size": batch,
        "data.shards": round_shards(devices, context.fields["data.shards"]),
    }


def _measured(
    context: Context, growth: str, devices: int, present: Mapping[str, Any], fewest: int
) -> RunSpec:
    batch = context.options.measured_batch_size or _batch_size(context)
    ratio = devices // fewest if growth == "weak" else 1
    overrides = _overrides(context, devices, batch * ratio)
    return RunSpec(
        f"measured-{devices}-batch-{overrides['batch_size']}",
        overrides,
        "bench",
        {"seconds": context.options.seconds},
        devices if present["platform"] == "cpu" else 0,
    )


def _estimated(
    context: Context, growth: str, machine: Topology, machines: Sequence[Topology]
) -> RunSpec:
    fewest = min(m.devices for m in machines if m.generation == machine.generation)
    ratio = machine.devices // fewest if growth == "weak" else 1
    batch = _batch_size(context) * ratio
    overrides = _overrides(context, machine.devices, batch) | {"mesh.devices": 0}
    name = f"estimated-{machine.name}-batch-{overrides['batch_size']}"
    return RunSpec(name, overrides, "estimate", {"topology": machine.name})


@dataclasses.dataclass(frozen=True)
class _Line:
    """One result: a machine with a growth of the batch."""

    how: str
    growth: str
    family: str
    machine: str
    devices: int
    batch_size: int
    rate: float
    step_rate: float | None
    seconds: dict[str, float]
    limit: str


def _line(growth: str, result: RunResult) -> _Line:
    values, spec = result.values, result.spec
    is_estimated = spec.kind == "estimate"
    name = spec.settings["topology"] if is_estimated else ""
    return _Line(
        how=ESTIMATED if is_estimated else MEASURED,
        growth=growth,
        family=name.partition("-")[0] if is_estimated else MEASURED,
        machine=name if is_estimated else values["device"],
        devices=values["devices"] if is_estimated else spec.overrides["mesh.devices"],
        batch_size=spec.overrides["batch_size"],
        rate=result.examples_per_second,
        step_rate=None if is_estimated else values["step"]["examples_per_second"],
        seconds=dict(values["seconds"]) if is_estimated else {},
        limit=values["limit"],
    )


def _families(lines: Iterable[_Line]) -> list[list[_Line]]:
    """Groups lines whose speed-ups are comparable, each sorted by devices."""

    def key(line: _Line) -> tuple[str, str]:
        return line.growth, line.family

    ordered = sorted(lines, key=lambda line: (line.how == ESTIMATED, *key(line), line.devices))
    return [list(group) for _, group in itertools.groupby(ordered, key)]


def _label(family: str) -> str:
    return family if family == MEASURED else f"{family}, {ESTIMATED}"


def _speedup(line: _Line, first: _Line) -> float:
    return line.rate / first.rate


def _rows(family: Sequence[_Line]) -> list[tuple[Any, ...]]:
    first = family[0]
    return [
        (
            *(line.how, line.growth, line.machine, line.devices, line.batch_size),
            line.rate,
            line.step_rate,
            _speedup(line, first),
            _speedup(line, first) * first.devices / line.devices,
            *(1e3 * line.seconds[part] if line.seconds else None for part in PARTS),
            line.limit,
        )
        for line in family
    ]


def _speedups(lines: Sequence[_Line], growth: str) -> Panel:
    """Draws speed-ups over the ratio of devices. Estimates are dashed, in other colours."""
    series = []
    for family in _families(line for line in lines if line.growth == growth):
        first = family[0]
        name = family[0].family
        series.append(
            Series(
                _label(name),
                [line.devices / first.devices for line in family],
                [_speedup(line, first) for line in family],
                style="line" if name == MEASURED else "dashed",
                color=_COLORS.get(name, ""),
            )
        )
    most, published = PUBLISHED
    series.append(Series("linear", [1, most], [1, most], style="dashed", color="0.7"))
    label = f"Snap 2022: {published}x of {most}x"
    series.append(Series(label, [1, most], [1, published], style="line", color="k"))
    batch = "grows with the devices (weak)" if growth == "weak" else "stays (strong)"
    return Panel(
        f"The batch {batch}",
        "devices, relative",
        "speed-up",
        series,
        x_scale="log2",
        y_scale="log2",
    )


def _parts(lines: Sequence[_Line]) -> Panel:
    """Draws the parts of estimated steps, of the family with most machines."""
    estimates = [f for f in _families(lines) if f[0].seconds and f[0].growth == "weak"]
    family = max(estimates, key=len, default=[])
    series = [
        Series(
            part, [line.machine for line in family], [1e3 * line.seconds[part] for line in family]
        )
        for part in PARTS
    ]
    return Panel("Parts of a step, estimated (weak)", "", "ms", series if family else [])


def _conclusion(lines: Sequence[_Line], present: Mapping[str, Any]) -> list[str]:
    if not lines:
        return ["No run has finished."]
    speedups = [
        f"{_speedup(last, first):.2f} times with {last.devices / first.devices:g} times the devices"
        f" ({_label(first.family)})"
        for first, *_, last in (f for f in _families(lines) if len(f) > 1 and f[0].growth == "weak")
    ]
    limits = []
    if any(line.how == ESTIMATED for line in lines):
        limits.append("estimates come from compiled programs and published rates, not from runs")
    if present["platform"] == "cpu":
        limits.append(
            "devices of this processor share its cores, so they show the overhead of several"
            " devices and no speed-up of hardware"
        )
    sentences = ["No machine has results with a batch that grows over several numbers of devices."]
    if speedups:
        grown = " and ".join(filter(None, (", ".join(speedups[:-1]), speedups[-1])))
        sentences = [f"With a batch that grows, the throughput is {grown}."]
    if limits:
        text = ", and ".join(limits)
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return sentences


def _notes(lines: Sequence[_Line], present: Mapping[str, Any]) -> list[str]:
    notes = []
    if present["platform"] == "cpu":
        notes.append(f"This processor has {present['cores']} cores.")
    if any(line.how == ESTIMATED for line in lines):
        notes.append("Estimates leave out the input.")
    most, published = PUBLISHED
    notes.append(
        f"Snap measured {published} times the throughput with {most} times the cores of a TPU v3."
    )
    return notes


STUDY = Study(
    "scaling",
    "throughput over the number of devices, measured here and estimated for TPUs and GPUs",
    Options,
    runs,
)
