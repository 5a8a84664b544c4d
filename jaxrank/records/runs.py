"""JSON of the verbs that train and score runs."""

from typing import Annotated, Any, NotRequired, TypedDict

from jaxrank.records.common import (
    Bucket,
    Cluster,
    DifferencesByTask,
    Histogram,
    Intervals,
    Metrics,
    MetricsByTask,
    Requests,
)


class Day(TypedDict):
    """A day: its score, by the model that had not seen it."""

    day: Annotated[str, "name, of several short days the first and the last"]
    step: Annotated[int, "of the model"]
    metrics: Annotated[Metrics, "of the day"]


class Baseline(TypedDict):
    """A baseline: the logistic regression of `--baseline`."""

    metrics: Annotated[Metrics, "of the regression"]
    features: Annotated[str, "`one-hot` or `hashed`"]
    distinct_ids: Annotated[int, "in the training data"]
    strengths: Annotated[dict[str, float], "C by task"]
    seconds: Annotated[float, "of the regression", "s"]
    differences: Annotated[DifferencesByTask, "the model minus the regression, by task and metric"]


class Train(TypedDict):
    """Output of `train --json`."""

    step: Annotated[int, "steps done"]
    trained_steps: Annotated[int, "steps of this command"]
    examples_per_second: Annotated[
        float | None, "of training, without compilation, evaluation and saving", "examples/s"
    ]
    seconds: Annotated[float, "of the command", "s"]
    phase_seconds: Annotated[dict[str, float], "by [phase](commands.md#where-the-time-goes)", "s"]
    metrics: Annotated[Metrics, "on the validation data"]
    constant: Annotated[Metrics | None, "the same of the best constant"]
    best_possible: Annotated[Metrics | None, "the same of the truth of generated data"]
    checkpoint: Annotated[str, "the checkpoint of `metrics`"]
    checkpoint_step: Annotated[int, "its step"]
    days: Annotated[list[Day], 'with `data.valid="next_day"`, else empty']
    untrained: Annotated[
        list[str],
        "tasks that are not trained: of weight 0 in `task_weights`, or without a known label of"
        " weight above 0",
    ]
    unscaled: Annotated[list[str], "dense features that are not scaled and have large numbers"]
    losses: Annotated[dict[str, str], "losses that `task_losses` chooses, by task"]
    baseline: Annotated[Baseline | None, "with `--baseline`"]
    buckets: Annotated[dict[str, list[Bucket]], "by task"]
    histograms: Annotated[dict[str, Histogram], "by task"]
    requests: Annotated[Requests | None, "what the metrics of requests count"]


class Calibration(TypedDict):
    """A calibration of a checkpoint."""

    method: Annotated[str, "of the fit"]
    split: Annotated[str, "that it was fitted on"]
    tasks: Annotated[list[str], "that have a map"]
    by: NotRequired[Annotated[str, "feature whose values have corrections"]]


class SliceValue(TypedDict):
    """A value of a column, and the metrics of its examples."""

    value: Annotated[Any, "of the column, of several columns a list, null if missing"]
    metrics: Annotated[Metrics, "of the examples; of requests for the 1,000 largest values"]
    intervals: NotRequired[Annotated[Intervals, "of the 1,000 largest values"]]


class Slices(TypedDict):
    """Slices: metrics by the values of a column."""

    column: Annotated[str, "its name, or names"]
    is_ordered: Annotated[bool, "its values have an order, such as days"]
    values: Annotated[list[SliceValue], "in their order, or the worst first"]
    metrics: Annotated[Metrics, "of all values together: `<task>/gauc`"]
    gauc_excluded: Annotated[
        dict[str, float | None], "share of the weight in values of one label, by task"
    ]


class ComparedRun(TypedDict):
    """A compared run."""

    workdir: Annotated[str, "of the run"]
    checkpoint: Annotated[str, "path"]
    step: Annotated[int, "of the checkpoint"]
    metrics: Annotated[Metrics, "of the run"]
    intervals: Annotated[Intervals, "of `metrics`"]


