import examples
import jax
import numpy as np
import pytest
import tiny

from jaxrank import mesh as meshes
from jaxrank.build import make_predictor, make_step_spec
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.step import weights_of


def test_one_program_serves_the_whole_run():
    c = tiny.config(batch_size=64)
    lay = examples.small_layout()
    mesh = meshes.make_mesh(devices=2)
    step_spec = make_step_spec(c, lay, mesh, num_steps=8, room={"dim8": 1.0})
    program = CompiledSteps(step_spec, mesh, BatchShape(64, 8, {"dim8": 40}))
    state = program.init()
    for seed in range(3):
        batches = [
            examples.random_batch(lay, 64, seed=seed + i, group=8, capacity=40) for i in (0, 9)
        ]
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
        state, _ = program.train(state, meshes.put_batch(stacked, mesh, leading=1))
    assert program.train._cache_size() == 1


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_what_predicts_is_of_the_weights_of_a_state_and_needs_nothing_else(ema_decay):
    c = tiny.config(batch_size=64, ema_decay=ema_decay, task_weighting="uncertainty")
    c.model.norm = "batch"
    lay, mesh, room = examples.small_layout(), meshes.make_mesh(devices=2), {"dim8": 1.0}
    step_spec = make_step_spec(c, lay, mesh, num_steps=8, room=room)
    program = CompiledSteps(step_spec, mesh, BatchShape(64, 8, {"dim8": 40}))
    c.optim.dense.name = c.optim.tables.name = "no such optimizer"
    predictor = make_predictor(c, lay, mesh, room=room)
    assert predictor.weights_shape == weights_of(program.state_shape)
    assert predictor.weights_sharding == weights_of(program.state_sharding)
    weights = weights_of(program.init())
    batch = meshes.put_batch(examples.random_batch(lay, 64, seed=0, group=8, capacity=40), mesh)
    jax.tree.map(
        np.testing.assert_array_equal,
        predictor.predict(weights, batch),
        program.predictor.predict(weights, batch),
    )
