"""Tests of the page: its content, its syntax, and in a browser if one is installed."""

import copy
import json
import re
import shutil
from xml.etree import ElementTree

import browser
import numpy as np
import pytest

from jaxrank import cli
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate
from jaxrank.run_report import collect, page, score_sections, svg
from jaxrank.run_report.markup import escape, tag

EVIL = "</script><script>document.title='hacked'</script><img src=x onerror=\"x()\">&'\"\0\ud800"
SECTIONS = {name for name, _, _ in page._SECTIONS}


@pytest.fixture(scope="module")
def runs(variants, tmp_path_factory):
    """Copies of two runs on equal data, the first with slices."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("plain", "average"):
        shutil.copytree(variants.unbroken(name)[0], folder / name)
    cli.run(["evaluate", f"--workdir={folder / 'plain'}", "--by=c1"])
    return folder / "plain", folder / "average"


@pytest.fixture(scope="module")
def collected(runs):
    return collect.distinct_names([collect.collect(run) for run in runs])


def parsed(text):
    """Parses a page as XML, which is stricter than HTML."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.partition("\n")[2])


def section_text(root, section):
    return " ".join("".join(root.find(f".//section[@id='{section}']").itertext()).split())


def test_the_page_is_well_formed_with_unique_ids_and_loads_nothing(collected):
    text = page.render(collected)
    root = parsed(text)
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(set(ids)) == len(ids)
    assert set(ids) == SECTIONS
    links = [value for node in root.iter() for key, value in node.items() if key in ("href", "src")]
    assert {link.removeprefix("#") for link in links} == SECTIONS
    assert not re.search(r"url\(|@import|<script|<link|<iframe", text)
    assert "://" not in text


def test_each_section_shows_the_numbers_of_the_runs(collected, variants):
    root = parsed(page.render(collected))
    result = variants.unbroken("plain")[1]
    shown = section_text(root, "result")
    for task in ("click", "conversion"):
        assert f"{result.metrics[task]['auc']:.5g}" in shown
        assert f"{result.constant[task]['logloss']:.5g}" in shown
    assert shown.count("best constant0") == 2  # once per task, as both runs have it
    assert len(root.findall(".//section[@id='curves']//svg")) == 8  # 2 tasks, 2 metrics, 2 axes
    assert len(root.findall(".//section[@id='reliability']//svg")) == 2
    assert len(root.findall(".//section[@id='scores']//svg")) == 4
    assert "click by c1 of plain" in section_text(root, "slices")
    assert "train6,0006,000" in section_text(root, "data")
    assert "label click" in section_text(root, "drift")
    assert "4 tables with 430 rows" in section_text(root, "placement")
    assert "compilation" in section_text(root, "time")
    assert "ema_decay0.00.9" in section_text(root, "config")


def test_the_page_compares_with_the_regression_and_shows_the_coverage_of_vectors(collected):
    summary = json.loads(json.dumps(collected[0].summary))
    ends = {"difference": -0.0123, "low": -0.02, "high": -0.004}
    undefined = {"difference": 0.1, "low": None, "high": None}
    summary["result"]["baseline"] = {
        "metrics": {"click": {"logloss": 0.4321}},
        "differences": {"click": {"logloss": ends, "auc": undefined}},
    }
    vectors = {"path": "v.parquet", "row_coverage": 0.25, "lookup_coverage": 0.875}
    summary["tables"][0]["init_from"] = vectors | {"lr_multiplier": 0.5}
    root = parsed(page.render([collected[0]._replace(summary=summary)]))
    shown = section_text(root, "result")
    assert "logistic regression0.4321" in shown
    assert "with paired 95% intervals: logloss -0.012 (-0.02 to -0.004)." in shown
    assert f"{summary['tables'][0]['table']}v.parquet25.0%87.5%0.5" in section_text(
        root, "placement"
    )


