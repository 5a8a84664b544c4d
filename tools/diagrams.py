"""Draws the diagrams of docs/ as SVG.

    python -m tools.diagrams

Text has the colour of the page's text, so that one file suits light and dark pages.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parent.parent / "docs" / "images"
_CHARACTER, _LINE, _PAD = 7.0, 17, 12  # pixels
_STYLE = (
    "<style>text{font:13px sans-serif;fill:#3c4a63}.title{font-weight:bold}"
    ".box{fill:#eef2fb;stroke:#5c6bc0}.line{stroke:#5c6bc0;fill:none;marker-end:url(#end)}"
    "@media(prefers-color-scheme:dark){text{fill:#c9d3ea}.box{fill:#232a3d}}</style>"
    '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"'
    ' orient="auto"><path d="M0 0L8 4L0 8z" fill="#5c6bc0"/></marker></defs>'
)


class Box(NamedTuple):
    """A box of text lines, the first of which is its title. Position of its upper left corner."""

    x: int
    y: int
    lines: Sequence[str]

    @property
    def width(self) -> int:
        return int(max(map(len, self.lines)) * _CHARACTER) + 2 * _PAD

    @property
    def height(self) -> int:
        return len(self.lines) * _LINE + 2 * _PAD - 4


def pictures() -> Iterator[tuple[Path, str]]:
    """Yields each diagram with its SVG."""
    yield IMAGES / "overview.svg", _chain(_OVERVIEW, _VERBS, "From raw data to scores")
    yield IMAGES / "step.svg", _chain(_STEP, _MOVES, "A step on one of several devices")


_OVERVIEW = (
    ("raw data", "CSV, Parquet,", "TFRecord, Criteo"),
    ("store", "blocks of examples,", "vocabularies"),
    ("run", "checkpoints, metrics,", "report"),
    ("bundle", "ONNX, rows,", "vocabularies"),
    ("scores", "Python, HTTP,", "without JAX"),
)
_VERBS = ("prepare", "train", "export", "serve")
_STEP = (
    ("ids", "of its examples,", "sorted once"),
    ("owners", "rows of the ids", "that others read"),
    ("vectors", "combined", "per feature"),
    ("model", "loss, gradients,", "sums over devices"),
    ("update", "sums per row,", "at its owner"),
)
_MOVES = ("exchange", "exchange", "lookup", "exchange")


def _chain(texts: Sequence[Sequence[str]], verbs: Sequence[str], title: str) -> str:
    """Draws boxes from left to right, with a word on each arrow."""
    boxes: list[Box] = []
    x = 4
    for i, lines in enumerate(texts):
        boxes.append(Box(x, 24, lines))
        gap = int(len(verbs[i]) * _CHARACTER) + 24 if i < len(verbs) else 4
        x += boxes[-1].width + gap
    height = max(box.y + box.height for box in boxes) + 8
    shapes = [_box(box) for box in boxes]
    for before, after, verb in zip(boxes, boxes[1:], verbs, strict=False):
        left, right = before.x + before.width, after.x
        y = before.y + before.height // 2
        shapes.append(f'<path class="line" d="M{left + 2} {y}H{right - 2}"/>')
        shapes.append(
            f'<text x="{(left + right) // 2}" y="{y - 8}" text-anchor="middle">{verb}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x} {height}" role="img"'
        f' aria-label="{title}">\n<title>{title}</title>\n{_STYLE}\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _box(box: Box) -> str:
    size = f'width="{box.width}" height="{box.height}"'
    shape = f'<rect class="box" x="{box.x}" y="{box.y}" {size} rx="6"/>'
    texts = [
        f'<text x="{box.x + _PAD}" y="{box.y + _PAD + 8 + i * _LINE}"'
        f"{' class=' + chr(34) + 'title' + chr(34) if not i else ''}>{line}</text>"
        for i, line in enumerate(box.lines)
    ]
    return "\n".join([shape, *texts])


if __name__ == "__main__":
    for path, text in pictures():
        path.write_text(text)
        print(path)
