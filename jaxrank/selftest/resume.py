"""Compares a run that was killed and resumed with an unbroken one."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrank import json_files
from jaxrank.checkpoints import record
from jaxrank.runtime import processes
from jaxrank.selftest.check import FAIL, Verdict, passes
from jaxrank.train import train

UNBROKEN, KILLED = "unbroken", "killed"  # workdirs in the folder of the self-test
_TOLERANCE = 1e-2  # relative, of losses on devices whose sums have no fixed order


def run_unbroken(config: ConfigDict, folder: Path) -> None:
    """Trains to the end."""
    train(config, folder / UNBROKEN, report=_ignore, quiet=True)


def run_and_kill(config: ConfigDict, folder: Path) -> None:
    """Trains, and kills process 0 as soon as this process has saved a checkpoint."""
    checkpoints = folder / KILLED / "checkpoints"
    before = _saved(checkpoints)

    def kill(_: str) -> None:
        if _saved(checkpoints) - before:
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, folder / KILLED, report=kill, quiet=True)


def resume(config: ConfigDict, folder: Path) -> Verdict:
    """Resumes the killed run, and compares it with the unbroken one."""
    lines: list[str] = []
    train(config, folder / KILLED, report=lines.append, quiet=True)
    resumed = [line for line in lines if line.startswith("Resuming")]
    verdict = None
    if processes.is_first():
        if resumed:
            verdict = list(compare(folder, resumed[0], exact=jax.default_backend() == "cpu"))
        else:
            verdict = list(Verdict(FAIL, "the run started again from step 0", ADVICE))
    status, text, advice = processes.broadcast_value(verdict)
    return Verdict(status, text, advice)


def compare(folder: Path, resumed: str, *, exact: bool) -> Verdict:
    """Compares the records and the last checkpoints of the two runs.

    Args:
        resumed: the report of the resumed run.
        exact: all bits must be equal.
    """
    runs = [folder / name for name in (UNBROKEN, KILLED)]
    unbroken, killed = (_records(workdir / "metrics.jsonl") for workdir in runs)
    differs = _first_difference(unbroken, killed, 0.0 if exact else _TOLERANCE)
    if not differs and exact and len({_checksums(workdir) for workdir in runs}) > 1:
        differs = "the last checkpoints have other checksums"
    return passes(
        not differs,
        differs
        or f"{resumed}: equal to the unbroken run in {len(unbroken)} records"
        f"{' and in all bits of the last checkpoint' if exact else ''}",
        ADVICE,
    )


ADVICE = (
    "Check the rows `rename`, `lock` and `shared directory`, and the memory of the hosts. If they"
    " pass, report it as an issue with the log of this command."
)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    timed = ("examples_per_second", "seconds")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def _first_difference(
    unbroken: list[dict[str, Any]], killed: list[dict[str, Any]], tolerance: float
) -> str:
    if len(unbroken) != len(killed):
        return f"{len(unbroken)} and {len(killed)} records"
    for expected, record_ in zip(unbroken, killed, strict=True):
        for name in sorted(expected.keys() | record_.keys()):
            values = expected.get(name), record_.get(name)
            if not _are_close(*values, tolerance):
                return f"{name} of step {expected['step']} is {values[0]} and {values[1]}"
    return ""


def _are_close(expected: Any, value: Any, tolerance: float) -> bool:
    if expected == value:
        return True
    numbers = all(isinstance(v, int | float) for v in (expected, value))
    return numbers and abs(expected - value) <= tolerance * max(abs(expected), abs(value))


def _checksums(workdir: Path) -> str:
    newest = max(_saved(workdir / "checkpoints"))
    return json_files.to_text(record.read(workdir / "checkpoints" / str(newest))["checksums"])


def _saved(checkpoints: Path) -> set[int]:
    """Returns the steps of complete checkpoints."""
    if not checkpoints.is_dir():
        return set()
    return {int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()}


def _ignore(_: str) -> None:
    """Drops a line of a report."""
