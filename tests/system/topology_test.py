"""A checkpoint of any number of devices is restored on any other, wherever the tables lie."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny
from checkout import ROOT
from ml_collections import ConfigDict
from runs import nothing

from jaxrank import run as jobs
from jaxrank.embedding.storage import logical_rows
from jaxrank.evaluation import evaluate, score
from jaxrank.layout import ReplicatedRows
from jaxrank.step import prediction_weights
from jaxrank.workdir import files

PLACEMENTS = {
    "rows": {"": "rows"},
    "one of each": {"": "rows", "c1": "replicated", "l0": "replicated"},
    "auto": {"": "auto"},
}


def built(store, folder, placement, devices, replicas=1):
    c = tiny.config(ema_decay=0.9)
    c.data.store, c.mesh.devices, c.mesh.replicas = str(store), devices, replicas
    c.optim.tables.name = "lazy_adam"
    c.embedding.dims = ConfigDict({"l0": 4})
    each = dict(PLACEMENTS[placement])
    c.embedding.placement = each.pop("")
    c.embedding.placements = ConfigDict(each)
    job = jobs.build(c, folder, nothing)
    return c, job


def to_host(job, state):
    """A state on the host, tables in the order of their rows, whatever the placement."""
    host = jax.device_get(state)
    tables = {}
    for stack in job.program.step_spec.embedding.layout.stacks:
        kinds = {"rows": {name: t.rows for name, t in host.tables.items()}}
        kinds |= {slot: {n: t.slots[slot] for n, t in host.tables.items()} for slot in ("m", "v")}
        kinds["average"] = host.average.rows
        for kind, arrays in kinds.items():
            tables[stack.name, kind] = logical_rows(arrays, stack)
    average = host.average._replace(rows={})
    return host._replace(tables=tables, average=average, scratch={})


@pytest.mark.parametrize(
    ("placement", "before", "after"),
    [
        ("one of each", (1, 1), (8, 1)),
        ("one of each", (4, 1), (8, 2)),
        ("auto", (8, 1), (1, 1)),
        ("auto", (8, 4), (4, 1)),
    ],
)
def test_a_state_is_the_same_on_other_devices(store, tmp_path, placement, before, after):
    c, job = built(store, tmp_path, placement, *before)
    rng = np.random.default_rng(0)

    def random(x, sharding):
        return jax.device_put(np.asarray(rng.normal(size=x.shape) * 9, x.dtype), sharding)

    state = jax.tree.map(random, job.program.state_shape, job.program.state_sharding)
    job.save(16, state, None)
    files.save(tmp_path, c, job.schema, job.hot)
    job.checkpoints.close()
    expected = to_host(job, state)

    _, other = built(store, tmp_path, placement, *after)
    result = other.start(
        pytest.fail, allow_config_change=False, allow_older_checkpoint=False, report=nothing
    )
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(result)} == {after[0]}
    jax.tree.map(np.testing.assert_array_equal, to_host(other, result), expected)
    if placement == "one of each" and before[0] > 1:
        assert other.hot["dim8"].replicated_tables == ("c1",)
        assert other.hot["dim4"] == ReplicatedRows(("l0",), (), 0)
    for each in (job, other):
        each.batches.close()

    if placement != "auto":
        return
    # And by what evaluates, which takes all devices that there are.
    opened = evaluate.open_run(str(tmp_path))
    weights = opened.weights(16)
    scored = score.score(opened.predictor, weights, opened.split, 4096)
    local = score.score(job.program.predictor, prediction_weights(state), opened.split, 4096)
    for a, b in zip(scored, local, strict=True):
        np.testing.assert_allclose(a.logits, b.logits, rtol=1e-3, atol=1e-3)


def test_a_checkpoint_is_opened_without_jaxrank_as_documented(store, tmp_path):
    _, job = built(store, tmp_path, "rows", 8)
    state = job.program.init()
    job.save(16, state, None)
    job.checkpoints.wait()
    text = (ROOT / "docs" / "checkpoints.md").read_text().partition("## Opening a checkpoint\n")[2]
    code = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    assert "jaxrank" not in code
    code = code.replace("/tmp/run/checkpoints/977", f"{tmp_path}/checkpoints/16")
    code += f"\nassert jax.device_count() == 1\nnp.save('{tmp_path}/rows.npy', rows)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (stack,) = (s for s in job.program.step_spec.embedding.layout.stacks if s.dim == 8)
    arrays = {name: np.asarray(rows) for name, rows in state.average.rows.items()}
    rows = np.load(tmp_path / "rows.npy")
    np.testing.assert_array_equal(rows[: stack.rows], logical_rows(arrays, stack))
    job.batches.close()