class RunScore(TypedDict):
    """The score of a run on one value of a column."""

    metrics: Annotated[Metrics, "of the run"]
    intervals: Annotated[Intervals, "of `metrics`"]


class ComparedValue(TypedDict):
    """A compared value: runs on the examples with one value of a column."""

    value: Annotated[Any, "of the column, of several columns a list, null if missing"]
    examples: Annotated[int, "number"]
    runs: Annotated[list[RunScore], "in the order of the runs"]
    differences: Annotated[list[DifferencesByTask], "of each run but the first"]


class ComparedSlices(TypedDict):
    """Compared slices: runs by the values of a column."""

    column: Annotated[str, "its name, or names"]
    is_ordered: Annotated[bool, "its values have an order, such as days"]
    simultaneous: Annotated[bool, "intervals hold for all values together, as in a gate"]
    values: Annotated[list[ComparedValue], "the 1,000 largest"]
    others: Annotated[int, "number of values that are left out"]


class ConfigField(TypedDict):
    """A field of the config that differs."""

    field: Annotated[str, "path"]
    values: Annotated[list[Any], "in the order of the runs"]


class RankedColumn(TypedDict):
    """The column of requests of a comparison."""

    column: Annotated[str, "`features.group`"]
    k: Annotated[int, "number of first ranks that count"]


class Compare(TypedDict):
    """Output of `compare --json`."""

    runs: Annotated[list[ComparedRun], "in the order of the command"]
    differences: Annotated[
        list[DifferencesByTask], "of each run but the first: its metrics minus the first run's"
    ]
    examples: Annotated[int, "number of compared examples"]
    by: Annotated[ComparedSlices | None, "with `--by`"]
    config: Annotated[list[ConfigField], "fields that differ"]
    cluster: Annotated[Cluster | None, "of the intervals"]
    requests: Annotated[RankedColumn | None, "of the metrics of requests"]


class FailedValue(TypedDict):
    """A failed value: examples on which a condition is fulfilled."""

    value: Annotated[Any, "of the column"]
    estimate: Annotated[float | None, "compared metric or difference"]
    low: Annotated[float | None, "lower end of its interval"]
    high: Annotated[float | None, "upper end"]


class JudgedSlices(TypedDict):
    """Judged slices: a condition on the values of a column."""

    judged: Annotated[int, "number of values"]
    undefined: Annotated[int, "number of values that are too small"]
    others: Annotated[int, "number of values after the 1,000 largest, which are not judged"]
    failed: Annotated[list[FailedValue], "values on which the condition is fulfilled"]


class Condition(TypedDict):
    """A condition of `--fail-if`."""

    condition: Annotated[str, "as it was written"]
    certainty: Annotated[str, "`surely`, `likely` or `possibly`"]
    uses: Annotated[str, "the same in words"]
    is_relative: Annotated[bool, "numbers are fractions of the other model's metric"]
    holds: Annotated[bool | None, "it is fulfilled, so the gate fails; null: undefined"]
    passed: Annotated[bool, "not fulfilled, on no slice either"]
    value: Annotated[float | None, "compared metric or difference"]
    low: Annotated[float | None, "lower end of its interval"]
    high: Annotated[float | None, "upper end"]
    slices: Annotated[JudgedSlices | None, "with `--by`"]


class Gate(TypedDict):
    """[A gate](daily.md#the-gate): whether a model may replace another one."""

    passed: Annotated[bool, "all conditions pass"]
    conditions: Annotated[list[Condition], "in the order of the command"]


