"""A bundle scores raw values as `predict` does, and is exported atomically and resumably."""

import dataclasses
import errno
import json
import shutil
import threading
import tracemalloc
from types import SimpleNamespace

import jaxrank_serving
import numpy as np
import pages
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from every_feature import config, write
from jaxrank_serving import BundleError, RequestError
from jaxrank_serving.bundle import seal
from jaxrank_serving.signature import upgraded
from ml_collections import ConfigDict
from runs import nothing, saved

from jaxrank import cli
from jaxrank.calibration import files as calibrations
from jaxrank.calibration.by_value import ByValue
from jaxrank.calibration.maps import Calibration, LogitMap
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.config import Data
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.rejects import BadRows
from jaxrank.data.sources import text
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.export import bundle as bundles
from jaxrank.export import dense_part as dense_parts
from jaxrank.export import predict as predicts
from jaxrank.export import signature as signatures
from jaxrank.export import table_rows, vocabulary_index
from jaxrank.export.bundle import export_bundle
from jaxrank.export.card import card
from jaxrank.export.comparison import parity, validation
from jaxrank.export.comparison.raw_rows import raw_rows
from jaxrank.export.predict import predict_bundle
from jaxrank.export.signature import Requests
from jaxrank.export.statistics import statistics
from jaxrank.export.write import open_source, written
from jaxrank.features import Task
from jaxrank.metrics import exact

TASKS = ("click", "buy")


@pytest.fixture(scope="module", autouse=True)
def few_requests():
    """Latency is measured on few requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_REPEATS", dict.fromkeys(parity.CANDIDATES, 2))
        yield


def raw(folder):
    """Returns the validation rows as JSON would have them."""
    return pacsv.read_csv(
        folder / "raw" / "valid.csv",
        convert_options=pacsv.ConvertOptions(
            column_types={
                name: pa.string() for name in ("number", "age", "f0", "f1", "tag_weights")
            }
        ),
    ).to_pydict()


def request_columns(scorer, rows):
    return {c.name: rows[c.name] for c in scorer.signature.columns}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with random numbers and derived columns; conversions are given clicks."""
    folder = tmp_path_factory.mktemp("bundle")
    c = config(write(folder / "raw"))
    c.model.parents = ConfigDict({"buy": "click"})
    c.features.derived = [
        dict(name="crossed", kind="cross", columns=("user", "item")),
        dict(name="spread", kind="difference", columns=("f0", "f1")),
        dict(name="level", kind="log", columns="spread"),
        dict(name="quotient", kind="ratio", columns=("f1", "f0")),
    ]
    c.features.keep = ("item", "level")
    c.features.categorical = [
        *c.features.categorical,
        dict(columns="crossed", encoding="hash", rows=50),
    ]
    c.features.dense = [*c.features.dense, dict(columns="level", standardize=True)]
    c.features.dense = [*c.features.dense, dict(columns="quotient")]  # its tail is long
    c.mesh.devices = 1
    saved(c, folder / "run")
    return folder


@pytest.fixture(scope="module")
def exported(run):
    flags = ["--context=us*", "--default=age=30", "--json"]
    cli.run(["export", f"--workdir={run / 'run'}", f"--output={run / 'out'}", *flags])
    return run / "out"


@pytest.fixture(scope="module")
def scorer(exported):
    return jaxrank_serving.load(exported, verify=True)


@pytest.fixture(scope="module")
def predicted(run):
    evaluate.predict(str(run / "run"), output=str(run / "p.parquet"))
    table = pq.read_table(run / "p.parquet")
    return {task: table[f"predicted_{task}"].to_numpy() for task in TASKS}


def test_raw_rows_have_the_scores_of_predict(run, scorer, predicted):
    rows = request_columns(scorer, raw(run))
    users = rows.pop("user")
    scores = {output.name: np.empty(300) for output in scorer.signature.outputs}
    for user in set(users):
        places = [i for i, u in enumerate(users) if u == user]
        candidates = [{name: values[i] for name, values in rows.items()} for i in places]
        for name, values in scorer.score({"user": user}, candidates).items():
            scores[name][places] = values
    for task in TASKS:
        assert predicted[task].std() > 0.01
        np.testing.assert_allclose(scores[task], predicted[task], atol=1e-6)
    assert [f.name for f in scorer.signature.dense if f.log] == ["f1", "quotient"]
    assert [o.name for o in scorer.signature.outputs] == ["click", "buy", "buy_given_click"]
    joint = scores["click"] * scores["buy_given_click"]
    np.testing.assert_allclose(joint, scores["buy"], rtol=1e-5)


