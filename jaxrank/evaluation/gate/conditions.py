"""Conditions under which a model must not replace another one, as `--fail-if` states them."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxrank.errors import InputError
from jaxrank.features import Task
from jaxrank.metrics.registry import CALIBRATION, METRICS, probability_names, ranking_names
from jaxrank.validate import nearest

FLAG = "--fail-if"
SURELY, LIKELY, POSSIBLY = "surely", "likely", "possibly"
_CERTAINTIES = (SURELY, LIKELY, POSSIBLY)
GRAMMAR = (
    "'TASK/METRIC > BOUND', 'TASK/METRIC < BOUND' or 'TASK/METRIC outside LOW..HIGH', then perhaps"
    f" {', '.join(_CERTAINTIES[:-1])} or {POSSIBLY}. A bound with a sign, such as +0.001 or +0.1%,"
    " is compared with the difference to --against, and one without with the metric itself"
)
_CONDITION = re.compile(
    rf"\s*(?P<task>.+)/(?P<metric>[\w@]+)\s*(?P<relation>>|<|\boutside\b)\s*(?P<bounds>\S+?)"
    rf"(\s+(?P<certainty>{'|'.join(_CERTAINTIES)}))?\s*",
    re.DOTALL,
)
_BOUND = re.compile(r"(?P<sign>[+-]?)(?P<number>(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)(?P<percent>%?)")


class Span(NamedTuple):
    """A metric or a difference with its interval. NaN where undefined."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Span":
        return Span(*(number * factor for number in self))


class Condition(NamedTuple):
    """A parsed condition.

    text: as it was written.
    relation: ">", "<" or "outside".
    bounds: one number, or two with "outside". Of a percentage a hundredth of it.
    is_difference: compares the difference to the other model, not the metric.
    is_relative: compares the difference divided by the other model's metric.
    certainty: "surely": the whole interval fulfils the condition; "likely": the estimate does;
        "possibly": a part of the interval does.
    """

    text: str
    task: str
    metric: str
    relation: str
    bounds: tuple[float, ...]
    is_difference: bool
    is_relative: bool
    certainty: str = SURELY

    def holds(self, span: Span) -> bool | None:
        """Returns True if the condition is fulfilled, None if what it needs is undefined."""
        value, low, high = span
        needed = (value,) if self.certainty == LIKELY else (low, high)
        if any(math.isnan(number) for number in needed):
            return None
        smallest, largest = {
            SURELY: (low, high),
            LIKELY: (value, value),
            POSSIBLY: (high, low),
        }[self.certainty]
        if self.relation == ">":
            return smallest > self.bounds[0]
        if self.relation == "<":
            return largest < self.bounds[0]
        return largest < self.bounds[0] or smallest > self.bounds[1]


def parse(text: str) -> Condition:
    """Parses a condition.

    Raises:
        InputError: it does not follow the grammar.
    """
    matched = _CONDITION.fullmatch(text)
    if matched is None:
        raise _invalid(text)
    relation = matched["relation"]
    texts = matched["bounds"].split("..") if relation == "outside" else [matched["bounds"]]
    bounds = [_BOUND.fullmatch(bound) for bound in texts]
    if len(bounds) != 1 + (relation == "outside") or None in bounds:
        raise _invalid(text)
    forms = {(bool(b["sign"]), bool(b["percent"])) for b in bounds if b is not None}
    if len(forms) > 1:
        raise _invalid(text, "LOW and HIGH must both have a sign or a % sign, or both have none")
    ((is_difference, is_relative),) = forms
    if is_relative and not is_difference:
        raise _invalid(text, "a percentage must have a sign, + or -, because it is of a difference")
    unit = 0.01 if is_relative else 1.0
    numbers = tuple(float(b["sign"] + b["number"]) * unit for b in bounds if b is not None)
    if not all(math.isfinite(number) for number in numbers):
        raise _invalid(text, "a bound must be a finite number")
    if len(numbers) == 2 and not numbers[0] < numbers[1]:
        raise _invalid(text, "LOW must be below HIGH")
    return Condition(
        text.strip(),
        matched["task"],
        matched["metric"],
        relation,
        numbers,
        is_difference,
        is_relative,
        matched["certainty"] or SURELY,
    )


def _invalid(text: str, why: str = "") -> InputError:
    return InputError(f"{FLAG}: must be {GRAMMAR}: found {text!r}{why and f', where {why}'}.")


def parse_all(texts: Sequence[str], *, has_other: bool) -> list[Condition]:
    """Parses conditions, before anything is read.

    Args:
        has_other: there is another model to compare with.

    Raises:
        InputError: a condition does not follow the grammar, or needs another model.
    """
    conditions = [parse(text) for text in texts]
    for condition in conditions:
        if condition.is_difference and not has_other:
            raise InputError(
                f"{FLAG}: {condition.text!r} compares with another model, because its bound has a"
                " sign, so --against must name a run: found none."
            )
    return conditions


def check_metrics(
    conditions: Sequence[Condition],
    tasks: Mapping[str, Task],
    ranked: Collection[str] = (),
    k: int = 0,
) -> None:
    """Checks that each condition names a metric of a task.

    Args:
        ranked: tasks that are trained by ranking alone, without metrics of probabilities.
        k: number of first ranks of the metrics of requests. 0: the data has no requests.

    Raises:
        InputError: it does not, with the grammar.
    """
    known = [
        f"{task.name}/{name}"
        for task in tasks.values()
        for name in (
            *(metric.name for metric in METRICS[task.kind]),
            CALIBRATION,
            *(ranking_names(task.kind, k) if k else ()),
        )
    ]
    for condition in conditions:
        name = f"{condition.task}/{condition.metric}"
        if name not in known:
            raise InputError(
                f"{FLAG}: {condition.text!r}: TASK/METRIC must be one of {', '.join(known)}: found"
                f" {name!r}{nearest(name, known)}.{_hint(condition.metric, k)} A condition is"
                f" {GRAMMAR}."
            )
        kind = tasks[condition.task].kind
        if condition.task in ranked and condition.metric in probability_names(kind):
            raise InputError(
                f"{FLAG}: {condition.text!r}: must not be about probabilities: found"
                f" {condition.metric!r} of {condition.task!r}, which is trained by ranking alone"
                " and has none. A gate judges such a task by its metrics of requests, and a binary"
                " one by its AUC too."
            )


def _hint(metric: str, k: int) -> str:
    """Says what the metrics of requests depend on, if an unknown metric looks like them."""
    base = metric.partition("@")[0]
    if not any(base == name.partition("@")[0] for name in ranking_names("binary", 1)):
        return ""
    if not k:
        return " Metrics of requests need data with features.group."
    return f" The number of first ranks is eval.top_k of the run, {k}."
