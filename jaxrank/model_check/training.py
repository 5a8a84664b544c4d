"""Properties of training: the number of devices, and resuming from a checkpoint."""

import functools
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrank import mesh as meshes
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.checkpoints.record import Metric
from jaxrank.features import Batch
from jaxrank.model_check.case import DEVICES, STEPS, Case
from jaxrank.program import CompiledSteps
from jaxrank.selftest.check import NOT_APPLICABLE, Verdict, passes
from jaxrank.selftest.devices import relative_difference
from jaxrank.step import TrainState, prediction_weights

# Largest difference over the largest number, as in `selftest.devices`.
_TOLERANCE = 1e-3


class Trained(NamedTuple):
    """A run of two executions.

    losses: f32[steps].
    logits: f32[B, tasks] of one more batch.
    state: the last state, on the host.
    """

    losses: np.ndarray
    logits: np.ndarray
    state: TrainState


class Training:
    """Trains the case on CPUs. The run on one device is shared by the checks."""

    def __init__(self, case: Case):
        self._case = case
        self._folder = tempfile.TemporaryDirectory(prefix="jaxrank-check-model-")
        self._checkpoints = Checkpoints(self._folder.name)

    def close(self) -> None:
        self._checkpoints.close()
        self._folder.cleanup()

    @functools.cached_property
    def _alone(self) -> Trained:
        """The run on one device, which saves a checkpoint between its executions."""
        program = self._case.program(1)
        batches = _Batches(self._case.executions())
        state, losses = program.init(), []
        for execution in range(2):
            state, loss = _execute(program, state, batches.take(execution))
            losses.append(loss)
            if not execution:
                metric = Metric(None, "", False)
                self._checkpoints.save(STEPS, state, {}, metric)
                self._checkpoints.wait()
        return _trained(program, state, losses, batches.take(2))

    def devices(self) -> Verdict:
        """Fails if several devices train another model than one."""
        if len(jax.devices()) < DEVICES:
            return Verdict(NOT_APPLICABLE, f"found {len(jax.devices())} of {DEVICES} CPU devices")
        program = self._case.program(DEVICES)
        batches = _Batches(self._case.executions())
        state, losses = program.init(), []
        for execution in range(2):
            state, loss = _execute(program, state, batches.take(execution))
            losses.append(loss)
        together = _trained(program, state, losses, batches.take(2))
        alone = self._alone
        difference = relative_difference(
            [(together.losses, alone.losses), (together.logits, alone.logits)]
        )
        return passes(
            difference <= _TOLERANCE,
            f"{2 * STEPS} steps on {DEVICES} devices and on one differ by {difference:.1e}"
            f" (at most {_TOLERANCE:.0e})",
            "A device sees its share of the batch. Use jaxrank.models.Dropout and BatchNorm, or"
            " inputs.share, instead of means or random numbers over the examples of a device.",
        )

    def resume(self) -> Verdict:
        """Fails if a run from a checkpoint differs from the unbroken one in any bit."""
        unbroken = self._alone
        program = self._case.program(1)
        state, _ = self._checkpoints.restore(
            STEPS, program.blank(), program.state_shape, program.state_sharding
        )
        batches = _Batches(self._case.executions())
        state, _ = _execute(program, state, batches.take(1))
        resumed = _trained(program, state, [], batches.take(2))
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(unbroken.state),
            jax.tree.leaves(resumed.state),
            strict=True,
        )
        differing = [
            jax.tree_util.keystr(path)
            for (path, a), b in pairs
            if not np.array_equal(a, b, equal_nan=True)
        ]
        return passes(
            not differing,
            f"{len(differing)} arrays of the resumed state differ, first {differing[0]}"
            if differing
            else f"resumed after {STEPS} of {2 * STEPS} steps, equal to the bit",
            "Keep all state of the model in variables of Flax, and draw random numbers with"
            " self.make_rng.",
        )


class _Batches:
    """Batches by the number of their execution."""

    def __init__(self, executions: Iterator[Batch]):
        self._executions, self._seen = executions, list[Batch]()

    def take(self, execution: int) -> Batch:
        while len(self._seen) <= execution:
            self._seen.append(next(self._executions))
        return self._seen[execution]


def _execute(program: CompiledSteps, state: TrainState, batches: Batch) -> tuple[Any, np.ndarray]:
    placed = _put(program, batches, 1)
    state, metrics = program.train(state, placed, np.int32(STEPS))
    return state, np.asarray(metrics.loss)


def _trained(
    program: CompiledSteps, state: TrainState, losses: list[np.ndarray], following: Batch
) -> Trained:
    batch = _put(program, jax.tree.map(lambda x: x[0], following), 0)
    logits, _, _ = program.predictor.predict(prediction_weights(state), batch)
    host = jax.device_get(state._replace(scratch={}))
    return Trained(np.concatenate([*losses, np.zeros(0, np.float32)]), np.asarray(logits), host)


def _put(program: CompiledSteps, batch: Batch, leading: int) -> Any:
    if program.mesh.size == 1:
        return jax.device_put(batch, program.mesh.devices.flat[0])
    return meshes.put_batch(batch, program.mesh, leading)
