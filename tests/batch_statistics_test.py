"""Compares the batch norm statistics of a checkpoint with statistics of all examples at once."""

import functools

import examples
import jax
import numpy as np
import pytest
import tiny
from runs import newest

from jaxrank import mesh as meshes
from jaxrank.batch_statistics import reestimated, steps_read
from jaxrank.build import Builder
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.step import prediction_weights

pytestmark = pytest.mark.usefixtures("shared_programs")
BATCH, STEPS = 64, 3


class Batches:
    """Batches of calls of one step, each a function of the step alone."""

    def __init__(self, layout):
        self.stacked = [examples.random_batch(layout, BATCH, seed=k) for k in range(STEPS)]
        self._step = 0

    def seek(self, step):
        self._step = step

    def __next__(self):
        self._step += 1
        return jax.tree.map(lambda x: x[None], self.stacked[self._step - 1])

    def close(self):
        pass


@functools.cache
def make_program(devices, layout, batch_size=BATCH, **changes):
    c = tiny.config(batch_size=batch_size, **changes)
    c.model.norm, c.model.mlp_units, c.model.cross_layers = "batch", (8,), 1
    mesh = meshes.make_mesh(devices=devices)
    step_spec = Builder(c, layout.schema).step_spec(
        layout, mesh, num_steps=1, room={s.name: 1.0 for s in layout.stacks}
    )
    return CompiledSteps(
        step_spec, mesh, BatchShape(batch_size, 4, {s.name: 24 for s in layout.stacks})
    )


def norm_statistics(model_state):
    return model_state["batch_stats"]["tower"]["norm_0"]


@pytest.mark.parametrize(("devices", "decay"), [(1, 0.0), (8, 0.9)])
def test_they_are_those_of_all_examples_that_count_together(devices, decay):
    layout = examples.small_layout()
    batches, program = Batches(layout), make_program(devices, layout, ema_decay=decay)
    state = program.init()
    new = reestimated(program, batches, STEPS, state)
    result = norm_statistics((new.average if decay else new).model_state)
    whole = make_program(1, layout, batch_size=BATCH * STEPS)
    together = jax.tree.map(lambda *parts: np.concatenate(parts), *batches.stacked)
    counted = (together.weights > 0).any(axis=1)
    assert 0 < counted.sum() < len(counted)
    expected, count = whole.moments(prediction_weights(whole.init()), together, np.int32(0))
    assert count == counted.sum()
    for name, array in norm_statistics(expected).items():
        np.testing.assert_allclose(result[name], array, rtol=1e-4, atol=1e-6)
    assert result["mean"].sharding == norm_statistics(state.model_state)["mean"].sharding
    # Nothing else has changed, and neither has what is trained where an average predicts.
    same = new._replace(model_state=state.model_state, average=state.average)
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_a_checkpoint_holds_those_of_its_own_layers(variants):
    """A run leaves what its last batches give for the weights that it saved."""
    workdir, _, _ = variants.unbroken("experts")
    job, state = newest(variants.config("experts"), workdir)
    again = reestimated(job.program, job.recent_batches, int(state.step), state)
    jax.tree.map(np.testing.assert_array_equal, again.model_state, state.model_state)


def test_the_last_batches_are_read_and_not_more_than_there_are():
    assert steps_read(4096, 100) == range(92, 100)
    assert steps_read(128, 1000) == range(872, 1000)
    assert steps_read(128, 16) == range(16)
