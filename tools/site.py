"""Hooks of mkdocs for the site of docs/."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Removes the backslash before a bar in code of a table.

    Code hosts need it, and Python-Markdown shows it.
    """
    return re.sub(r"<code>[^<]*</code>", lambda m: m[0].replace("\\|", "|"), html)
