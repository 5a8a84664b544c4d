"""The pages of docs/ and the README: generated tables, and links that lead somewhere."""

import ast
import dataclasses
import functools
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pages
import pytest

import jaxrank
from benchmarks import tables
from jaxrank import cli, flags
from jaxrank.aot import report as compile_report
from jaxrank.bench import report as bench_report
from jaxrank.bench.advice import Throughput
from jaxrank.data.drift.compare import Drift
from jaxrank.evaluation import evaluate, report, slices
from jaxrank.evaluation.calibrate import Calibrated
from jaxrank.evaluation.comparison import compare
from jaxrank.evaluation.follow import Followed
from jaxrank.explain.importance import Importance
from jaxrank.export import bundle, predict
from jaxrank.model_check import check
from jaxrank.placement import report as plan_report
from jaxrank.selftest import report as selftest_report
from jaxrank.studies import registry as studies
from jaxrank.studies.execution import outcome
from jaxrank.studies.study import Outcome
from tools import diagrams, reference

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", sorted(tables.PAGES.glob("*.md")), ids=lambda path: path.name)
def test_the_tables_of_the_benchmarks_are_those_of_the_results(page):
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")
    assert tables.fill(text) == text, "run: python -m benchmarks.tables"


def test_a_later_result_replaces_an_earlier_one_and_no_digit_is_lost():
    fields = dict.fromkeys(tables.FIELDS, "") | {"unit": "ms"}
    results = [
        fields | {"program": "a", "workload": "x", "value": "1.0"},
        fields | {"program": "a", "workload": "x", "value": "12345.50", "deviation": "0.10"},
        fields | {"program": "b", "workload": "y", "value": "2"},
    ]
    assert tables.pivot(results, "program", "workload").splitlines() == [
        "| ms | x | y |",
        "| --- | ---: | ---: |",
        "| a | 12,345.50 (0.10) |  |",
        "| b |  | 2 |",
    ]


def test_the_figures_of_the_readme_are_results():
    section = (ROOT / "README.md").read_text().split("\n## Benchmarks\n")[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()[2:]
    files = [path.stem for path in tables.RESULTS.glob("*.jsonl")]
    values = {tables.number(r["value"]) for file in files for r in tables.load(file)}
    figures = [cell.split()[0] for row in rows for cell in row.split("|")[3:5]]
    assert len(figures) == 12
    assert set(figures) <= values


def anchors(page):
    """The anchors that a page offers, as code hosts derive them from its headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_pages_that_the_code_names_exist():
    folders = [ROOT / name for name in ("jaxrank", "benchmarks", "configs")]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"docs/[\w/.-]+\.md", text)}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["reliability.md", "architecture.md", "security.md"])
def test_tests_that_a_page_names_exist(page):
    text = (ROOT / "docs" / page).read_text()
    groups = re.findall(r"`(?:tests/)?([\w/]+_test\.py)(?:: (\w+))?(?:\.\.\.)?`", text)
    assert groups
    for file, name in groups:
        assert f"def test_{name}" in (ROOT / "tests" / file).read_text(), (file, name)


SITE = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "examples/daily/README.md"]
GENERATED = ("config.md", "flags.md", "python.md")


def test_generated_pages_and_tables_are_those_of_the_code():
    """After a change: python -m tools.reference"""
    for path, text in reference.pages():
        assert path.read_text() == text, path
    for path, text in diagrams.pictures():
        assert path.read_text() == text, f"{path}: run: python -m tools.diagrams"


@functools.cache
def pages_that_run() -> set[Path]:
    """Returns the pages whose blocks docs_commands_test.py and extending_test.py run."""
    tree = ast.parse((ROOT / "tests/system/docs_commands_test.py").read_text())
    names: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            texts = {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
            names[ast.unparse(node.targets[0])] = texts
    cookbook = names["OF_TUTORIAL"] | names["COOKBOOK"] | names["ALONE"]
    run = {pages.DOCS / name for name in {*names["TUTORIAL"], "extending.md"}}
    run |= {pages.DOCS / "cookbook" / f"{name}.md" for name in cookbook}
    assert all(page.is_file() for page in run)
    return run


@pytest.mark.parametrize("page", [*READMES, *SITE], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_short_and_says_of_each_block_whether_it_runs(page):
    if page.name not in GENERATED and page.parent.name != "log":
        limit = 150 if page.parent.name == "benchmarks" else 200
        assert len(page.read_text().splitlines()) <= limit
    runs = page in pages_that_run()
    for block in pages.blocks(page):
        assert block.language, f"{block}: name a language"
        assert block.is_skipped() or runs, f"{block}: run it, or say why not"
        if block.mark.startswith("run by "):
            file = block.mark.removeprefix("run by ").split(":")[0]
            assert list((ROOT / "tests").rglob(file)), block


def commands_of(page):
    """Yields the commands of jaxrank on a page, as words."""
    for block in pages.blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines() * (block.language == "bash"):
            line = line.rpartition(" ] || ")[2]  # after a test for a file
            if line.startswith("jaxrank "):
                yield shlex.split(line.partition(" &&")[0], comments=True)[1:]


@pytest.mark.parametrize("page", SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_verbs_and_flags_that_exist(page):
    for verb, *words in commands_of(page):
        _, verbs = flags.parsers()
        if verb == "study" and words[0] != "NAME":
            studies.add_flags(verbs[verb], words)
        if verb == "serve":
            continue  # its flags are compared by tests/serving
        known = {name for action in verbs[verb]._actions for name in action.option_strings}
        written = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert {flag for flag in written if not flag.startswith("--config.")} <= known, (
            verb,
            words,
        )


def test_messages_that_the_page_explains_are_those_of_the_code():
    rows = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    pieces = [piece for row in rows for piece in re.findall(r"`(.+?)`", row)]
    texts = []
    for folder in ("jaxrank", "serving"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                    texts.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
    everything = "\n".join(texts)
    assert len(pieces) > 40
    assert [piece for piece in pieces if piece not in everything] == []


def documented_keys(page, title):
    """Returns the names in the first column of the table under a heading."""
    section = (ROOT / "docs" / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("train --json", report.Result._fields),
        ("evaluate --json", evaluate.Evaluation._fields),
        ("export --json", bundle.BundleExport._fields),
        ("predict --json", evaluate.Prediction._fields + predict.BundlePrediction._fields),
    ],
)
def test_the_documented_keys_are_those_of_the_results(title, fields):
    assert documented_keys("records.md", title) == set(fields)


def keys_of(function):
    """Returns the constant keys of the longest dictionary in a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    longest = max(dicts, key=lambda node: len(node.keys))
    return {key.value for key in longest.keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("bench", {*Throughput._fields, *keys_of(bench_report.to_json)}),
        ("calibrate", Calibrated._fields),
        ("compare", compare.Comparison._fields),
        ("compare-data", Drift._fields),
        ("compile", keys_of(compile_report.to_json)),
        (
            "check-model --json and selftest",
            keys_of(check.to_json) | keys_of(selftest_report.to_json),
        ),
        ("evaluate --follow", Followed._fields),
        ("explain", Importance._fields),
        ("plan", keys_of(plan_report.to_json)),
        ("study", {*keys_of(outcome.write), *(f.name for f in dataclasses.fields(Outcome))}),
    ],
)
def test_the_documented_keys_of_the_other_verbs_are_those_of_the_code(title, keys):
    assert documented_keys("records_verbs.md", f"{title} --json") == set(keys)


