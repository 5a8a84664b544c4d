"""Tables that start from files of pre-trained vectors."""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict
from raw_csv import config, write
from runs import newest, nothing, rows_by_value, saved

from jaxrank.errors import InputError
from jaxrank.run import build
from jaxrank.train import train
from jaxrank.warm_start import start as warm_start
from jaxrank.warm_start.pretrained import start_vectors

pytestmark = pytest.mark.usefixtures("shared_programs")

DIM = 4
VECTORS = {
    f"u{i}": np.random.default_rng(i).normal(size=DIM).astype(np.float32) for i in range(0, 200, 2)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Raw data, and vectors of every second user."""
    path = write(tmp_path_factory.mktemp("pretrained"), 0)
    lines = [" ".join([user, *map(repr, v.tolist())]) for user, v in VECTORS.items()]
    (path / "vectors.txt").write_text("\n".join([*lines, ""]))
    return path


def with_vectors(folder, **changes):
    return config(
        folder,
        ids=("user",),
        lists=(),
        embedding__init_from=ConfigDict({"us*": str(folder / "vectors.txt")}),
        embedding__init_std=0.1,
        embedding__placement="rows",
        data__shards=8,
        **changes,
    )


def covered(rows):
    """Returns the rows of the users that have vectors, and those vectors."""
    users = [user for user in rows if user in VECTORS]
    assert 5 < len(users) < len(rows) - 5
    return [rows[user] for user in users], [VECTORS[user] for user in users]


@pytest.mark.parametrize("devices", [1, 8])
def test_rows_start_from_the_vectors_of_their_values(devices, folder, tmp_path):
    c = with_vectors(folder, mesh__devices=devices, ema_decay=0.9, optim__tables__name="lazy_adam")
    job, lines = build(c, tmp_path, nothing), []
    state = start_vectors(job, job.program.init(), lines.append)
    untouched = job.program.init()
    job.batches.close()
    for kind in ("rows", "average"):
        rows, fresh = (rows_by_value(job, s, kind)["user"] for s in (state, untouched))
        np.testing.assert_array_equal(*covered(rows))
        others = [user for user in rows if user not in VECTORS]
        np.testing.assert_array_equal([rows[u] for u in others], [fresh[u] for u in others])
    for slot in ("m", "v"):
        np.testing.assert_array_equal(
            *(list(rows_by_value(job, s, slot)["user"].values()) for s in (state, untouched))
        )
    values, counts = job.store.vocabulary("user")
    lookups = sum(n for user, n in zip(values, counts, strict=True) if user in VECTORS)
    expected = sum(user in VECTORS for user in values)
    assert f"has {expected} of {len(values)} rows" in lines[0]
    assert f"{lookups / sum(counts):.1%} of the lookups in 1,024 training examples" in lines[0]


def test_a_frozen_table_keeps_its_vectors_when_the_run_resumes_without_the_file(folder, tmp_path):
    raw = write(tmp_path / "raw", 0)
    (raw / "vectors.txt").write_bytes((folder / "vectors.txt").read_bytes())
    c = with_vectors(
        raw,
        ema_decay=0.9,
        embedding__l2=0.1,
        optim__tables__lr_multipliers=ConfigDict({"user": 0.0}),
        num_steps=8,
    )
    train(c, tmp_path / "run", report=nothing, page=False)
    (raw / "vectors.txt").unlink()
    c.num_steps = 16
    train(c, tmp_path / "run", report=nothing, page=False, allow_config_change=True)
    job, state = newest(c, tmp_path / "run")
    assert int(state.step) == 16
    fresh = job.program.init()
    for kind in ("rows", "average"):
        rows, random = (rows_by_value(job, s, kind)["user"] for s in (state, fresh))
        np.testing.assert_array_equal(*covered(rows))
        np.testing.assert_array_equal(rows["unknown"], random["unknown"])
    before, after = (rows_by_value(job, s, "accumulator")["user"] for s in (fresh, state))
    assert all(after[user] > before[user] for user in after if user in VECTORS)
    (table,) = json.loads((tmp_path / "run" / "summary.json").read_text())["tables"]
    assert table["init_from"]["lr_multiplier"] == 0
    assert table["init_from"]["covered_rows"] == sum(user in VECTORS for user in rows)


def test_rows_of_an_older_run_come_before_the_vectors(folder, tmp_path):
    old = config(folder, ids=("user",), lists=())
    old_job, old_state = saved(old, tmp_path / "run")
    new = write(tmp_path / "new", 1)
    (new / "vectors.txt").write_bytes((folder / "vectors.txt").read_bytes())
    job, lines = build(with_vectors(new), tmp_path / "next", nothing), []
    state = warm_start.start(job, str(tmp_path / "run"), lines.append)
    job.batches.close()
    previous = rows_by_value(old_job, old_state, "rows")["user"]
    sources = set()
    for user, row in rows_by_value(job, state, "rows")["user"].items():
        if user in previous:
            np.testing.assert_array_equal(row, previous[user])
        elif user in VECTORS:
            np.testing.assert_array_equal(row, VECTORS[user])
        sources.add((user in previous, user in VECTORS))
    assert len(sources) == 4
    assert "pre-trained vectors (embedding.init_from) stay in rows that are new" in lines[1]
    users, counts = job.store.vocabulary("user")
    covered = {user for user in users if user in VECTORS and user not in previous}
    lookups = sum(n for user, n in zip(users, counts, strict=True) if user in covered)
    assert f"has {len(covered)} of {len(users)} rows" in lines[0]
    assert f"{lookups / sum(counts):.1%} of the lookups" in lines[0]
    replaced = sum(user in VECTORS and user in previous for user in users)
    assert f"; {replaced} more are copied from the older run" in lines[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(embedding__init_from=ConfigDict({"ads": "x"})), ["'ads' must match a table", "user"]),
        (dict(embedding__init_from=ConfigDict({"user": "absent"})), ["absent"]),
        (dict(embedding__dim=8), ["'user'", "dim of its vectors, 4 in", "dim 8", "dims.user = 4"]),
        (dict(embedding__dim=0), ["no dim"]),
        (dict(model__name="deepfm"), ["model.name='deepfm'"]),
        (
            dict(features__categorical=[dict(columns="user", encoding="bucket", buckets=3)]),
            ["'user'", "'bucket'"],
        ),
    ],
    ids=lambda x: next(iter(x)),
)
def test_invalid_files_are_rejected_before_the_data_is_prepared(changes, named, folder, tmp_path):
    c = with_vectors(folder)
    with c.unlocked():
        for path, value in changes.items():
            section, _, name = path.partition("__")
            c[section][name] = value
    with pytest.raises(InputError) as error:
        build(c, tmp_path, nothing)
    assert [part for part in named if part not in str(error.value)] == []
    assert not (tmp_path / "data").exists()
