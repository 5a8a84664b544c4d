"""The bias of each task in checkpoints, and in those that were saved before there was one."""

import json
import shutil

import jax
import numpy as np
import pytest
from runs import final_state, newest, nothing, on_store, run
from tiny import config

from jaxrank import cli
from jaxrank.checkpoints import manager
from jaxrank.checkpoints.manager import Checkpoints, without_bias
from jaxrank.data.prepare.passes import prepare
from jaxrank.run import build
from jaxrank.train import train
from jaxrank.warm_start import start as warm_start
from jaxrank.workdir import files


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "store"
    c = config()
    prepare(c.features.to_dict(), c.source.to_dict(), str(path), report=nothing)
    return path


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["weights", "average"])
def older(request, store, tmp_path_factory):
    """A run of 8 steps without biases in its checkpoint, and its decay of averages."""
    folder = tmp_path_factory.mktemp("older")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("weights_of", "_training_of"):
            original = getattr(manager, name)
            patch.setattr(manager, name, lambda s, original=original: without_bias(original(s)))
        run(store, folder / "run", num_steps=8, ema_decay=request.param)
    sums = Checkpoints(folder / "run", read_only=True).saved_checksums(8)
    assert not [name for part in sums.values() for name in part if name.split(".")[-1] == "bias"]
    return folder / "run", request.param


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_goes_on_from_a_checkpoint_without_biases(store, older, tmp_path, devices):
    workdir, decay = older
    changes = dict(ema_decay=decay)
    c = on_store(store, num_steps=8, **changes)
    c.mesh.devices = devices
    _, state = newest(c, workdir)
    for bias in (state.bias, *([state.average.bias] if decay else [])):
        np.testing.assert_array_equal(bias, np.zeros(2, np.float32))
        assert bias.sharding.is_fully_replicated
        assert len(bias.sharding.device_set) == devices
    if devices == 1:
        shutil.copytree(workdir, tmp_path / "run")
        run(store, tmp_path / "whole", **changes)
        goes_on = on_store(store, **changes)
        train(goes_on, tmp_path / "run", report=nothing, allow_config_change=True)
        expected, found = (final_state(store, tmp_path / n, **changes) for n in ("whole", "run"))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_it_is_evaluated_and_exported(older, tmp_path, capsys):
    workdir, _ = older
    cli.run(["evaluate", f"--workdir={workdir}", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 8
    cli.run(["export", f"--workdir={workdir}", f"--output={tmp_path / 'out'}"])
    layers = np.load(tmp_path / "out" / "layers.npz")
    np.testing.assert_array_equal(layers["bias"], np.zeros(2, np.float32))


def test_a_run_starts_with_the_biases_of_another(store, older, tmp_path):
    """And with zeros where that one has none."""
    workdir, decay = older
    c = on_store(store, ema_decay=decay)
    job = build(c, tmp_path / "next", nothing)
    job.batches.close()
    state = warm_start.start(job, str(workdir), nothing)
    np.testing.assert_array_equal(state.bias, np.zeros(2, np.float32))
    bias = np.array([0.5, -1.5], np.float32)
    state = state._replace(bias=jax.device_put(bias, state.bias.sharding), step=state.step + 4)
    if decay:
        average = jax.device_put(bias * 2, state.bias.sharding)
        state = state._replace(average=state.average._replace(bias=average))
    job.save(4, state, None)
    files.save(tmp_path / "next", c, job.schema, job.hot)
    job.checkpoints.close()
    third = build(c, tmp_path / "third", nothing)
    third.batches.close()
    found = warm_start.start(third, str(tmp_path / "next"), nothing)
    np.testing.assert_array_equal(found.bias, bias)
    if decay:
        np.testing.assert_array_equal(found.average.bias, bias * 2)
