"""Parts of several records.

A record is a TypedDict with the keys of a JSON object. Each type has a meaning and, where
there is one, a unit: `Annotated[int, "accumulated rows", "bytes"]`. A key with a name in angle
brackets, such as "<task>/<metric>", stands for any number of keys, also none. `float | None` is
null where a number is undefined. docs/records*.md are made of these declarations, and the tests
compare them with what the verbs print.
"""

from typing import Annotated, Any, NotRequired, TypedDict

Metrics = TypedDict(
    "Metrics",
    {"<task>/<metric>": Annotated[float | None, "a [metric](metrics.md)"]},
)
Intervals = TypedDict(
    "Intervals",
    {"<task>/<metric>": Annotated[list[float | None], "low and high end"]},
)
Metrics.__doc__ = "Metrics, by task and name."
Intervals.__doc__ = "95% intervals of metrics."
MetricsByTask = dict[str, dict[str, float | None]]  # {task: {metric: value}}


class Bucket(TypedDict):
    """A bucket: examples with similar predictions, of ten groups of equal size."""

    lower: Annotated[float, "smallest prediction"]
    upper: Annotated[float, "largest prediction"]
    examples: Annotated[int, "number"]
    weight: Annotated[float, "their weight"]
    predicted: Annotated[float, "mean prediction"]
    observed: Annotated[float, "mean label"]
    error: Annotated[float, "standard error of `observed`"]


class Histogram(TypedDict):
    """A histogram: weights of examples by score. The scores of binary tasks are logits."""

    edges: Annotated[list[float], "of the bins, one more than there are bins"]
    negative: NotRequired[Annotated[list[float], "of a binary task: weight of label 0"]]
    positive: NotRequired[Annotated[list[float], "of a binary task: weight of label 1"]]
    predicted: NotRequired[Annotated[list[float], "of another task: weight by prediction"]]
    labels: NotRequired[Annotated[list[float], "of another task: weight by label"]]


class RequestCounts(TypedDict):
    """Counts of requests of one task."""

    requests: Annotated[int, "with a candidate"]
    without_positives: Annotated[float | None, "their share without a positive label"]
    gauc_excluded: Annotated[float | None, "share of the weight in requests of one label"]


class Requests(TypedDict):
    """Requests: the examples that share a value of `features.group`."""

    column: Annotated[str, "name of the column"]
    k: Annotated[int, "number of first ranks that count"]
    weighting: Annotated[str, "what weights the requests of a GAUC"]
    tasks: Annotated[dict[str, RequestCounts], "by task"]


class Cluster(TypedDict):
    """A cluster: the examples that share a value of `eval.cluster`, for intervals."""

    column: Annotated[str, "name of the column"]
    clusters: Annotated[int, "number of its values"]


class Difference(TypedDict):
    """A difference of a metric, with its paired 95% interval."""

    difference: Annotated[float | None, "a metric minus the first one"]
    low: Annotated[float | None, "lower end"]
    high: Annotated[float | None, "upper end"]


DifferencesByTask = dict[str, dict[str, Difference]]  # {task: {metric: difference}}


class Table(TypedDict):
    """A table of numbers and texts."""

    columns: Annotated[list[str], "titles"]
    rows: Annotated[list[list[Any]], "values, null where unknown"]
