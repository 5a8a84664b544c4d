"""Abnormal steps are skipped and reported, and their batches are written."""

import functools
import json

import jax
import numpy as np
import pytest
from runs import newest_state, nothing, records, store_config

from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.errors import InputError, RunError
from jaxrank.optim import is_schedule
from jaxrank.run import build
from jaxrank.telemetry import debug_batches
from jaxrank.telemetry.debug_batches import LastBatches
from jaxrank.telemetry.loss_spikes import LossSpikeDetector
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

PUT = meshes.put_batch


def config(store, devices=1, **changes):
    c = store_config(store, **changes)
    c.mesh.devices = devices
    c.eval.every_steps = c.num_steps
    return c


def step_records(workdir):
    return {r["step"]: r for r in records(workdir)}


def poison(monkeypatch, value, steps, steps_per_execution=2):
    """One number of the batches of some steps, counted from 1, becomes another."""
    executions = iter(range(10**6))

    def put(batch, mesh, leading=0):
        if leading:
            first = next(executions) * steps_per_execution
            batch = jax.tree.map(np.array, batch)
            for i in range(steps_per_execution):
                if first + i + 1 in steps:
                    batch.dense[i, -1, 0] = value
        return PUT(batch, mesh, leading)

    monkeypatch.setattr(meshes, "put_batch", put)


@pytest.mark.parametrize(
    ("devices", "scope", "row_optimizer"),
    [(1, "read", "rowwise_adagrad"), (8, "table", "lazy_adam")],
)
def test_a_step_that_is_skipped_changes_nothing(
    store, tmp_path, monkeypatch, devices, scope, row_optimizer
):
    changes = {"devices": devices, "num_steps": 4, "ema_decay": 0.9}
    before = config(store, **changes)
    after = config(store, **changes | {"num_steps": 6})
    for c in (before, after):
        c.watch.on_nonfinite = "skip"
        c.embedding.l2, c.embedding.l2_scope, c.optim.tables.name = 0.01, scope, row_optimizer
        c.model.norm = "batch"
    train(before, tmp_path / "before", report=nothing)
    lines = []
    poison(monkeypatch, np.nan, {5, 6})
    train(after, tmp_path / "after", report=lines.append)

    reported = step_records(tmp_path / "after")
    assert [reported[i]["skipped"] for i in range(1, 7)] == [0, 0, 0, 0, 1, 1]
    assert reported[5]["loss"] is None
    assert any(line.startswith("step 6 skipped, ") and " 2 steps skipped" in line for line in lines)
    expected, result = (
        newest_state(before, tmp_path / "before"),
        newest_state(after, tmp_path / "after"),
    )
    assert (int(expected.step), int(result.step)) == (4, 6)
    # The rate of layers, as that of tables, is of the steps done, skipped ones too.
    nodes = jax.tree.leaves(result.opt_state, is_leaf=is_schedule)
    assert [int(node.count) for node in nodes if is_schedule(node)] == [6]
    # Moments are corrected by the steps that moved them.
    assert int(result.earlier) == -2
    same = result._replace(
        step=expected.step,
        earlier=expected.earlier,
        opt_state=jax.tree.map(
            lambda new, old: old if is_schedule(new) else new,
            result.opt_state,
            expected.opt_state,
            is_leaf=is_schedule,
        ),
    )
    # Statistics of batch norm are estimated from the last batches, which differ.
    same = same._replace(average=same.average._replace(model_state=expected.average.model_state))
    jax.tree.map(np.testing.assert_array_equal, same, expected)


def test_what_is_not_skipped_is_what_it_was_without_skipping(store, tmp_path):
    states = []
    for name in ("stop", "skip"):
        c = config(store, num_steps=4)
        c.watch.on_nonfinite = name
        train(c, tmp_path / name, report=nothing)
        states.append(newest_state(c, tmp_path / name))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), *states)


def test_a_finite_gradient_whose_square_is_not_is_skipped_too(store, tmp_path, monkeypatch):
    c = config(store, num_steps=6)
    c.watch.on_nonfinite = "skip"
    poison(monkeypatch, 1e25, {4})
    train(c, tmp_path, report=nothing)
    assert [step_records(tmp_path)[i]["skipped"] for i in range(1, 7)] == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("value", [1.0, 1e25, np.nan])
def test_the_gradient_of_one_vector_on_one_device_counts(value):
    mesh = meshes.make_mesh(devices=8, replicas=2)
    of_examples = jax.P(meshes.EXAMPLES)
    check = jax.shard_map(
        functools.partial(steps._all_finite, mesh, np.float32(0)),
        mesh=mesh,
        in_specs=of_examples,
        out_specs=jax.P(),
        check_vma=False,
    )
    gradients = np.zeros(16, np.float32)
    gradients[5] = value
    assert bool(jax.jit(check)({"dim4": gradients})) == (value == 1)


