import examples
import jax
import numpy as np
import pytest
import tiny
from sharded import logical

from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.step import prediction_weights


def test_one_program_serves_the_whole_run():
    c = tiny.config(batch_size=64)
    lay = examples.small_layout()
    mesh = meshes.make_mesh(devices=2)
    step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=8, room={"dim8": 1.0})
    program = CompiledSteps(step_spec, mesh, BatchShape(64, 8, {"dim8": 40}))
    state = program.init()
    for count in (2, 2, 1):  # the last execution may be shorter
        batches = [
            examples.random_batch(lay, 64, seed=count + i, group=8, capacity=40) for i in (0, 9)
        ]
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
        batch = meshes.put_batch(stacked, mesh, leading=1)
        state, _ = program.train(state, batch, np.int32(count))
    assert program.train._cache_size() == 1
    assert int(state.step) == 5


@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.9, "on_nonfinite": "skip"}])
def test_batches_behind_the_last_step_change_nothing(changes, monkeypatch):
    """Neither where the loop ends with the steps, nor where those behind are masked, as on GPU."""
    c = tiny.config(batch_size=64, ema_decay=changes.get("ema_decay", 0.0))
    c.watch.on_nonfinite = changes.get("on_nonfinite", "stop")
    c.optim.dense.name, c.model.cross_layers = "adamw", 1
    c.optim.dense.warmup_steps = c.optim.tables.warmup_steps = 5
    c.optim.tables.name = "lazy_adam"
    c.embedding.l2_scope, c.embedding.l2 = "table", 0.1
    c.model.norm = "batch"
    lay = examples.small_layout()
    mesh = meshes.make_mesh(devices=2)
    batches = [examples.random_batch(lay, 64, seed=i, group=8, capacity=40) for i in range(3)]

    def train_steps(platforms, steps, count):
        monkeypatch.setattr("jaxrank.program._COUNTS_ON_HOST", platforms)
        step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=8, room={"dim8": 1.0})
        program = CompiledSteps(step_spec, mesh, BatchShape(64, 8, {"dim8": 40}))
        stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches[:steps])
        batch = meshes.put_batch(stacked, mesh, leading=1)
        state, metrics = program.train(program.init(), batch, np.int32(count))
        return jax.device_get((state._replace(scratch={}), metrics.loss[:count]))

    expected = train_steps((), 2, 2)
    assert expected[0].step == 2
    for platforms in ((), ("cpu",)):
        result = train_steps(platforms, 3, 2)
        # By another program, whose multiplications and additions are contracted otherwise.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), result, expected)
        assert result[0].step == 2


def test_one_norm_clips_dense_parameters_and_rows_on_any_mesh():
    """A step of SGD without a limit has the gradients that NumPy clips."""
    c = tiny.config(batch_size=64)
    for section in (c.optim.dense, c.optim.tables):
        section.name, section.base_learning_rate = "sgd", 64.0  # 1 for this batch
    lay = examples.small_layout()
    batch = jax.tree.map(
        lambda x: x[None], examples.random_batch(lay, 64, seed=1, group=8, capacity=40)
    )

    def changes(devices, replicas, **clip):
        c.optim.dense.update(clip)
        mesh = meshes.make_mesh(devices=devices, replicas=replicas)
        step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=8, room={"dim8": 1.0})
        program = CompiledSteps(step_spec, mesh, BatchShape(64, 8, {"dim8": 40}))
        old = jax.device_get(program.init())
        new, metrics = program.train(
            program.init(), meshes.put_batch(batch, mesh, leading=1), np.int32(1)
        )
        rows = [logical(step_spec.embedding, s.tables)["dim8"][0] for s in (new, old)]
        dense = jax.tree.map(np.subtract, jax.device_get(new.params), old.params)
        rates = metrics.learning_rate[0], metrics.table_learning_rate[0]
        return jax.tree.leaves(dense), [rows[0] - rows[1]], rates, float(metrics.gradient_norm[0])

    dense, rows, rates, _ = changes(1, 1)
    squares = [
        sum(np.square(a / rate, dtype=np.float64).sum() for a in arrays)
        for arrays, rate in zip((dense, rows), rates, strict=True)
    ]
    assert min(squares) > 0.01 * max(squares)
    norm = np.sqrt(sum(squares))
    clipped = changes(8, 2, clip_norm=norm / 3, clip_scope="all")
    assert clipped[3] == pytest.approx(norm, rel=1e-4)
    for arrays, expected in zip(clipped[:2], (dense, rows), strict=True):
        for a, b in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(a, b / 3, rtol=1e-3, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_what_predicts_is_of_the_weights_of_a_state_and_needs_nothing_else(ema_decay):
    c = tiny.config(batch_size=64, ema_decay=ema_decay, task_weighting="uncertainty")
    c.model.norm = "batch"
    lay, mesh, room = examples.small_layout(), meshes.make_mesh(devices=2), {"dim8": 1.0}
    step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=8, room=room)
    program = CompiledSteps(step_spec, mesh, BatchShape(64, 8, {"dim8": 40}))
    c.optim.dense.name = c.optim.tables.name = "no such optimizer"
    predictor = Builder(c, lay.schema).predictor(lay, mesh, room=room)
    assert predictor.weights_shape == prediction_weights(program.state_shape)
    assert predictor.weights_sharding == prediction_weights(program.state_sharding)
    weights = prediction_weights(program.init())
    batch = meshes.put_batch(examples.random_batch(lay, 64, seed=0, group=8, capacity=40), mesh)
    jax.tree.map(
        np.testing.assert_array_equal,
        predictor.predict(weights, batch),
        program.predictor.predict(weights, batch),
    )
