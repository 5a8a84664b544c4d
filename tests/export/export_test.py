"""Tests of exported files against the tables and the predictions of the model itself."""

import json
import shutil

import jax
import numpy as np
import pages
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import xxhash
from every_feature import config, write
from ml_collections import ConfigDict
from runs import nothing, saved

from jaxrank import cli
from jaxrank.checkpoints import manager
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.data.batches.stack_rows import StackRows
from jaxrank.data.keyed_hash import pseudonymise
from jaxrank.data.prepare.passes import prepare
from jaxrank.embedding.storage import logical_rows
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.export import table_rows
from jaxrank.export import write as exports
from jaxrank.export.write import export
from jaxrank.step import prediction_weights

pytestmark = pytest.mark.usefixtures("shared_programs")

TABLES = ("user", "item", "pair", "tags", "code", "number", "age")
WITH_VALUES = ("user", "item", "pair", "tags")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on eight devices, the run itself and its state.

    Every number of the state is random. Raw data is in `raw` in that folder.
    """
    folder = tmp_path_factory.mktemp("export")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_PIECE", 2**12)
        return folder, *saved(config(write(folder / "raw")), folder / "run")


@pytest.fixture(scope="module")
def exported(run):
    folder, _, _ = run
    cli.run(
        [
            "export",
            f"--workdir={folder / 'run'}",
            f"--output={folder / 'out'}",
            "--format=files",
            "--json",
        ]
    )
    return folder / "out"


@pytest.fixture(scope="module")
def predicted(run):
    """Predictions f[n, tasks] of `predict`."""
    folder, _, _ = run
    evaluate.predict(str(folder / "run"), output=str(folder / "p.parquet"), data="", split="")
    result = pq.read_table(folder / "p.parquet")
    return np.stack([result[f"predicted_{task}"].to_numpy() for task in ("click", "buy")], axis=1)


def read_vectors(path):
    table = pq.read_table(path)
    assert table["row"].to_pylist() == list(range(len(table)))
    return np.array(table["vector"].to_pylist(), np.float32)


def test_every_vector_is_that_of_the_row_that_a_batch_reads(run, exported):
    _, job, state = run
    layout = job.program.step_spec.embedding.layout
    result = set()
    for stack in layout.stacks:
        rows = logical_rows(jax.device_get(prediction_weights(state).rows), stack)
        for i, name in enumerate(stack.tables):
            count = next(table.rows for table in layout.schema.tables if table.name == name)
            of_batch = StackRows(layout, stack, ["any"], [i])
            read = of_batch.matrix(np.arange(count, dtype=np.int32)[:, None])[:, 0]
            np.testing.assert_array_equal(
                read_vectors(exported / f"tables/{name}.parquet"), rows[read]
            )
            result.add(name)
    assert result == set(TABLES) == {p.stem for p in (exported / "tables").iterdir()}
    # The test covers rows of each kind, in several pieces.
    stack = next(stack for stack in layout.stacks if stack.name == "dim4")
    assert 0 < stack.hot_start < stack.replicated < stack.rows
    assert len(stack.hot) > stack.replicated - stack.hot_start
    checkpoints = manager.Checkpoints(job.directory, read_only=True)
    sums = checkpoints.saved_checksums(16)["weights"]
    stored = CheckpointReader(checkpoints.path / "16" / "weights", sums)
    assert len(list(stored.pieces("rows.dim4"))) > 1


def test_columns_have_the_types_that_are_reported(run, exported):
    _, job, _ = run
    dims = {"pair": 3, "age": 5}
    for name in TABLES:
        schema = pq.read_schema(exported / f"tables/{name}.parquet")
        expected = {"row": pa.int32(), "vector": pa.list_(pa.float32(), dims.get(name, 4))}
        expected |= {"value": pa.string()} if name in WITH_VALUES else {}
        assert dict(zip(schema.names, schema.types, strict=True)) == expected
    for name in WITH_VALUES:
        values = pq.read_table(exported / f"tables/{name}.parquet")["value"].to_pylist()
        assert values == [None, None, *job.store.vocabulary(name)[0]]


def test_predictions_follow_from_raw_text_and_the_files_alone(run, exported, predicted):
    """NumPy computes the encoding, the lookup, DCN-V2, a tower with batch norm, and two logits."""
    raw = pacsv.read_csv(
        run[0] / "raw" / "valid.csv",
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(["number", "age", "f0", "f1", "tag_weights"], pa.string())
        ),
    ).to_pydict()
    lines = json.loads((exported / "export.json").read_text())
    assert [task["name"] for task in lines["tasks"]] == ["click", "buy"]
    tables = {t["name"]: t for t in lines["tables"]}
    vectors = {name: read_vectors(exported / t["file"]) for name, t in tables.items()}
    rows = {}
    for name in WITH_VALUES:
        values = pq.read_table(exported / tables[name]["file"])["value"].to_pylist()
        rows[name] = {value: row for row, value in enumerate(values) if value}

    def vector(feature, value):
        table = tables[feature["table"]]
        result = vectors[table["name"]]
        if table["encoding"] == "integer":
            assert table["on_bad_id"] == "oov"
            last = table["rows"] - 1
            return result[min(int(value), last)] if value else np.zeros(table["dim"])
        if not value:
            return result[0]
        if table["encoding"] == "vocabulary":
            return result[rows[table["name"]].get(value, 1)]
        if table["encoding"] == "hash":
            digest = xxhash.xxh64_intdigest((feature["salt"] + value).encode())
            return result[2 + digest % (table["rows"] - 2)]
        return result[2 + sum(edge <= float(value) for edge in feature["boundaries"])]

    examples = []
    for i in range(300):
        parts = {}
        for f in lines["dense"]:
            x = float(raw[f["name"]][i] or "nan")
            x = np.sign(x) * np.log1p(abs(x)) if f["log"] else x
            parts["float", f["name"], 0] = [np.nan_to_num((x - f["mean"]) / f["std"])]
            if f["missing_indicator"]:
                parts["float", f"{f['name']}:missing", 0] = [float(np.isnan(x))]
        for f in lines["categorical"]:
            cell = raw[f["name"]][i] or ""
            values = cell.split(f["separator"]) if f["separator"] and cell else [cell] * f["length"]
            for place, value in enumerate(values):
                parts["id", f["name"], place] = vector(f, value)
        for f in lines["ragged"]:
            cell = raw[f["name"]][i]
            values = cell.split(f["separator"]) if cell else []
            weights = np.ones(len(values))
            if f["weights"] and values:
                weights = np.array([float(w) for w in raw[f["weights"]][i].split("|")])
            norm = {"mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[f["combiner"]]
            sums = np.zeros(tables[f["table"]]["dim"])
            for value, weight in zip(values, weights, strict=True):
                sums += weight / max(norm, 1e-38) * vector(f, value)
            parts["list", f["name"], 0] = sums
        inputs = [(p["kind"], p["feature"], p["place"]) for p in lines["inputs"]]
        assert set(inputs) == set(parts)
        assert [len(parts[p]) for p in inputs] == [p["size"] for p in lines["inputs"]]
        examples.append(np.concatenate([parts[p] for p in inputs]))

    layer = dict(np.load(exported / "layers.npz"))
    x0 = x = np.array(examples)
    for n in range(lines["config"]["model"]["cross_layers"]):
        name = f"params.cross.layer_{n}"
        x = x0 * (x @ layer[f"{name}.kernel"] + layer[f"{name}.bias"]) + x
    deep = x0 @ layer["params.tower.layer_0.kernel"]
    mean, var = (layer[f"model_state.batch_stats.tower.norm_0.{s}"] for s in ("mean", "var"))
    deep = (deep - mean) / np.sqrt(var + 1e-5) * layer["params.tower.norm_0.scale"]
    deep = np.maximum(deep + layer["params.tower.norm_0.bias"], 0)
    head = np.concatenate([x, deep], axis=1) @ layer["params.head.kernel"]
    logits = (head + layer["params.head.bias"]) * layer["scale"] + layer["bias"]
    p = 1 / (1 + np.exp(-logits))
    assert predicted.std(axis=0).min() > 0.05
    np.testing.assert_allclose(p, predicted, atol=1e-5)


def documented(mark):
    page = "serving.md" if mark == "python" else "exported_files.md"
    return pages.marked(page, f"run by export_test.py: {mark}")


def test_the_documented_programs_run(run, exported, predicted):
    folder = run[0]
    places = {"/tmp/exported": exported, "/tmp/quickstart/data": folder / "run" / "data"}
    places["/tmp/quickstart"] = folder / "run"
    names = {}
    for mark in ("value", "scores", "python"):
        code = documented(mark)
        for old, new in places.items():
            code = code.replace(old, str(new))
        exec(code, names)
    np.testing.assert_allclose(names["predictions"], predicted, atol=1e-5)
    np.testing.assert_allclose(1 / (1 + np.exp(-names["logits"])), predicted, atol=1e-6)
    values = pq.read_table(exported / "tables/item.parquet")["value"].to_pylist()
    expected = read_vectors(exported / "tables/item.parquet")[values.index("i7")]
    np.testing.assert_array_equal(np.float32(names["vector"]), expected)


def test_the_documented_program_scores_sequences(run, tmp_path):
    """The tables have two dimensions, and the model reads them in another order than the config."""
    c = config(run[0] / "raw")
    c.features.ragged = [
        dict(columns="seen", table="item", min_count=2, combiner="none", max_length=3),
        dict(columns="tags", combiner="none", max_length=5, on_overlong="truncate"),
        dict(columns="pair", separator="|", combiner="mean"),
    ]
    c.features.categorical = [
        entry for entry in c.features.categorical if entry["columns"] != "pair"
    ]
    c.features.sequences = [dict(name="past", columns="seen", order="newest_first")]
    attention = dict(pool="target_attention", candidate={"seen": "item"})
    c.model.sequences = ConfigDict({"past": attention})
    c.embedding.dims = ConfigDict({"tags": 3})
    saved(c, tmp_path / "run")
    export(str(tmp_path / "run"), output=str(tmp_path / "out"))
    lines = json.loads((tmp_path / "out" / "export.json").read_text())
    kinds = [(i["kind"], i["feature"]) for i in lines["inputs"]]
    assert kinds[-2:] == [("sequence", "tags"), ("sequence", "seen")]

    names = {}
    code = documented("scores").replace("/tmp/exported", str(tmp_path / "out"))
    exec(code.replace("/tmp/quickstart/data", str(tmp_path / "run" / "data")), names)
    evaluate.predict(str(tmp_path / "run"), output=str(tmp_path / "p.parquet"))
    result = pq.read_table(tmp_path / "p.parquet")
    predicted = np.stack([result[f"predicted_{t}"].to_numpy() for t in ("click", "buy")], axis=1)
    assert predicted.std(axis=0).min() > 0.05
    np.testing.assert_allclose(names["predictions"], predicted, atol=1e-5)


def test_tables_larger_than_memory_give_the_same_files(run, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(table_rows, "_FILE", 1000)
    export(str(run[0] / "run"), output=str(tmp_path / "out"))
    for name in TABLES:
        a, b = (pq.read_table(p / f"tables/{name}.parquet") for p in (exported, tmp_path / "out"))
        assert a.equals(b)
    assert pq.ParquetFile(tmp_path / "out/tables/item.parquet").num_row_groups > 2
    assert (tmp_path / "out/export.json").read_text() == (exported / "export.json").read_text()


def test_the_store_may_have_moved_and_grown(run, exported, tmp_path):
    folder = run[0]
    workdir = tmp_path / "run"
    shutil.copytree(folder / "run", workdir, ignore=shutil.ignore_patterns("data"))
    c = config(folder / "raw")
    c.source.files.train = c.source.files.valid
    later = tmp_path / "later"
    grown = prepare(
        c.features.to_dict(), c.source.to_dict(), later, report=nothing,
        vocabularies=str(folder / "run" / "data"),
    )  # fmt: skip
    with pytest.raises(InputError, match="data: no such store"):
        export(str(workdir), output=str(tmp_path / "out"))
    export(str(workdir), output=str(tmp_path / "out"), data=str(later))
    local = pq.read_table(tmp_path / "out/tables/user.parquet")
    assert local.equals(pq.read_table(exported / "tables/user.parquet"))
    assert len(grown.vocabulary("user")[0]) > len(local) - 2


def test_other_vocabularies_and_another_model_are_rejected(run, tmp_path):
    folder = run[0]
    c = config(folder / "raw")
    c.source.files.train = c.source.files.valid
    prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "other", report=nothing)
    with pytest.raises(InputError, match="must be those that the model"):
        export(str(folder / "run"), output=str(tmp_path / "out"), data=str(tmp_path / "other"))
    shutil.copytree(folder / "run", tmp_path / "run")
    lines = json.loads((tmp_path / "run/config.json").read_text())
    lines["model"]["mlp_units"] = [9]
    (tmp_path / "run/config.json").write_text(json.dumps(lines))
    with pytest.raises(InputError, match=r"params.tower.layer_0.kernel: \(\d+, 8\), .* \(\d+, 9\)"):
        export(str(tmp_path / "run"), output=str(tmp_path / "out"))
    assert {p.name for p in tmp_path.iterdir()} == {"other", "run"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workdir={}/none",), "config.json: no such file"),
        (("--checkpoint=12",), r"newest, best .*\[16\]: found '12'"),
        (("--output={}/raw",), r"--output: .*raw must not exist"),
        (("--output=gs://bucket/out",), "--output: must .*found gs://bucket/out"),
        (("--data={}/none",), "none: no such store"),
        (("--split=valid",), "unknown argument '--split=valid'"),
    ],
)
def test_what_cannot_be_is_rejected(run, tmp_path, flags, message):
    folder = run[0]
    inputs = [f"--workdir={folder / 'run'}", f"--output={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=message):
        cli.run(["export", *inputs, *(flag.format(folder) for flag in flags)])
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_checkpoint_is_rejected(run, tmp_path):
    shutil.copytree(run[0] / "run", tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(InputError, match="found no checkpoints"):
        export(str(tmp_path), output=str(tmp_path / "out"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="must hold a checkpoint"):
        export(str(tmp_path), output=str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("failure", "raised"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError("full"), RunError)]
)
def test_what_is_interrupted_leaves_nothing(run, tmp_path, monkeypatch, failure, raised):
    workdir, output = str(run[0] / "run"), tmp_path / "out"
    leftover = tmp_path / ".out.partial" / "tables"  # left by a killed process
    leftover.mkdir(parents=True)
    (leftover / "old.parquet").touch()
    write_table, written = exports._write_table, []

    def fails(path, *args):
        if written:
            raise failure
        written.append(path)
        write_table(path, *args)

    monkeypatch.setattr(exports, "_write_table", fails)
    with pytest.raises(raised):
        export(workdir, output=str(output))
    assert written
    assert list(tmp_path.iterdir()) == []

    monkeypatch.undo()
    leftover.mkdir(parents=True)
    (leftover / "old.parquet").touch()
    export(workdir, output=str(output))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {p.stem for p in (output / "tables").iterdir()} == set(TABLES)


def test_one_process_at_a_time_writes_an_output(run, tmp_path):
    with exports.written(str(tmp_path / "out")):
        with pytest.raises(RunError, match="another process is writing"):
            export(str(run[0] / "run"), output=str(tmp_path / "out"))
        assert (tmp_path / ".out.partial").is_dir()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a run with one feature, the run itself and its state.

    Each vector takes three lines of storage, and raw values are stored as keyed hashes. The export
    is in `out` in that folder.
    """
    folder = tmp_path_factory.mktemp("wide")
    c = config(write(folder / "raw"), ema_decay=0.0)
    c.features.dense, c.features.ragged, c.mesh.devices = [], [], 1
    c.features.categorical, c.features.tasks = [dict(columns="item")], c.features.tasks[:1]
    c.embedding.dim, c.embedding.dims, c.embedding.placements = 300, ConfigDict(), ConfigDict()
    (folder / "key").write_bytes(b"0123456789abcdef")
    c.data.store = str(folder / "store")
    prepare(
        c.features.to_dict(), c.source.to_dict(), folder / "store", report=nothing,
        hash_key_file=str(folder / "key"),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_PIECE", 2**17)
        job, state = saved(c, folder / "run")
    export(str(folder / "run"), output=str(folder / "out"))
    return folder, job, state


def test_vectors_of_several_lines_are_put_together(wide):
    folder, job, state = wide
    (stack,) = job.program.step_spec.embedding.layout.stacks
    expected = logical_rows(jax.device_get(prediction_weights(state).rows), stack)
    np.testing.assert_array_equal(read_vectors(folder / "out/tables/item.parquet"), expected)


def test_values_are_keyed_hashes_where_the_store_holds_them(wide):
    folder, _, _ = wide
    assert json.loads((folder / "out/export.json").read_text())["keyed_hashes"]
    values = pq.read_table(folder / "out/tables/item.parquet")["value"].to_pylist()
    assert values[0] is values[1] is None
    assert pseudonymise(b"0123456789abcdef")("i7") in values