def test_a_task_without_positives_and_a_run_without_scores_have_a_sentence(collected):
    summary = json.loads(json.dumps(collected[0].summary))
    constant, metrics = (summary["result"][key]["click"] for key in ("constant", "metrics"))
    constant.update(logloss=0.0, auc=None)
    metrics.update(logloss=0.0002, auc=None, normalized_entropy=None, calibration=None)
    shown = section_text(parsed(page.render([collected[0]._replace(summary=summary)])), "result")
    assert "click: logloss 0.0002. All labels are equal, so a constant has no loss." in shown
    assert "of the best constant" in shown  # the other task

    summary["result"].update(metrics={}, constant={}, buckets={}, histograms={})
    root = parsed(page.render([collected[0]._replace(summary=summary)]))
    assert "no scores, because the run has no validation data" in section_text(root, "result")
    assert "No checkpoint of this run has been scored" in section_text(root, "reliability")


def test_slices_of_a_run_without_validation_data_name_the_command(runs, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(runs[0], workdir)
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["valid"] = ""
    (workdir / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"--by: .*run must be .* evaluate .* --by=c1 --split=NAME"
    ):
        collect.collect(workdir, by="c1")


def test_every_run_of_a_chart_has_a_color_and_an_entry_of_its_own():
    assert len({svg.color(i) for i in range(50)}) == 50
    assert all(re.fullmatch("#[0-9a-f]{6}", svg.color(i)) for i in range(50))
    points = dict(x=[1.0, 2.0], y=[1.0, 2.0])
    series = [
        svg.Series("a, training", **points, color=svg.color(0), faint=True),
        svg.Series("a, validation", **points, color=svg.color(0)),
        svg.Series("b, training", **points, color=svg.color(1), faint=True),  # was not evaluated
    ]
    chart = ElementTree.fromstring(svg.lines("curves", series, x_label="steps", y_label="loss"))
    legend = ["".join(entry.itertext()).strip() for entry in chart.findall(".//span")]
    assert legend == ["a, validation", "b, training"]


def test_an_interval_has_both_sides_where_they_differ():
    form = score_sections._format_interval
    assert form(0.5, [0.4, 0.6]) == "0.5 ±0.1"
    assert form(0.5, [0.4, 0.7]) == "0.5 -0.1/+0.2"
    assert form(0.5, None) == "0.5"


def test_the_worst_slices_come_first(collected):
    root = parsed(page.render(collected[:1]))
    (first, *_) = root.findall(".//section[@id='slices']//tbody")
    of_click = collected[0].slices[0]["by"]["values"]
    losses = {
        str(entry["value"] if entry["value"] is not None else "missing"): (
            entry["intervals"]["click"]["normalized_entropy"][0]
        )
        for entry in of_click
    }
    order = [losses["".join(row[0].itertext())] for row in first]
    known = [loss for loss in order if loss == loss]
    assert known == sorted(known, reverse=True)
    assert known[0] == np.nanmax(list(losses.values()))
    assert all(loss != loss for loss in order[len(known) :])


def renamed(value, names):
    """Returns a tree in which every key and text of `names` is another."""
    if isinstance(value, dict):
        return {names.get(k, k): renamed(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [renamed(v, names) for v in value]
    return names.get(value, value) if isinstance(value, str) else value


def hostile(run):
    """The run with names and values of features, tasks, splits and columns that are HTML."""
    names = {name: f"{EVIL}{name}" for name in ("click", "f0", "c1", "l0", "train", "valid")}
    summary = renamed(json.loads(json.dumps(run.summary)), names)
    summary["config"]["seed"] = EVIL
    summary["description"] = summary["devices"] = summary["finished"] = EVIL
    summary["result"]["checkpoint"] = summary["data"]["store"] = EVIL
    slices = copy.deepcopy(renamed(json.loads(json.dumps(run.slices)), names))
    for entry in slices:
        entry["by"]["values"][0]["value"] = EVIL
    valid = {f"{EVIL}{name}": curve for name, curve in run.history.valid.items()}
    history = run.history._replace(valid=valid)
    return run._replace(name=EVIL, summary=summary, slices=slices, history=history)


def test_names_and_values_never_become_markup(collected):
    runs = [hostile(run) for run in collected]
    root = parsed(page.render(runs))
    assert {node.tag for node in root.iter()} == {
        node.tag for node in parsed(page.render(collected)).iter()
    }
    allowed = {"img", "script"} & {node.tag for node in root.iter()}
    assert not allowed
    assert "<img src=x onerror=" in section_text(root, "slices")
    assert not [key for node in root.iter() for key in node.attrib if key.startswith("on")]


def test_only_text_that_is_markup_already_stays():
    assert escape("<b a=\"1\" b='2'>&\0") == "&lt;b a=&quot;1&quot; b=&#x27;2&#x27;&gt;&amp;\ufffd"
    assert tag("p", tag("b", "<"), "<", class_='"') == '<p class="&quot;"><b>&lt;</b>&lt;</p>'


@pytest.mark.skipif(not browser.installed(), reason="no Chromium is installed")
def test_a_browser_shows_the_page_without_errors_requests_or_sideways_scrolling(
    collected, tmp_path
):
    path = tmp_path / "report.html"
    page.write([*collected, hostile(collected[0])], path)

    async def look(tab):
        await tab.open(path.as_uri())
        assert "<script>" in await tab.value("document.title")  # as text
        requests = [e for e in tab.events if e["method"] == "Network.requestWillBeSent"]
        assert [r["params"]["request"]["url"] for r in requests] == [path.as_uri()]
        logged = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        assert not [event for event in tab.events if event["method"] in logged]
        for width, mobile in ((1280, False), (390, True), (320, True)):
            await tab.resize(width, 800, mobile=mobile)
            assert await tab.value("innerWidth") == width
            assert await tab.value("document.documentElement.scrollWidth") <= width
            narrow = "[...document.querySelectorAll('figure svg')].map(s => s.clientWidth)"
            assert min(await tab.value(narrow)) > 250
            assert len(await tab.picture(800)) > 10_000
        pdf = await tab.call("Page.printToPDF")
        assert len(pdf["data"]) > 10_000

    browser.visit(look)


def test_the_command_writes_one_page_for_several_runs(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.run(["report", *map(str, runs), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result == {"output": str(tmp_path / "report.html"), "runs": [str(run) for run in runs]}
    shown = section_text(parsed((tmp_path / "report.html").read_text()), "config")
    assert "Differences between the runs" in shown


def test_slices_are_scored_on_request_and_a_run_without_summary_is_scored(runs, tmp_path, capsys):
    workdir = tmp_path / "plain"
    shutil.copytree(runs[0], workdir)
    for name in ("summary.json", "report.html"):
        (workdir / name).unlink()
    shutil.rmtree(workdir / "evaluations")
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    older = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    text = "\n".join(map(json.dumps, older))
    (workdir / "metrics.jsonl").write_text(f'{text}\n{{"step": 99, "ki')  # was killed
    cli.run(["report", str(workdir), "--by=c1"])
    assert "which has no summary.json" in capsys.readouterr().out
    root = parsed((workdir / "report.html").read_text())
    expected = parsed(page.render([collect.collect(runs[0])]))
    for section in ("reliability", "scores", "slices", "data", "drift"):
        assert section_text(root, section) == section_text(expected, section), section
    assert len(root.findall(".//section[@id='curves']//svg")) == 4  # without time


def test_a_workdir_that_cannot_be_written_is_evaluated_all_the_same(runs, tmp_path):
    (tmp_path / "evaluations").write_text("")
    collect.save_slices(tmp_path, evaluate.evaluate(str(runs[0]), by="c1"))
    assert (tmp_path / "evaluations").read_text() == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--output=a.txt"], r"--output: must be a file FILE.html: found .*a.txt"),
        (["--output=x.html/a.html"], r"--output: .*x.html.* it is not a directory"),
        (["--output=x.html"], r"--output: .*x.html must be a new file or one that jaxrank wrote"),
        (["{run}"], "each run must be given once"),
        (["nowhere"], "config.json: no such file"),
        (["--by=c9"], "--by: must be a stored column .*'c9'"),
    ],
)
def test_bad_arguments_are_named(runs, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.html").write_text("")
    filled = [arg.format(run=runs[0]) for arg in args]
    with pytest.raises(InputError, match=message):
        cli.run(["report", str(runs[0]), *filled])