def test_rows_to_compare_are_collected_over_chunks(run, monkeypatch):
    monkeypatch.setattr(text, "_MIN_CHUNK_BYTES", 64)
    monkeypatch.setattr(text, "_ROWS_PER_CHUNK", 40)
    source = open_source(str(run / "run"), "newest", "")
    spec = bundles.bundle_features(source)
    users = [user or None for user in raw(run)["user"]]
    del users[50]
    encode = Encoder.encode

    def rejected(encoder, chunk):
        if 52 in chunk.rows:  # its line, after the header
            raise BadRows(chunk, np.flatnonzero(chunk.rows == 52), "user", "good", "another")
        return encode(encoder, chunk)

    monkeypatch.setattr(Encoder, "encode", rejected)
    for count, rows in ((100, 100), (1000, 299)):
        result = raw_rows(source.run, source.store, spec, count, None)
        assert result.batch.column("user").to_pylist() == users[:rows]
        assert result.examples.rows == rows


@pytest.mark.parametrize("by", [None, "item"])
def test_a_bundle_of_a_calibrated_checkpoint_has_its_calibrated_scores(
    run, predicted, tmp_path, by
):
    workdir = tmp_path / "run"
    shutil.copytree(run / "run", workdir)
    checkpoints = Checkpoints(workdir, read_only=True)
    step = checkpoints.step()
    maps = {
        0: LogitMap((0.0,), (-0.3,), 0.5, 0.5),
        1: LogitMap((-3.0, -1.0), (-4.0, 1.0), 1.0, 1.0),
    }
    origin = {"method": "platt", "split": "test", "tasks": list(TASKS)}
    if by:
        by = ByValue("item", (2, 4), ((0.5, 1.0), (2.0, 1.5)), ((0.1, -2.0), (-1.0, 3.0)))
    calibration = Calibration(maps, (-1, 0), origin, by)
    sums = checkpoints.saved_checksums(step)["weights"]
    calibrations.save(workdir, step, calibration, TASKS, sums)
    logits = np.stack([np.log(predicted[t]) - np.log1p(-predicted[t]) for t in TASKS], axis=1)
    export_bundle(str(workdir), output=str(tmp_path / "out"), report=nothing)
    scorer = jaxrank_serving.load(tmp_path / "out")
    assert scorer.signature.origin["calibration"] == origin
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["format_version"] == (3 if by else 2)
    columns, coefficients = request_columns(scorer, raw(run)), None
    if by:
        features, _ = scorer.encode({}, columns)
        offset = next(t.offset for t in scorer.signature.tables if t.name == "item")
        items = features.ids["item"][:, 0] - offset
        assert {2, 4} < set(items)
        coefficients = by.coefficients(items)
    expected = exact.probability(calibration(logits, np, coefficients))
    scores = scorer.score({}, columns)
    for i, task in enumerate(TASKS):
        np.testing.assert_allclose(scores[task], expected[:, i], atol=1e-5)
    if by:  # as the trained program does
        evaluate.predict(str(workdir), output=str(tmp_path / "p.parquet"))
        table = pq.read_table(tmp_path / "p.parquet")
        np.testing.assert_allclose(table["predicted_buy"], scores["buy"], atol=1e-5)
    is_bound = scores["buy"] == scores["click"]
    assert 0 < is_bound.sum() < len(is_bound)
    joint = scores["click"] * scores["buy_given_click"]
    np.testing.assert_allclose(joint, scores["buy"], rtol=1e-4)
    recorded = scorer.signature.statistics
    assert recorded.scored_rows == 300
    page = (tmp_path / "out" / "model_card.md").read_text()
    for task in recorded.tasks:
        labels, p = np.array(raw(run)[task.task]), scores[task.task]
        logloss = -np.mean(np.where(labels, np.log(p), np.log1p(-p)))
        assert task.score_mean == pytest.approx(p.mean(), abs=1e-5)
        assert task.metrics["logloss"] == pytest.approx(logloss, abs=1e-4)
        assert 0.3 < task.metrics["auc"] < 0.7  # labels are random
        assert f"| {task.task}, mean score | {task.score_mean:.6g} |" in page
        assert f"| {task.task}/logloss | {task.metrics['logloss']:.6g} |" in page


