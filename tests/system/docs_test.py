"""The pages of docs/ and the README: generated tables, and links that lead somewhere."""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import shlex
import textwrap
import typing
from pathlib import Path

import pages
import pytest
from jaxrank_serving.server import protocol

import jaxrank
from benchmarks import tables
from jaxrank import cli, config_files, flags
from jaxrank.aot import report as compile_report
from jaxrank.bench import report as bench_report
from jaxrank.bench.advice import Throughput
from jaxrank.data.drift.compare import Drift
from jaxrank.evaluation import evaluate, report
from jaxrank.evaluation.calibrate import Calibrated
from jaxrank.evaluation.comparison import compare
from jaxrank.evaluation.follow import Followed
from jaxrank.explain.importance import Importance
from jaxrank.export import bundle, predict, write
from jaxrank.model_check import check
from jaxrank.placement import report as plan_report
from jaxrank.records import checks, files, runs
from jaxrank.selftest import report as selftest_report
from jaxrank.studies import registry as studies
from jaxrank.studies.execution import outcome
from jaxrank.studies.study import Outcome
from tools import diagrams, records, reference

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


@pytest.mark.parametrize(
    "folder", ["docs", "docs/cookbook", "docs/benchmarks", "docs/benchmarks/log"]
)
def test_the_index_of_a_folder_links_all_its_pages(folder):
    index = ROOT / folder / "index.md"
    links = set(re.findall(r"\]\((\w+\.md)", index.read_text()))
    assert {path.name for path in index.parent.glob("*.md")} - {"index.md"} - links == set()


def test_pages_that_the_code_names_exist():
    folders = [ROOT / name for name in ("jaxrank", "benchmarks", "configs")]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"docs/[\w/.-]+\.md", text)}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["reliability.md", "security.md", "architecture.md"])
def test_tests_that_a_page_names_exist_and_are_linked(page):
    text = (ROOT / "docs" / page).read_text()
    groups = re.findall(r"\[`([\w/]+_test\.py)(?:: (\w+))?(\.\.\.)?`\]\(\.\./tests/(\S+?)\)", text)
    assert len(groups) == text.count("_test.py") // 2 > 0
    for file, name, dots, link in groups:
        assert file == link
        start = f"def test_{name}" if dots or not name else f"def test_{name}("
        assert start in (ROOT / "tests" / file).read_text(), (file, name)


SITE = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "examples/daily/README.md"]


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
    limit = 150 if page.parent.name == "benchmarks" else 200
    assert len(page.read_text().splitlines()) <= limit
    runs = page in pages_that_run()
    for block in pages.blocks(page):
        assert block.language, f"{block}: name a language"
        assert block.is_skipped() or runs, f"{block}: run it, or say why not"
        if block.mark.startswith("run by "):
            file, _, name = block.mark.removeprefix("run by ").partition(": ")
            assert reads(file, page, name), f"{block}: {file} does not read the block"
        for file in re.findall(r"\b[\w/]+_test\.py", block.mark):
            assert list((ROOT / "tests").rglob(file.removeprefix("tests/"))), f"{block}: {file}"
        for path in re.findall(r"\b(?:tests|cookbook)/[\w/.]+", block.mark):
            assert (ROOT / path).exists() or (ROOT / "docs" / path).exists(), f"{block}: {path}"


def reads(file, page, name):
    """Returns whether a test file has the name of a page, and the name of a block's mark."""
    for path in (ROOT / "tests").rglob(file):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        names_block = any(re.search(rf"\b{name}\b", text) for text in texts)
        if names_block and str(page.relative_to(ROOT / "docs")) in texts:
            return True
    return False


def commands_of(page):
    """Yields the commands of jaxrank on a page, as words."""
    for block in pages.blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines() * (block.language == "bash"):
            line = line.rpartition(" ] || ")[2]  # after a test for a file
            if line.startswith("jaxrank "):
                yield shlex.split(line.partition(" &&")[0], comments=True)[1:]


