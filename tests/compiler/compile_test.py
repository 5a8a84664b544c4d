"""Tests `jaxrank compile` on the command line, for absent TPU slices and GPUs."""

import contextlib
import io
import json

import pytest
from checkout import TINY

from jaxrank import cli
from jaxrank.aot import compile
from jaxrank.aot import devices as absent
from jaxrank.aot.topology import topology
from jaxrank.errors import InputError, RunError

pytest.importorskip("libtpu", reason="the TPU compiler is for Linux on x86-64")

# All devices of a slice, for tests that use one device of their machine.
WHOLE = (f"--config={TINY}", "--config.mesh.devices=0")


def compile_all(capsys, names, *args):
    """Runs `compile` and returns the JSON of each slice, and the standard error."""
    cli.run(["compile", *WHOLE, f"--topology={names}", *args, "--json"])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1])["topologies"], err


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("v2-8", 8, "TPU v2"),
        ("v3-32", 32, "TPU v3"),
        ("v3-2", 2, "TPU v3"),
        ("v3-128", 128, "TPU v3"),
        ("v4-8", 4, "TPU v4"),
        ("v4-128", 64, "TPU v4"),
        ("v5e-1", 1, "TPU v5 lite"),
        ("v5litepod-16", 16, "TPU v5 lite"),
        ("v5p-8", 4, "TPU v5"),
        ("v6e-8", 8, "TPU v6 lite"),
    ],
)
def test_slices_have_the_devices_that_their_names_say(name, devices, kind):
    result = absent.devices(topology(name))
    assert len(result) == devices
    assert {device.device_kind for device in result} == {kind}


LARGE = 80_000_000  # rows, an eighth of which does not fit fast memory
ROWS = (
    f"--config.source.categorical=({LARGE},40)",
    f"--config.features.categorical[0].rows={LARGE}",
)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """Compiles for two slices. Returns the JSON, the text and the picture."""
    picture = tmp_path_factory.mktemp("scaling") / "scaling.png"
    args = (*WHOLE, *ROWS, "--config.model.mlp_units=(2048,2048)", "--config.batch_size=512")
    args += ("--config.data.shards=32",)
    args += ("--topology=v3-32,v3-8", "--scaling=weak", f"--picture={picture}")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cli.run(["compile", *args, "--json"])
    return json.loads(out.getvalue().splitlines()[-1]), err.getvalue(), picture


@pytest.mark.slow
def test_what_one_device_needs_is_reported(scaled):
    result, err, _ = scaled
    _, entry = result["topologies"]
    assert (entry["name"], entry["cores"], entry["devices"]) == ("v3-8", 8, 8)
    assert entry["fits"] is True
    assert entry["tables_aliased"] is True
    assert entry["compiler_error"] == ""
    assert 1 <= entry["tables_bytes"] / (LARGE * (8 + 1) * 4 / 8) < 1.01
    assert entry["tables_bytes"] < entry["state_bytes"] < entry["used_bytes"]
    assert entry["used_bytes"] >= entry["state_bytes"] + entry["temporaries_bytes"]
    assert entry["used_bytes"] < entry["usable_bytes"] < entry["hbm_bytes"]
    assert entry["collective_bytes"] == sum(entry["collectives"].values())
    assert set(entry["collectives"]) == {"all-to-all", "all-reduce"}
    # Three executions of two steps of 64 examples: dense, labels and weights of two tasks, ids.
    assert entry["batches_bytes"] > 3 * 2 * 64 * 4 * (6 + 2 + 2 + 2)
    # A layer's product is computed three times, forward and backward. It is much larger than the
    # products that move vectors.
    layer = 2 * 64 * 2048 * 2048
    assert 3 * layer < entry["flops"] < 6 * layer
    assert entry["compile_seconds"] > 0
    row, *_ = [line.split() for line in err.splitlines() if line.lstrip().startswith("v3-8 ")]
    assert row[:3] == ["v3-8", "8", "yes"]


def test_a_step_that_updates_whole_tables_is_not_in_place(capsys):
    """Compiles for one of the devices of a slice."""
    some = ("--config.embedding.l2_scope=table", "--config.mesh.devices=1")
    (entry,), err = compile_all(capsys, "v3-8", *ROWS, *some)
    assert entry["tables_aliased"] is False
    assert entry["devices"] == 1
    assert "hosts" not in err


def test_tables_that_are_too_large_are_rejected_by_how_much(capsys, tmp_path):
    rows = 2_000_000_000
    args = (
        f"--config.source.categorical=({rows},40)",
        f"--config.features.categorical[0].rows={rows}",
    )
    picture = f"--picture={tmp_path / 'scaling.png'}"
    args = (*args, "--config.embedding.dim=32", "--scaling=weak", picture)
    with pytest.raises(RunError, match=r"v3-8: .* [\d.]+ GiB more .* 15.48"):
        compile_all(capsys, "v3-8", *args)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["scaling"] == []
    assert not list(tmp_path.iterdir())
    (entry,) = result["topologies"]
    assert entry["fits"] is False
    assert entry["tables_bytes"] >= rows * (32 + 1) * 4 / 8
    assert entry["used_bytes"] > entry["usable_bytes"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", "--topology: must have a value: found nothing"),
        (",", "--topology: must .*: found ','"),
        ("v9-8", "--topology: must be a generation of TPUs or of GPUs.*found 'v9-8'"),
        ("v3-8,v3-24", "power of two: found v3-24, of 12 chips"),
    ],
)
def test_a_slice_that_cannot_be_is_rejected_before_anything_is_compiled(names, text, capsys):
    with pytest.raises(InputError, match=text):
        compile_all(capsys, names)


