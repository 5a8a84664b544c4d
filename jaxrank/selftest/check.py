"""The result of a check, and the function that runs one in all processes."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrank.runtime import processes

PASS = "pass"
FAIL = "fail"
NOT_APPLICABLE = "not applicable"

# All checks in the order in which they run.
NAMES = (
    "processes",
    "versions",
    "native code",
    "shared directory",
    "rename",
    "lock",
    "space",
    "exchange",
    "all-reduce",
    "devices",
    "input",
    "resume",
)

# Checks of the file system.
ON_FILES = ("shared directory", "rename", "lock", "space")


class Check(NamedTuple):
    """The result of one check.

    name: one of NAMES.
    status: PASS, FAIL or NOT_APPLICABLE.
    finding: what was measured or observed.
    advice: what to do if it failed.
    seconds: duration.
    """

    name: str
    status: str
    finding: str
    advice: str = ""
    seconds: float = 0.0


class Verdict(NamedTuple):
    """The status of a check in one process, the finding, and what to do; see `Check`."""

    status: str
    finding: str
    advice: str = ""


def passes(condition: bool, finding: str, advice: str) -> Verdict:
    """Returns a verdict that has the advice only if the check fails."""
    return Verdict(PASS, finding) if condition else Verdict(FAIL, finding, advice)


def run(name: str, function: Callable[[], Verdict], advice: str) -> Check:
    """Runs a check in all processes. It fails if it fails in one of them.

    Args:
        advice: what to do if the function raises.
    """
    started = time.monotonic()
    try:
        verdict = function()
    # Every error is a finding about this machine, whatever library raises it.
    except Exception as error:
        text = " ".join(str(error).split()) or repr(error)
        verdict = Verdict(FAIL, f"{type(error).__name__}: {text[:400]}", advice)
    verdicts: list[list[Any]] = processes.gather_values(list(verdict))
    failed = [i for i, (status, *_) in enumerate(verdicts) if status == FAIL]
    first = failed[0] if failed else 0
    status, finding, advice = verdicts[first]
    if first:
        finding = f"process {first}: {finding}"
    return Check(name, status, finding, advice, time.monotonic() - started)
