"""Tests of bias and scale of each task in checkpoints of this version and of earlier ones."""

import json
import shutil

import jax
import numpy as np
import pytest
from runs import newest, newest_state, nothing, store_config
from tiny import config

from jaxrank import cli
from jaxrank.checkpoints import manager
from jaxrank.checkpoints.manager import Checkpoints, drop_fields
from jaxrank.data.prepare.passes import prepare
from jaxrank.run import build
from jaxrank.train import train
from jaxrank.warm_start import start as warm_start
from jaxrank.workdir import files

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "store"
    c = config()
    prepare(c.features.to_dict(), c.source.to_dict(), str(path), report=nothing)
    return path


NEUTRAL = {"bias": np.zeros(2, np.float32), "scale": np.ones(2, np.float32)}


def older_config(store, lacking, **changes):
    """Returns a config whose run starts with the biases that a checkpoint without any implies."""
    c = store_config(store, **changes)
    if "bias" in lacking:
        with c.unlocked():
            c.model.initial_bias = {"click": 0.0, "conversion": 0.0}
    return c


@pytest.fixture(
    scope="module",
    params=[(0.9, ("bias", "scale")), (0.0, ("scale",))],
    ids=["average", "scale"],
)
def older(request, store, tmp_path_factory):
    """A run of 8 steps, its `ema_decay`, and the fields that its checkpoint lacks."""
    folder = tmp_path_factory.mktemp("older")
    decay, lacking = request.param
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prediction_weights", "_training_state"):
            original = getattr(manager, name)
            patch.setattr(
                manager, name, lambda s, original=original: drop_fields(original(s), lacking)
            )
        c = older_config(store, lacking, num_steps=8, ema_decay=decay)
        train(c, folder / "run", report=nothing)
    sums = Checkpoints(folder / "run", read_only=True).saved_checksums(8)
    fields = {name.split(".")[-1] for part in sums.values() for name in part}
    assert not fields & {*lacking, "scale"}
    return folder / "run", decay, lacking


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_resumes_from_a_checkpoint_without_biases(store, older, tmp_path, devices):
    workdir, decay, lacking = older
    changes = dict(ema_decay=decay)
    c = older_config(store, lacking, num_steps=8, **changes)
    c.mesh.devices = devices
    _, state = newest(c, workdir)
    for weights in (state, *([state.average] if decay else [])):
        for field in lacking:
            result = getattr(weights, field)
            np.testing.assert_array_equal(result, NEUTRAL[field])
            assert result.sharding.is_fully_replicated
            assert len(result.sharding.device_set) == devices
    if devices == 1:
        shutil.copytree(workdir, tmp_path / "run")
        whole = older_config(store, lacking, **changes)
        train(whole, tmp_path / "whole", report=nothing)
        train(whole, tmp_path / "run", report=nothing, allow_config_change=True)
        expected, result = (newest_state(whole, tmp_path / name) for name in ("whole", "run"))
        jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_it_is_evaluated_and_exported(older, tmp_path, capsys):
    workdir, _, lacking = older
    cli.run(["evaluate", f"--workdir={workdir}", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 8
    cli.run(["export", f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--format=files"])
    layers = np.load(tmp_path / "out" / "layers.npz")
    for field in lacking:
        np.testing.assert_array_equal(layers[field], NEUTRAL[field])


@pytest.mark.parametrize("initial_bias", [{}, {"click": 4.0}])
def test_a_run_starts_with_the_biases_of_another(store, older, tmp_path, initial_bias):
    """Fields that the older checkpoint lacks have neutral values, and set biases override."""
    workdir, decay, lacking = older
    c = store_config(store, ema_decay=decay)
    job = build(c, tmp_path / "next", nothing)
    job.batches.close()
    state = warm_start.start(job, str(workdir), nothing)
    for field in lacking:
        np.testing.assert_array_equal(getattr(state, field), NEUTRAL[field])
    bias = np.array([0.5, -1.5], np.float32)
    state = state._replace(bias=jax.device_put(bias, state.bias.sharding), step=state.step + 4)
    if decay:
        average = jax.device_put(bias * 2, state.bias.sharding)
        state = state._replace(average=state.average._replace(bias=average))
    job.save(4, state, None)
    files.save(tmp_path / "next", c, job.schema, job.hot)
    job.checkpoints.close()
    with c.unlocked():
        c.model.initial_bias = initial_bias
    third = build(c, tmp_path / "third", nothing)
    third.batches.close()
    lines = []
    result = warm_start.start(third, str(tmp_path / "next"), lines.append)
    np.testing.assert_array_equal(result.bias, [initial_bias.get("click", 0.5), -1.5])
    assert ("bias of click: 4.0 (model.initial_bias)" in lines[0]) == bool(initial_bias)
    if decay:
        np.testing.assert_array_equal(result.average.bias, [initial_bias.get("click", 1.0), -3.0])
