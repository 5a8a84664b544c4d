"""Ranges of values of config fields: the option `range` of studies that search."""

import ast
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from scipy import stats

from jaxrank import config_files
from jaxrank.errors import InputError

FORMS = "log:LOW..HIGH, linear:LOW..HIGH, int:LOW..HIGH or VALUE|VALUE"
_INTERVAL = re.compile(r"(log|linear|int):(.+)\.\.(.+)")
_DIGITS = 4  # significant digits of a drawn number


class Range(NamedTuple):
    """Values of a field.

    scale: "log", "linear", "int" or "choices".
    low, high: ends of the interval, both included. Not used by choices.
    """

    path: str
    scale: str
    low: float = 0.0
    high: float = 0.0
    choices: Sequence[Any] = ()

    def value(self, quantile: float) -> Any:
        """Returns the value at a quantile in [0, 1) of the distribution."""
        if self.scale == "choices":
            return self.choices[int(quantile * len(self.choices))]
        if self.scale == "int":
            drawn = stats.randint.ppf(quantile, int(self.low), int(self.high) + 1)
            return min(max(int(drawn), int(self.low)), int(self.high))
        if self.scale == "log":
            drawn = stats.loguniform.ppf(quantile, self.low, self.high)
        else:
            drawn = stats.uniform.ppf(quantile, self.low, self.high - self.low)
        return min(max(float(f"{drawn:.{_DIGITS}g}"), self.low), self.high)


def parse_ranges(
    entries: Sequence[str], config: ConfigDict, *, fixed: Sequence[str]
) -> list[Range]:
    """Parses entries of the form FIELD=RANGE.

    Args:
        fixed: fields that must not have a range.

    Raises:
        InputError: there is no range, a range is empty or of another form, or its field is fixed,
            unknown or repeated.
    """
    ranges: dict[str, Range] = {}
    for entry in entries:
        path, equals, text = (part.strip() for part in entry.partition("="))
        where = f"--range={entry}"
        if not path or not equals:
            raise InputError(f"--range: must be FIELD=RANGE: found {entry!r}.")
        if path in ranges:
            raise InputError(f"{where}: {path} must have one range: found two.")
        if path in fixed:
            raise InputError(
                f"{where}: must be another field than {', '.join(fixed)}, which the study sets so"
                " that points are compared at equal examples and seeds."
            )
        ranges[path] = _range(path, text, where)
        _check_field(ranges[path], config, where)
    if not ranges:
        raise InputError(
            "--range: must be given: found none. Declare the range of a field, such as"
            " --range=optim.dense.base_learning_rate=log:1e-4..1e-1."
        )
    return list(ranges.values())


def _range(path: str, text: str, where: str) -> Range:
    match = _INTERVAL.fullmatch(text)
    if not match:
        texts = [choice.strip() for choice in text.split("|")]
        if not all(texts) or len(texts) < 2:
            raise InputError(f"{where}: must be {FORMS}: found {text!r}.")
        return Range(path, "choices", choices=[_literal(choice) for choice in texts])
    scale = match[1]
    try:
        low, high = (int(end) if scale == "int" else float(end) for end in match.groups()[1:])
    except ValueError as error:
        kind = "whole numbers" if scale == "int" else "numbers"
        raise InputError(f"{where}: ends must be {kind}: found {match[2]}, {match[3]}.") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(
            f"{where}: must have a low end below its high end: found the empty range"
            f" {match[2]}..{match[3]}."
        )
    if scale == "log" and low <= 0:
        raise InputError(f"{where}: a log range must be above 0: found {match[2]}.")
    return Range(path, scale, low, high)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _check_field(declared: Range, config: ConfigDict, where: str) -> None:
    """Raises InputError if the field does not exist. Values of existing ones may be invalid."""
    if declared.path not in config_files.flatten(config_files.to_plain(config)):
        try:
            config_files.overridden(config, {declared.path: declared.value(0.5)})
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
