"""Runs the code blocks of the pages of docs/.

Pages that build on each other run in one directory, as a reader would. A block that is not run says
why, see `pages`. Flags that make commands quick are added here.
"""

import json
import re
import sys

import pages
import pytest
import runs
from checkout import ROOT
from ml_collections import ConfigDict
from registries import restored
from sharing import share_programs

from jaxrank import config, config_files
from jaxrank.data.spec.features import FeatureSpec

pytest.importorskip("sklearn", reason="needs the extra test")

TUTORIAL = ("tutorial.md", "metrics.md", "tuning.md", "performance.md")
OF_TUTORIAL = ("position",)  # pages of the cookbook
COOKBOOK = (
    "several_tasks",
    "warm_start",
    "own_model",
    "serving",
    "several_hosts",
    "daily",
    "study",
)
ONE = "--config.mesh.devices=1"
SHORT = [ONE, "--no-report", "--config.num_epochs=0.0", "--config.num_steps=24"]
FEW = ["--config.source.rows.train=2000", "--config.source.rows.valid=1500"]
ALONE = [("delay", FEW), ("negatives", FEW), ("history", FEW), ("vectors", [])]


@pytest.fixture
def folder(tmp_path, monkeypatch, _programs):
    """The working directory. Equal runs share their compiled programs."""
    monkeypatch.chdir(tmp_path)
    share_programs(monkeypatch, _programs)
    with restored():
        yield tmp_path


def test_the_tutorial_and_the_pages_that_build_on_it_run(folder, capsys):
    tutorial, *more = (*TUTORIAL, *(f"cookbook/{name}.md" for name in OF_TUTORIAL))
    whole = {"train": [ONE, "--no-report"], "bench": [ONE]}
    results = pages.run_page(pages.DOCS / tutorial, folder, whole, compare=True)
    (answer,) = [result for verb, result in results if verb == "curl"]
    printed = re.search(r"```text\n\[(\S+) +(\S+)\]", (pages.DOCS / tutorial).read_text())
    scores = pytest.approx([float(score) for score in printed.groups()], abs=pages.TOLERANCE[0])
    assert answer["scores"]["click"] == scores
    flags = whole | {"train": SHORT}
    for name in more:
        results += pages.run_page(pages.DOCS / name, folder, flags)
    assert "ECE 0.0" in capsys.readouterr().out
    assert {verb for verb, _ in results} == {
        *("bench", "compare", "curl", "evaluate", "export", "predict", "train")
    }
    assert runs.records(folder / "run", None)
    exec(pages.marked("python.md", "run by docs_commands_test.py: python"), {})


@pytest.mark.slow
def test_the_cookbook_runs(folder, monkeypatch):
    (folder / "launch").symlink_to(ROOT / "launch")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'serving'}")
    flags = {"train": SHORT, "study": ["--group=ids=c*"]}
    results = []
    for name in COOKBOOK:
        results += pages.run_page(pages.DOCS / "cookbook" / f"{name}.md", folder, flags)
    gates = [result["gate"] for verb, result in results if "gate" in result]
    assert [gate["passed"] for gate in gates] == [True]
    _are_days_of_one_world(results)
    assert (folder / "production").resolve() == folder / "runs" / "1"


def _are_days_of_one_world(results):
    """Yesterday's model is good on the next day, and ids have left and wait by then."""
    change, _ = next(result["gate"] for _, result in results if "gate" in result)["conditions"]
    assert change["condition"].startswith("click/logloss")
    assert abs(change["value"]) < 0.05  # of 24 steps
    (production,) = [
        run["metrics"]["click/auc"]
        for _, result in results
        if "gate" in result
        for run in result["comparison"]["runs"]
        if run["workdir"] == "production"
    ]
    assert production > 0.65
    days = [result["vocabularies"].get("ad") for verb, result in results if verb == "prepare"]
    line = "table ad: {kept} rows kept, {new} new, {evicted} evicted; {waiting} ids wait;"
    page = (pages.DOCS / "cookbook/daily.md").read_text()
    printed = [line.format_map(ids) for ids in days if ids]
    assert [text for text in printed if text in page] == printed[1:]
    assert " 0 evicted" not in printed[-1]
    assert " 0 ids wait" not in printed[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), ALONE)
def test_a_page_of_the_cookbook_runs(name, flags, folder):
    results = pages.run_page(
        pages.DOCS / "cookbook" / f"{name}.md", folder, {"train": [*SHORT, *flags]}
    )
    assert results[0][0] == "train"


CONFIGS = [
    block
    for name in ("data.md", "migrating.md", "migrating_more.md", "cookbook/history.md")
    for block in pages.blocks(pages.DOCS / name)
    if block.mark in [f"run by docs_commands_test.py: {name}" for name in ("loaded", "translated")]
]


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_a_config_of_a_page_is_valid(block, tmp_path):
    file = tmp_path / "page.py"
    file.write_text(block.text)
    loaded = config_files.load(file)
    config.check(loaded)
    assert FeatureSpec.from_state(config_files.to_plain(loaded.features)).tasks


FRAGMENTS = (
    *("derived.md", "sequences.md", "models.md", "placement.md", "requests.md"),
    "cookbook/vectors.md",
)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_of_a_config_is_valid(name):
    c = config.default()
    c.features.tasks = [dict(name="click", label="click")]
    fragments = [
        block
        for block in pages.blocks(pages.DOCS / name)
        if block.mark == "run by docs_commands_test.py: fragment"
    ]
    assert fragments
    for block in fragments:
        exec(block.text, {"c": c, "ConfigDict": ConfigDict})
        config.check(c)
        FeatureSpec.from_state(config_files.to_plain(c.features))


def test_the_notebook_runs(folder, monkeypatch):
    """As a script, because a kernel would be one more process."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    book = json.loads((ROOT / "examples" / "first_model.ipynb").read_text())
    cells = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
    assert not any(c["outputs"] for c in book["cells"] if c["cell_type"] == "code")
    names = {}
    shortened = cells[0] + "\nconfig.num_steps = 24\n"
    for cell in (shortened, *cells[1:]):
        exec(cell, names)
    assert names["result"].metrics["click"]["normalized_entropy"] < 1.0
    assert len(names["base"]) == 5


def test_a_printed_line_is_compared_but_for_rounding():
    printed = "  model     0.34000   0.69502\nclick: -0.00693 to 5,000"
    assert pages.not_printed("model 0.34001 0.69500\nclick: -0.0069 to 5,000", printed) == []
    for line in (
        "model 0.35000 0.69502",
        "models 0.34000 0.69502",
        "model 0.34",
        "click: 0.1 to 1",
    ):
        assert pages.not_printed(line, printed) == [line]