def commands_within(page):
    """Yields the commands of jaxrank within sentences and tables of a page, as words."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\n", " ")
    for command in re.findall(r"`jaxrank ([^`]+)`", text):
        words = shlex.split(command)
        if words[0] != "VERB":
            yield words


@pytest.mark.parametrize("page", SITE, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_have_verbs_and_flags_that_exist(page):
    for verb, *words in (*commands_of(page), *commands_within(page)):
        _, verbs = flags.parsers()
        if verb == "study" and words and words[0] not in ("NAME", "--help"):
            studies.add_flags(verbs[verb], words)
        if verb == "serve":
            continue  # its flags are compared by tests/serving
        known = {name for action in verbs[verb]._actions for name in action.option_strings}
        written = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert {flag for flag in written if not flag.startswith("--config.")} <= known, (
            verb,
            words,
        )


def test_commands_of_studies_have_valid_options_and_every_flag_that_they_need():
    count = 0
    for verb, *words in itertools.chain.from_iterable(map(commands_of, SITE)):
        if verb != "study" or words[0] == "NAME" or "--help" in words:
            continue
        parser, verbs = flags.parsers()
        studies.add_flags(verbs[verb], words)
        args, overrides = parser.parse_known_args([verb, *words])
        assert all(word.startswith("--config.") for word in overrides)
        studies.make_options(studies.find(args.name), vars(args))
        count += 1
    assert count > 15


def test_commands_of_the_article_name_configs_that_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = [w for words in commands_of(ROOT / "docs/studies_snap.md") for w in words]
    paths = {w.partition("=")[2] for w in names if w.startswith(("--config=", "--other-configs="))}
    assert len(paths) == 6
    for path in paths:
        config_files.load(path)


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


RECORDS = [
    f"{name}.{kind.__name__}"
    for name, module in records.MODULES.items()
    for kind in vars(module).values()
    if typing.is_typeddict(kind) and kind.__module__ == module.__name__
]


def test_every_record_is_on_a_page():
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert len(RECORDS) > 80
    for record in RECORDS:
        name = record.partition(".")[2]
        assert f"<!-- record: {record} -->" in text or f"| **{name}** |" in text, record


def keys_of(function):
    """Returns the constant keys of the longest dictionary in a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    longest = max(dicts, key=lambda node: len(node.keys))
    return {key.value for key in longest.keys if isinstance(key, ast.Constant)}


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        (runs.Train, report.Result._fields),
        (runs.Evaluate, evaluate.Evaluation._fields),
        (runs.Follow, Followed._fields),
        (runs.Calibrate, Calibrated._fields),
        (runs.Explain, Importance._fields),
        (runs.Compare, compare.Comparison._fields),
        (files.Prepare, keys_of(cli._prepare)),
        (files.Export, bundle.BundleExport._fields),
        (files.ExportFiles, write.Export._fields),
        (files.Predict, evaluate.Prediction._fields),
        (files.PredictBundle, predict.BundlePrediction._fields),
        (checks.Bench, {*Throughput._fields, *keys_of(bench_report.to_json)}),
        (checks.CompareData, Drift._fields),
        (checks.Compile, keys_of(compile_report.to_json)),
        (checks.CheckModel, keys_of(check.to_json)),
        (checks.Selftest, keys_of(selftest_report.to_json)),
        (checks.Plan, keys_of(plan_report.to_json)),
        (
            checks.Study,
            {*keys_of(outcome.write), *(f.name for f in dataclasses.fields(Outcome))},
        ),
    ],
)
def test_the_declared_keys_are_those_of_the_results(record, keys):
    """Also of verbs that a quick suite does not run. `conftest` compares the output of the rest."""
    assert record.__required_keys__ == set(keys)


def test_the_declared_paths_are_those_of_the_server():
    tree = ast.parse((ROOT / "serving/jaxrank_serving/server/app.py").read_text())
    routes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchSequence):
            parts = [
                p.value.value if isinstance(p, ast.MatchValue) else p.name for p in node.patterns
            ]
            names = {"name": "NAME", "version": "VERSION", None: "VERSION"}
            routes.add("/" + "/".join(names.get(part, part) for part in parts))
    assert {route.path for route in protocol.ROUTES} == routes


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