class Evaluate(TypedDict):
    """Output of `evaluate --json`."""

    step: Annotated[int, "of the checkpoint"]
    checkpoint: Annotated[str, "its path"]
    data: Annotated[str, "path of the split that was scored"]
    examples_per_second: Annotated[float, "of scoring", "examples/s"]
    seconds: Annotated[float, "of the command", "s"]
    metrics: Annotated[Metrics, "on the data"]
    intervals: Annotated[Intervals, "of `metrics`"]
    constant: Annotated[Metrics, "the same of the best constant"]
    best_possible: Annotated[Metrics | None, "the same of the truth of generated data"]
    buckets: Annotated[dict[str, list[Bucket]], "by task"]
    histograms: Annotated[dict[str, Histogram], "by task"]
    calibration_error: Annotated[dict[str, float | None], "expected calibration error, by task"]
    calibrated: Annotated[Calibration | None, "the calibration of the checkpoint"]
    untrained: Annotated[list[str], "as of `train`"]
    losses: Annotated[dict[str, str], "as of `train`"]
    cluster: Annotated[Cluster | None, "of the intervals"]
    requests: Annotated[Requests | None, "what the metrics of requests count"]
    by: Annotated[Slices | None, "with `--by`"]
    gate: NotRequired[Annotated[Gate, "with `--against` or `--fail-if`"]]
    comparison: NotRequired[Annotated[Compare, "with these: the old run, if any, and the new one"]]
    error: NotRequired[Annotated[str, "why the gate failed"]]


class FollowedStep(TypedDict):
    """A followed checkpoint."""

    step: Annotated[int, "of the checkpoint"]
    metrics: Annotated[Metrics, "of the data"]


class Follow(TypedDict):
    """Output of `evaluate --follow --json`."""

    evaluations: Annotated[list[FollowedStep], "of each checkpoint that was scored"]
    output: Annotated[str, "folder of `metrics.jsonl` and the TensorBoard files"]


class CalibratedValue(TypedDict):
    """A calibrated value of a feature."""

    value: Annotated[Any, "of the feature"]
    examples: Annotated[int, "number"]
    before: Annotated[MetricsByTask, "by task and metric"]
    after: Annotated[MetricsByTask, "by task and metric"]


class CalibratedSlices(TypedDict):
    """Calibrated slices: corrections by the values of a feature."""

    feature: Annotated[str, "name"]
    fitted: Annotated[int, "number of values with a correction of their own"]
    values: Annotated[list[CalibratedValue], "the largest, the worst after calibration first"]


class Calibrate(TypedDict):
    """Output of `calibrate --json`."""

    method: Annotated[str, "of the fit, or `none`"]
    split: Annotated[str, "that it was fitted on"]
    measured_on: Annotated[str, "split that `before` and `after` are of"]
    before: Annotated[MetricsByTask, "logloss, calibration and expected calibration error, by task"]
    after: Annotated[MetricsByTask, "the same with the calibration"]
    skipped: Annotated[dict[str, str], "why tasks have no calibration, by task"]
    by: Annotated[CalibratedSlices | None, "with `--by`"]
    path: Annotated[str, "file that was written"]
    checkpoint: Annotated[str, "its path"]
    step: Annotated[int, "of the checkpoint"]
    seconds: Annotated[float, "of the command", "s"]


# {group: {task: {metric: [change, low, high]}}}
Changes = dict[str, dict[str, dict[str, list[float | None]]]]


class ExplainedValue(TypedDict):
    """An explained value of a column."""

    value: Annotated[Any, "of the column"]
    examples: Annotated[int, "number"]
    changes: Annotated[Changes, "as of all examples"]


class ExplainedSlices(TypedDict):
    """Explained slices: importance by the values of a column."""

    column: Annotated[str, "name"]
    values: Annotated[list[ExplainedValue], "the largest"]


class Explain(TypedDict):
    """Output of `explain --json`."""

    checkpoint: Annotated[str, "its path"]
    step: Annotated[int, "of the checkpoint"]
    data: Annotated[str, "path of the split that was scored"]
    rows: Annotated[int, "number of examples"]
    base: Annotated[MetricsByTask, "of the model as it is, by task and metric"]
    changes: Annotated[
        Changes,
        "change, low and high by permuting the features of a group, by group, task and metric",
    ]
    by: Annotated[ExplainedSlices | None, "with `--by`"]
    groups: Annotated[dict[str, list[str]], "features by group"]
    seconds: Annotated[float, "of the command", "s"]
