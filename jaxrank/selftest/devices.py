"""Compares training on all devices with training on one."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.program import CompiledSteps
from jaxrank.run import Run
from jaxrank.selftest.check import NOT_APPLICABLE, Verdict, passes
from jaxrank.step import prediction_weights

# Largest difference over the largest number. Sums of float32 in another order differ by far less,
# and a lost gradient by far more. Other devices round products more.
_TOLERANCE = {"cpu": 1e-3}
_OTHERS = 1e-2

STORE = "data"  # the store of the run, in the folder of the self-test


class Trained(NamedTuple):
    """Losses of the steps f32[steps] and logits of one more batch f32[B, tasks]."""

    losses: np.ndarray
    logits: np.ndarray


def check(run: Run, executions: int, *, each_device: bool) -> Verdict:
    """Fails if a device alone trains another model than all devices together.

    Every process compares one of its devices, on batches that it reads alone.

    Args:
        executions: number of executions of `steps_per_execution` steps.
        each_device: compare all devices, not only the first of each process.
    """
    mesh = run.program.mesh
    if mesh.size == 1 and not each_device:
        return Verdict(NOT_APPLICABLE, "one device")
    together = _train(run.program, run, run.batches, mesh, executions)
    devices = mesh.local_devices if each_device else mesh.local_devices[:1]
    differences = [
        relative_difference(zip(together, _alone(run, device, executions), strict=True))
        for device in devices
    ]
    largest = int(np.argmax(differences))  # the first NaN if there is one
    worst, where = differences[largest], devices[largest]
    tolerance = _TOLERANCE.get(meshes.platform(mesh), _OTHERS)
    steps = executions * run.steps_per_execution
    return passes(
        worst <= tolerance,
        f"{steps} steps on {mesh.size} devices and on {where} alone differ by {worst:.1e}"
        f" (at most {tolerance:.0e})",
        "Run `jaxrank selftest --full`, which compares each device, and take a device that differs"
        " out of the cluster. If all differ, the exchange is wrong: report it as an issue.",
    )


def _alone(run: Run, device: Any, executions: int) -> Trained:
    """Trains on one device of this process, with the whole batches."""
    builder, program = run.builder, run.program
    mesh = meshes.device_mesh([device], 1)
    step_spec = builder.step_spec(
        program.predictor.layout, mesh, num_steps=run.run_schedule.num_steps, room={}
    )
    single = CompiledSteps(step_spec, mesh, program.shape)
    batches = runs.make_batches(
        dataclasses.replace(builder.data, num_workers=0, prefetch_batches=0),
        builder.pack(run.train_split),
        program.predictor.layout,
        batch_size=program.shape.batch_size,
        steps_per_execution=run.steps_per_execution,
        seed=program.step_spec.seed,
        num_steps=run.run_schedule.num_steps,
        room_steps=run.batches.room_steps,
        room=run.batches.list_room.measured,
        process=(0, 1),
    )
    try:
        return _train(single, run, batches, mesh, executions)
    finally:
        batches.close()


def _train(
    program: CompiledSteps, run: Run, batches: TrainBatches, mesh: Mesh, executions: int
) -> Trained:
    put = _putter(mesh)
    batches.seek(0)
    state, losses = program.init(run.base_rates), []
    for _ in range(executions):
        state, metrics = program.train(
            state, put(next(batches), 1), np.int32(run.steps_per_execution)
        )
        losses.append(np.asarray(metrics.loss))
    batch = jax.tree.map(lambda x: x[0], next(batches))
    logits, _, _ = program.predictor.predict(prediction_weights(state), put(batch, 0))
    return Trained(np.concatenate(losses), np.asarray(logits))


def _putter(mesh: Mesh) -> Callable[[Any, int], Any]:
    """Returns a function that puts a batch on a mesh, of all processes or of one device."""
    if mesh.size == 1:
        device = mesh.devices.flat[0]
        return lambda batch, leading: jax.device_put(batch, device)
    return lambda batch, leading: meshes.put_batch(batch, mesh, leading)


def relative_difference(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the largest difference of two arrays, over the largest number of the second one.

    It is NaN if a number is NaN.
    """
    tiny = np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore"):
        each = [np.abs(a - b).max() / np.maximum(np.abs(b).max(), tiny) for a, b in pairs]
    return float(np.max(each))