def test_the_output_of_a_ranked_task_is_a_score(scorer):
    schema = SimpleNamespace(tasks=[Task("click"), Task("buy"), Task("spend", "real")])
    outputs = dense_parts.output_names(schema, (-1, 0, -1), ["buy"])
    assert {o["name"]: o["meaning"] for o in outputs} == {
        "click": "probability",
        "buy": "score",
        "spend": "number",
        "buy_given_click": "score",
    }
    tree = dataclasses.asdict(scorer.signature) | {"outputs": outputs}
    page = card(tree, {})
    assert "- Outputs: click (probability), buy (score), spend (number), buy_given_click (" in page
    assert "- Trained by ranking alone: buy, buy_given_click. A score orders" in page
    assert "ranking" not in card(dataclasses.asdict(scorer.signature), {})
    for output in outputs:  # as bundles of earlier versions have them
        del output["meaning"]
    older = upgraded({"outputs": outputs}, 2)
    assert [o["meaning"] for o in older["outputs"][::2]] == ["probability", "number"]
    assert older["calibration"] is None
    tree["statistics"] = {"split": "", "rows": None, "tasks": [{"task": "click"}], "features": []}
    older = upgraded(tree, 3)["statistics"]
    assert older["scored_rows"] is None
    assert older["tasks"] == [{"task": "click", "metrics": {}}]


def test_text_is_spelled_as_values_of_the_trained_type():
    columns = {
        "ad": ["30.0", "-7", "0030.00", "", "x"],
        "rate": ["36.0", "0.5", "1e3", None, "2."],
        "flag": ["True", "false", "1", "", None],
        "name": ["30.0", "true", "a", "", None],
    }
    typed = {"ad": "int64", "rate": "float32", "flag": "bool", "absent": "bool"}

    def spelled(**changes):
        arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
        batch = pa.RecordBatch.from_pydict(arrays | changes)
        return predicts._as_trained(Chunk(batch, "day.csv", np.arange(2, 7)), typed).batch

    assert spelled().to_pydict() == {
        "ad": ["30", "-7", "0030", "", "x"],
        "rate": ["36", "0.5", "1e3", None, "2"],
        "flag": ["1", "0", "1", None, None],
        "name": columns["name"],
    }
    with pytest.raises(InputError, match="day.csv, row 4, column flag: must be true.* found '36'"):
        spelled(flag=pa.array(["1", "0", "36", "0", ""]))
    numbers = pa.array([1, 0, 1, 1, 0])
    assert spelled(flag=numbers)["flag"].equals(numbers)


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_a_bundle_predicts_files_as_the_run_predicts_its_store(
    run, exported, predicted, tmp_path, end
):
    table = pacsv.read_csv(
        run / "raw" / "valid.csv",
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(raw(run), pa.string()), strings_can_be_null=True
        ),
    )
    if end == "parquet":
        table = table.drop_columns(["click"])
        pq.write_table(table, tmp_path / "raw.parquet", row_group_size=70)
    else:
        pacsv.write_csv(table, tmp_path / "raw.csv")
    output = tmp_path / "p.parquet"
    flags = [f"--bundle={exported}", f"--input={tmp_path / 'raw'}.{end}", f"--output={output}"]
    cli.run(["predict", *flags])
    actual, expected = pq.read_table(output), pq.read_table(run / "p.parquet")
    assert actual.schema == expected.schema
    assert "level" in actual.schema.names
    for name in actual.schema.names:
        if end == "parquet" and name.startswith("label_"):
            assert actual[name].null_count == 300
        elif name.startswith("predicted_"):
            np.testing.assert_allclose(actual[name], expected[name], atol=1e-6)
        else:
            assert actual[name].equals(expected[name]), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bundle=B"], "--input: must name the raw data"),
        (["--bundle=B", "--workdir=W", "--input=I"], "--workdir: must be used without --bundle"),
        (["--bundle=B", "--input=I", "--split=s"], "--split: must be used without --bundle"),
        (["--workdir=W", "--input=I"], "--input: must be used with --bundle"),
        ([], "--workdir, --bundle: one of them must be given"),
        (["--bundle=B", "--input=I"], "--bundle: B: must be a bundle: found no manifest"),
        ([f"--bundle={__file__}", "--input=I"], "_test.py: must be a bundle: found no manifest"),
    ],
)
def test_flags_of_predictions_by_a_bundle_are_checked(tmp_path, flags, message):
    with pytest.raises(InputError, match=message):
        cli.run(["predict", f"--output={tmp_path / 'p.parquet'}", *flags])
    assert not list(tmp_path.iterdir())


