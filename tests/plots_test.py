"""Tests the content of plots, not their look."""

import numpy as np
import pytest

from jaxrank import plots
from jaxrank.atomic import is_marked
from jaxrank.data.files import check_replaceable
from jaxrank.errors import RunError

PNG = b"\x89PNG\r\n\x1a\n"


def statistics(features, rows=1000):
    """Makes statistics, with a third of the features of each kind."""
    return {
        "rows": rows,
        "tasks": {"click": {"known": rows, "positives": 3}},
        "dense": {f"f{i}": {"missing": i % rows} for i in range(features)},
        "categorical": {
            f"c{i}": {"missing": 0, "ids": rows, "distinct": i} for i in range(features)
        },
        "ragged": {
            f"l{i}": {"mean": 2.5, "p50": 2, "p95": 9, "p99": 10, "max": 11 + i, "empty": 0}
            for i in range(features)
        },
    }


def drawn(monkeypatch, summaries):
    """Draws statistics. Returns {title of a panel: names in it}."""
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plots.draw_statistics(summaries, "unused.png")
    panels = figures[0].axes
    return {p.get_title(): [t.get_text() for t in p.get_yticklabels()] for p in panels}


def test_statistics_become_a_png(tmp_path):
    lines = {"train": statistics(3), "valid": statistics(3, rows=10)}
    plots.draw_statistics(lines, tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)
    plots.draw_statistics(lines, tmp_path / "s.svg")
    for path in (tmp_path / "s.png", tmp_path / "s.svg"):
        assert is_marked(path)
        check_replaceable(path, "--picture")


def test_a_name_with_dollars_is_no_formula(tmp_path):
    name = r"$\foo{$"
    series = dict(label=name, x=[name], y=[1.0], low=(), style="points", color="")
    labels = dict(title=name, x_label=name, y_label=name, x_scale="linear", y_scale="linear")
    plots.draw_panels([dict(**labels, series=[series])], [tmp_path / "a.svg"])
    plots.draw_statistics({name: {"rows": 1, "dense": {name: {"missing": 1}}}}, tmp_path / "b.svg")
    for file, texts in (("a.svg", 5), ("b.svg", 1)):
        shown = (tmp_path / file).read_text()
        assert shown.count(f"<!-- {name} -->") == texts


def test_of_many_features_the_forty_with_the_largest_values_are_drawn(monkeypatch):
    (missing, distinct, lengths) = drawn(monkeypatch, {"train": statistics(700)}).values()
    assert missing == [f"f{i}" for i in range(699, 659, -1)]
    assert distinct == [f"c{i}" for i in range(699, 659, -1)]
    assert lengths == [f"l{i}" for i in range(699, 659, -1)]


def test_shares_are_of_the_examples_of_their_split(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    lines = {"a": {"rows": 10, "dense": {"f": {"missing": 5}}}}
    lines["b"] = {
        "rows": 40,
        "dense": {"f": {"missing": 10}},
        "categorical": {"c": {"missing": 8, "ids": 80}},
        "ragged": {"l": {"empty": 30, "ids": 7}},
    }
    plots.draw_statistics(lines, "unused.png")
    widths = [bar.get_width() for bar in figures[0].axes[0].patches]
    # The larger split b first, and in it the features by their largest fraction.
    np.testing.assert_allclose(widths, [0.75, 0.25, 0.1, 0, 0.5, 0])


def test_what_is_absent_is_not_drawn(monkeypatch):
    assert list(drawn(monkeypatch, {})) == [""]
    result = drawn(monkeypatch, {"train": {"rows": 5, "categorical": {"c0": {"distinct": 4}}}})
    assert result == {"distinct values": ["c0"]}


def test_a_picture_that_cannot_be_written_is_reported_and_leaves_the_one_before(
    monkeypatch, tmp_path
):
    def full(figure, path, **settings):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(plots.Figure, "savefig", full)
    (tmp_path / "s.png").write_text("before")
    with pytest.raises(RunError, match=r"s\.png: cannot be written: No space"):
        plots.draw_statistics({"train": statistics(2)}, tmp_path / "s.png")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
