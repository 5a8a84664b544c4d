"""JSON of the verbs that measure, compare data, plan and check."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from jaxrank.records.common import Table


class Rate(TypedDict):
    """A rate."""

    examples_per_second: Annotated[float, "measured", "examples/s"]


class Bench(TypedDict):
    """Output of `bench --json`."""

    input: Annotated[Rate, "of the input alone"]
    step: Annotated[Rate, "of the step alone"]
    both: Annotated[Rate, "of training"]
    both_over_step: Annotated[float, "share of the step's rate that training reaches"]
    stages: Annotated[
        dict[str, float],
        "of a million examples by stage, on one thread except the step",
        "s",
    ]
    limit: Annotated[str, "the slowest stage"]
    advice: Annotated[str, "the setting to change"]
    device: Annotated[str, "number and kind of devices"]
    batch_size: Annotated[int, "per step", "examples"]


class Drift(TypedDict):
    """Drift of a feature. Null where a feature has no such number."""

    name: Annotated[str, "of the feature"]
    kind: Annotated[str, "`dense`, `categorical` or `ragged`"]
    psi: Annotated[float | None, "population stability index"]
    new: Annotated[float | None, "share of ids that the old side lacks"]
    lost: Annotated[float | None, "share of ids that the new side lacks"]
    missing: Annotated[list[float] | None, "share of missing values, of both sides"]
    unknown: Annotated[list[float] | None, "share of unknown ids, of both sides"]
    mean: Annotated[list[float | None] | None, "of the numbers or lengths, of both sides"]
    shift: Annotated[
        float | None, "of the mean, in deviations of the old numbers or over the old length"
    ]
    note: Annotated[str, "why something is absent"]
    undefined: Annotated[list[str], "thresholds whose number cannot be computed"]
    exceeds: Annotated[list[str], "thresholds that are exceeded"]


class CompareData(TypedDict):
    """Output of `compare-data --json`."""

    old: Annotated[str, "compared data"]
    new: Annotated[str, "compared data"]
    rows: Annotated[list[int], "of both"]
    features: Annotated[list[Drift], "those above a threshold first ([measures](daily.md#drift))"]
    exceeded: Annotated[dict[str, list[str]], "names of thresholds, by feature"]
    error: NotRequired[Annotated[str, "which thresholds are exceeded"]]


class Compiled(TypedDict):
    """A compiled slice. Bytes and operations are of one device."""

    name: Annotated[str, "of the slice"]
    cores: Annotated[int, "number"]
    devices: Annotated[int, "number"]
    fits: Annotated[bool, "memory suffices"]
    hbm_bytes: Annotated[int, "memory", "bytes"]
    usable_bytes: Annotated[int, "memory that a program may use", "bytes"]
    used_bytes: Annotated[int, "memory that the program uses", "bytes"]
    tables_bytes: Annotated[int, "tables", "bytes"]
    state_bytes: Annotated[int, "dense parameters and optimizer", "bytes"]
    batches_bytes: Annotated[int, "batches", "bytes"]
    temporaries_bytes: Annotated[int, "of the compiler", "bytes"]
    evaluation_bytes: Annotated[int, "of evaluation", "bytes"]
    collective_bytes: Annotated[int, "sum of `collectives`", "bytes per step"]
    collectives: Annotated[dict[str, int], "by kind", "bytes per step"]
    flops: Annotated[float, "operations", "per step"]
    tables_aliased: Annotated[bool, "tables are updated in place"]
    compile_seconds: Annotated[float, "of the compiler", "s"]
    compiler_error: Annotated[str, "empty, or why it does not compile"]


class Scaling(TypedDict):
    """An estimate of a slice, with `--scaling`."""

    name: Annotated[str, "of the slice"]
    batch_size: Annotated[int, "per step", "examples"]
    fits: Annotated[bool, "memory suffices"]
    step_seconds: Annotated[float, "sum of `seconds`", "s"]
    seconds: Annotated[dict[str, float], "by part of the step", "s"]
    product_flops: Annotated[float, "of matrix products", "per step"]
    memory_bytes: Annotated[float, "read and written", "bytes per step"]
    examples_per_second: Annotated[float, "estimate", "examples/s"]
    speedup: Annotated[float, "over the smallest slice"]
    efficiency: Annotated[float, "share of a linear speed-up"]
    limit: Annotated[str, "part that takes longest"]


class Compile(TypedDict):
    """Output of `compile --json`."""

    topologies: Annotated[list[Compiled], "in the order of the command"]
    scaling: Annotated[list[Scaling], "with `--scaling`, else empty"]
    error: Annotated[str, "empty, or which slices do not fit or compile"]


class Check(TypedDict):
    """A check."""

    name: Annotated[str, "of the check"]
    status: Annotated[Literal["pass", "fail", "not applicable"], "result"]
    finding: Annotated[str, "what was observed"]
    advice: Annotated[str, "what to do if it failed"]
    seconds: Annotated[float, "of the check", "s"]


class CheckModel(TypedDict):
    """Output of `check-model --json`."""

    model: Annotated[str, "its name"]
    checks: Annotated[list[Check], "in order"]
    error: Annotated[str, "empty, or which checks failed"]


class Selftest(TypedDict):
    """Output of `selftest --json`."""

    checks: Annotated[list[Check], "in order"]
    seconds: Annotated[float, "of the command", "s"]
    error: Annotated[str, "empty, or which checks failed"]


class MemoryByKind(TypedDict):
    """Memory of one device by kind."""

    tables: Annotated[int, "rows", "bytes"]
    accumulators: Annotated[int, "state of the row optimizer and average", "bytes"]
    buffers: Annotated[int, "of the exchange", "bytes"]
    vectors: Annotated[int, "that ids read, and their gradients", "bytes"]
    dense: Annotated[int, "parameters, gradients, optimizer", "bytes"]
    activations: Annotated[int, "of its share of a batch", "bytes"]
    batches: Annotated[int, "on the device", "bytes"]


class PlannedTable(TypedDict):
    """A planned table."""

    name: Annotated[str, "of the table"]
    rows: Annotated[int, "number"]
    dim: Annotated[int, "of a vector"]
    placement: Annotated[Literal["replicated", "rows"], "`rows`: sharded by row"]
    reason: Annotated[str, "of the placement"]
    replicated_rows: Annotated[int, "rows that every device keeps"]
    lookups: Annotated[float, "expected distinct sharded rows per device and step"]
    bytes: Annotated[int, "of all rows once, with accumulators", "bytes"]


class Plan(TypedDict):
    """Output of `plan --json`."""

    devices: Annotated[int, "of the machine"]
    topology: Annotated[str, "of the machine, or empty"]
    replicas: Annotated[int, "of the tables"]
    batch_size: Annotated[int, "of all devices", "examples"]
    fits: Annotated[bool, "memory suffices"]
    over_bytes: Annotated[int, "missing memory of a device", "bytes"]
    memory_bytes: Annotated[int, "memory of a device", "bytes"]
    bytes_per_device: Annotated[list[int], "that are needed", "bytes"]
    bytes_by_kind: Annotated[MemoryByKind, "the same by kind", "bytes"]
    exchanged_bytes_per_step: Annotated[int, "sent by one device", "bytes"]
    lookups_per_device: Annotated[
        list[float], "mean rows per step that each device reads, after duplicates"
    ]
    imbalance: Annotated[float | None, "the largest of these over their mean"]
    largest_imbalance: Annotated[float | None, "the same in the worst batch"]
    batches: Annotated[int, "number of replayed batches"]
    capacity: Annotated[dict[str, int], "of a buffer of the exchange, by stack", "ids"]
    buffer_use: Annotated[float | None, "ids over places in the buffers"]
    rounds: Annotated[dict[str, float], "mean rounds of the exchange, by stack"]
    fullest_over_mean: Annotated[
        dict[str, float], "ids in the fullest buffer over the mean, by stack"
    ]
    tables: Annotated[list[PlannedTable], "in the order of the schema"]
    warnings: Annotated[list[str], "texts"]
    error: Annotated[str, "empty, or what does not fit"]


class Series(TypedDict):
    """A series of points."""

    label: Annotated[str, "in the legend"]
    x: Annotated[list[Any], "numbers, or texts of categories"]
    y: Annotated[list[float | None], "numbers"]
    low: Annotated[list[float | None], "lower ends of intervals, or empty"]
    high: Annotated[list[float | None], "upper ends, or empty"]
    style: Annotated[str, "`line`, `dashed`, `points` or `bars`"]
    color: Annotated[str, "or empty"]


class Panel(TypedDict):
    """A panel of a picture."""

    title: Annotated[str, "of the panel"]
    x_label: Annotated[str, "of the axis"]
    y_label: Annotated[str, "of the axis"]
    series: Annotated[list[Series], "in the order of the legend"]
    x_scale: Annotated[str, "`linear`, `log` or `log2`"]
    y_scale: Annotated[str, "`linear`, `log` or `log2`"]


class Study(TypedDict):
    """Output of `study --json`."""

    study: Annotated[str, "its name"]
    table: Annotated[Table, "the result"]
    panels: Annotated[list[Panel], "the points of the picture"]
    conclusion: Annotated[list[str], "one or two sentences"]
    notes: Annotated[list[str], "assumptions, limits and other findings"]
    best_overrides: Annotated[list[str], "flags that set the best values"]
    failed: Annotated[dict[str, str], "error by run"]
    files: Annotated[list[str], "that were written"]
