"""A model of a user's own, from a file: everything that the built-in one can do."""

import json
import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from ml_collections import ConfigDict
from registries import restored
from runs import nothing, records

from jaxrank import cli, config, config_files, extensions
from jaxrank.checkpoints import record
from jaxrank.errors import InputError
from jaxrank.models import Inputs, from_flax, registry
from jaxrank.run import build
from jaxrank.warm_start import start as warm_start

pytestmark = pytest.mark.usefixtures("shared_programs")
OWN = ROOT / "tests" / "helpers" / "own_model.py"
MODELS = f"--models={OWN}"
LOSS = f"--models={ROOT / 'tests' / 'helpers' / 'own_loss.py'}"
CONFIG = """
import tiny
from jaxrank.config import default

def get_config():
    c = tiny.config()
    with c.unlocked():
        c.model = default(model="own").model
        c.task_losses.click = dict(name="expected_cost", miss=3)
        c.features.categorical = c.features.categorical[:{ids}]
    c.model.ids = ("c0", "c1")[:{ids}]
    c.model.factors.c0 = 2.0
    c.eval.metric = "mean/brier"
    return c
"""
NO_LISTS = CONFIG.replace("    return c", "    c.features.ragged = []\n    return c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Configs of one id, of two, and without lists, and a run of the first."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "no_lists.py").write_text(NO_LISTS.format(ids=1))
    for name, ids in (("one", 1), ("two", 2)):
        (folder / f"{name}.py").write_text(CONFIG.format(ids=ids))
    with restored():
        train(folder, "run")
        yield folder


def train(folder, name, *args):
    config = f"--config={folder / 'one.py'}"
    cli.run(["train", config, MODELS, LOSS, f"--workdir={folder / name}", "--quiet", *args])


