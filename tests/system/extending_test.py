"""The page on extending, as a user follows it: each block is written to a file or run."""

import json
import re
import shlex
import tomllib

import pages
import pytest
from checkout import ROOT
from registries import restored

from jaxrank import cli, extensions

PAGE = ROOT / "docs" / "extending.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
ROWS = ["--config.source.rows.train=4000", "--config.source.rows.valid=1000"]
# What makes the commands quick.
SHORTENED = {
    "train": [
        *ROWS,
        "--config.num_steps=16",
        "--config.eval.every_steps=8",
        "--config.batch_size=128",
        "--config.mesh.devices=1",
    ],
    "check-model": ["--skip=compile", "--config.model.width=4", *ROWS],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for kind, text in BLOCKS:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)[1]
            (tmp_path / name).write_text(text)
    with restored():
        yield tmp_path


def commands():
    return [
        shlex.split(line) for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()
    ]


def test_every_command_of_the_page_runs(folder, capsys):
    results = {}
    for program, verb, *flags in commands():
        assert program == "jaxrank"
        cli.run([verb, *flags, *SHORTENED.get(verb, []), "--json"])
        results[verb] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(results) == {"check-model", "train", "evaluate", "export"}

    checks = results["check-model"]["checks"]
    named = re.findall(r"^\| (`.*`) \|", PAGE.read_text(), re.MULTILINE)
    properties = re.findall(r"\w+", " ".join(named))
    assert [c["name"] for c in checks] == [name for name in properties if name != "compile"]
    assert {c["status"] for c in checks} == {"pass"}

    metrics = results["evaluate"]["metrics"]
    assert {"click/brier", "conversion/brier", "conversion/calibration"} <= set(metrics)
    assert results["export"]["onnx"] == ""
    code = json.loads((folder / "run" / "code.json").read_text())
    names = {kind: list(entries) for kind, entries in code.items()}
    assert names == {"model": ["two_towers"], "loss": ["weighted_bce"], "metric": ["brier"]}


@pytest.mark.parametrize(
    ("name", "mark", "kind"),
    [
        ("metrics.md", "brier", "python"),
        ("cookbook/own_model.md", "check-model", "bash"),
        ("models.md", "train", "bash"),
    ],
)
def test_a_block_of_another_page_is_part_of_a_block_that_runs(name, mark, kind):
    part = pages.marked(name, f"run by extending_test.py: {mark}")
    assert any(part in text for other, text in BLOCKS if other == kind)


def test_the_block_for_packages_names_the_group():
    (text,) = [text for kind, text in BLOCKS if kind == "toml"]
    (group,) = tomllib.loads(text)["project"]["entry-points"]
    assert group == extensions.GROUP


def test_the_page_is_short_and_has_no_other_blocks():
    assert len(PAGE.read_text().splitlines()) <= 200
    assert [kind for kind, _ in BLOCKS] == ["python", "python", "bash", "bash", "toml"]
    assert PAGE.read_text().count("```") == 2 * len(BLOCKS)
