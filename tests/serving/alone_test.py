"""Bundles of all registered models score raw values where only `pip install ./serving` was run."""

import csv
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib

import numpy as np
import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from every_feature import config, write
from ml_collections import ConfigDict
from runs import nothing, saved

from jaxrank import extensions
from jaxrank.config import default
from jaxrank.data.prepare.passes import prepare
from jaxrank.evaluation import evaluate
from jaxrank.export.bundle import export_bundle
from jaxrank.export.comparison import parity
from jaxrank.models import registry

TASKS = ("click", "buy")
# Fields that make a model small, or that use more of it.
FIELDS = {
    "ranker": dict(
        cross_layers=1,
        mlp_units=(8,),
        norm="batch",
        multitask="mmoe",
        experts=2,
        expert_mlp_units=(4,),
        sequences={
            "seen": dict(pool="target_attention", candidate={"seen": "item"}, mlp_units=(4,))
        },
    ),
    "gdcn": dict(mlp_units=(4,), cross_layers=1),
    "qnn": dict(layers=1, norm="batch"),
    "deepfm": dict(mlp_units=(4,)),
    "final_mlp": dict(first_mlp_units=(4,), second_mlp_units=(4,), heads=2),
}
# Prints the packages that can be imported, and {model: {output: its scores}}.
PROGRAM = """
import importlib.util, json, sys
import jaxrank_serving
names = ["jax", "jaxlib", "flax", "jaxrank", "pyarrow", "onnx", "numpy"]
present = [name for name in names if importlib.util.find_spec(name)]
request, scores = json.load(sys.stdin), {}
for model, path in request["bundles"].items():
    scorer = jaxrank_serving.load(path, verify=True)
    columns = {c.name: request["rows"][c.name] for c in scorer.signature.columns}
    scores[model] = {name: list(s) for name, s in scorer.score({}, columns).items()}
print(json.dumps([present, scores]))
"""


def small(folder, model):
    """Returns a config with hashes, weighted lists, a sequence and two tasks."""
    c = config(folder / "raw")
    c.features.ragged = [
        dict(columns="seen", table="item", min_count=2, combiner="none", max_length=3),
        dict(columns="tags", encoding="hash", rows=30, weights="tag_weights", combiner="sqrtn"),
    ]
    c.embedding.dims, c.mesh.devices = ConfigDict(), 1
    c.data.store = str(folder / "store")
    with c.unlocked():
        c.model = default(model=model).model
    for name, value in FIELDS.get(model, {}).items():
        c.model[name] = ConfigDict(value) if isinstance(value, dict) else value
    c.model.parents = ConfigDict({"buy": "click"})
    return c


def requirements(name):
    """Returns the names of a distribution and of all that it requires without extras."""
    done, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in done:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # required on other platforms or versions of Python only
        done.add(name)
        waiting += [re.match(r"[\w.-]+", line)[0] for line in lines if "extra ==" not in line]
    return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A folder of links to what `pip install ./serving` installs."""
    folder = tmp_path_factory.mktemp("environment")
    project = tomllib.loads((ROOT / "serving" / "pyproject.toml").read_text())["project"]
    (folder / "jaxrank_serving").symlink_to(ROOT / "serving" / "jaxrank_serving")
    declared = [re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]]
    for name in set().union(*map(requirements, declared)):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
    return folder


@pytest.mark.slow
def test_bundles_of_all_models_score_as_predict_does_without_jax(
    environment, tmp_path, monkeypatch
):
    monkeypatch.setattr(parity, "_REPEATS", dict.fromkeys(parity.CANDIDATES, 1))
    models = [n for n in registry.names() if (registry.MODEL, n) not in extensions.origins()]
    assert len(models) > 5
    write(tmp_path / "raw")
    c = small(tmp_path, registry.RANKER)
    prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "store", report=nothing)
    bundles, expected = {}, {}
    for model in models:
        workdir, predictions = tmp_path / model, tmp_path / f"{model}.parquet"
        saved(small(tmp_path, model), workdir)
        bundles[model] = str(tmp_path / f"{model} bundle")
        export_bundle(str(workdir), output=bundles[model], report=nothing)
        evaluate.predict(str(workdir), output=str(predictions))
        table = pq.read_table(predictions)
        expected[model] = {task: table[f"predicted_{task}"].to_pylist() for task in TASKS}
    with open(tmp_path / "raw" / "valid.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    rows = {name: [line[name] for line in lines] for name in lines[0]}
    request = json.dumps({"bundles": bundles, "rows": rows})
    # Without `site` and the checkout, only the linked packages can be imported.
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        input=request, capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(environment)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    present, scores = json.loads(done.stdout)
    assert present == ["numpy"]
    for model in models:
        for task in TASKS:
            assert np.std(expected[model][task]) > 1e-3
            assert scores[model][task] == pytest.approx(expected[model][task], abs=1e-5), model
