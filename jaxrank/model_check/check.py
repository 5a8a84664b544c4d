"""Checks the properties of a model that the rest of the system relies on."""

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxrank.config_files import error_line
from jaxrank.errors import InputError
from jaxrank.model_check import functions as pure
from jaxrank.model_check import programs
from jaxrank.model_check.case import DEVICES, Case, make
from jaxrank.model_check.training import Training
from jaxrank.report import Report
from jaxrank.selftest.check import FAIL, NOT_APPLICABLE, Check, Verdict
from jaxrank.validate import check_choice

TOPOLOGIES = ("v3-8", "h200-1")
# In the order in which they are checked. If one of the first fails, others may not run.
PROPERTIES = (
    "tracing",
    "shapes",
    "dtypes",
    "train",
    "order",
    "devices",
    "resume",
    "export",
    "onnx",
    "compile",
)
_FIRST = ("tracing", "shapes", "train")
# Errors that name another property than the one that was checked.
_OF_TRACING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)
_OF_TRAIN = ("InvalidRngError", "ModifyScopeVariableError")  # Flax's, by name
_SHAPE = "must return logits of shape"


class Result(NamedTuple):
    """The checks of a model, in order.

    model: its name.
    """

    model: str
    checks: list[Check]

    @property
    def failed(self) -> list[str]:
        """The names of the properties that do not hold."""
        return [check.name for check in self.checks if check.status == FAIL]


def check_model(
    config: ConfigDict,
    *,
    workdir: str = "",
    topologies: Sequence[str] = TOPOLOGIES,
    skip: Collection[str] = (),
    report: Report,
) -> Result:
    """Checks the model of a config on random examples of its features.

    Args:
        workdir: of a run, whose store is read if it exists. May be empty; see `case.make`.
        topologies: accelerators to compile for.
        skip: properties that are not checked.
        report: gets lines to print.

    Raises:
        InputError: the config is invalid, there is no data, or a name does not exist.
    """
    for name in skip:
        check_choice("--skip", name, PROPERTIES)
    case = make(config, workdir)
    checks: list[Check] = []
    training = Training(case)
    try:
        for name, function in _functions(case, training, topologies, skip):
            blocked = [c.name for c in checks if c.status == FAIL and c.name in _FIRST]
            if blocked:
                checks.append(Check(name, NOT_APPLICABLE, f"not run, because {blocked[0]} failed"))
                continue
            report(f"Checking {name}")
            checks.append(_run(name, function))
    finally:
        training.close()
    return Result(case.builder.model_name, _in_order(checks))


def _functions(
    case: Case, training: Training, topologies: Sequence[str], skip: Collection[str]
) -> Iterator[tuple[str, Callable[[], Verdict]]]:
    """Yields the checks in the order in which they run."""
    exports = programs.Exports(case)
    by_name: Mapping[str, Callable[[], Verdict]] = {
        "tracing": lambda: pure.tracing(case),
        "shapes": lambda: pure.shapes(case),
        "dtypes": lambda: pure.dtypes(case),
        "train": lambda: pure.train(case),
        "order": lambda: pure.order(case),
        "devices": training.devices,
        "resume": training.resume,
        "export": exports.stablehlo,
        "onnx": exports.onnx,
    }
    yield from ((name, check) for name, check in by_name.items() if name not in skip)
    if "compile" not in skip:
        for topology in topologies:
            yield f"compile {topology}", functools.partial(programs.compiles, case, topology)


def _run(name: str, function: Callable[[], Verdict]) -> Check:
    """Runs a check. An error of the model is a finding."""
    started = time.monotonic()
    try:
        verdict = function()
    except Exception as error:  # of any kind: it is the user's program
        name = _violated_property(error) or name
        verdict = Verdict(FAIL, _described(error), _ADVICE.get(name, ""))
    return Check(name, *verdict, seconds=time.monotonic() - started)


_ADVICE = {
    "tracing": "Use jnp.where or jax.lax.cond in place of a Python branch on values.",
    "shapes": "Return one number per example and task: self.tasks columns.",
    "train": "Pass `train` on: random numbers and updates of statistics belong to training only.",
}


def _violated_property(error: Exception) -> str:
    """Returns the property that an error violates, or an empty text."""
    if isinstance(error, _OF_TRACING):
        return "tracing"
    if type(error).__name__ in _OF_TRAIN:
        return "train"
    return "shapes" if isinstance(error, InputError) and _SHAPE in str(error) else ""


def _described(error: Exception) -> str:
    """Returns one line about an error of the model, with the line of the user's file."""
    text = " ".join(str(error).split())[:300]
    if not isinstance(error, InputError):
        text = f"{type(error).__name__}: {text}"
    line = error_line(error, "")
    return f"{line}: {text}" if line else text


def _in_order(checks: Sequence[Check]) -> list[Check]:
    """Returns one check per name, in the order of PROPERTIES. A failure replaces what it hides."""
    by_name: dict[str, Check] = {}
    for check in checks:
        known = by_name.get(check.name)
        if known is None or check.status == FAIL:
            by_name[check.name] = check
    return sorted(by_name.values(), key=lambda check: PROPERTIES.index(check.name.split()[0]))


def use_cpus() -> None:
    """Runs everything on `DEVICES` CPU devices, unless JAX has opened its devices."""
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", DEVICES)
    except RuntimeError:  # open: the check reports how many there are
        return


def describe(result: Result) -> str:
    """Formats one line per property, and what to do about those that failed."""
    width = max(len(check.name) for check in result.checks)
    lines = []
    for check in result.checks:
        status = {FAIL: "FAIL", NOT_APPLICABLE: "skip"}.get(check.status, check.status)
        advice = f" {check.advice}" if check.status == FAIL and check.advice else ""
        lines.append(f"{status}  {check.name:<{width}}  {check.finding.rstrip('.')}.{advice}")
    return "\n".join([*lines, "", summary(result)])


def summary(result: Result) -> str:
    """Returns one sentence about all properties."""
    if result.failed:
        count = len(result.checks)
        return f"{result.model}: {len(result.failed)} of {count} properties failed: " + (
            f"{', '.join(result.failed)}."
        )
    return f"{result.model}: no property failed."


def to_json(result: Result) -> dict[str, Any]:
    """Converts the result to plain data."""
    return {
        "model": result.model,
        "checks": [check._asdict() for check in result.checks],
        "error": summary(result) if result.failed else "",
    }
