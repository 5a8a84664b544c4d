"""Decides whether a model may replace another one: both score the same rows."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank.errors import InputError
from jaxrank.evaluation.comparison import compare
from jaxrank.evaluation.evaluate import Evaluation, evaluate_opened, load_run, open_saved
from jaxrank.evaluation.gate.conditions import Condition, Span, check_metrics, parse_all


class Verdict(NamedTuple):
    """The result of one condition.

    condition: as it was written.
    certainty: "surely", "likely" or "possibly".
    is_relative: the numbers are fractions of the other model's metric.
    holds: the condition is fulfilled, so the gate fails. None: undefined, so it fails too.
    value, low, high: the compared metric or difference, and its 95% interval.
    slices: {judged, undefined, others: numbers of slices, the last of small ones beyond the limit
        of `compare`; failed: {value, and the numbers as above} of each slice that fulfils the
        condition}. None without slices.
    """

    condition: str
    certainty: str
    is_relative: bool
    holds: bool | None
    value: float
    low: float
    high: float
    slices: dict[str, Any] | None

    @property
    def passes(self) -> bool:
        return self.holds is False and not (self.slices and self.slices["failed"])


class Gate(NamedTuple):
    """Result of `judge`.

    evaluation: of the new model.
    comparison: of the old model and the new one, or of the new one alone.
    verdicts: of each condition.
    """

    evaluation: Evaluation
    comparison: compare.Comparison
    verdicts: list[Verdict]

    @property
    def passes(self) -> bool:
        return all(verdict.passes for verdict in self.verdicts)


def judge(
    workdir: str,
    *,
    against: str = "",
    fail_if: Sequence[str] = (),
    checkpoint: str = "newest",
    data: str = "",
    split: str = "",
    batch_size: int | None = None,
    by: str = "",
) -> Gate:
    """Scores a run, and the run that it may replace, on the same rows, and judges the conditions.

    Of the other run this is the best checkpoint with early stopping, else the newest one.

    Args:
        workdir: of the new run.
        against: the workdir of the run that it may replace. Empty: none.
        fail_if: conditions, see `conditions.GRAMMAR`. They must hold neither for all examples nor,
            with `by`, for a slice.
        checkpoint, data, split, batch_size, by: as in `evaluate.evaluate`.

    Raises:
        InputError: a condition is invalid (before anything is read), or as in `evaluate.evaluate`
            and `compare.compare`.
    """
    started = time.perf_counter()
    conditions = parse_all(fail_if, has_other=bool(against))
    if against and Path(against).resolve() == Path(workdir).resolve():
        raise InputError(f"--against: must name another run than --workdir: found {against}.")
    runs = [load_run(path) for path in (against, workdir) if path]
    shared = compare.common_tasks([{t.name: t for t in run.schema.tasks} for run in runs])
    ranked = {name for run in runs for name in run.builder.ranked}
    tasks = {task.name: task for task in shared}
    check_metrics(conditions, tasks, ranked, runs[-1].builder.eval.top_k)
    new = open_saved(runs[-1], data=data, split=split, batch_size=batch_size)
    other = None
    if against:
        is_direct = runs[-1].data(data).is_direct
        store = data or ("" if is_direct else str(new.store.path))
        other = open_saved(runs[0], data=store, split=new.split.name, batch_size=batch_size)
    if not new.requests.column:
        check_metrics(conditions, tasks, ranked)
    rows = compare.Rows.read(new, by)
    evaluation, scores = evaluate_opened(new, checkpoint, rows.groups, rows.clusters)
    scored = [compare.ScoredRun.from_scores(workdir, new, evaluation.step, scores)]
    if other is not None:
        scored.insert(0, compare.score(against, other))
        compare.check_rows(*scored)
    comparison = compare.compare_scored(scored, rows, simultaneous=True)
    evaluation = evaluation._replace(seconds=time.perf_counter() - started)
    return Gate(evaluation, comparison, [_verdict(c, comparison) for c in conditions])


def _verdict(condition: Condition, comparison: compare.Comparison) -> Verdict:
    span = _span(condition, comparison.runs, comparison.differences)
    slices = None
    if comparison.by is not None:
        spans = [
            (entry["value"], _span(condition, entry["runs"], entry["differences"]))
            for entry in comparison.by["values"]
        ]
        held = [condition.holds(of_slice) for _, of_slice in spans]
        slices = {
            "judged": sum(h is not None for h in held),
            "undefined": sum(h is None for h in held),
            "others": comparison.by["others"],
            "failed": [
                {"value": value, **_numbers(of_slice)}
                for (value, of_slice), h in zip(spans, held, strict=True)
                if h
            ],
        }
    return Verdict(
        condition.text,
        condition.certainty,
        condition.is_relative,
        condition.holds(span),
        *span,
        slices,
    )


def _numbers(span: Span) -> dict[str, float]:
    return {"estimate": span.value, "low": span.low, "high": span.high}


def _span(
    condition: Condition,
    runs: Sequence[Mapping[str, Any]],
    differences: Sequence[Mapping[str, Any]],
) -> Span:
    """Returns what a condition compares, of all examples or of a slice."""
    task, metric = condition.task, condition.metric
    if not condition.is_difference:
        new = runs[-1]
        return Span(new["metrics"][task][metric], *new["intervals"][task][metric])
    entry = differences[-1][task][metric]
    span = Span(entry["difference"], entry["low"], entry["high"])
    if not condition.is_relative:
        return span
    # The error of the old metric moves the fraction by a product of two small numbers.
    base = abs(runs[0]["metrics"][task][metric])
    return span.scaled(1 / base if base > 0 else math.nan)
