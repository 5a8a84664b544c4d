"""Contribution of each feature, or group of features: runs without it, beside full ones.

Each group is left out in runs of its own, by `features.skip`. They have the seeds of the runs with
all features, and are compared with them seed by seed. Open fields of the config have the values of
the full model in all runs.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrank.data.spec import skip
from jaxrank.errors import InputError
from jaxrank.metrics import run_intervals
from jaxrank.studies import tuning
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
    first_metrics,
    known,
)
from jaxrank.validate import field

FULL = "all features"
_COLUMNS = (
    "left out",
    "features",
    "metric",
    "runs",
    "full",
    "without",
    "difference",
    "low",
    "high",
)
_MAX_SHOWN_GROUPS = 40  # groups in the picture, those with the largest effects
_UNCHOSEN = ("source", "features", "data")  # sections that have no open fields


@dataclasses.dataclass(frozen=True)
class Options:
    group: tuple[str, ...] = field(
        (),
        single=True,
        help="features that are left out together, NAME=PATTERN,PATTERN, or a pattern of features"
        " that are left out one by one; default: each feature",
    )
    runs: int = field(3, help="number of seeds", at_least=2)
    steps: int = field(0, help="steps of each run; 0: the length that the config sets", at_least=0)


def runs(context: Context) -> Runs:
    options, fields = context.options, context.fields
    for entry in options.group:
        _split(entry)  # before any run
    common = tuning.final_evaluation(fields["steps_per_execution"])
    if options.steps:
        common |= {"num_steps": options.steps, "num_epochs": 0.0}
    full = yield from tuning.resolve(common)
    groups = parse_groups(options.group, full["features"])
    common |= _chosen(fields, full["fields"])
    seeds = [fields["seed"] + i for i in range(options.runs)]
    runs_of = {FULL: "full"} | {group: f"without-{_file_name(group)}" for group in groups}
    if len(set(runs_of.values())) < len(runs_of):
        runs_of = {group: f"{name}-{i}" for i, (group, name) in enumerate(runs_of.items())}
    specs = [
        RunSpec(
            f"{name}-seed{seed}",
            common | _skipped(fields["features.skip"], groups.get(group, ())) | {"seed": seed},
        )
        for group, name in runs_of.items()
        for seed in seeds
    ]
    results = iter((yield specs))
    by_group = {group: [next(results) for _ in seeds] for group in runs_of}
    names = first_metrics(by_group[FULL])
    if not names:
        return Outcome(Table(_COLUMNS, []), conclusion=["No run with all features has finished."])
    effects = {group: _effects(by_group[group], by_group[FULL], names) for group in groups}
    order = sorted(  # the groups that the model needs most first
        (group for group, effect in effects.items() if effect),
        key=lambda group: effects[group][names[0]].value,
        reverse=not tuning.is_higher_better(names[0]),
    )
    rows = [
        _row(group, groups[group], name, by_group, effects[group][name])
        for name in names
        for group in order
    ]
    return Outcome(
        Table(_COLUMNS, rows),
        _panels(order, effects, names),
        _conclusion(order, effects, names[0]),
        _notes(order, effects, names[0]),
    )


def parse_groups(entries: Sequence[str], features: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the features of each group.

    Args:
        entries: of the option `group`.
        features: names of all features of the model.

    Raises:
        InputError: a group matches no feature or all of them, or two groups have one name.
    """
    groups: dict[str, tuple[str, ...]] = {}
    for entry in entries or ("*",):
        name, patterns = _split(entry)
        matched = set().union(*(skip.matches("--group", pattern, features) for pattern in patterns))
        members = tuple(feature for feature in features if feature in matched)
        new = {name: members} if name else {member: (member,) for member in members}
        for group, left_out in new.items():
            if groups.setdefault(group, left_out) != left_out or group == FULL:
                raise InputError(f"--group: must have a name of its own: found {group!r} again.")
            if len(left_out) == len(features):
                raise InputError(
                    f"--group: must leave a feature to train on: found {group}, which is all"
                    f" {len(features)} features of the model: {', '.join(features[:20])}."
                )
    return groups


