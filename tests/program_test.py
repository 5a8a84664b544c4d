import examples
import jax
import numpy as np
import tiny

from jaxrank import mesh as meshes
from jaxrank.build import make_trainee
from jaxrank.program import BatchShape, Program


def test_one_program_serves_the_whole_run():
    c = tiny.config(batch_size=64)
    lay = examples.small_layout()
    mesh = meshes.make_mesh(devices=2)
    trainee = make_trainee(c, lay, mesh, num_steps=8, room={"dim8": 1.0})
    program = Program(trainee, mesh, BatchShape(64, 8, {"dim8": 40}))
    state = program.init()
    for seed in range(3):
        batches = [
            examples.random_batch(lay, 64, seed=seed + i, group=8, capacity=40) for i in (0, 9)
        ]
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
        state, _ = program.train(state, meshes.put_batch(stacked, mesh, leading=1))
    assert program.train._cache_size() == 1
