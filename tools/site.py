"""Hooks of mkdocs for the site of docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# From a page in docs/ to a file of the repository, such as ../tests/train_test.py. Code hosts
# follow it, and the site has a copy of the file.
_OUTSIDE = re.compile(r"\]\(\.\./((?:tests|benchmarks)/[\w/]+\.py)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files of the repository to which pages link."""
    linked = {
        path
        for page in files.documentation_pages()
        for path in _OUTSIDE.findall(page.content_string)
        if (ROOT / path).is_file()
    }
    for path in sorted(linked):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lets links to files of the repository lead to their copies. --strict checks that they do."""
    return _OUTSIDE.sub(r"](\1)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Removes the backslash before a bar in code of a table.

    Code hosts need it, and Python-Markdown shows it.
    """
    return re.sub(r"<code>[^<]*</code>", lambda m: m[0].replace("\\|", "|"), html)