def _split(entry: str) -> tuple[str, list[str]]:
    """Returns the name of a group, empty for features one by one, and its patterns.

    Raises:
        InputError: the entry has another form.
    """
    name, equals, text = entry.rpartition("=")
    patterns = [pattern.strip() for pattern in text.split(",") if pattern.strip()]
    if not patterns or (equals and not name.strip()):
        raise InputError(
            f"--group: must be NAME=PATTERN,PATTERN or a pattern of features: found {entry!r}."
        )
    return name.strip(), patterns


def _skipped(skipped: Sequence[str], left_out: Sequence[str]) -> dict[str, Any]:
    return {"features.skip": (*skipped, *left_out)} if left_out else {}


def _chosen(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns overrides that set open fields of a config to the values chosen for it, by path."""
    chosen = {
        path: tuple(value) if isinstance(value, list) else value
        for path, value in new.items()
        if old.get(path) != value and path.partition(".")[0] not in _UNCHOSEN
    }
    # The name of the model decides on its other fields.
    return dict(sorted(chosen.items(), key=lambda item: item[0] != "model.name"))


def _file_name(group: str) -> str:
    return re.sub(r"[^\w.,=+-]", "_", group)


def _pairs(
    results: Sequence[RunResult], full: Sequence[RunResult]
) -> list[tuple[RunResult, RunResult]]:
    pairs = zip(results, full, strict=True)
    return [(result, other) for result, other in pairs if result.is_done and other.is_done]


def _effects(
    results: Sequence[RunResult], full: Sequence[RunResult], names: Sequence[str]
) -> dict[str, run_intervals.Interval]:
    """Returns the change of each metric by leaving a group out. Empty: no pair has finished."""
    pairs = _pairs(results, full)
    if not pairs:
        return {}
    return {
        name: run_intervals.paired(
            [result.metrics[name] for result, _ in pairs],
            [other.metrics[name] for _, other in pairs],
        )
        for name in names
    }


def _row(
    group: str,
    members: Sequence[str],
    name: str,
    by_group: Mapping[str, Sequence[RunResult]],
    effect: run_intervals.Interval,
) -> tuple[Any, ...]:
    pairs = _pairs(by_group[group], by_group[FULL])
    without, full = (
        run_intervals.mean([results[i].metrics[name] for results in pairs]).value for i in (0, 1)
    )
    return (group, len(members), name, len(pairs), full, without, *known(effect))


def _panels(
    order: Sequence[str],
    effects: Mapping[str, Mapping[str, run_intervals.Interval]],
    names: Sequence[str],
) -> list[Panel]:
    panels = []
    largest = sorted(order, key=lambda group: -abs(effects[group][names[0]].value))[
        :_MAX_SHOWN_GROUPS
    ]
    shown = [group for group in order if group in largest]
    for name in names if shown else ():
        changes = {group: effects[group][name] for group in shown}
        series = Series.interval_series("", changes, style="points")
        panels.append(Panel(f"{name} without a feature", "", f"change of {name}", [series]))
    return panels


def _conclusion(
    order: Sequence[str],
    effects: Mapping[str, Mapping[str, run_intervals.Interval]],
    name: str,
) -> list[str]:
    if not order:
        return ["No run without a group has finished."]

    def change(group: str) -> str:
        return effects[group][name].text()

    first, last = order[0], order[-1]
    text = f"Leaving out {first} changes {name} by {change(first)}"
    if last != first:
        text += (
            f", the worst change of {len(order)} groups, and leaving out {last} by {change(last)}"
        )
    return [
        f"{text}.",
        "This does not add up over groups: similar features cost little one by one and may cost"
        " much together, so leave them out as a group before you delete several.",
    ]


def _notes(
    order: Sequence[str],
    effects: Mapping[str, Mapping[str, run_intervals.Interval]],
    name: str,
) -> list[str]:
    intervals_of = [effects[group][name] for group in order]
    unclear = sum(not (i.low > 0 or i.high < 0) for i in intervals_of)
    return [
        f"{unclear} of {len(order)} intervals of {name} contain 0.",
        f"An interval of {run_intervals.CONFIDENCE:.0%} is for one group alone: of many groups"
        " without effect, some intervals exclude 0 by chance.",
    ]


STUDY = Study(
    "ablation",
    "what each feature or group of features adds to the model",
    Options,
    runs,
    compares_metrics=True,
)