def test_too_many_skipped_steps_end_the_run(store, tmp_path, monkeypatch):
    c = config(store)
    c.watch.on_nonfinite, c.watch.max_skipped_steps = "skip", 2
    poison(monkeypatch, np.inf, {2, 3, 5, 6, 7})
    with pytest.raises(RunError, match=r"step 7: at most watch.max_skipped_steps=2"):
        train(c, tmp_path, report=nothing)
    lines = step_records(tmp_path)
    assert max(lines) == 7
    assert [lines[i]["skipped"] for i in range(1, 8)] == [0, 1, 1, 0, 1, 1, 1]


def test_the_last_batches_of_a_step_that_is_not_finite_are_written(store, tmp_path, monkeypatch):
    c = config(store)
    poison(monkeypatch, np.nan, {7})
    message = rf"step 7: loss .* The batches up to it are in {tmp_path}/debug/7\."
    with pytest.raises(RunError, match=message):
        train(c, tmp_path, report=nothing, debug_batches=4)
    lines = step_records(tmp_path)
    assert (max(lines), lines[7]["loss"]) == (7, None)
    folder = tmp_path / "debug" / "7"
    files = [f"step-00000{step}.process-0.npz" for step in (4, 5, 6, 7)]
    assert sorted(p.name for p in folder.iterdir()) == ["about.json", *files]
    assert json.loads((folder / "about.json").read_text())["why"] == "not finite"

    job = build(c, tmp_path / "again", nothing)
    executions = [next(job.batches) for _ in range(4)]
    job.batches.close()
    for step, file in zip((4, 5, 6, 7), files, strict=True):
        expected = jax.tree.map(lambda x, i=step: x[(i - 1) % 2], executions[(step - 1) // 2])
        jax.tree.map(np.testing.assert_array_equal, debug_batches.load(folder / file), expected)


def test_a_loss_that_stands_out_is_reported_and_its_batches_written(store, tmp_path, monkeypatch):
    c = config(store, num_steps=128, log_every_steps=64)
    lines = []
    poison(monkeypatch, 1e4, {110})
    train(c, tmp_path, report=lines.append, debug_batches=1)
    (line,) = (line for line in lines if "standard deviations above" in line)
    assert line.startswith("step 110: the loss ")
    assert line.endswith(f"The batches up to it are in {tmp_path}/debug/110.")
    reported = step_records(tmp_path)
    assert reported[110]["loss_spike"] > 10
    assert "loss_spike" not in reported[109]


def test_spikes_are_those_over_the_limit():
    rng = np.random.default_rng(0)
    losses = 0.5 + 0.01 * rng.normal(size=5000)
    losses[[50, 1000, 3000]] += [1e4, 0.3, 0.3]  # of the first hundred none is judged
    losses[2000] -= 0.3
    watch, never = LossSpikeDetector(8), LossSpikeDetector(0)
    assert [i for i, x in enumerate(losses) if watch.add_loss(x)] == [1000, 3000]
    assert not any(never.add_loss(x) for x in losses)
    watch = LossSpikeDetector(8)
    for loss in losses[:3000]:
        watch.add_loss(loss)
    resumed = LossSpikeDetector.from_state(json.loads(json.dumps(watch.to_state())), limit=8)
    assert resumed.add_loss(losses[3000]) == watch.add_loss(losses[3000]) > 8
    rising = LossSpikeDetector(8)
    assert not any(rising.add_loss(1 - 0.9**i) for i in range(1000))
    constant = LossSpikeDetector(8)
    assert not any(constant.add_loss(0.5) for _ in range(1000))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("on_nonfinite", "ignore", "watch.on_nonfinite: must be one of .*stop.*skip.*'ignore'"),
        ("max_skipped_steps", -1, "watch.max_skipped_steps: must be at least 0"),
        ("loss_spike", -1.0, "watch.loss_spike: must be at least 0"),
    ],
)
def test_fields_that_cannot_be_are_rejected(store, tmp_path, field, value, message):
    c = config(store)
    c.watch[field] = value
    with pytest.raises(InputError, match=message):
        train(c, tmp_path, report=nothing)


def test_a_negative_number_of_batches_is_rejected(tmp_path):
    with pytest.raises(InputError, match="--debug-batches: must be 0 or more: found -1"):
        LastBatches(tmp_path, -1)
