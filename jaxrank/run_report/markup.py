"""Elements of an HTML page. All text is escaped, so that no name or value becomes markup."""

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Characters that neither HTML nor XML may contain, and halves of surrogate pairs.
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Markup(str):
    """Text that is HTML already. Only `tag` and `join` make it."""


def escape(text: Any) -> Markup:
    """Returns any value as text of a page."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_INVALID.sub("\ufffd", str(text)), quote=True))


def join(parts: Iterable[Any]) -> Markup:
    """Joins elements and texts."""
    return Markup("".join(escape(part) for part in parts))


def tag(name: str, /, *content: Any, **attributes: Any) -> Markup:
    """Returns an element; `class_` and `stroke_width` become class and stroke-width."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not content:
        return Markup(f"<{name}{listed} />")
    return Markup(f"<{name}{listed}>{join(content)}</{name}>")


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]], *, texts: int = 1) -> Markup:
    """Returns a table that scrolls sideways on narrow screens.

    Args:
        header: of the columns.
        rows: of cells.
        texts: number of columns, from the first, that hold text. The others hold numbers.
    """

    def cells(kind: str, values: Sequence[Any]) -> Markup:
        return join(
            tag(kind, value, class_=None if i < texts else "n") if value != "" else Markup("<td/>")
            for i, value in enumerate(values)
        )

    body = join(tag("tr", cells("td", row)) for row in rows if row)
    head = tag("thead", tag("tr", cells("th", header)))
    return tag("div", tag("table", head, tag("tbody", body)), class_="scroll")


def number(value: float | None) -> str:
    """Formats a number; a dash if it is undefined."""
    if value is None or value != value:
        return "–"
    if isinstance(value, int) or (abs(value) >= 1000 and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
