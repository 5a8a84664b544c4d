"""The HTML page of one or several runs: one file without scripts, pictures inline."""

import time
from collections.abc import Sequence
from pathlib import Path

import jaxrank
from jaxrank.atomic import MARK, replacing
from jaxrank.errors import RunError
from jaxrank.run_report import data_sections, run_sections, score_sections
from jaxrank.run_report.collect import RunReport
from jaxrank.run_report.markup import Markup, join, tag

NAME = "report.html"  # in a workdir

_SECTIONS = (
    ("result", "Result", score_sections.result),
    ("curves", "Learning curves", run_sections.learning_curves),
    ("reliability", "Reliability", score_sections.reliability),
    ("scores", "Scores by label", score_sections.histograms),
    ("slices", "Slices", score_sections.slices),
    ("data", "Data", data_sections.statistics),
    ("drift", "Drift between splits", data_sections.drift),
    ("placement", "Placement and balance", run_sections.placement),
    ("time", "Where the time went", run_sections.times),
    ("config", "Config", run_sections.configs),
)


def write(runs: Sequence[RunReport], path: Path) -> None:
    """Writes the page. The file is complete whenever it exists.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error}.") from error


def render(runs: Sequence[RunReport]) -> str:
    """Returns the page, which is also well-formed XML."""
    names = ", ".join(run.name for run in runs)
    style = (Path(__file__).parent / "style.css").read_text()
    head = tag(
        "head",
        Markup('<meta charset="utf-8" />'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content=MARK),
        # Nothing is loaded, whatever a name or value contains.
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        ),
        tag("title", f"jaxrank: {names}"),
        Markup(f"<style>{style}</style>"),
    )
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    sections = [
        tag("section", tag("h2", title), *make(runs), id=name) for name, title, make in _SECTIONS
    ]
    body = tag(
        "body",
        tag("h1", names),
        tag("p", f"Report of jaxrank {jaxrank.__version__}, {now}", class_="note"),
        tag("nav", *(tag("a", title, href=f"#{name}") for name, title, _ in _SECTIONS)),
        join(sections),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
