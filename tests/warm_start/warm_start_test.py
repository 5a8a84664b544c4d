"""Tests of a run that starts from one with other values, features, placement or mesh."""

import functools
import json
import shutil

import jax
import numpy as np
import pages
import pytest
from ml_collections import ConfigDict
from raw_csv import config, write
from runs import nothing, rows_by_value, saved

from jaxrank import cli
from jaxrank.calibration.files import calibration_path
from jaxrank.checkpoints import manager
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.errors import InputError
from jaxrank.evaluation import score
from jaxrank.run import build
from jaxrank.step import averaged, prediction_weights, trained
from jaxrank.train import train
from jaxrank.warm_start import start as warm_start

pytestmark = pytest.mark.usefixtures("shared_programs")


def started(old, config, workdir, lines=None):
    """Starts a run from the run in `old`, and returns it with its first state."""
    job = build(config, workdir, nothing)
    report = nothing if lines is None else lines.append
    state = warm_start.start(job, str(old), report)
    job.batches.close()
    return job, state


def predictions(job, weights):
    """Returns predictions f[n, tasks] for the validation split."""
    scored = score.score(job.program.predictor, weights, job.open_split("valid"), 512)
    return np.concatenate([s.logits for s in scored])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of raw data, config, workdir, run and state of an older run."""
    folder = tmp_path_factory.mktemp("first")
    write(folder / "raw", 0)
    c = config(folder / "raw", ema_decay=0.9)
    return folder / "raw", c, folder / "run", *saved(c, folder / "run")


SLOTS = {"rowwise_adagrad": ["accumulator"], "lazy_adam": ["m", "v"], "ftrl": ["n", "z"]}


@pytest.mark.parametrize(
    ("row_optimizer", "before", "after", "values"),
    [
        ("rowwise_adagrad", 8, 1, 70),
        ("lazy_adam", 1, 8, 15),
        ("ftrl", 8, 2, 40),
    ],
    ids=["grown, 8 devices to 1", "shrunk, 1 device to 8", "permuted, 8 to 2"],
)
def test_rows_and_slots_go_with_their_values(tmp_path, row_optimizer, before, after, values):
    changes = dict(optim__tables__name=row_optimizer, ema_decay=0.9, data__shards=8)
    old = config(write(tmp_path / "old", 0), mesh__devices=before, **changes)
    old_job, old_state = saved(old, tmp_path / "run")

    new = config(write(tmp_path / "new", 1, values=values), mesh__devices=after, **changes)
    new.seed = 5
    lines = []
    job, state = started(tmp_path / "run", new, tmp_path / "next", lines)
    untouched = job.program.init()
    carried = 0
    for kind in ("rows", "average", *SLOTS[row_optimizer]):
        previous, fresh, result = (
            rows_by_value(*x, kind) for x in ((old_job, old_state), (job, untouched), (job, state))
        )
        for table, rows in result.items():
            for value, row in rows.items():
                expected = previous[table].get(value, fresh[table][value])
                np.testing.assert_array_equal(row, expected, err_msg=f"{kind} {table} {value}")
                carried += value in previous[table]
            assert (
                set(rows) != set(previous[table]) or table != "user"
            )  # there are rows of each kind
    each = carried // (2 + len(SLOTS[row_optimizer]))
    assert f"{each:,} copied" in lines[0]


def test_layers_moments_and_averages_are_those_of_the_older_run(first, tmp_path):
    _, _, run, _, old = first
    c = config(write(tmp_path / "new", 1), ema_decay=0.9)
    _, state = started(run, c, tmp_path / "next")
    for field in ("params", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, field), getattr(old, field))
        average = getattr(state.average, field), getattr(old.average, field)
        jax.tree.map(np.testing.assert_array_equal, *average)
    moments, (schedule,) = state.opt_state[0]
    jax.tree.map(np.testing.assert_array_equal, moments, old.opt_state[0][0])
    assert int(moments.count) == 16
    assert (int(schedule), int(state.step), int(state.earlier)) == (0, 0, 16)


def test_without_an_average_of_its_own_a_run_starts_from_what_predicted(first, tmp_path):
    raw, _, run, old_job, old = first
    job, state = started(run, config(raw), tmp_path / "next")
    jax.tree.map(np.testing.assert_array_equal, state.params, old.average.params)
    expected = predictions(old_job, prediction_weights(old))
    np.testing.assert_array_equal(predictions(job, prediction_weights(state)), expected)


def test_ftrl_keeps_the_averages_that_it_starts_from(tmp_path):
    """FTRL derives rows from its sums, which belong to the trained rows."""
    changes = dict(optim__tables__name="ftrl", optim__tables__settings={"l1": 1e-3, "l2": 0.1})
    raw = write(tmp_path / "raw", 0)
    saved(config(raw, ema_decay=0.9, **changes), tmp_path / "run")
    job, state = started(tmp_path / "run", config(raw, **changes), tmp_path / "next")
    change_of = jax.jit(job.program.step_spec.embedding.row_optimizer.change)
    for table in state.tables.values():
        assert (np.asarray(table.slots["n"]) > 0).any()
        rows = np.asarray(table.rows)
        change, _ = change_of(rows, table.slots, np.zeros_like(rows), np.float32(0.1), 0)
        np.testing.assert_allclose(change, 0, atol=1e-6)


def test_an_average_begins_with_the_weights_where_the_older_run_had_none(tmp_path):
    raw = write(tmp_path / "raw", 0)
    saved(config(raw), tmp_path / "run")
    _, state = started(tmp_path / "run", config(raw, ema_decay=0.9), tmp_path / "next")
    jax.tree.map(np.testing.assert_array_equal, state.average, trained(state))


def test_rows_of_several_lines_are_written_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "_PIECE", 2**17)
    raw = write(tmp_path / "raw", 0)
    c = config(raw, ids=("user",), lists=(), embedding__dim=300, embedding__placement="rows")
    old_job, old = saved(c, tmp_path / "run")
    arrays = CheckpointReader(
        tmp_path / "run" / "checkpoints" / "16" / "weights",
        Checkpoints(tmp_path / "run", read_only=True).saved_checksums(16)["weights"],
    )
    lines = old.tables["dim300"].rows.shape[0]
    assert lines == 3 * 1024
    pieces = [len(piece) for _, piece in arrays.pieces("rows.dim300")]
    assert len(pieces) > 1
    assert any(length % 3 for length in pieces)
    assert not any(len(piece) % 3 for _, piece in arrays.pieces("rows.dim300", 3))
    job, state = started(tmp_path / "run", c, tmp_path / "next")
    previous, result = (rows_by_value(*x, "rows")["user"] for x in ((old_job, old), (job, state)))
    assert list(previous) == list(result)
    np.testing.assert_array_equal(list(previous.values()), list(result.values()))


# `inputs_test` has the axes of every kind of layer.
MODELS = {
    "matrix, layers of floats": dict(model__cross="dcn_v2", model__dense_mlp_units=(6, 3)),
    "mix, parallel, ple": dict(
        model__cross="dcn_mix",
        model__cross_rank=3,
        model__cross_experts=2,
        model__structure="parallel",
        model__norm="batch",
        model__multitask="ple",
        model__experts=1,
        model__expert_mlp_units=(4,),
    ),
    "quadratic beside a cross network": dict(
        model__name="qnn", model__layers=2, model__cross_layers=1
    ),
}


@pytest.mark.parametrize("model", list(MODELS))
def test_features_keep_what_is_theirs_in_any_order(tmp_path, model):
    """The raw data is the same. A dropped or new feature is empty in the scored examples."""
    without = ("item", "f1")
    raw = write(tmp_path / "raw", 0, without=without)
    old = config(raw, ids=("user", "item"), floats=("f1", "f0"), **MODELS[model])
    old_job, old_state = saved(old, tmp_path / "run")
    # An empty feature reads the vector of missing values, which must add nothing.
    new = config(raw, ids=("user",), floats=("f0",), lists=("seen", "tags"), **MODELS[model])
    lines = []
    job, state = started(tmp_path / "run", new, tmp_path / "next", lines)
    assert "dropped features: f1, item" in lines[0]
    assert "0 new\n" in lines[0] or lines[0].endswith("0 new")
    weights = prediction_weights(old_state)
    silent = weights._replace(rows=_zero_missing(old_job, weights.rows, "item"))
    expected = predictions(old_job, silent)
    local = prediction_weights(state)
    local = local._replace(rows=_zero_missing(job, local.rows, "item"))
    np.testing.assert_allclose(predictions(job, local), expected, rtol=1e-5, atol=1e-6)

    # Back again: the two features are new, and their inputs are zero.
    job, state = saved(new, tmp_path / "next")
    back_job, back = started(tmp_path / "next", old, tmp_path / "back", lines)
    assert "new features: f1, item" in lines[1]
    local, theirs = prediction_weights(state), prediction_weights(back)
    local = local._replace(rows=_zero_missing(job, local.rows, "item"))
    theirs = theirs._replace(rows=_zero_missing(back_job, theirs.rows, "item"))
    expected = predictions(job, local)
    np.testing.assert_allclose(predictions(back_job, theirs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [((), (2,)), ((2,), ()), ((2,), (4, 3))])
def test_what_reads_layers_of_floats_that_are_new_or_gone_keeps_its_vectors(
    tmp_path, before, after
):
    """This also holds for layers with as many outputs as there are dense features."""
    raw = write(tmp_path / "raw", 0)
    old = config(raw, model__dense_mlp_units=before)
    old_state = saved(old, tmp_path / "run")[1]
    new = config(raw, model__dense_mlp_units=after)
    job, state = started(tmp_path / "run", new, tmp_path / "next")
    states = old_state, state, job.program.init()
    theirs, local, fresh = (np.asarray(s.params["cross"]["layer_0"]["kernel"]) for s in states)
    a, b = (widths[-1] if widths else 2 for widths in (before, after))
    np.testing.assert_array_equal(local[b:, b:], theirs[a:, a:])
    np.testing.assert_array_equal(local[:b], fresh[:b])
    np.testing.assert_array_equal(local[:, :b], fresh[:, :b])


def test_sequences_keep_what_is_theirs_where_a_model_has_nothing_else(tmp_path):
    raw = write(tmp_path / "raw", 0)

    def sequence_config(*names):
        c = config(raw, ids=(), lists=(), model__cross="none")
        c.features.ragged = [
            dict(columns=name, separator="|", combiner="none", max_length=16) for name in names
        ]
        return c

    old_job, old_state = saved(sequence_config("tags", "seen"), tmp_path / "run")
    job, state = started(tmp_path / "run", sequence_config("seen", "tags"), tmp_path / "next")
    expected = predictions(old_job, prediction_weights(old_state))
    np.testing.assert_allclose(
        predictions(job, prediction_weights(state)), expected, rtol=1e-5, atol=1e-6
    )


def _zero_missing(job, rows, table):
    """Returns rows with zeros for missing values, which the list `seen` never reads."""
    (stack,) = (s for s in job.program.step_spec.embedding.layout.stacks if table in s.tables)
    result = dict(rows)
    (part,) = (p for p in job.program.step_spec.embedding.parts[stack.name] if p)
    at = stack.offsets[stack.tables.index(table)]
    place = int(part.position(np.array([at], np.int32))[0])
    stored = np.array(result[part.name]).reshape(-1, part.width)
    stored[place] = 0
    result[part.name] = jax.numpy.asarray(stored.reshape(-1, 128))
    return result


def test_what_reads_pairs_of_features_starts_over_where_they_are_others(tmp_path):
    raw = write(tmp_path / "raw", 0)
    changes = dict(model__cross="dlrm", model__bottom_mlp_units=(8,), embedding__dims=ConfigDict())
    old = config(raw, lists=("tags",), **changes)
    _, before = saved(old, tmp_path / "run")
    lines = []
    new = config(raw, lists=(), floats=("f0",), **changes)
    job, state = started(tmp_path / "run", new, tmp_path / "next", lines)
    assert "new: params.tower.layer_0.kernel" in lines[0]
    result, fresh = (s.params["tower"]["layer_0"]["kernel"] for s in (state, job.program.init()))
    np.testing.assert_array_equal(result, fresh)
    bottom = before.params["cross"]["bottom"]["layer_0"]["kernel"]
    np.testing.assert_array_equal(state.params["cross"]["bottom"]["layer_0"]["kernel"], bottom[:1])


def test_other_optimizers_and_dimensions_start_over_and_are_reported(first, tmp_path):
    raw, _, run, *_ = first
    c = config(raw, optim__dense__name="adagrad", optim__tables__name="adagrad")
    c.embedding.dims = ConfigDict({"tags": 8, "user": 2})
    lines = []
    job, state = started(run, c, tmp_path / "next", lines)
    assert "table user: 42 rows reinitialised (dim 4 -> 2)" in lines[0]
    assert "table optimizer reinitialised" in lines[0]
    assert "layer optimizer reinitialised" in lines[0]
    fresh = job.program.init()
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, fresh.opt_state)
    assert not np.array_equal(state.params["head"]["bias"], fresh.params["head"]["bias"])
    for name, table in state.tables.items():
        jax.tree.map(np.testing.assert_array_equal, table.slots, fresh.tables[name].slots)
    np.testing.assert_array_equal(state.tables["dim2"].rows, fresh.tables["dim2"].rows)
    assert int(state.earlier) == 16


def test_the_penalty_of_vectors_is_reported(first, tmp_path):
    raw, _, run, *_ = first
    lines = []
    started(run, config(raw), tmp_path / "none", lines)
    penalised = config(raw, embedding__l2=0.1, embedding__l2s={"user": 0.2})
    started(run, penalised, tmp_path / "next", lines)
    assert "L2 of vectors" not in lines[0]
    expected = "0.1, 0.2 of user on the rows that a batch reads, in place of none (embedding.l2)"
    assert f"L2 of vectors: {expected}" in lines[1]


def test_moments_that_start_over_count_steps_from_0(first, tmp_path):
    raw, _, run, *_ = first
    _, state = started(run, config(raw, optim__tables__name="lazy_adam"), tmp_path / "next")
    assert int(state.earlier) == 0


@pytest.mark.parametrize("row_optimizer", ["adagrad", "lazy_adam"])
def test_an_average_resumes_under_another_rule_of_tables(first, tmp_path, row_optimizer):
    raw, _, run, *_ = first
    c = config(raw, ema_decay=0.9, optim__tables__name=row_optimizer)
    job, state = started(run, c, tmp_path / "next")
    weights = trained(state)._replace(params=jax.tree.map(lambda x: x + 1, state.params))
    after = state._replace(params=weights.params, step=state.step + 1)
    average = jax.jit(functools.partial(averaged, job.program.step_spec))
    moved = average(after, np.zeros(1, bool), np.int32(1))
    keep = (1 + 17) / (10 + 17)  # after 16 earlier steps and one
    jax.tree.map(
        lambda new, previous, changed: np.testing.assert_allclose(
            new, keep * previous + (1 - keep) * changed, rtol=1e-4, atol=1e-6
        ),
        moved.average.params,
        state.average.params,
        weights.params,
    )


def test_a_run_counts_the_steps_of_all_runs_before_it(first, tmp_path):
    raw, _, run, *_ = first
    start = dict(report=nothing, init_from=str(run))
    train(config(raw, num_steps=8), tmp_path / "second", **start)
    _, third = started(tmp_path / "second", config(raw), tmp_path / "third")
    assert int(third.earlier) == 16 + 8


def test_a_checkpoint_of_a_step_may_be_named(first, tmp_path):
    raw, c, run, *_ = first
    steps = sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdecimal())
    lines = []
    path = calibration_path(run, steps[0])
    path.parent.mkdir()
    path.touch()
    started(run / "checkpoints" / str(steps[0]), c, tmp_path / "next", lines)
    shutil.rmtree(path.parent)
    assert lines[0].startswith(f"Started from {run}/checkpoints/{steps[0]}:")
    assert "not finished" not in lines[0]
    assert "its calibration is not copied" in lines[0]
    assert not calibration_path(tmp_path / "next", 0).parent.exists()


def test_a_run_that_has_not_come_to_its_end_is_reported(first, tmp_path):
    raw, c, run, *_ = first
    shutil.copytree(run, tmp_path / "stopped")
    (tmp_path / "stopped" / "finished").touch()
    for name, is_told in (("before", False), ("after", True)):
        lines = []
        started(tmp_path / "stopped", c, tmp_path / name, lines)
        assert ("not finished" in lines[0]) == is_told
        (tmp_path / "stopped" / "finished").unlink(missing_ok=True)


def _damaged(run, tmp_path):
    """Copies a run and changes a bit in each file of its weights."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for file in sorted(copy.glob("checkpoints/*/weights/**/d/*")):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    return copy


def test_what_cannot_be_started_from_is_rejected(first, tmp_path):
    raw, c, run, *_ = first

    def rejected(message, source=run, **changes):
        with pytest.raises(InputError, match=message):
            started(source, config(raw, **changes), tmp_path / message)

    rejected("config.json: no such file", tmp_path / "nowhere")
    rejected("newest, best or one", run / "checkpoints" / "7")
    other = [dict(name="like", label="click")]
    rejected("same tasks, .*like.*: found .*click", features__tasks=other)
    rejected("damaged", _damaged(run, tmp_path))

    # Its vocabularies differ, and the old ones are absent.
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    shutil.rmtree(bare / "data")
    new = write(tmp_path / "new", 1)
    with pytest.raises(InputError, match="bare must have .* no such store"):
        started(bare, config(new), tmp_path / "other")
    _, state = started(bare, c, tmp_path / "same")  # equal vocabularies need no store
    assert int(state.earlier) == 16


DAILY = pages.marked("days.md", "run by warm_start_test.py: DAILY")


@pytest.mark.slow
def test_the_daily_recipe_does_better_than_a_start_from_nothing(tmp_path, capsys):
    days = [write(tmp_path / f"raw{day}", day, values=60, rows=4096) for day in range(3)]
    for day, raw in enumerate(days):
        text = "from pathlib import Path\nfrom raw_csv import config\n\n"
        text += "def get_config():\n"
        text += f"    return config(Path({str(raw)!r}), num_steps=0, num_epochs=1.0)\n"
        (tmp_path / f"day{day + 1}.py").write_text(text)
    for line in DAILY.splitlines():
        verb, *args = line.replace("/data/", f"{tmp_path}/").split()[1:]
        cli.run([verb, *args])
    lines = json.loads((tmp_path / "run3" / "config.json").read_text())
    assert lines["data"]["store"] == f"{tmp_path}/day3"

    day3 = tmp_path / "day3"
    alone = [f"--config={day3}.py", f"--workdir={tmp_path / 'alone'}"]
    cli.run(["train", *alone, f"--config.data.store={day3}"])

    def loss(name):
        capsys.readouterr()
        cli.run(["evaluate", f"--workdir={tmp_path / name}", f"--data={day3}", "--json"])
        return json.loads(capsys.readouterr().out)["metrics"]["click/logloss"]

    assert loss("run3") < loss("alone")
