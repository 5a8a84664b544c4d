"""A small picture of the reliability of each task, for TensorBoard.

Matplotlib takes more than half a second for it, which every evaluation would pay.
"""

import io
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw

from jaxrank.metrics.intervals import Z

_SIZE, _MARGIN = 240, 34  # pixels of a panel, and of the space around it
_GRAY, _BLUE = (150, 150, 150), (31, 119, 180)


def draw_reliability(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes:
    """Returns a PNG with a panel per task: mean predictions to the right, mean labels upwards.

    Args:
        tables: of each task; see `exact.calibration_buckets`. A bar is a 95% interval.
    """
    width = max(len(tables), 1) * (_SIZE + 2 * _MARGIN)
    image = Image.new("RGB", (width, _SIZE + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(image)
    for i, (task, table) in enumerate(tables.items()):
        _panel(draw, i * (_SIZE + 2 * _MARGIN) + _MARGIN, task, table)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _panel(
    draw: ImageDraw.ImageDraw, left: int, task: str, table: Sequence[Mapping[str, float]]
) -> None:
    values = [b[name] for b in table for name in ("predicted", "observed")]
    least, largest = min([0.0, *values]), max([0.0, *values])
    span = (largest - least) or 1.0
    bottom = _MARGIN + _SIZE

    def pixel(predicted: float, observed: float) -> tuple[float, float]:
        # Intervals may leave the panel.
        x, y = ((v - least) / span * _SIZE for v in (predicted, observed))
        return left + x, min(max(bottom - y, _MARGIN), bottom)

    draw.rectangle((left, _MARGIN, left + _SIZE, bottom), outline=_GRAY)
    draw.line((*pixel(least, least), *pixel(largest, largest)), fill=_GRAY)
    points = [pixel(b["predicted"], b["observed"]) for b in table]
    for bucket, (x, y) in zip(table, points, strict=True):
        error = Z * bucket["error"]
        ends = (pixel(0, bucket["observed"] + side * error)[1] for side in (1, -1))
        draw.line([(x, end) for end in ends], fill=_BLUE)
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=_BLUE)
    draw.line(points, fill=_BLUE)
    # The font of Pillow has Latin letters only.
    name = task.encode("latin-1", "replace").decode("latin-1")
    draw.text((left, 4), f"{name}: observed over predicted", fill="black")
    draw.text((left, bottom + 6), f"{least:.4g}", fill="black")
    draw.text((left + _SIZE - 40, bottom + 6), f"{largest:.4g}", fill="black")