def test_a_batch_that_a_slice_cannot_split_is_rejected(capsys):
    with pytest.raises(
        InputError,
        match="must be a multiple of .*: found batch_size=64",
    ):
        compile_all(capsys, "v3-128", "--config.batch_size=64")


def test_what_train_would_reject_is_rejected_or_reported(capsys):
    for args, message in (
        (("--config.mesh.devices=9",), "mesh.devices: must be at most 8.*found 9"),
        (("--config.data.shards=3",), "batch_size: must be a multiple of data.shards"),
        (("--config.eval.metric=click/foo",), "eval.metric: must be one of 'click/logloss'"),
        (("--config.data.valid=nope",), r"data.valid: must be a split of the generated data"),
        (("--config.num_epochs=1.0",), "num_steps, num_epochs: one of them must be 0"),
    ):
        with pytest.raises(InputError, match=message):
            compile_all(capsys, "v3-8", *args)
    with pytest.raises(InputError, match=r"mesh.devices: must .*: found 4 .*\[0, 0, 0, 0\] of 2"):
        compile_all(capsys, "v3-16", "--config.mesh.devices=4")


def test_hosts_that_the_data_cannot_be_shared_by_are_reported(monkeypatch, capsys):
    def nothing_is_compiled(*_):
        raise RunError("so far")

    monkeypatch.setattr(compile, "_compiled", nothing_is_compiled)
    with pytest.raises(RunError, match="so far"):
        compile_all(capsys, "v3-16", "--config.data.shards=1", "--config.batch_size=8192")
    assert "v3-16 has 2 hosts: data.shards must" in capsys.readouterr().err


def test_replicas_that_a_slice_cannot_have_are_rejected(capsys):
    with pytest.raises(InputError, match="mesh.replicas: must .*replicas=3, 8 devices"):
        compile_all(capsys, "v3-8", "--config.mesh.replicas=3")


def test_the_lack_of_the_compiler_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(absent.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"found no libtpu. Install jaxrank's extra `tpu`"):
        compile_all(capsys, "v3-8")
    with pytest.raises(InputError, match=r"no JAX plugin for CUDA. Install.* `gpu-compiler`"):
        compile_all(capsys, "h100-1")


def test_scaling_of_gpus_compiles_for_tpus(capsys, monkeypatch):
    def devices(topology):
        raise InputError(f"compiles for {topology.name}")

    monkeypatch.setattr("jaxrank.aot.devices.devices", devices)
    with pytest.raises(InputError, match="compiles for v6e-8"):
        compile_all(capsys, "h100-8", "--scaling=weak")


def test_what_a_gpu_needs_is_reported(capsys):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra gpu-compiler")
    (eight, entry), err = compile_all(capsys, "h100-8,a100-1", *ROWS)
    assert (eight["name"], eight["devices"], entry["devices"]) == ("h100-8", 8, 1)
    assert eight["fits"] is entry["fits"] is True
    assert eight["tables_aliased"] is entry["tables_aliased"] is True
    assert 1 <= entry["tables_bytes"] / (LARGE * (8 + 1) * 4) < 1.01
    assert 1 <= eight["tables_bytes"] * 8 / (LARGE * (8 + 1) * 4) < 1.01
    assert set(eight["collectives"]) == {"all-to-all", "all-reduce"}
    assert entry["collectives"] == {}
    (row,) = [line.split() for line in err.splitlines() if line.lstrip().startswith("a100-1 ")]
    assert row[:3] == ["a100-1", "1", "yes"]
    with pytest.raises(InputError, match="multiple of 8: found h100-12"):
        compile_all(capsys, "h100-12")


@pytest.mark.slow
def test_scaling_is_reported_and_drawn(scaled):
    result, err, picture = scaled
    large, small = result["scaling"]
    assert (large["name"], small["name"]) == ("v3-32", "v3-8")
    assert large["batch_size"] == 4 * small["batch_size"] == 4 * 512
    assert (small["speedup"], small["efficiency"]) == (1, 1)
    assert large["speedup"] == pytest.approx(4 * large["efficiency"])
    assert 0.2 < large["efficiency"] < 1.1
    assert sum(small["seconds"].values()) == pytest.approx(small["step_seconds"])
    assert small["examples_per_second"] == pytest.approx(512 / small["step_seconds"])
    assert small["limit"] in small["seconds"]
    assert all(large["seconds"].values()), "each part takes some time"
    assert small["fits"] is True
    assert "of linear" in err
    assert "without launches and input; not a throughput to expect." in err
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--topology=v3-8", "--picture=a.png"), "--scaling"),
        (
            ("--topology=v3-8", "--scaling=weak", "--config.mesh.devices=4"),
            "--scaling: must .*: found mesh.devices=4",
        ),
        (("--topology=v3-8,v4-8", "--scaling=weak"), "one generation.*v3-8, v4-8"),
        (("--topology=v3-8,v3-32", "--scaling=strong"), "whole groups of 16.*batch_size=128"),
    ],
)
def test_scaling_that_cannot_be_reported_is_rejected_before_anything_is_compiled(args, message):
    with pytest.raises(InputError, match=message):
        cli.run(["compile", *WHOLE, *args])
