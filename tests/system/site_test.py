"""The site of docs/: it builds, and a phone shows it."""

import asyncio
import subprocess
import sys

import browser
import pytest
from checkout import ROOT
from servers import serving

WIDTH = 390  # of a phone, in CSS pixels
# The first page, the longest code, and tables that are wider than a phone.
PAGES = (
    "index.html",
    "tutorial.html",
    "config_features.html",
    "flags.html",
    "records_parts.html",
    "reliability.html",
    "benchmarks/index.html",
)
SEARCH = """
const box = document.querySelector("[data-md-component=search-query]");
box.focus();
box.value = "gauc";
box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
"""
FOUND = "document.querySelectorAll('.md-search-result__item a').length"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. Unknown pages, links and anchors are errors."""
    pytest.importorskip("material", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_has_its_pages_the_search_and_the_files_that_pages_link(site):
    assert (site / "search/search_index.json").stat().st_size > 100_000
    page = (site / "reliability.html").read_text()
    assert 'href="tests/system/kill_test.py"' in page
    assert (site / "tests/system/kill_test.py").read_bytes() == (
        ROOT / "tests/system/kill_test.py"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not browser.installed(), reason="no Chromium is installed")
def test_a_phone_shows_pages_without_sideways_scrolling_and_finds_words(site):
    async def look(tab):
        for page in PAGES:
            await tab.open(f"{url}/{page}")
            await tab.resize(WIDTH, 800, mobile=True)
            assert await tab.value("innerWidth") == WIDTH, page
            assert await tab.value("document.documentElement.scrollWidth") <= WIDTH, page
            assert await tab.value("document.querySelector('h1').offsetWidth") > WIDTH / 2, page
        await tab.value(SEARCH)
        for _ in range(200):
            if await tab.value(FOUND):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the search finds nothing")

    with serving(site) as url:
        browser.visit(look)
