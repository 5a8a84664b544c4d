"""Writes the last batches of a run when a loss is not finite or spikes."""

from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrank import json_files
from jaxrank.errors import InputError
from jaxrank.features import Batch, Lists
from jaxrank.runtime import processes

_MAX_WRITTEN_STEPS = 10  # maximum number of steps for which one run of the program writes batches
# Executions between the one whose losses are checked and the one whose batches were transferred
# last: one is queued, one has its batches on the devices, and losses are read one execution late.
_BETWEEN = 3


class LastBatches:
    """Keeps the batches of the last steps on the host, each process its own share.

    Args:
        workdir: of the run.
        steps: number of steps to keep. 0: none.

    Raises:
        InputError: `steps` is negative.
    """

    def __init__(self, workdir: Path, steps: int):
        if steps < 0:
            raise InputError(f"--debug-batches: must be 0 or more: found {steps}.")
        self._folder = workdir / "debug"
        self._steps, self._steps_per_execution, self._next = steps, 1, 0
        self._executions: deque[tuple[int, Batch]] = deque()
        self._written = 0

    def begin(self, step: int, steps_per_execution: int) -> None:
        """Sets the number of steps before the next batches, and the number of a whole execution."""
        self._next, self._steps_per_execution = step, steps_per_execution
        executions = -(-self._steps // steps_per_execution) + 1 + _BETWEEN
        self._executions = deque(maxlen=executions)

    def keep(self, batches: Batch) -> None:
        """Copies the batches of the next execution, which have a leading axis of steps."""
        if self._steps:
            # A copy, because the input pipeline reuses the memory.
            self._executions.append((self._next, jax.tree.map(np.array, batches)))
            self._next = self._end(self._next)

    def _end(self, step: int) -> int:
        """The step at which an execution that begins after `step` ends, unless the run ends
        before."""
        return (step // self._steps_per_execution + 1) * self._steps_per_execution

    def write(self, step: int, why: str, checkpoint: str, *, at_the_end: bool = False) -> str:
        """Writes the batches up to `step` to WORKDIR/debug/STEP, and returns a sentence about it.

        There is one file step-000317.process-0.npz per step and process, see `load`.

        Args:
            step: counted from 1.
            why: reason, for about.json.
            checkpoint: newest checkpoint, for about.json.
            at_the_end: write even if the maximum number of steps per run is reached.
        """
        if not self._steps or (self._written >= _MAX_WRITTEN_STEPS and not at_the_end):
            return ""
        self._written += 1
        folder = self._folder / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        for first, batches in list(self._executions):
            for i in range(self._end(first) - first):
                number = first + i + 1
                if step - self._steps < number <= step:
                    _save(folder, number, jax.tree.map(lambda x, i=i: x[i], batches))
        if processes.is_first():
            description = {"step": step, "why": why, "checkpoint": checkpoint}
            json_files.write(folder / "about.json", description)
        return f" The batches up to it are in {folder}."


def _save(folder: Path, number: int, batch: Batch) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
    file = folder / f"step-{number:06d}.process-{processes.place()[0]}.npz"
    np.savez_compressed(file, **arrays)


def load(path: str | Path) -> Batch:
    """Loads the share of a batch that `LastBatches` wrote, without an axis of steps."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    ids: dict[str, Any] = {}
    lists: dict[str, dict[str, Any]] = {}
    others = {}
    for name, array in arrays.items():
        field, *rest = name.split("/")
        if field == "ids":
            ids[rest[0]] = array
        elif field == "lists":
            lists.setdefault(rest[0], {})[rest[1]] = array
        else:
            others[field] = array
    return Batch(ids=ids, lists={name: Lists(**parts) for name, parts in lists.items()}, **others)