def result(capsys, *args):
    capsys.readouterr()
    cli.run([*args, MODELS, LOSS, "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_minimises_its_loss_and_watches_the_mean_of_its_metric(folder):
    first = records(folder / "run")[0]
    # Every prediction is near the base rate p: the cost is 3 p (1 - p) + (1 - p) p, which is four
    # times the Brier score.
    cost = first["loss"] - first["conversion/logloss"]
    assert cost == pytest.approx(4 * first["click/brier"], rel=0.1)
    newest = records(folder / "run", "valid")[-1]
    watched = record.read(folder / "run" / "checkpoints" / "16")
    assert watched["metric"] == np.mean([newest[f"{t}/brier"] for t in ("click", "conversion")])
    assert watched["measures"].startswith("mean/brier (click, conversion) of valid")
    saved = json.loads((folder / "run" / "code.json").read_text())
    names = {kind: list(entries) for kind, entries in saved.items()}
    assert names == {"model": ["own"], "loss": ["expected_cost"], "metric": ["brier"]}


def test_it_is_evaluated_predicts_and_is_exported(folder, capsys):
    workdir = f"--workdir={folder / 'run'}"
    results = result(capsys, "evaluate", workdir)
    assert results["metrics"]["click/logloss"] < 1
    assert 0 < results["metrics"]["click/brier"] < results["metrics"]["click/logloss"]
    cli.run(["predict", workdir, f"--output={folder / 'p.parquet'}", MODELS])
    predicted = pq.read_table(folder / "p.parquet")["predicted_click"].to_numpy()
    assert len(predicted) == 1000
    cli.run(["export", workdir, f"--output={folder / 'out'}", "--format=files", MODELS])
    layers = np.load(folder / "out" / "layers.npz")
    assert set(layers) >= {"bias", "params.tower.kernel", "params.head.bias"}
    lines = json.loads((folder / "out" / "export.json").read_text())["model"]
    assert (lines["name"], lines["tasks"], lines["ids"], lines["width"]) == ("own", 2, ["c0"], 8)
    assert lines["factors"] == {"c0": 2.0}
    cli.run(["export", workdir, f"--output={folder / 'bundle'}", MODELS])  # scores are compared


def test_it_starts_from_a_run_with_one_feature_less(folder):
    extensions.load(OWN)
    config = config_files.load(folder / "two.py")
    job = build(config, folder / "next", nothing)
    lines = []
    state = warm_start.start(job, str(folder / "run"), lines.append)
    job.batches.close()
    fresh = np.asarray(job.program.init().params["tower"]["kernel"])
    older = build(config_files.load(folder / "one.py"), folder / "run", nothing)
    program, checkpoints = older.program, older.checkpoints
    older.batches.close()
    old, _ = checkpoints.restore(16, program.blank(), program.state_shape, program.state_sharding)
    kernel, old = (np.asarray(s.params["tower"]["kernel"]) for s in (state, old))
    # The vector of c0, the new one of c1, and the floats.
    assert len(kernel) == len(old) + 8
    np.testing.assert_array_equal(kernel[:8], old[:8])
    np.testing.assert_array_equal(kernel[8:16], fresh[8:16])
    np.testing.assert_array_equal(kernel[16:], old[8:])
    assert "3 arrays copied, 1 copied feature by feature, 0 new" in lines[0]


def test_it_compiles_for_a_slice_that_is_not_here(folder, capsys):
    pytest.importorskip("libtpu", reason="the TPU compiler is for Linux on x86-64")
    config = f"--config={folder / 'no_lists.py'}"
    results = result(capsys, "compile", config, "--topology=v3-8")
    (entry,) = results["topologies"]
    assert entry["fits"] is True
    assert entry["flops"] > 0


def test_a_run_whose_model_is_not_registered_reports_how_to_give_it(folder, monkeypatch):
    monkeypatch.delitem(registry._MODULES, "own", raising=False)
    monkeypatch.delitem(extensions._ORIGINS, ("model", "own"), raising=False)
    for verb in ("evaluate", "export"):
        output = [f"--output={folder / 'never'}"] if verb == "export" else []
        missing = rf"model.name.*ranker.*: found 'own'.*--models=FILE.py. .* 'own' of {OWN}"
        with pytest.raises(InputError, match=missing):
            cli.run([verb, f"--workdir={folder / 'run'}", *output])
    extensions.load(OWN)


def test_code_that_has_changed_is_reported_and_does_not_resume(folder, capsys):
    path = folder / "run" / "code.json"
    saved = json.loads(path.read_text())
    assert saved["model"]["own"]["file"] == str(OWN)
    saved["model"]["own"]["checksum"] = "of other code"
    path.write_text(json.dumps(saved))
    changed = f"{OWN} (model 'own') has changed"
    with pytest.raises(InputError, match=f"{re.escape(changed)}.*--allow-config-change"):
        train(folder, "run")
    capsys.readouterr()
    cli.run(["evaluate", f"--workdir={folder / 'run'}", MODELS])
    assert changed in capsys.readouterr().out
    train(folder, "run", "--allow-config-change")
    capsys.readouterr()
    cli.run(["evaluate", f"--workdir={folder / 'run'}", MODELS])
    assert "changed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "is_equal"),
    [
        ("x = 1  # a comment\n\n\ndef f():\n    return x\n", True),
        ("x = 1\n\n\ndef f():\n    return 2 * x\n", False),
        ("x = 1\n\n\ndef f():\n    return x\n\n\ndef get_config():\n    return 2\n", True),
    ],
)
def test_the_checksum_of_a_file_is_of_its_code(tmp_path, text, is_equal):
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file, content in zip(files, ("x = 1\n\n\ndef f():\n    return x\n", text), strict=True):
        file.write_text(content)
    assert len({*map(extensions.checksum, files)}) == 1 + (not is_equal)


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_models.py").write_text("WIDTH = 3\n")
    for end in ("", "import sys\nsys.path.remove(__file__.rpartition('/')[0])\n"):
        (tmp_path / "m.py").write_text(f"import neighbour_of_models\n{end}")
        extensions.load(tmp_path / "m.py")
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import jax\n\n1 / 0\n", r"m.py, line 3: ZeroDivisionError: division by zero"),
        ("x = 1\ny = (\n", r"m.py, line 2: SyntaxError: '\(' was never closed"),
        (
            "from flax import linen as nn\nfrom jaxrank.models import register\n"
            "@register('ranker')\nclass Mine(nn.Module):\n    tasks: int\n",
            r"m.py, line 3: model 'ranker' must be registered once: found Ranker",
        ),
    ],
)
def test_a_file_that_does_not_run_is_named_with_its_line(tmp_path, text, message, monkeypatch):
    (tmp_path / "m.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        extensions.load("m.py")
    with pytest.raises(InputError, match=message):
        cli.run(["train", "--config=c.py", f"--models={tmp_path / 'm.py'}", "--workdir=w"])
    with pytest.raises(InputError, match=r"--models: no such file: .*none.py"):
        cli.run(["train", "--config=c.py", f"--models={tmp_path / 'none.py'}", "--workdir=w"])


def test_an_error_of_a_model_is_named_with_its_line(tmp_path):
    text = OWN.read_text().replace('"own"', '"raising"')
    text = text.replace("        x = nn.relu", "        x = x @ x\n        x = nn.relu")
    line = 1 + text[: text.index("x @ x")].count("\n")
    (tmp_path / "m.py").write_text(text)
    config = CONFIG.replace('"own"', '"raising"').format(ids=1)
    (tmp_path / "c.py").write_text(config.replace("expected_cost", "bce").replace(", miss=3", ""))
    flags = [
        f"--{name}={tmp_path / file}" for name, file in (("models", "m.py"), ("config", "c.py"))
    ]
    with (
        restored(),
        pytest.raises(InputError, match=rf"m.py, line {line}: TypeError: .*dot_general"),
    ):
        cli.run(["train", *flags, f"--workdir={tmp_path / 'run'}", "--config.eval.metric="])


def test_a_config_may_register_the_model_that_it_names(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))
    text = OWN.read_text().replace('"own"', '"beside"')
    config = CONFIG.replace('"own"', '"beside"').format(ids=1)
    (tmp_path / "c.py").write_text("from __future__ import annotations\n" + text + config)
    for _ in range(2):  # executed again, it registers again
        config = config_files.load(tmp_path / "c.py", ["--config.model.width=4"])
        assert (config.model.name, config.model.width) == ("beside", 4)
    with pytest.raises(InputError, match=r"model.widht: .*Did you mean model.width"):
        config_files.load(tmp_path / "c.py", ["--config.model.widht=4"])
    assert "jaxrank_config" not in sys.modules


def test_a_model_that_gives_no_logit_for_each_task_is_rejected(folder):
    extensions.load(OWN)
    model = registry.find_module("own")

    class Wrong(model):
        def __call__(self, inputs, train):
            return inputs.all_dense[:, :1]

    inputs = Inputs.from_arrays({"f": np.ones(3, np.float32)}, {})
    with pytest.raises(InputError, match=r"Wrong must return .*\[3, 2\]: found \[3, 1\]"):
        jax.eval_shape(lambda: from_flax(Wrong(tasks=2)).apply({}, {}, inputs, train=False))


def test_a_model_of_an_installed_package_is_found_by_its_name(monkeypatch):
    monkeypatch.setattr(registry, "_MODULES", dict(registry._MODULES))
    registry._MODULES.pop("own", None)
    entry = SimpleNamespace(name="own", value="package", load=lambda: extensions.load(OWN))
    groups = {extensions.GROUP: [entry]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: groups[group])
    extensions.load_packages.cache_clear()
    c = config.default()
    with c.unlocked():
        c.model = ConfigDict({"name": "own"})
    with pytest.raises(InputError, match="model.[a-z]+ is missing"):  # no longer the name
        config.check(c)
    assert "own" in registry.names()
    extensions.load_packages.cache_clear()
