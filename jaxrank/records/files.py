"""JSON of the verbs that write files: stores, exports, predictions, and short results."""

from typing import Annotated, Any, TypedDict

from jaxrank.records.common import MetricsByTask


class Split(TypedDict):
    """A split of a store."""

    rows: Annotated[int, "number of examples"]
    bytes: Annotated[int, "of its files", "bytes"]
    statistics: Annotated[dict[str, Any], "of its columns, as in `summary.json`"]


class VocabularyChange(TypedDict):
    """A change of a vocabulary, with `--vocabularies`."""

    kept: Annotated[int, "rows"]
    new: Annotated[int, "rows"]
    evicted: Annotated[int, "rows"]
    waiting: Annotated[int, "ids that are not admitted yet"]
    dropped: Annotated[int, "ids that no longer wait, for lack of room"]
    lookups: Annotated[int, "ids in the training split"]
    lost: Annotated[int, "the ones without a row"]
    lost_share: Annotated[float, "their share of `lookups`"]


class Prepare(TypedDict):
    """Output of `prepare --json`."""

    store: Annotated[str, "its path"]
    splits: Annotated[dict[str, Split], "by name"]
    tables: Annotated[dict[str, int], "rows by table"]
    vocabularies: Annotated[
        dict[str, VocabularyChange], "by table, with `--vocabularies`, else empty"
    ]


class Parity(TypedDict):
    """Parity of a bundle and the trained program."""

    rows: Annotated[int, "number of raw rows that both scored"]
    difference: Annotated[float, "largest difference of a prediction"]
    rounding: Annotated[
        float | None, "the same to the precision of training; null if that is the same"
    ]


class Latency(TypedDict):
    """Latency of a request."""

    p50_ms: Annotated[float, "50th percentile", "ms"]
    p99_ms: Annotated[float, "99th percentile", "ms"]


class Delta(TypedDict):
    """A delta, of `--since`."""

    rows: Annotated[int, "rows that differ"]
    total_rows: Annotated[int, "all rows"]
    added: Annotated[int, "values that are new or have another row"]
    removed: Annotated[int, "values that have no row any more"]
    bytes: Annotated[int, "of all files", "bytes"]


class Export(TypedDict):
    """Output of `export --json`."""

    output: Annotated[str, "directory that was written"]
    checkpoint: Annotated[str, "its path"]
    step: Annotated[int, "of the checkpoint"]
    tables: Annotated[int, "number of tables"]
    rows: Annotated[int, "number of their rows"]
    bytes: Annotated[int, "of all files", "bytes"]
    onnx: Annotated[str, "empty, or why there is no ONNX model"]
    parity: Annotated[Parity, "the comparison with the trained program"]
    latency_ms: Annotated[dict[str, Latency], "by number of candidates; empty without ONNX"]
    rounding: Annotated[MetricsByTask, "change of metrics by rounded tables, by task and metric"]
    delta: Annotated[Delta | None, "with `--since`"]
    seconds: Annotated[float, "of the command", "s"]
    worse_than_constant: Annotated[list[str], "tasks for which a constant is better"]


class ExportFiles(TypedDict):
    """Output of `export --format=files --json`."""

    output: Annotated[str, "directory that was written"]
    checkpoint: Annotated[str, "its path"]
    step: Annotated[int, "of the checkpoint"]
    tables: Annotated[int, "number of tables"]
    rows: Annotated[int, "number of their rows"]
    parameters: Annotated[int, "number of parameters outside tables"]
    seconds: Annotated[float, "of the command", "s"]
    worse_than_constant: Annotated[list[str], "tasks for which a constant is better"]


class Predict(TypedDict):
    """Output of `predict --json` with `--workdir`."""

    output: Annotated[str, "file that was written"]
    rows: Annotated[int, "its rows"]
    checkpoint: Annotated[str, "its path"]
    step: Annotated[int, "of the checkpoint"]
    worse_than_constant: Annotated[list[str], "tasks for which a constant is better"]
    ranked: Annotated[list[str], "tasks whose predictions are scores without calibration"]
    seconds: Annotated[float, "of the command", "s"]


class PredictBundle(TypedDict):
    """Output of `predict --json` with `--bundle`."""

    output: Annotated[str, "file that was written"]
    rows: Annotated[int, "its rows"]
    bundle: Annotated[str, "its path"]
    version: Annotated[str, "checksum of its manifest"]
    labelled: Annotated[bool, "the input has labels"]
    seconds: Annotated[float, "of the command", "s"]


class Report(TypedDict):
    """Output of `report --json`."""

    output: Annotated[str, "page that was written"]
    runs: Annotated[list[str], "workdirs"]


class Configs(TypedDict):
    """Output of `configs --json`."""

    configs: Annotated[dict[str, str], "first line of each config, by name"]


class Launch(TypedDict):
    """Output of `launch --json`."""

    path: Annotated[str, "directory of the scripts"]


class Error(TypedDict):
    """Output of any verb with `--json` that has no result."""

    error: Annotated[str, "what must hold and what was found"]
    status: Annotated[int, "the exit status"]
