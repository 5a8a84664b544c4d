"""The pages of docs/ and the README: generated tables, and links that lead somewhere."""

import re
from pathlib import Path

import pytest

from benchmarks import tables

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


@pytest.mark.parametrize("page", ["reliability.md", "architecture.md"])
def test_tests_that_a_page_names_exist(page):
    text = (ROOT / "docs" / page).read_text()
    groups = re.findall(r"`(?:tests/)?([\w/]+_test\.py)(?:: (\w+))?(?:\.\.\.)?`", text)
    assert groups
    for file, name in groups:
        assert f"def test_{name}" in (ROOT / "tests" / file).read_text(), (file, name)
