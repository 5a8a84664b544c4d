"""Checkpoints of which a file is damaged: an error that names it, or what was saved."""

import random
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import final_state, nothing, records, run, store_config, without_speed

from jaxrank.checkpoints.checksums import checksums
from jaxrank.checkpoints.manager import Checkpoints, _unraisable
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate
from jaxrank.run import build
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """A run with checkpoints of the steps 8 and 16, its job, and its last state."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    run(store, workdir)
    return workdir, build(store_config(store), workdir, nothing), final_state(store, workdir)


def truncated(data, draw):
    return data[: draw.randrange(len(data))]


def flipped(data, draw):
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def overwritten(data, draw):
    place = draw.randrange(len(data))
    noise = draw.randbytes(min(64, len(data) - place))
    return data[:place] + noise + data[place + len(noise) :]


DAMAGES = {"truncated": truncated, "flipped": flipped, "overwritten": overwritten, "removed": None}


def damage(checkpoint, kind, draw):
    """Damages a file that is not empty; returns which."""
    files = [p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size]
    # Of the same draw about the same file: half of the names are random.
    path = draw.choice(sorted(files, key=lambda p: (str(p.parent), p.stat().st_size)))
    if kind == "removed":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes(), draw))
    return path


def restored(job, workdir):
    checkpoints = Checkpoints(workdir)
    try:
        step = checkpoints.step()
        program = job.program
        return checkpoints.restore(
            step, program.blank(), program.state_shape, program.state_sharding
        )[0]
    finally:
        checkpoints.close()


def check(whole, folder, kind, seed):
    """Returns True if the damage was reported. Otherwise checks that it changed nothing."""
    workdir, job, state = whole
    shutil.copytree(workdir / "checkpoints" / "16", folder / "checkpoints" / "16")
    path = damage(folder / "checkpoints" / "16", kind, random.Random(seed))
    try:
        result = restored(job, folder)
    except InputError as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert str(folder / "checkpoints") in text
        return True
    # If the checkpoint were not recognised at all, the run would start from scratch.
    assert result is not None, path
    result = jax.device_get(result._replace(scratch={}))
    jax.tree.map(np.testing.assert_array_equal, result, state)
    return False


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_seen_or_changes_nothing(whole, tmp_path, kind):
    seen = [check(whole, tmp_path / f"{seed}", kind, seed) for seed in range(100, 110)]
    assert sum(seen) > 1  # of some files nothing depends


def test_a_bit_that_flipped_in_an_array_is_seen(whole, tmp_path, monkeypatch):
    workdir, job, _ = whole
    shutil.copytree(workdir, tmp_path / "copy")
    real = Checkpoints._restored

    def one_bit_else(self, step, **parts):
        result = real(self, step, **parts)
        if "weights" in result.keys():  # noqa: SIM118 - not a dict
            name, rows = next(iter(result["weights"].rows.items()))
            result["weights"].rows[name] = rows.at[3, 5].multiply(1.0000001)
        return result

    monkeypatch.setattr(Checkpoints, "_restored", one_bit_else)
    with pytest.raises(InputError, match=r"16/weights: arrays must .*damaged in \.rows\['dim8'\]"):
        restored(job, tmp_path / "copy")
    with pytest.raises(InputError, match="16/weights: arrays must have the checksums"):
        evaluate.evaluate(str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("file", "is_told"),
    [
        ("/site/orbax/checkpoint/serialization.py", False),
        ("/site/jaxrank/runtime/prefetch.py", True),
    ],
)
def test_what_orbax_leaves_of_a_restore_that_failed_is_not_reported_again(file, is_told):
    names, lines = {}, []
    exec(compile("async def read(): pass", file, "exec"), names)
    left = names["read"]()
    result = SimpleNamespace(object=left, exc_value=Exception("while reading array index"))
    _unraisable(result, lines.append)
    left.close()
    assert lines == [result] * is_told


def test_an_older_checkpoint_is_taken_only_if_that_is_allowed(whole, store, tmp_path):
    workdir, job, state = whole
    shutil.copytree(workdir, tmp_path / "copy")
    (tmp_path / "copy/checkpoints/16/training/manifest.ocdbt").unlink()
    c = store_config(store)
    with pytest.raises(InputError, match="checkpoints/16: this checkpoint is damaged"):
        train(c, tmp_path / "copy", report=lambda text: None)
    assert sorted(p.name for p in (tmp_path / "copy/checkpoints").iterdir()) == ["16", "8"]
    lines = []
    train(c, tmp_path / "copy", report=lines.append, allow_older_checkpoint=True)
    assert any("Checkpoint 16 is damaged" in text for text in lines)
    assert any("Resuming after step 8 instead" in text for text in lines)
    assert [p.name for p in (tmp_path / "copy/damaged").iterdir()] == ["16"]
    jax.tree.map(np.testing.assert_array_equal, final_state(store, tmp_path / "copy"), state)
    assert without_speed(records(tmp_path / "copy")) == without_speed(records(workdir))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "float64"])
def test_any_changed_element_changes_the_checksum(dtype):
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        array = jnp.asarray(draw.integers(0, 2, (7, 5)), dtype)
        base = checksums({"a": array})["['a']"]
        for place in np.ndindex(7, 5):
            other = array.at[place].set(1 - array[place] if dtype != "bool" else ~array[place])
            assert checksums({"a": other})["['a']"] != base
        assert checksums({"a": array[::-1]})["['a']"] != base
        assert checksums({"a": array[:, ::-1]})["['a']"] != base


def test_a_checksum_does_not_depend_on_how_the_array_is_split():
    from jaxrank import mesh as meshes

    array = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    result = {
        checksums([jax.device_put(array, meshes.example_sharding(meshes.make_mesh(devices=n)))])[
            "[0]"
        ]
        for n in (1, 2, 8)
    }
    assert len(result) == 1