def test_a_bundle_predicts_nothing_from_an_invalid_row(run, exported, tmp_path):
    lines = (run / "raw" / "valid.csv").read_text().splitlines()
    cells = lines[200].split(",")
    cells[lines[0].split(",").index('"f1"')] = "seven"
    lines[200] = ",".join(cells)
    (tmp_path / "raw.csv").write_text("\n".join(lines) + "\n")
    arguments = dict(inputs=str(tmp_path / "raw.csv"), output=str(tmp_path / "p.parquet"))
    with pytest.raises(InputError, match="raw.csv, row 201, column f1: must be .*'seven'"):
        predict_bundle(str(exported), **arguments)
    (tmp_path / "raw.csv").write_text("\n".join(lines).replace(",", ";"))
    with pytest.raises(InputError, match="no column .*: set source.delimiter=';'. The input must"):
        predict_bundle(str(exported), **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["raw.csv"]


def test_the_signature_has_statistics_of_the_validation_data(run, exported, scorer):
    rows, recorded = raw(run), scorer.signature.statistics
    assert (recorded.split, recorded.rows) == ("valid", 300)
    features = {feature.name: feature for feature in recorded.features}
    assert features.keys() == scorer.counts().keys()
    assert features["user"].missing == rows["user"].count("") / 300
    unseen = {user for user in rows["user"] if user} - set(
        pacsv.read_csv(run / "raw" / "train.csv")["user"].to_pylist()
    )
    assert features["user"].unknown == sum(user in unseen for user in rows["user"]) / 300 > 0
    lengths = [len(tags.split("|")) if tags else 0 for tags in rows["tags"]]
    assert features["tags"].mean_length == pytest.approx(np.mean(lengths))
    means = {task.task: task for task in recorded.tasks}
    assert means["click"].label_mean == pytest.approx(np.mean(rows["click"]))
    assert means["click"].score_mean is None  # this run was not evaluated
    card = (exported / "model_card.md").read_text()
    assert f"| click, mean label | {means['click'].label_mean:.6g} |" in card
    assert f"| user | {features['user'].missing:.1%} missing" in card
    assert "| user | text | context | rejected |" in card
    assert '| age | text | candidate | `"30"` |' in card


def test_scores_are_those_of_the_last_evaluation_of_the_checkpoint(tmp_path):
    records = [
        dict(step=step, kind=kind, **{"click/calibration": value, "click/auc": value / 4})
        for step, kind, value in [(1, "valid", 1.0), (2, "valid", 3.0), (2, "valid", 2.0)]
        + [(2, "train", 9.0), (3, "valid", 4.0)]
    ]
    text = "\n".join(map(json.dumps, records)) + '\n{"step": 2, "kind": "valid", "cli'
    (tmp_path / "metrics.jsonl").write_text(text)
    run = SimpleNamespace(
        directory=tmp_path,
        builder=SimpleNamespace(data=Data(valid="valid", train="train")),
        schema=SimpleNamespace(tasks=[SimpleNamespace(name="click")]),
    )
    recorded = SimpleNamespace(
        has_statistics=True, statistics=dict(rows=9, traffic=dict(click=dict(mean=0.25)))
    )
    store = SimpleNamespace(split=lambda *_: recorded)
    source = SimpleNamespace(run=run, step=2, store=store, calibration=None)
    spec = SimpleNamespace(dense=[], categorical=[], ragged=[])
    result = statistics(source, spec)
    assert result["scored_rows"] == 9
    assert result["tasks"] == [
        dict(task="click", label_mean=0.25, score_mean=0.5, metrics={"auc": 0.5})
    ]
    other = validation.Validation(5, {"click": 0.1}, {"click": {"auc": 0.9}}, {})
    assert validation.with_validation(result, other) == result
    source.calibration = object()
    assert statistics(source, spec)["tasks"] == [
        dict(task="click", label_mean=0.25, score_mean=None, metrics={})
    ]


def test_values_are_counted_by_feature(run, exported):
    scorer = jaxrank_serving.load(exported)
    rows = request_columns(scorer, raw(run))
    users = rows.pop("user")
    for user in ("u1", "", "never seen"):
        scorer.score({"user": user}, {name: values[:100] for name, values in rows.items()})
    counts = scorer.counts()
    assert counts["user"] == (3, 1, 1, 0, 0, 0)
    assert counts["number"].values == 300
    assert counts["number"].missing == 3 * rows["number"][:100].count("")
    assert counts["number"].out_of_range > 0
    assert counts["pair"].values == 600
    assert len(users) == 300


def test_requests_are_checked_and_defaults_filled_in(run, scorer):
    rows = request_columns(scorer, raw(run))
    rows.pop("user")
    candidates = [{name: values[i] for name, values in rows.items()} for i in range(3)]
    whole = scorer.score({"user": "u1"}, candidates)
    without = [{k: v for k, v in c.items() if k != "age"} for c in candidates]
    thirty = [c | {"age": 30} for c in candidates]
    expected = scorer.score({"user": "u1"}, thirty)
    np.testing.assert_array_equal(scorer.score({"user": "u1"}, without)["click"], expected["click"])
    mixed = scorer.score({"user": "u1"}, [candidates[0], without[1], candidates[2]])
    np.testing.assert_allclose(mixed["click"][::2], whole["click"][::2], rtol=1e-6)
    np.testing.assert_allclose(mixed["click"][1], expected["click"][1], rtol=1e-6)
    assert scorer.score({"user": "u1"}, [])["click"].shape == (0,)
    for context, changed, message in (
        ({}, candidates, "context, user: must be given"),
        ({"user": "u1", "item": "i1"}, candidates, "item: must be given once"),
        ({}, [c | {"user": "u2"} for c in candidates], "user: must be given in the context"),
        ({"user": "u1"}, [*candidates[:2], {"item": "i1"}], r"candidate 2, f0: must be given"),
        ({"user": "u1"}, [{"item": "i1"}], "each candidate, f0: must be given"),
        ({"user": "u1"}, [c | {"itm": 1} for c in candidates], "each candidate, itm: must be a fe"),
        ({"user": "u1"}, [candidates[0], candidates[1] | {"itm": 1}], "candidate 1, itm: must be"),
        ({"user": "u1", "usr": "u1"}, candidates, "context, usr: must be a feature of the model"),
        ({"user": "u1"}, {"item": "i1"}, "each candidate, item: must be a list of values"),
        ({"user": "u1"}, [c | {"number": "x"} for c in candidates], "candidate 0, number"),
        ({"user": {}}, candidates, "context, user: must be text or a whole number"),
        ({"user": "\ud800"}, candidates, "must be text in UTF-8"),
        ({"user": "u1"}, "abc", "must be a list of candidates"),
        ({"user": "u1"}, {"item": ["a"], "code": []}, "must be columns of one length"),
    ):
        with pytest.raises(RequestError, match=message):
            scorer.score(context, changed)


def test_many_unknown_names_cost_nothing_but_themselves(scorer):
    many = {f"unknown {i}": 1 for i in range(3_000)}
    for candidates in ([many, *[{}] * 1_000], [{}, many, *[{}] * 1_000], {n: [1] for n in many}):
        tracemalloc.start()
        with pytest.raises(RequestError, match="unknown .*: must be a feature of the model"):
            scorer.score({"user": "u1"}, candidates)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20  # lists of all candidates for each name took 24 MB


def test_a_default_of_text_stays_as_it_is_written():
    for kind, given, expected in (
        *((pa.string(), given, given) for given in ("1.10", "1e5", "007", "true", "Zürich")),
        (pa.string(), '"1.10"', "1.10"),
        *((pa.string(), given, None) for given in ("", "null")),
        (pa.int64(), "30", 30),
        (pa.float32(), "1.10", 1.1),
        (pa.list_(pa.string()), '["1.10"]', ["1.10"]),
        (pa.int64(), 30, 30),
    ):
        assert signatures._default(given, kind) == expected


def test_the_documented_program_runs(exported):
    code = pages.marked("serving.md", "run by bundle_test.py: bundle")
    names = {}
    exec(code.replace("/tmp/ads", str(exported)), names)
    assert names["click"].shape == (2,)


def test_threads_share_a_scorer(run, exported):
    scorer, alone = (jaxrank_serving.load(exported, threads=threads) for threads in (2, 1))
    rows = request_columns(scorer, raw(run))
    user = rows.pop("user")[0]
    expected = scorer.score({"user": user}, rows)["click"]
    np.testing.assert_allclose(expected, alone.score({"user": user}, rows)["click"], rtol=1e-6)
    results = []

    def score():
        results.extend(scorer.score({"user": user}, rows)["click"] for _ in range(5))

    threads = [threading.Thread(target=score) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.parametrize("valid", ["", "next_day"])
def test_without_a_validation_split_the_cost_of_rounding_is_said_to_be_unknown(valid):
    lines = []
    builder = SimpleNamespace(data=Data(valid=valid))
    source = SimpleNamespace(run=SimpleNamespace(builder=builder), calibration=None)
    result = validation.validate(source, None, "int8", lines.append)
    assert result == validation.NOT_SCORED
    assert lines == [
        f"The cost of int8 tables was not measured: data.valid is {valid!r}, and no split"
    ]


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_rounded_tables_are_smaller_and_their_cost_is_measured(
    run, exported, predicted, tmp_path, dtype, limit
):
    lines = []
    result = export_bundle(
        str(run / "run"), output=str(tmp_path / "out"), tables=dtype, report=lines.append
    )
    assert result.parity.difference < 1e-6
    changes = result.rounding["click"]
    assert 0 < abs(changes["logloss"]) < limit
    assert "auc" in changes
    page = (tmp_path / "out" / "model_card.md").read_text()
    assert f"{changes['logloss']:.6g}" in page
    assert "Scores of 300 rows of valid" in page
    assert any(f"{dtype} tables change click on 300 examples" in line for line in lines)
    scorer = jaxrank_serving.load(tmp_path / "out")
    scores = scorer.score({}, request_columns(scorer, raw(run)))
    assert 0 < np.abs(scores["click"] - predicted["click"]).max() < limit
    size = {"bfloat16": 1 / 2, "int8": 1 / 4}[dtype]
    stored, whole = (
        (folder / "tables" / "dim4.bin").stat().st_size for folder in (tmp_path / "out", exported)
    )
    assert stored == size * whole


def test_sequences_and_keyed_hashes_are_scored(run, tmp_path):
    c = config(run / "raw")
    c.features.ragged = [
        dict(columns="seen", table="item", min_count=2, combiner="none", max_length=3),
        dict(columns="tags", combiner="none", max_length=5, on_overlong="truncate", keep="last"),
    ]
    c.embedding.dims = ConfigDict({"tags": 3})
    c.data.store, c.mesh.devices = str(tmp_path / "store"), 1
    (tmp_path / "key").write_bytes(b"0123456789abcdef")
    prepare(
        c.features.to_dict(), c.source.to_dict(), tmp_path / "store", report=nothing,
        hash_key_file=str(tmp_path / "key"),
    )  # fmt: skip
    saved(c, tmp_path / "run")
    with pytest.raises(InputError, match="--hash-key-file: must name the key"):
        export_bundle(str(tmp_path / "run"), output=str(tmp_path / "out"))
    key_file = str(tmp_path / "key")
    export_bundle(str(tmp_path / "run"), output=str(tmp_path / "out"), hash_key_file=key_file)
    with pytest.raises(BundleError, match="hash_key: must be the key .*found none"):
        jaxrank_serving.load(tmp_path / "out")
    scorer = jaxrank_serving.load(tmp_path / "out", hash_key=b"0123456789abcdef")
    evaluate.predict(str(tmp_path / "run"), output=str(tmp_path / "p.parquet"))
    expected = pq.read_table(tmp_path / "p.parquet")["predicted_click"].to_numpy()
    scores = scorer.score({}, request_columns(scorer, raw(run)))
    np.testing.assert_allclose(scores["click"], expected, atol=1e-6)
    truncated = sum(max(0, len(tags.split("|")) - 5) for tags in raw(run)["tags"])
    assert scorer.counts()["tags"].truncated == truncated > 0


def test_an_export_in_small_pieces_gives_the_same_files(run, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(table_rows, "_FILE", 1000)
    monkeypatch.setattr(vocabulary_index, "_IN_MEMORY", 50)
    monkeypatch.setattr(vocabulary_index, "_SLICE", 30)
    requests = Requests(("us*",), {"age": "30"})
    export_bundle(str(run / "run"), output=str(tmp_path / "out"), requests=requests)
    names = [str(p.relative_to(exported)) for p in exported.rglob("*") if p.is_file()]
    assert len(names) >= 8
    for name in set(names) - {"model_card.md", "manifest.json", "model.stablehlo"}:
        assert (tmp_path / "out" / name).read_bytes() == (exported / name).read_bytes(), name


def test_equal_hashes_lead_to_other_seeds(tmp_path, monkeypatch):
    hash_seed = vocabulary_index.hash_seed
    values = pa.chunked_array([["a", "b", "c"]])
    # A hash with two bits that count collides for some seeds.
    digest = vocabulary_index.xxhash.xxh3_64_intdigest
    tried = []

    def few_bits(value, seed=0):
        return digest(value, seed) & 0xC000000000000000

    monkeypatch.setattr(vocabulary_index.xxhash, "xxh3_64_intdigest", few_bits)
    monkeypatch.setattr(
        vocabulary_index, "hash_seed", lambda n, a: tried.append(a) or digest(b"%d" % a)
    )
    (tmp_path / "scratch").mkdir()
    written = vocabulary_index.write_index(
        [("t", values)], tmp_path / "index", tmp_path / "scratch"
    )
    assert len(tried) > 1
    assert written.seeds["t"] == digest(b"%d" % tried[-1])
    assert not list((tmp_path / "scratch").iterdir())
    assert hash_seed("t", 0) != hash_seed("t", 1) != hash_seed("u", 1)


def test_an_interrupted_export_continues(run, exported, tmp_path, monkeypatch):
    write_index, written = bundles.write_index, []
    make = bundles.write_stack
    full = OSError(errno.ENOSPC, "No space left on device")

    def counted(rows, dim, dtype, path, scales_path):
        if written == [3]:  # the disk is full within the second stack
            written.append("full")
            path.write_bytes(b"some rows")
            raise full
        written.append(dim)
        make(rows, dim, dtype, path, scales_path)

    def fails(*_):
        raise full

    monkeypatch.setattr(bundles, "write_stack", counted)
    monkeypatch.setattr(bundles, "write_index", fails)
    output = tmp_path / "out"
    for _ in range(2):
        with pytest.raises(RunError, match="out: cannot be written: .*No space left"):
            export_bundle(str(run / "run"), output=str(output))
        assert not output.exists()
    monkeypatch.setattr(bundles, "write_index", write_index)
    export_bundle(str(run / "run"), output=str(output))
    assert written == [3, "full", 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    jaxrank_serving.load(output, verify=True)
    for name in ("tables/dim4.bin", "vocabularies.bin"):
        assert (output / name).read_bytes() == (exported / name).read_bytes()


def test_one_export_at_a_time_writes_a_bundle(run, tmp_path):
    with written(str(tmp_path / "out")) as partial:
        (partial / "file").touch()
        with pytest.raises(RunError, match="another process is writing .*out"):
            export_bundle(str(run / "run"), output=str(tmp_path / "out"))
        assert [p.name for p in partial.iterdir()] == ["file"]


def test_a_bundle_that_predicts_otherwise_is_not_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "restored", lambda vectors, dtype: 1.01 * vectors)
    with pytest.raises(RunError, match=r"must predict like the trained program, to 1e-05: found 0"):
        export_bundle(str(run / "run"), output=str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_the_raw_data_must_be_there(run, tmp_path):
    shutil.copytree(run / "run", tmp_path / "run")
    shutil.move(run / "raw" / "valid.csv", run / "raw" / "moved.csv")
    try:
        with pytest.raises(InputError, match=r"valid.csv.*--format=files needs none"):
            export_bundle(str(tmp_path / "run"), output=str(tmp_path / "out"))
    finally:
        shutil.move(run / "raw" / "moved.csv", run / "raw" / "valid.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_without_an_onnx_form_the_bundle_has_stablehlo_only(run, tmp_path, monkeypatch):
    from jaxrank.export.onnx import primitives

    monkeypatch.delitem(primitives.CONVERTERS, "dot_general")
    lines = []
    result = export_bundle(str(run / "run"), output=str(tmp_path / "out"), report=lines.append)
    assert "dot_general" in result.onnx
    assert "products.py" in result.onnx
    assert any("No model in ONNX" in line for line in lines)
    assert result.parity.difference < 1e-6
    assert not (tmp_path / "out" / "model.onnx").exists()
    with pytest.raises(BundleError, match="found StableHLO only"):
        jaxrank_serving.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--context=usr", r"--context: .*found 'usr'.*user"),
        ("--default=age", "--default: must be NAME=VALUE: found 'age'"),
        ("--default=position=1", "--default: .*found 'position'"),
        ("--default=ag?=1", "--default: must name a column .*found 'ag\\?'"),
        ("--default=age=old", "--default: .*age: must be a finite number or empty: found 'old'"),
    ],
)
def test_flags_of_a_bundle_are_checked(run, tmp_path, flag, message):
    arguments = [f"--workdir={run / 'run'}", f"--output={tmp_path / 'out'}", flag]
    with pytest.raises(InputError, match=message):
        cli.run(["export", *arguments])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag", ["--tables=int8", "--context=user", "--default=age=1", "--hash-key-file=key"]
)
def test_flags_of_a_bundle_are_rejected_for_files(tmp_path, flag):
    command = ["export", f"--workdir={tmp_path}", f"--output={tmp_path / 'out'}", "--format=files"]
    name = flag.partition("=")[0]
    with pytest.raises(
        InputError, match=rf"{name}: must be used with --format=bundle: found .*files"
    ):
        cli.run([*command, flag])


def truncated(folder):
    with open(folder / "tables" / "dim4.bin", "r+b") as file:
        file.truncate(100)


def edited_manifest(folder):
    tree = json.loads((folder / "manifest.json").read_text())
    tree["files"].pop("model_card.md")
    (folder / "manifest.json").write_text(json.dumps(tree))


def with_version(version):
    def change(folder):
        tree = json.loads((folder / "manifest.json").read_text()) | {"format_version": version}
        (folder / "manifest.json").write_text(json.dumps(tree))

    return change


def with_manifest(edit):
    def change(folder):
        tree = json.loads((folder / "manifest.json").read_text())
        edit(tree)
        (folder / "manifest.json").write_text(json.dumps(tree | {"checksum": seal(tree)}))

    return change


def edited_signature(folder):
    text = (folder / "signature.json").read_text()
    (folder / "signature.json").write_text(text.replace('"user"', '"used"', 1))


def foreign(folder):
    (folder / "manifest.json").write_text('{"format": "saved_model"}')


def edited_row(folder):
    with open(folder / "tables" / "dim4.bin", "r+b") as file:
        file.seek(40)
        file.write(b"\x01\x02")


def test_a_bundle_of_format_1_scores_as_its_run_did(tmp_path):
    """Its scores equal those that `predict` gave in the program that exported it."""
    folder = ROOT / "tests" / "golden" / "bundle_1"
    scorer = jaxrank_serving.load(folder, verify=True)
    rows = {
        "price": [3.6528889299977854, 3.1046606412239224, 3.01195712082821, 4.329248619190199],
        "ad": ["a42", "a31", "a25", "a13"],
        "user": ["u6", "u22", "u12", "u19"],
        "hist": ["a6|a32", "", "", "a28"],
    }
    expected = [0.4311548869045816, 0.4682810510327398, 0.4733296095116643, 0.39159263373279574]
    np.testing.assert_allclose(scorer.score({}, rows)["click"], expected, atol=1e-6)
    assert [(o.name, o.parent) for o in scorer.signature.outputs] == [("click", "")]
    ids = {"price": [3.65] * 3, "ad": ["a42", None, "nosuch"], "user": ["u6"] * 3}
    scores = scorer.score({}, ids | {"hist": ["a6|a32"] * 3})["click"]
    np.testing.assert_allclose(scores, [0.43135, 0.43161, 0.42272], atol=1e-5)
    assert scorer.counts()["ad"][:3] == (3 + 4, 1, 1)
    command = ["predict", f"--bundle={folder}", "--input=raw.csv"]
    with pytest.raises(InputError, match=r"found none, because its format is 1. Export the model"):
        cli.run([*command, f"--output={tmp_path / 'p.parquet'}"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, r"tables/dim4.bin: must have [\d,]+ bytes: found 100"),
        (edited_manifest, "manifest.json: is corrupt"),
        (with_version(4), "format_version of 1 to 3.*found 4. Install a newer jaxrank-serving"),
        (with_version(0), "format_version of 1 to 3.*found 0. Export the model again"),
        (with_version("2"), "format_version of 1 to 3.*found '2'. Export the model again"),
        (edited_row, "dim4.bin: is corrupt"),
        (edited_signature, "signature.json: is corrupt"),
        (foreign, "must be of the format 'jaxrank bundle': found 'saved_model'"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format":'),
            "manifest.json: must be readable as JSON",
        ),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "must be a bundle: found no manifest.json",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "of the format .*found None"),
        (with_manifest(lambda tree: tree.pop("files")), "files must be an object: found None"),
        (
            with_manifest(lambda tree: tree["files"]["model.onnx"].pop("checksum")),
            "model.onnx must have bytes and a checksum: found {'bytes'",
        ),
        (lambda folder: (folder / "vocabularies.bin").unlink(), "vocabularies.bin: must exist"),
    ],
)
def test_a_damaged_bundle_is_named(exported, tmp_path, damage, message):
    shutil.copytree(exported, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(BundleError, match=message):
        jaxrank_serving.load(tmp_path / "out", verify=True)