def test_the_documented_keys_of_prepare_and_of_short_results_are_those_of_the_code():
    assert documented_keys("records.md", "prepare --json") == keys_of(cli._prepare)
    section = (ROOT / "docs/records_verbs.md").read_text().split("## Short ones\n")[1]
    rows = re.findall(r"^\| `(\w+) --json` \| (.*) \|$", section, re.MULTILINE)
    assert {verb: set(re.findall(r"`(\w+)`", keys)) for verb, keys in rows} == {
        verb: keys_of(getattr(cli, f"_{verb}")) for verb in ("report", "configs", "launch")
    }


@pytest.mark.parametrize(
    ("page", "title", "keys"),
    [
        ("records.md", "evaluate --json", {"metrics", *slices.Slices._fields} - {"gauc"}),
        ("records_verbs.md", "compare --json", keys_of(compare._sliced)),
    ],
)
def test_the_documented_keys_of_slices_are_those_of_the_results(page, title, keys):
    section = (ROOT / "docs" / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    (row,) = re.findall(r"^\| `by` \| (.*) \|$", section, re.MULTILINE)
    assert keys <= set(re.findall(r"`(?:by\.)?(\w+)`", row))


def test_the_documented_paths_are_those_of_the_server():
    tree = ast.parse((ROOT / "serving/jaxrank_serving/server/app.py").read_text())
    routes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchSequence):
            parts = [
                p.value.value if isinstance(p, ast.MatchValue) else p.name for p in node.patterns
            ]
            names = {"name": "NAME", "version": "VERSION", None: "VERSION"}
            routes.add("/" + "/".join(names.get(part, part) for part in parts))
    page = (ROOT / "docs/protocol.md").read_text()
    assert set(re.findall(r"^\| `(/.*?)` \|", page, re.MULTILINE)) == routes


def test_the_site_builds_without_warnings(tmp_path):
    """Unknown pages, links and anchors are warnings, which --strict makes errors."""
    pytest.importorskip("material", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000
    assert 'name="viewport"' in (tmp_path / "index.html").read_text()


def test_public_names_are_those_of_the_stub():
    """Types are read from the stub, because the names are imported when they are used."""
    tree = ast.parse((ROOT / "jaxrank/__init__.pyi").read_text())
    stub = {
        alias.asname: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert stub == jaxrank._PUBLIC
    assert all(callable(getattr(jaxrank, name)) for name in jaxrank.__all__)
    assert (ROOT / "jaxrank/py.typed").exists()
